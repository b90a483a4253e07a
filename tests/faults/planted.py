"""Plant one silent mistake in how processes share a model. PLANTED names it, a key of PLANTS.

One process is right with each mistake, and so is every layout in which the mistake has no effect. A name with
a number is that of the issue or pull request of another project; docs/edit.md has a table of them.
"""
import os

import torch
import torch.distributed as dist

import model
from kilogpt import optim
from kilogpt.devices.parts import find_parts, replace_parts
from kilogpt.devices.parts import find_experts
from kilogpt.islands.outer_optimizer import OuterOptimizer
from kilogpt.layers import mixture
from kilogpt.layers.convolution import Convolution
from kilogpt.layers.delta import DeltaRule
from kilogpt.layers.preferences import PreferenceLoss
from kilogpt.optim import local_part
from kilogpt.parallel import apply, context, expert, pipeline, stages
from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.ddp import Zero1
from kilogpt.parallel.expert import ExpertBalance
from kilogpt.parallel.layout import Layout
from kilogpt.run import checkpoint


def is_among_many():
    """Whether this process trains with others, which is unknown before the fork in which it starts."""
    return int(os.environ.get('WORLD_SIZE', 1)) > 1


def plant_after(owner, name, change):
    """Call change(*arguments, result) after each call of a function; return its result unless it is None."""
    original = getattr(owner, name)

    def changed(*arguments, **options):
        result = original(*arguments, **options)
        other = change(*arguments, result)
        return result if other is None else other

    setattr(owner, name, changed)


def change_gradients(factor_of):
    """Multiply each gradient of an iteration by factor_of(layout, name, parameter)."""
    original = Parallel.forward_backward

    def changed(self, batch, n_targets=0, last=True, *scale):
        loss = original(self, batch, n_targets, last, *scale)
        for name, parameter in self.named_parameters() if last else ():
            if parameter.grad is not None:
                parameter.grad.mul_(factor_of(self.layout, name, parameter))
        return loss

    Parallel.forward_backward = changed


def change_norm(is_counted):
    """Leave gradients out of the norm on the processes where is_counted(gradient) is False."""
    original = apply.total_norm
    apply.total_norm = lambda gradients, device: original(
        [gradient if is_counted(gradient) else gradient * 0 for gradient in gradients], device)


def placement_of(tensor, dimension):
    """(how a DTensor is placed in a dimension of its mesh, this process's rank there); (None, 0) without."""
    names = getattr(tensor, 'device_mesh', None) is not None and tensor.device_mesh.mesh_dim_names
    if not names or dimension not in names:
        return None, 0
    return tensor.placements[names.index(dimension)], tensor.device_mesh.get_local_rank(dimension)


# --- reported at other projects -----------------------------------------------------------------------------

def split_vectors_not_in_norm():
    """Megatron-LM 7452, finding 8: the norm has a head-split vector's gradient of the first tp rank alone."""
    def is_counted(gradient):
        placement, tp_rank = placement_of(gradient, 'tp')
        return gradient.dim() > 1 or tp_rank == 0 or not placement.is_shard()

    change_norm(is_counted)


def router_losses_of_every_tp_rank():
    """Megatron-LM 7452, finding 10: the gradient of the router's own losses is tp times too large."""
    def set_loss_scale(self, loss_scale):
        for router in self.routers.values():
            router.loss_scale = loss_scale

    ExpertBalance.set_loss_scale = set_loss_scale


def experts_not_in_norm():
    """Megatron-LM 5916: with ep and tp, the norm has the experts of the first tp rank alone."""
    def is_counted(gradient):
        ep_placement, _ = placement_of(gradient, 'ep')
        _, tp_rank = placement_of(gradient, 'tp')
        return ep_placement is None or tp_rank == 0

    change_norm(is_counted)


def experts_not_divided():
    """Megatron-LM 5956: experts' gradients are averaged over too few ranks, and are ep times too large."""
    expert.local_matrix = lambda matrix, ep: matrix.to_local()


def experts_summed_as_dense():
    """Megatron-LM 1628: with tp alone, experts' gradients are averaged over ranks with other columns."""
    def local_matrix(matrix, ep):
        local, mesh = matrix.to_local(), matrix.device_mesh
        if local.requires_grad and ep == 1:
            local.register_hook(lambda gradient: average(gradient, mesh.get_group('tp')))
        return right(matrix, ep) if ep > 1 else local

    def average(gradient, group):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total / dist.get_world_size(group)

    right, expert.local_matrix = expert.local_matrix, local_matrix


def attention_gradients_of_own_part():
    """Megatron-LM 1464: cp's forward pass is right, but gradients of keys do not reach the other ranks."""
    def keep_own_part(stage, mesh, _):
        def hook(module, inputs):
            q, k, v = inputs
            length = k.size(2) // mesh.size()
            is_own = torch.arange(k.size(2)) // length == mesh.get_local_rank()
            if k.requires_grad:
                k.register_hook(lambda gradient: gradient * is_own[:, None].to(gradient))
            return q, k, v

        for owner, name in find_parts(stage, 'attention'):
            getattr(owner, name).register_forward_pre_hook(hook)

    plant_after(context, 'exchange_heads', keep_own_part)


def loss_not_scaled_by_cp():
    """Megatron-LM 673: gradients are averaged over dp and cp, but the loss is scaled for dp alone."""
    plant_after(Layout, '__post_init__', lambda layout, _: setattr(layout, 'gradient_ranks', layout.dp))


def router_without_other_ranks_experts():
    """transformers 48687, in our code: the router's gradient lacks the experts of other ranks."""
    def exchange_tokens(group, ep):
        def own_dispatch(rows, ends):
            size = len(ends) // ep
            first = group.rank() * size
            Permute.own = int(ends[first - 1]) if first else 0, int(ends[first + size - 1])
            return dispatch(rows, ends)

        dispatch = right(group, ep)
        return own_dispatch

    class Permute(mixture.Permute):
        own = None

        @staticmethod
        def forward(ctx, x, order, inverse):
            ctx.own = Permute.own
            return mixture_permute.forward(ctx, x, order, inverse)

        @staticmethod
        def backward(ctx, grad):
            if ctx.own:
                place = torch.arange(len(grad))
                grad = grad * ((place >= ctx.own[0]) & (place < ctx.own[1])).to(grad)
            return mixture_permute.backward(ctx, grad)

    mixture_permute, mixture.Permute = mixture.Permute, Permute
    right, expert.exchange_tokens = expert.exchange_tokens, exchange_tokens


def bias_of_every_tp_rank():
    """torchtitan 4245: each tp rank adds the whole bias to its part of a sum."""
    def add_more(stage, mesh, _):
        from torch.distributed.tensor import Partial
        blocks = stage.get_submodule(stage.split_plan['blocks']).values()
        for name, module in [pair for block in blocks for pair in block.named_modules()]:
            if name in stage.split_plan['rowwise'] and module.bias is not None:
                module.register_forward_hook(lambda module, inputs, output: output + (mesh.size() - 1) * (
                    module.bias.to_local(grad_placements=[Partial()]).to(output)))

    plant_after(stages, 'split_tensors', add_more)


def loads_of_tp_ranks():
    """torchtitan 4154, in our code: with tp, experts' loads are summed over the tp ranks alone."""
    def update(self, is_applied):
        all_reduce = dist.all_reduce
        if self.tp > 1:
            group = self.processes.mesh.get_group('tp')
            dist.all_reduce = lambda counts: all_reduce(counts, group=group)
        try:
            right(self, is_applied)
        finally:
            dist.all_reduce = all_reduce

    right, ExpertBalance.update = ExpertBalance.update, update


def logged_loss_of_a_part():
    """torchtitan 3280: with tp, the loss that is shown is not summed over the ranks of cp."""
    plant_after(Parallel, 'forward_backward', lambda self, *arguments: (
        arguments[-1] / self.layout.cp if self.layout.tp > 1 else None))


def convolution_across_documents():
    """torchtitan 3984, in our code: where a cp rank's part begins, a convolution reads other documents."""
    part = [0]

    def forward(self, *parts, positions, cache=None, **options):
        if part[0] and cache is None:
            positions = positions + self.n_before * (torch.arange(positions.size(1)) == 0)
        return right(self, *parts, positions=positions, cache=cache, **options)

    def keep_part(parallel, *_):
        part[0] = parallel.layout.positions(parallel.processes.rank, parallel.block_size).start

    plant_after(Parallel, 'parallelize', keep_part)
    right, Convolution.forward = Convolution.forward, forward


def state_across_documents():
    """torchtitan 3984: a recurrent state continues into the next document."""
    def forward(self, *inputs, begins=None, cache=None):
        return right(self, *inputs, begins=None if is_among_many() else begins, cache=cache)

    right, DeltaRule.forward = DeltaRule.forward, forward


def experts_tokens_without_sum():
    """torchtitan 1878: with tp, gradients of the experts' tokens are terms of a sum, which is not made."""
    def drop_sum(stage, mesh, ep, tp, _):
        for routed in find_experts(stage).values() if tp > 1 else ():
            routed._forward_pre_hooks.clear()
            routed.register_forward_pre_hook(lambda module, inputs: (inputs[0].to_local(), inputs[1]))

    plant_after(expert, 'split_experts', drop_sum)


def detached_router():
    """Automodel 2995: with ep, the weights of experts' outputs are detached, so the router does not learn."""
    def detach(stage, mesh, ep, tp, _):
        for routed in find_experts(stage).values() if ep > 1 else ():
            routed.router.register_forward_hook(
                lambda module, inputs, outputs: (outputs[0], outputs[1].detach() + 0 * outputs[1]))

    plant_after(expert, 'split_experts', detach)


def mask_of_first_batch():
    """ART 648: the mask that was computed for one batch is used again for another batch."""
    masks = {}

    def first_seen(T, window, starts, device):
        first = right(T, window, starts, device)
        if first is None or not is_among_many():
            return first
        return masks.setdefault((window, first.shape), first)

    right, model.first_seen = model.first_seen, first_seen


# --- found here ----------------------------------------------------------------------------------------------

def freed_parameters():
    """With ZeRO-3, the halves of a split backward pass look for parameters that FSDP2 has freed."""
    pipeline._stage_class()._gather_parameters = lambda self: None


# --- others that our code could have ------------------------------------------------------------------------

def experts_divided_by_tp():
    """With ep and tp, experts' gradients are divided by ep · tp."""
    plant_after(expert, 'local_matrix', divide_by_tp)


def divide_by_tp(matrix, ep, local):
    names = matrix.device_mesh.mesh_dim_names
    if local.requires_grad and ep > 1 and 'tp' in names:
        local.register_hook(lambda gradient: gradient / matrix.device_mesh['tp'].size())


def tied_gradients_not_summed():
    """The gradients of a tied pair on two pipeline stages are not added."""
    pipeline.Pipeline._sum_tied_gradients = lambda self: None


def tied_pair_counted_twice():
    """The norm of a pipeline's gradients has both copies of a tied pair."""
    def clip_gradients(self, *arguments):
        if not self.pipeline or len([p for p in self.pipeline.tied_pair if p is not None]) == 0:
            return right(self, *arguments)
        pair, self.pipeline.tied_pair = self.pipeline.tied_pair, []
        try:
            return right(self, *arguments)
        finally:
            self.pipeline.tied_pair = pair

    right, Parallel.clip_gradients = Parallel.clip_gradients, clip_gradients


def replicas_exchange_the_last():
    """Replicas (HSDP) exchange the gradients of the last micro-batch, not of all."""
    def forward_backward(self, batch, n_targets=0, last=True, *scale):
        forgets = last and self.layout.dp_replicate > 1 and not self.pipeline
        for module in self.network.modules() if forgets else ():
            if hasattr(module, '_get_fsdp_state'):
                state = module._get_fsdp_state()
                for group in getattr(state, '_fsdp_param_groups', [state._fsdp_param_group]):
                    if group is not None:
                        group._partial_reduce_output = None
        return right(self, batch, n_targets, last, *scale)

    right, Parallel.forward_backward = Parallel.forward_backward, forward_backward


def momentum_lost():
    """A run that resumes on several processes starts with Muon's momentum at zero."""
    def forget(path, parameters, optimizer=None, _=None):
        for state in optimizer.state.values() if optimizer is not None and is_among_many() else ():
            if 'momentum_buffer' in state:
                local_part(state['momentum_buffer']).zero_()

    plant_after(checkpoint, 'load', forget)


def stages_without_documents():
    """Pipeline stages after the first see a row as one document."""
    def forward(self, idx, targets=None, starts=None, *others, **options):
        if self.transformer.wte is None:
            starts = None
        return right(self, idx, targets, starts, *others, **options)

    right, model.GPT.forward = model.GPT.forward, forward


def window_of_a_part():
    """With cp, a window does not reach back into the part before."""
    part = [None]

    def keep_part(parallel, *_):
        if parallel.layout.cp > 1:
            part[0] = parallel.block_size // parallel.layout.cp

    def limit(T, window, starts, device, first):
        if part[0] and 0 < window < T:
            return torch.maximum(first, torch.arange(T, device=device) // part[0] * part[0])

    plant_after(Parallel, 'parallelize', keep_part)
    plant_after(model, 'first_seen', limit)


def uneven_rows_not_gathered():
    """ZeRO-1 does not gather the parameters whose rows do not divide evenly."""
    def drop_uneven(self, parameters, result):
        sent, sizes, places = result
        return sent, sizes, [place if place.dim() == 2 else place.clone() for place in places]

    plant_after(Zero1, '_views_to_gather', drop_uneven)


def reference_moved():
    """With cp, the reference of a pair's targets is one position off."""
    def forward(self, nats, pairs, reference):
        is_part = pairs.numel() > nats.numel()
        return right(self, nats, pairs, reference.roll(1, dims=1) if is_part else reference)

    right, PreferenceLoss.forward = PreferenceLoss.forward, forward


def fragment_not_sent_on():
    """Replicas within an island do not take the last fragment from the replica that has received it."""
    def keep_own(self, number, means, group, device, result):
        if group.rank() and number % len(self.fragments) == len(self.fragments) - 1:
            return {index: outer.clone() for index, outer in self.of_fragment(number).items()}

    plant_after(OuterOptimizer, 'broadcast_means', keep_own)


def convolution_without_gradient_before():
    """With cp, a convolution's gradient does not reach the part before."""
    plant_after(context, 'exchange_heads', lambda stage, mesh, _: replace_parts(
        stage, 'positions_before', lambda before: lambda x, n: before(x, n).detach()))


def padding_counts():
    """Where a batch does not divide evenly, rows of padding are rows of the batch again."""
    plant_after(Layout, 'rows', lambda layout, rank, total, micro_batch, step, rows: rows.clip(min=0))


def tables_averaged_over_tp():
    """With tp, the gradient of a value embedding's table is divided by the ranks that divide its features."""
    change_gradients(lambda layout, name, parameter: (
        1 / layout.tp if name.endswith('value_embedding.table.weight') else 1))


def lr_factors_lost():
    """ZeRO-1 hands the optimizer its rows without the factors of their learning rates."""
    def forget(parallel, *_):
        if parallel._zero1:
            optim.parse_lr_factors = lambda text: {}

    plant_after(Parallel, 'parallelize', forget)


def adapters_averaged_over_tp():
    """With tp, the gradient of an adapter's A, which all ranks have, is averaged and not summed."""
    change_gradients(lambda layout, name, parameter: 1 / layout.tp if name.endswith('c_fc.lora_A') else 1)


PLANTS = {
    'Megatron-LM 7452 norm': split_vectors_not_in_norm,
    'Megatron-LM 7452 router': router_losses_of_every_tp_rank,
    'Megatron-LM 5916': experts_not_in_norm,
    'Megatron-LM 5956': experts_not_divided,
    'Megatron-LM 1628': experts_summed_as_dense,
    'Megatron-LM 1464': attention_gradients_of_own_part,
    'Megatron-LM 673': loss_not_scaled_by_cp,
    'transformers 48687': router_without_other_ranks_experts,
    'torchtitan 4245': bias_of_every_tp_rank,
    'torchtitan 4154': loads_of_tp_ranks,
    'torchtitan 3280': logged_loss_of_a_part,
    'torchtitan 3984': convolution_across_documents,
    'torchtitan 3984 state': state_across_documents,
    'torchtitan 1878': experts_tokens_without_sum,
    'Automodel 2995': detached_router,
    'ART 648': mask_of_first_batch,
    'freed parameters': freed_parameters,
    'experts divided by tp': experts_divided_by_tp,
    'tied gradients': tied_gradients_not_summed,
    'tied norm': tied_pair_counted_twice,
    'replicas': replicas_exchange_the_last,
    'momentum': momentum_lost,
    'documents of stages': stages_without_documents,
    'window': window_of_a_part,
    'uneven rows': uneven_rows_not_gathered,
    'reference': reference_moved,
    'fragment': fragment_not_sent_on,
    'convolution': convolution_without_gradient_before,
    'padding': padding_counts,
    'tables': tables_averaged_over_tp,
    'lr_factors': lr_factors_lost,
    'adapters': adapters_averaged_over_tp,
}
if os.environ.get('PLANTED'):
    PLANTS[os.environ['PLANTED']]()
