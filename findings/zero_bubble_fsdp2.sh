#!/usr/bin/env bash
# PyTorch's zero-bubble schedules compute wrong gradients on stages of FSDP2 with reshard_after_forward=True.
#
#     bash findings/zero_bubble_fsdp2.sh
#
# The script installs torch==2.13.0 in a temporary folder and runs a small model on two gloo processes of this
# machine. No code of kiloGPT runs. A pipeline of four residual blocks computes gradients without FSDP2, with
# reshard_after_forward=False and with True, under interleaved 1F1B and two zero-bubble schedules.
#
# Exit code: 0 if the surprise is still there, 1 if the gradients are right or the script fails.
#
# Variables: TORCH=2.15.0 tries another version, and PYTHON=path uses a Python that has torch, without a venv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1

if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet "torch==${TORCH:-2.13.0}" numpy
fi

cat > "$folder/script.py" <<'SCRIPT'
import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

MICRO_BATCHES, WIDTH = 4, 16
# {schedule: the stages of each of the two processes}
SCHEDULES = dict(ScheduleInterleaved1F1B=([0, 2], [1, 3]), ScheduleInterleavedZeroBubble=([0, 2], [1, 3]),
                 ScheduleZBVZeroBubble=([0, 3], [1, 2]))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def gradients(blocks, name, reshard):
    """{stage: gradient} of a process's stages after one step. reshard: None for a model without FSDP2."""
    mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('pp', 'dp'))
    stages = []
    for index in SCHEDULES[name][dist.get_rank()]:
        block = copy.deepcopy(blocks[index])
        if reshard is not None:
            fully_shard(block, mesh=mesh['dp'], reshard_after_forward=reshard)
        stages.append(PipelineStage(block, index, 4, torch.device('cpu'), group=mesh.get_group('pp')))
    schedule = getattr(schedules, name)(stages, MICRO_BATCHES, scale_grads=False,
                                        loss_fn=lambda y, target: (y - target).square().mean())
    torch.manual_seed(1)
    x, target = torch.randn(2, 8, WIDTH)
    schedule.step(*[x] * (dist.get_rank() == 0), target=target, losses=[])
    found = {}
    for stage in stages:
        gradient = stage.submod.linear.weight.grad
        found[stage.stage_index] = gradient.full_tensor() if hasattr(gradient, 'full_tensor') else gradient
    return found


def describe(found, expected):
    """(whether the gradients are right, their errors as text), of all stages of both processes."""
    parts = {}
    for index, gradient in found.items():
        error = None
        if gradient is not None:
            error = ((gradient - expected[index]).norm() / expected[index].norm()).item()
        parts[index] = error
    all_parts = [None, None]
    dist.all_gather_object(all_parts, parts)
    errors = dict(sorted((all_parts[0] | all_parts[1]).items()))
    texts = ['no gradient' if error is None else f'{error:.1e}' for error in errors.values()]
    return all(error is not None and error < 1e-5 for error in errors.values()), ', '.join(texts)


dist.init_process_group('gloo')
torch.manual_seed(0)
blocks = [Block() for _ in range(4)]
expected = gradients(blocks, 'ScheduleInterleaved1F1B', None)
wrong = []
for name in SCHEDULES:
    reference = expected if name != 'ScheduleZBVZeroBubble' else gradients(blocks, name, None)
    for reshard in (None, False, True):
        is_right, errors = describe(gradients(blocks, name, reshard), reference)
        if not is_right:
            wrong.append((name, reshard))
        if dist.get_rank() == 0:
            print(f'{name:30} reshard_after_forward={reshard!s:5}  errors of stages 0 to 3: {errors}')
surprise = [('ScheduleInterleavedZeroBubble', True), ('ScheduleZBVZeroBubble', True)]
if dist.get_rank() == 0:
    print('still there' if wrong == surprise else f'changed: wrong are {wrong}')
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong != surprise)
SCRIPT

"$PYTHON" -c 'import platform, torch; print("python", platform.python_version(), "torch", torch.__version__)'
echo 'many expect: FSDP2 with reshard_after_forward=True changes memory, but not the gradients'
echo 'seen: errors of gradients, relative to their norms (None: without FSDP2)'
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc_per_node=2 "$folder/script.py"
