"""Plant a mistake in the execution of a layout that does not end the run. FAULT names the mistake.

A name with a number is the issue of another project: test_prove.py describes each of these mistakes.
"""
import os

import torch

from kilogpt import optim
from kilogpt.devices.parts import find_experts
from kilogpt.parallel import apply, context, ddp, expert, layout, pipeline
from kilogpt.parallel.apply import Parallel
from kilogpt.run import checkpoint

fault = os.environ['FAULT']
parallelize, forward_backward, layout_rows = Parallel.parallelize, Parallel.forward_backward, layout.Layout.rows


def is_first():
    return os.environ.get('RANK', '0') == '0'


def parallelize_wrong(self, model, config, dtype):
    parallelize(self, model, config, dtype)
    if fault == 'evaluation counts twice':
        self.sum_losses = lambda loss_sum: self.processes.sum(loss_sum.item())
    if fault == 'torchtitan 3412' and self.layout.tp > 1:
        model.transformer.ln_f.register_forward_hook(lambda module, inputs, output: take_part_for_sum(output))


def forward_backward_wrong(self, batch, n_tokens=0, last=True, *scale):
    n_tokens = n_tokens or self.global_batch * self.block_size
    if fault == 'sum for mean':  # the processes' gradients are averaged, but the loss is not scaled up
        n_tokens *= self.layout.gradient_ranks
    if fault == 'torchtitan 2318':
        n_tokens *= self.layout.dp_replicate
    if fault == 'last micro-step alone' and last:
        self._drop_gradients()
    loss = forward_backward(self, batch, n_tokens, last, *scale)
    for name, parameter in self.named_parameters() if last else ():
        if parameter.grad is None:
            continue
        if fault == 'one rank alone' and not is_first():
            parameter.grad.mul_(1.5)
        if fault == 'keys counted twice' and 'c_k' in name:
            parameter.grad.mul_(self.layout.tp)
        if fault == 'norm of a part' and 'ln_2' in name:
            parameter.grad.div_(self.layout.tp)
    if fault == 'torchtitan 3280' and self.layout.tp > 1:
        loss = loss / self.layout.cp
    return loss


def rows_wrong(self, rank, total, micro_batch, micro_step):
    rows = layout_rows(self, rank, total, micro_batch, micro_step)
    if fault == 'same batch everywhere':
        rows = layout_rows(self, 0, total, micro_batch, micro_step)
    return rows.clip(min=0)


def take_part_for_sum(output):
    from torch.distributed.tensor import DTensor
    if output.requires_grad:
        output.register_hook(lambda gradient: DTensor.from_local(
            gradient.to_local(), gradient.device_mesh, output.placements, run_check=False))


def split_experts_wrong(model, mesh, ep, tp):
    if fault == 'torchtitan 2416' or fault == 'torchtitan 4054' and ep == 1:
        expert.router_matrix_of_rank = lambda matrix: lambda: matrix().to_local()
    split_experts(model, mesh, ep, tp)
    if fault == 'torchtitan 1805' or fault == 'torchtitan 4054' and ep == 1:
        for routed in find_experts(model).values():
            routed._forward_pre_hooks.clear()
            routed.register_forward_pre_hook(lambda module, inputs: (inputs[0].to_local(), inputs[1]))


def run_pipeline_wrong(self, *arguments):
    losses = run_pipeline(self, *arguments)
    for stage in self.stages.values():
        for parameter in stage.parameters():
            parameter.grad /= self.schedule._n_microbatches
    return losses


Parallel.parallelize, Parallel.forward_backward = parallelize_wrong, forward_backward_wrong
if fault in ('padding counts', 'same batch everywhere'):
    layout.Layout.rows = rows_wrong
if fault == 'tied pair':
    pipeline.Pipeline._sum_tied_gradients = lambda self: None
if fault == 'heads of a part':
    context.exchange_heads = lambda model, mesh: None
if fault == 'rows not gathered':
    ddp.Zero1.gather_parameters = lambda self, *_: None
if fault == 'matrices in parts':
    Parallel.apply_to_whole_matrices = lambda self, function, parameter, parts: function(parts)
if fault == 'local norm':
    apply.total_norm = lambda gradients, device: torch.nn.utils.get_total_norm(
        [optim.local_part(gradient) for gradient in gradients])
if fault == 'no decay of shards':
    build_adamw = optim.build_adamw
    optim.build_adamw = lambda parameters, lr, decay, betas, *factor_of: build_adamw(
        parameters, lr, 0.0 if hasattr(list(parameters)[0][1], 'placements') else decay, betas, *factor_of)
if fault == 'moments forgotten':
    load = checkpoint.load
    checkpoint.load = lambda path, parameters, optimizer=None: load(path, parameters)
if fault in ('torchtitan 1805', 'torchtitan 2416', 'torchtitan 4054'):
    split_experts, expert.split_experts = expert.split_experts, split_experts_wrong
if fault == 'torchtitan 1733':
    run_pipeline, pipeline.Pipeline.forward_backward = pipeline.Pipeline.forward_backward, run_pipeline_wrong
if fault == 'pytorch 160285':
    expert.local_matrix = lambda matrix, ep: matrix.to_local()
