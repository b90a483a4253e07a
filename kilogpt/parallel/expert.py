"""A mixture of experts on many processes.

  expert parallel (ep)  each process has some of the experts, and tokens travel to their experts and back by
                        all-to-all (GShard, Lepikhin et al. 2020). FSDP2 shards an expert over the processes
                        that share it.
  tensor parallel (tp)  each process has a part of every expert's width, and all tokens, as in a dense MLP

The balance of the experts goes by the tokens of the whole batch, which are summed once an iteration.
"""
import contextlib

import torch
import torch.distributed as dist

from kilogpt.devices.parts import find_experts, replace_parts


def split_experts(model, mesh, ep, tp):
    """Apply expert and tensor parallelism to all mixtures of experts of a model, in place.

    mesh: has the dimensions 'ep' and 'tp' if their degrees are above 1.
    """
    mesh = mesh[('ep',) * (ep > 1) + ('tp',) * (tp > 1)]
    for routed in find_experts(model).values():
        split_matrices(routed.experts, mesh, ep, tp)
        if tp > 1:
            split_router(routed, mesh['tp'])
    replace_parts(model, 'matrices', lambda matrices: lambda: [local_matrix(m, ep) for m in matrices()])
    if ep > 1:
        replace_parts(model, 'dispatch', lambda _: exchange_tokens(mesh['ep'].get_group(), ep))
    if tp > 1:
        replace_parts(model, 'router_matrix', router_matrix_of_rank)


def split_matrices(experts, mesh, ep, tp):
    """Make the matrices of experts DTensors on a mesh with the dimensions 'ep' and 'tp', in place."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    # The dimension of each parameter that is an expert's width. All ranks have the biases of outputs.
    width_dims = dict(c_fc=1, c_gate=1, c_proj=2, c_fc_bias=1, c_gate_bias=1)
    for name, parameter in list(experts.named_parameters()):
        of_width = Shard(width_dims[name]) if name in width_dims else Replicate()
        placements = [Shard(0)] * (ep > 1) + [of_width] * (tp > 1)
        sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        experts.register_parameter(name, torch.nn.Parameter(sharded, parameter.requires_grad))


def split_router(routed, mesh):
    """Let a mixture of experts take whole tokens and return its part of the sequence, in place.

    mesh: of tensor parallelism. Each rank has a part of the experts' width, so that all gradients on a rank
    are parts of sums: those of the tokens, of the weights of experts' outputs, and of the router. All of them
    stay parts until the end, since a whole gradient among the parts would count tp times.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    router = routed.router
    for name in ('weight', 'logit_bias'):
        whole = getattr(router, name)
        if whole is not None:
            replicas = distribute_tensor(whole.detach(), mesh, [Replicate()], src_data_rank=None)
            setattr(router, name, torch.nn.Parameter(replicas, whole.requires_grad))

    def take_tokens(module, inputs):
        x, is_counted = inputs
        return x.to_local(grad_placements=[Partial()]), is_counted

    def sum_and_scatter(module, inputs, outputs):
        y, result = outputs
        y = DTensor.from_local(y, mesh, [Partial()], run_check=False)
        return y.redistribute(placements=[Shard(1)]).to_local(), result

    routed.register_forward_pre_hook(take_tokens)
    routed.register_forward_hook(sum_and_scatter)


def router_matrix_of_rank(matrix):
    """The form of a router's `matrix` or `logit_biases` whose gradient is this rank's part of a sum."""
    from torch.distributed.tensor import Partial
    return lambda: matrix().to_local(grad_placements=[Partial()])


def local_matrix(matrix, ep):
    """This rank's part of experts' matrices, or of their biases, a DTensor.

    The gradient is a sum over the tokens of ep ranks. FSDP2 averages gradients over the ranks with the same
    experts, which are ep times fewer than the ranks that the average must include.
    """
    from torch.distributed.tensor import Partial
    local = matrix.to_local(grad_placements=[Partial() if placement.is_replicate() else placement
                                             for placement in matrix.placements])
    if local.requires_grad and ep > 1:
        local.register_hook(lambda gradient: gradient / ep)
    for size, placement in zip(matrix.device_mesh.shape, matrix.placements):
        if placement.is_replicate():  # the ranks' outputs are summed, and so are their shares of a bias
            local = local / size
    return local


def shard_experts(routed, layout, mesh, reshard, options):
    """Apply FSDP2 to a router, in float32, and to its experts, which only some data-parallel ranks share.

    options: of `fully_shard` for the rest of the model.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    not_trained = {parameter for parameter in routed.parameters() if not parameter.requires_grad}
    in_float32 = options | dict(mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    fully_shard(routed.router, reshard_after_forward=reshard, ignored_params=not_trained, **in_float32)
    if layout.ep > 1:
        mesh_dims = ('dp_replicate', 'expert_shard') if layout.dp_replicate > 1 else 'expert_shard'
        options = options | dict(mesh=mesh[mesh_dims])
    n_shards = layout.dp_shard * layout.cp // layout.ep

    def placement(parameter):
        """Whole experts on each rank, or the same part of all experts if only the parts divide evenly."""
        experts, rows, *_ = parameter.to_local().shape if hasattr(parameter, 'to_local') else parameter.shape
        return Shard(1) if experts % n_shards and rows % n_shards == 0 else Shard(0)

    fully_shard(routed.experts, reshard_after_forward=reshard, shard_placement_fn=placement, **options)


def exchange_tokens(group, ep):
    """The form of mixture.py's `dispatch_locally` for experts that `ep` processes share."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    def dispatch(rows, ends):
        n_sent = ends.diff(prepend=ends.new_zeros(1))  # (E,): rows from this process to each expert
        n_received = torch.empty_like(n_sent)  # (ep * E / ep,): rows from each process to each expert here
        dist.all_to_all_single(n_received, n_sent, group=group)
        n_received = n_received.view(ep, -1)
        # The host must know how many rows it sends. On a GPU the next line waits for the router.
        sent, received = n_sent.view(ep, -1).sum(dim=1).tolist(), n_received.sum(dim=1).tolist()
        rows = all_to_all_single_autograd(rows, received, sent, group)
        # The rows arrive sorted by process, and then by expert. Sort all of them by expert.
        experts = torch.arange(n_received.size(1), device=rows.device).repeat(ep)
        experts = experts.repeat_interleave(n_received.flatten(), output_size=sum(received))
        order = experts.argsort(stable=True)
        back = order.argsort()

        def combine(rows):
            return all_to_all_single_autograd(rows.index_select(0, back), sent, received, group)

        return rows.index_select(0, order), n_received.sum(dim=0).cumsum(dim=0), combine

    return dispatch


def remember_choice(router):
    """The `context_fn` of a checkpoint whose second forward pass takes the experts that the first pass chose.

    A second choice could differ after a difference in the last bit, and the gradients would be those of other
    experts.
    """
    choose = router.choose

    def contexts():
        choices = []

        def choose_and_keep(ranking):
            choices.append(choose(ranking))
            return choices[-1]

        return choose_by(choose_and_keep), choose_by(lambda ranking: choices.pop())

    @contextlib.contextmanager
    def choose_by(function):
        router.choose = function
        try:
            yield
        finally:
            router.choose = choose

    return contexts


class ExpertBalance:
    """Sums once an iteration how many tokens went to each expert, and rebalances the routers.

    model: the whole model. stages: {index: module}, the pipeline stages of this process.
    """

    def __init__(self, model, stages, processes, tp):
        self.names = list(find_experts(model))  # those in other pipeline stages included
        self.processes, self.tp = processes, tp
        self.routers = {}
        for stage in stages.values():
            self.routers |= {name: routed.router for name, routed in find_experts(stage).items()}
        self.n_experts = model.config.n_experts if self.names else 0
        self.n_tokens = None  # (routers of the model, E): tokens of the last iteration, on every process

    def set_loss_scale(self, loss_scale):
        """Set the factor of the routers' losses and of the model's: a tensor or a number."""
        for router in self.routers.values():
            router.loss_scale = loss_scale / self.tp  # each tensor-parallel rank adds the whole loss

    def load_max(self):
        """{} or one item: the most tokens of any expert, as a multiple of the mean of its block."""
        if self.n_tokens is None:
            return {}
        n_tokens = self.n_tokens.to(torch.get_default_dtype())
        return dict(moe_load_max=(n_tokens / n_tokens.mean(dim=1, keepdim=True)).max().item())

    def loads(self):
        """{} or one item: for each block with experts, each expert's share of the last iteration's tokens."""
        if self.n_tokens is None:
            return {}
        shares = self.n_tokens.double() / self.n_tokens.sum(dim=1, keepdim=True)
        return dict(moe_loads=[[round(share, 4) for share in block] for block in shares.tolist()])

    def forget(self):
        """Do not count the tokens since the last update."""
        for router in self.routers.values():
            router.n_tokens = None

    @torch.no_grad()
    def update(self, is_applied):
        """Rebalance all routers. is_applied: a tensor of 1, or of 0 if the update was skipped."""
        if not self.names:
            return
        counts = torch.zeros(len(self.names), self.n_experts, dtype=torch.int64, device=self.processes.device)
        for name, router in self.routers.items():
            if router.n_tokens is not None:
                counts[self.names.index(name)] = router.n_tokens
        if self.processes.world_size > 1:
            dist.all_reduce(counts)
        self.n_tokens = counts // self.tp  # tensor-parallel ranks have the same tokens
        for name, router in self.routers.items():
            if not router.weight.requires_grad:  # frozen beside adapters, as its bias then is
                continue
            n_tokens = self.n_tokens[self.names.index(name)].to(torch.get_default_dtype())
            router.rebalance(n_tokens, is_applied)
        self.forget()
