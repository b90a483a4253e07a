"""Pipeline parallelism (GPipe, Huang et al. 2019): a model cut into stages, and a schedule that runs them.

The schedules are PyTorch's own (torch.distributed.pipelining); `layout.SCHEDULES` lists them.
"""
import copy
import functools
import logging

import torch
import torch.distributed as dist

from kilogpt.parallel.layout import SCHEDULES, stage_lengths
from kilogpt.parallel.stages import multiply_finite

# On every process that an exception passes, also one of a lost connection, it prints the whole schedule.
logging.getLogger('torch.distributed.pipelining.schedules').setLevel(logging.CRITICAL)


def cut_stage(model, index, n_stages, block_size):
    """A copy of the model with only the parts of pipeline stage `index`, and None for the other parts.

    A stage is a run of whole blocks; `layout.stage_lengths` says how long.
    """
    plan = model.split_plan
    names = list(model.get_submodule(plan['blocks']))

    lengths = stage_lengths(model, n_stages, block_size)
    start = sum(lengths[:index])  # in parts: part 0 comes before the blocks, the last part after them
    end = start + lengths[index]
    stage = copy.deepcopy(model)
    blocks = stage.get_submodule(plan['blocks'])
    for part, name in enumerate(names, start=1):
        if not start <= part < end:
            del blocks[name]
    absent = ()
    if index > 0:
        absent += plan['before_blocks']
    if index < n_stages - 1:
        absent += plan['after_blocks']
    for name in absent:
        parent, _, child = name.rpartition('.')
        siblings = stage.get_submodule(parent)._modules
        if child in siblings:
            siblings[child] = None
    return stage


class Pipeline:
    """The stages of this rank, and the schedule that runs all micro-batches of an iteration in one step.

    stages: {index: module}.
    tied: {name of the head's weight: name of the embedding's} where the two are one parameter. On different
    stages they are two copies, the `tied_pair`, that each get the sum of both gradients. {} if they are
    frozen.
    splits_backward: whether the schedule may compute the gradients of weights later than those of inputs.
    """

    def __init__(self, stages, layout, mesh, device, *, micro_batch, micro_steps, block_size, n_embd, dtype,
                 tied, splits_backward):
        from torch.distributed import pipelining
        self.stages, self.device = stages, device
        self.loss_scale = 1.0  # what the sum of losses is multiplied by before the backward pass
        self._find_tied_pair(tied, layout, mesh)

        # Without these shapes, every change between training and evaluation would run the model once more to
        # infer them.
        length = block_size // layout.cp
        tokens = torch.empty(micro_batch, length, dtype=torch.int64, device='meta')
        x = torch.empty(micro_batch, length // layout.tp, n_embd, device='meta', requires_grad=True,
                        dtype=torch.bfloat16 if dtype == 'bfloat16' else torch.get_default_dtype())
        loss = torch.empty((), device='meta', requires_grad=True)
        pipeline_stages = []
        for index, stage in stages.items():
            pipeline_stage = _stage_class()(
                stage, index, layout.n_stages, device, group=mesh.get_group('pp'),
                input_args=x if index > 0 else tokens,
                output_args=x if index < layout.n_stages - 1 else loss)
            pipeline_stage.splits_backward = splits_backward
            if layout.zero_stage == 3:
                pipeline_stage.freed_modules = free_after_backward(stage)
            pipeline_stages.append(pipeline_stage)
        schedule = getattr(pipelining.schedules, SCHEDULES[layout.pp_schedule][0])
        self.schedule = schedule(
            pipeline_stages if layout.stages_per_rank > 1 else pipeline_stages[0], micro_steps,
            scale_grads=False, loss_fn=lambda loss, target: multiply_finite(loss, self.loss_scale))

    def _find_tied_pair(self, tied, layout, mesh):
        """Set tied_pair to [embedding's weight, head's weight], with None for a weight on another rank."""
        self.tied_pair, self._tied_group = [], None
        for head, embedding in tied.items():
            for index, name in ((0, embedding), (layout.n_stages - 1, head)):
                parameters = dict(self.stages[index].named_parameters()) if index in self.stages else {}
                self.tied_pair.append(parameters.get(name))
            if not layout.is_v_shaped:  # in a V, one rank has both
                first_and_last = mesh.mesh[[0, -1]].flatten(1).t().tolist()
                self._tied_group, _ = dist.new_subgroups_by_enumeration(first_and_last)

    def forward_backward(self, batch, loss_scale, last):
        """Add the gradients of all micro-batches; returns the sum of losses (0 without the last stage).

        batch: as in Parallel.forward_backward. last: whether it ends the iteration.
        """
        self.loss_scale = loss_scale
        losses = self._run(self.schedule.step, batch)
        if last:
            self._sum_tied_gradients()
        return losses

    def evaluate(self, batch):
        """The sum of the losses of all micro-batches."""
        return self._run(self.schedule.eval, batch)

    def _run(self, run, batch):
        losses = []
        x, targets, *others = batch
        inputs = [x] if 0 in self.stages else []
        # Keywords go to every stage, each micro-batch to the pass of its own.
        others = dict(zip(('starts', 'pairs', 'reference'), others))
        run(*inputs, target=targets, losses=losses, targets=targets, tokens=x, return_outputs=False, **others)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum().detach() / self.loss_scale

    def _sum_tied_gradients(self):
        gradients = [p.grad.to_local() for p in self.tied_pair if p is not None]
        if len(gradients) == 2:
            embedding, head = gradients
            embedding.add_(head)
            head.copy_(embedding)
        elif gradients:
            dist.all_reduce(gradients[0], group=self._tied_group)


def free_after_backward(stage):
    """Let FSDP2 free the blocks of a stage after each backward pass; returns the modules that FSDP2 frees.

    PyTorch's stages let all modules keep their parameters after a backward pass, and ZeRO-3 would need the
    memory of ZeRO-2. Now only the group of `stage` itself, embeddings and head, keeps its parameters.
    """
    stage.set_reshard_after_backward = functools.partial(stage.set_reshard_after_backward, recurse=False)
    return [module for module in stage.modules() if module is not stage and hasattr(module, 'reshard')]


@functools.cache
def _stage_class():
    """PipelineStage for V-shaped schedules (a rank hands tensors to itself), checkpointing and ZeRO-3."""
    from torch.distributed import pipelining

    class Stage(pipelining.PipelineStage):
        splits_backward = True
        freed_modules = ()  # those whose parameters FSDP2 frees between passes (ZeRO-3)

        def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
            full_backward = full_backward or not self.splits_backward
            if not full_backward and not self.is_first:  # the first stage computes all in the second half
                self._gather_parameters()
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

        def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
            if not self.splits_backward:  # backward_one_chunk has computed these gradients
                return
            if not self.is_first:
                self._gather_parameters()
                self._set_reshard(False)
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            self._set_reshard(True)
            for module in self.freed_modules:  # the second half may not pass FSDP2's hooks
                module.reshard()

        def _set_reshard(self, reshards):
            """Whether FSDP2 frees parameters where a backward pass has left a module.

            The second half is one pass for each group of parameters. With biases of experts, a group may lead through
            modules whose parameters a later group needs.
            """
            for module in self.freed_modules:
                module.set_reshard_after_backward(reshards, recurse=False)

        def _gather_parameters(self):
            """Gather the parameters that FSDP2 has freed, before one half of a backward pass.

            Each half looks for `submod.parameters()` in autograd's graph, which has the gathered parameters.
            After FSDP2 has freed these, the module has the shards in their place. PyTorch then drops the
            gradients of the parameters that the half does not find, without an error.
            """
            for module in self.freed_modules:
                module.unshard()

        def get_local_bwd_output(self, mb_index):
            # Evaluation has no gradients to hand over.
            return super().get_local_bwd_output(mb_index) if self.has_backward else None

        def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
            if self.has_backward:
                super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

        def _get_init_p2p_neighbors_ops(self):
            # torch 2.11 greets each neighbouring stage, even one on the same rank, which gloo cannot send to.
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    return Stage
