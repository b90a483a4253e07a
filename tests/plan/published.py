"""Runs that torchtitan has published, and predictions for them by memory_model.py and time_model.py.

github.com/pytorch/torchtitan, benchmarks/: llama3_h100_202412_torchtitan.md and
asyncTP_llama3_h100_2025-06_torchtitan.md. H100 with 96 GB at 2.4 TB/s, 500 W, NVLink, 400 Gb/s for each GPU.
Memory is what PyTorch's allocator has reserved. torchtitan differs from this repository in three ways: its
loss holds all logits, 14 bytes each; its selective checkpointing keeps the results of every second product;
its cp is ring attention. `predict` takes the first two into account.
"""
import functools
from typing import NamedTuple

import torch

from kilogpt import machines
from kilogpt.plan import memory_model, time_model
from kilogpt.plan.shape import Shape
from kilogpt.parallel.layout import Layout
from model import GPT, GPTConfig

MODELS = {  # n_layer, n_head, n_embd, n_hidden
    '8B': (32, 32, 4096, 14336), '70B': (80, 64, 8192, 28672), '405B': (126, 128, 16384, 53248)}
BYTES_OF_A_LOGIT = 14  # in 16 bits and in float32, both with gradients, and the softmax


class Row(NamedTuple):
    """A published run. tokens_per_sec: for each GPU. gib: None = not published."""
    name: str
    model: str
    block_size: int
    gpus: int
    layout: dict
    split: tuple  # micro_batch, micro_steps
    options: dict
    tokens_per_sec: float
    gib: float | None
    fitted: str = ''  # the constants that were fitted to this row
    misses: str = ''  # why the prediction misses this row


def row(name, model, gpus, layout, split, options, speed, gib=None, block_size=8192, **rest):
    options = dict(compile=True) | options
    return Row(name, model, block_size, gpus, layout, split, options, speed, gib, **rest)


FSDP = dict(zero_stage=3)
SELECTIVE, FULL = dict(activation_checkpoint='selective'), dict(activation_checkpoint='full')
FP8, ASYNC, EAGER = dict(fp8=True), dict(async_tp=True), dict(compile=False)
TP_PP = dict(zero_stage=2, tp=8, pp=8)
RING = 'ring attention; ours is all-to-all'
ROWS = [
    row('8B, FSDP', '8B', 8, FSDP, (2, 1), SELECTIVE, 6667, 77.0, fitted='products, gaps'),
    row('8B, FSDP, float8', '8B', 8, FSDP, (2, 1), SELECTIVE | FP8, 8532, 76.8, fitted='float8'),
    row('8B, FSDP, not compiled', '8B', 8, FSDP, (2, 1), SELECTIVE | EAGER, 5762, 82.4),
    row('8B, FSDP', '8B', 128, FSDP, (2, 1), SELECTIVE, 6514, 62.0),
    row('8B, FSDP, float8', '8B', 128, FSDP, (2, 1), SELECTIVE | FP8, 8380, 61.8),
    row('8B, FSDP, float8', '8B', 8, FSDP, (1, 1), FULL | FP8, 3890, 83.9, 32768, fitted='attention'),
    row('8B, cp 2, float8', '8B', 8, FSDP | dict(cp=2), (1, 1), FULL | FP8, 2540, 84.2, 65536),
    row('8B, cp 4, float8', '8B', 8, FSDP | dict(cp=4), (1, 1), FULL | FP8, 1071, 84.0, 131072,
        misses=RING),
    row('8B, cp 8, float8', '8B', 8, FSDP | dict(cp=8), (1, 1), FULL | FP8, 548, 84.5, 262144,
        misses=RING),
    row('8B, tp 8', '8B', 64, FSDP | dict(tp=8), (12, 1), SELECTIVE, 4378),
    row('8B, tp 8, async', '8B', 64, FSDP | dict(tp=8), (12, 1), SELECTIVE | ASYNC, 4809),
    row('70B, tp 8', '70B', 256, FSDP | dict(tp=8), (16, 1), FULL, 597),
    row('70B, tp 8, async', '70B', 256, FSDP | dict(tp=8), (16, 1), FULL | ASYNC, 652),
    row('70B, tp 8, float8', '70B', 256, FSDP | dict(tp=8), (16, 1), FULL | FP8, 829, 71.9,
        misses='memory, for an unknown reason'),
    row('405B, tp 8 × pp 8, float8, async, 1f1b', '405B', 512, TP_PP, (4, 8), FULL | FP8 | ASYNC, 100, 82.5),
    row('405B, the same, interleaved', '405B', 512, TP_PP | dict(pp_schedule='interleaved1f1b'), (4, 8),
        FULL | FP8 | ASYNC, 128, 72.7),
]


@functools.cache
def shape_of(model, block_size):
    n_layer, n_head, n_embd, n_hidden = MODELS[model]
    with torch.device('meta'):
        return Shape(GPT(GPTConfig(
            block_size=block_size, vocab_size=128256, n_layer=n_layer, n_head=n_head, n_kv_head=8,
            n_embd=n_embd, n_hidden=n_hidden, bias=False, pos='rope', norm='rmsnorm', mlp='swiglu',
            tie_weights=False), seed=None))


def predict(row):
    """(tokens/s for each GPU, GiB) that the planner's formulas predict for a row."""
    machine = machines.find_machine('H100')
    machine.bandwidth *= 2.4 / 3.35
    shape, layout = shape_of(row.model, row.block_size), Layout(row.gpus, **row.layout)
    work = memory_model.Work(*row.split, row.block_size, **row.options)
    seconds = sum(time_model.seconds(shape, layout, work, machine).values())
    config, tp = shape.config, layout.tp
    s, tokens = work.micro_batch * work.block_size / layout.cp, work.micro_batch * work.block_size
    recomputed = 0  # bytes of the products that torchtitan does not keep
    if row.options['activation_checkpoint'] == 'selective':
        # Every second of the seven products: c_k, c_proj, c_gate. The compiler would not keep that of c_proj anyway.
        width = config.n_kv_head * config.head_width + config.n_embd + config.n_hidden
        recomputed = shape.n_blocks * s * work.width * (width - work.compile * config.n_embd) / tp
        flops = 2 * s * (config.n_embd * width) / tp
        seconds += shape.n_blocks * flops / machine.rate('float8' if work.fp8 else work.dtype, 1024)
    most = 0
    for rank in range(layout.pp):
        for parts in memory_model.phases(shape, layout, work, rank).values():
            if parts['logits']:
                parts['logits'] = BYTES_OF_A_LOGIT * s * config.padded_vocab_size / tp
            parts['activations'] -= recomputed * (parts['activations'] > 0)
            most = max(most, sum(parts.values()))
    gib = (1 + memory_model.GAPS) * most / 2 ** 30
    return tokens * work.micro_steps * layout.dp / seconds / row.gpus, gib
