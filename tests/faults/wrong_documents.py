"""Plant a mistake in what documents and windows mean in a layout. FAULT names the mistake.

A single process is right with each of them, and so is every layout in which the mistake has no effect.
"""
import os

import torch

import model
from data.documents import PackedLoader
from data.batches import Batches
from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.pipeline import Pipeline
from model import GPT, Block

fault = os.environ['FAULT']
parallelize, forward_backward = Parallel.parallelize, Parallel.forward_backward
first_seen, rope_tables, call_batches = model.first_seen, model.rope_tables, Batches.__call__
forward, run_pipeline, evaluate = GPT.forward, Pipeline._run, Pipeline.evaluate
order_rows, block_forward = PackedLoader._order, Block.forward
part = slice(None)  # of each sequence that this process takes


def rank():
    return int(os.environ.get('RANK', 0))


def parallelize_wrong(self, network, config, dtype):
    global part
    parallelize(self, network, config, dtype)
    part = self.layout.positions(self.processes.rank, config['block_size'])
    for stage in self.stages.values():
        if fault == 'positions of the row':
            stage.first_position = 0
        if fault == 'layers of a stage':
            count_layers_within(stage)


def count_layers_within(stage):
    config_of_model, first = type(stage.config), int(next(iter(stage.transformer.h), 0))

    class Config(config_of_model):
        def window_of(self, layer):
            return super().window_of(layer - first)

    stage.config.__class__ = Config


def call_batches_wrong(self, *arguments):
    x, y, *starts = call_batches(self, *arguments)
    if fault == 'starts cut':
        starts = [each[:, self.positions] for each in starts]
    if fault == 'starts of other sequences' and rank() == 1:
        starts = [each.flip(0) for each in starts]
    return x, y, *starts


def forward_wrong(self, idx, targets=None, starts=None, **others):
    if self.transformer.wte is None:
        starts = None
    return forward(self, idx, targets, starts, **others)


def run_pipeline_wrong(self, run, batch):
    x, y, starts = batch
    micro_batch = len(starts) // self.schedule._n_microbatches
    return run_pipeline(self, run, (x, y, starts[:micro_batch].repeat(self.schedule._n_microbatches, 1)))


def rope_tables_wrong(config, positions, length):
    if part.start:  # the later parts of a sequence count from its beginning
        positions = torch.arange(part.start, part.stop)[None]
    return rope_tables(config, positions, length)


def first_seen_wrong(T, window, starts, device):
    first = first_seen(T, window, starts, device)
    length = (part.stop or T) - (part.start or 0)
    begins = torch.arange(T, device=device) // length * length
    return torch.maximum(first, begins) if 0 < window < T else first


def forward_backward_wrong(self, batch, n_tokens=0, *others):
    return forward_backward(self, batch, n_tokens // self.layout.cp, *others)


def mean_over_documents(self, idx, targets=None, starts=None, cache=None):
    n_documents = (starts == torch.arange(starts.size(1))).sum()
    return forward(self, idx, targets, starts, cache) / n_documents


def block_forward_wrong(self, x, rope=None, mask=None, *others):
    if torch._C._current_graph_task_id() < 0:  # not the second pass of a checkpoint, in a backward pass
        self.last_mask = mask
    return block_forward(self, x, rope, self.last_mask, *others)


if fault in ('positions of the row', 'layers of a stage', 'positions of a part', 'window of a part'):
    Parallel.parallelize = parallelize_wrong
if fault in ('starts cut', 'starts of other sequences'):
    Batches.__call__ = call_batches_wrong
if fault == 'stages without starts':
    GPT.forward = forward_wrong
if fault == 'starts of the first micro-batch':
    Pipeline._run = run_pipeline_wrong
if fault == 'positions of a part':
    model.rope_tables = rope_tables_wrong
if fault == 'window of a part':
    model.first_seen = first_seen_wrong
if fault == 'mean over documents':
    GPT.forward = mean_over_documents
if fault == 'mask of the last micro-batch':
    Block.forward = block_forward_wrong
if fault == 'tokens of a part':
    Parallel.forward_backward = forward_backward_wrong
if fault == 'rows of each rank':
    PackedLoader._order = lambda self, epoch, block: order_rows(self, epoch + rank(), block)
if fault == 'evaluated as one text':
    Pipeline.evaluate = lambda self, batch: evaluate(self, batch[:2])
