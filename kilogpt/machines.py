"""What machines can do: GPUs, the links between them, and machines that `python -m kilogpt.plan --calibrate` measured."""
import dataclasses
import difflib
import json
import os
from dataclasses import dataclass, field

# Of each GPU: dense peak TFLOP/s in 16 bits with float32 accumulation, in float32 (TF32 where the GPU has it) and in
# float8 (0: none); memory in GB and its bandwidth in GB/s; and the GB/s that a GPU sends to the others of its node:
# half of the sum over both directions that makers give for NVLink, or 32 for PCIe 4.0 and 64 for 5.0 (16 lanes).
# Sources: NVIDIA's data sheets of each GPU (A100, H100, H200, L4, L40, L40S, A10, A40, V100, T4: nvidia.com/data-center;
# Blackwell architecture brief for B200; Ada and Blackwell GPU architecture white papers for the RTX cards).
GPUS = {
    'B200': (2250, 1125, 4500, 180, 8000, 900),
    'GH200': (989, 494, 1979, 96, 4000, 450),
    'H200': (989, 494, 1979, 141, 4800, 450),
    'H100 PCIe': (756, 378, 1513, 80, 2000, 64),
    'H100 NVL': (835, 417, 1671, 94, 3900, 64),
    'H100': (989, 494, 1979, 80, 3350, 450),
    'A100': (312, 156, 0, 80, 2039, 300),
    'A100 40GB': (312, 156, 0, 40, 1555, 300),
    'A10': (125, 62.5, 0, 24, 600, 32),
    'A40': (149.7, 74.8, 0, 48, 696, 32),
    'A6000': (154.8, 77.4, 0, 48, 768, 32),
    'L4': (121, 60.5, 242, 24, 300, 32),
    'L40S': (362, 183, 733, 48, 864, 32),
    'L40': (181, 90.5, 362, 48, 864, 32),
    'RTX 5090': (209.5, 104.8, 419, 32, 1792, 64),
    'RTX 4090': (165.2, 82.6, 330, 24, 1008, 32),
    'RTX 3090': (71, 35.6, 0, 24, 936, 32),
    'V100': (125, 15.7, 0, 32, 900, 150),
    'T4': (65, 8.1, 0, 16, 320, 16),
}
