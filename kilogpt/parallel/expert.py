"""A mixture of experts on many processes.

  expert parallel (ep)  each process has some of the experts, and tokens travel to theirs and back by
                        all-to-all (GShard, Lepikhin et al. 2020). FSDP2 shards an expert over the processes
                        that share it.
  tensor parallel (tp)  each process has a part of every expert's width, and all tokens, as in a dense MLP

The balance of the experts goes by the tokens of the whole batch, which are added up once an iteration.
"""
import contextlib
import functools

import torch
import torch.distributed as dist
from torch.nn import functional as F


def find_experts(model):
    """{name: module} of the model's mixtures of experts, as its split_plan names them."""
    plan, found = model.split_plan, {}
    if 'experts' not in plan:
        return found
    for number, block in model.get_submodule(plan['blocks']).items():
        modules = dict(block.named_modules())
        if plan['experts'] in modules:
            found[f'{plan["blocks"]}.{number}.{plan["experts"]}'] = modules[plan['experts']]
    return found


def group_products(model, dtypes):
    """Compute the products of all experts of a block at once where PyTorch can, in place.

    dtypes: those in which the device can. PyTorch 2.10 and later can where rows are multiples of 16 bytes.
    """
    if hasattr(F, 'grouped_mm'):
        for routed in find_experts(model).values():
            routed.experts.products = functools.partial(grouped_products, routed.experts.products, dtypes)


def grouped_products(loop, dtypes, ends):
    """As `loop`, model.py's loop_over_experts, but on a GPU the host waits for no size."""
    offsets = ends.to(torch.int32)

    def product(x, matrices):
        is_aligned = matrices.size(-1) % 8 == 0 and matrices.size(-2) % 8 == 0
        if x.dtype in dtypes and is_aligned and x.size(0):  # no token may have come to this process
            return F.grouped_mm(x, matrices.mT, offs=offsets)
        return loop(ends)(x, matrices)

    return product


def split_experts(routed, mesh, ep, tp):
    """Expert and tensor parallelism of one mixture of experts, in place.

    mesh: has the dimensions 'ep' and 'tp', where their degrees are above 1.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    router, experts = routed.router, routed.experts
    mesh = mesh[('ep',) * (ep > 1) + ('tp',) * (tp > 1)]
    width_of = dict(c_fc=1, c_gate=1, c_proj=2)  # the dimension of each parameter that is an expert's width
    for name, parameter in list(experts.named_parameters()):
        placements = [Shard(0)] * (ep > 1) + [Shard(width_of[name])] * (tp > 1)
        sharded = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        experts.register_parameter(name, torch.nn.Parameter(sharded))
    all_matrices = experts.matrices
    experts.matrices = lambda: [local_matrix(matrix, ep) for matrix in all_matrices()]
    if ep > 1:
        routed.send = exchange_tokens(mesh['ep'].get_group(), ep)
    if tp == 1:
        return

    # Each rank has a part of the experts' width, so that all its gradients are parts of sums: those of the
    # tokens, of the weights that the experts' outputs have, and of the router. None is summed up before the
    # end, since a whole gradient among the parts would count tp times.
    tp_mesh = mesh['tp']
    weight = distribute_tensor(router.weight.detach(), tp_mesh, [Replicate()], src_data_rank=None)
    router.weight = torch.nn.Parameter(weight)
    router.matrix = lambda: router.weight.to_local(grad_placements=[Partial()])

    def take_tokens(module, inputs):
        x, is_counted = inputs
        return x.to_local(grad_placements=[Partial()]), is_counted

    def sum_and_scatter(module, inputs, outputs):
        y, result = outputs
        y = DTensor.from_local(y, tp_mesh, [Partial()], run_check=False)
        return y.redistribute(placements=[Shard(1)]).to_local(), result

    routed.register_forward_pre_hook(take_tokens)
    routed.register_forward_hook(sum_and_scatter)


def local_matrix(matrix, ep):
    """This rank's part of experts' matrices, a DTensor.

    The gradient has come from the tokens of ep ranks, of which FSDP2 does not know: it averages over the
    ranks that have the same experts, ep times fewer than those whose gradients are to be averaged.
    """
    local = matrix.to_local()
    if local.requires_grad and ep > 1:
        local.register_hook(lambda gradient: gradient / ep)
    return local


def shard_experts(routed, layout, mesh, reshard, options):
    """FSDP2 for the router, in float32, and for experts that others than all data-parallel ranks share.

    options: of `fully_shard`, for the rest of the model.
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
        """Whole experts on each rank, or the same part of all experts where that is what divides evenly."""
        experts, rows, _ = parameter.to_local().shape if hasattr(parameter, 'to_local') else parameter.shape
        return Shard(1) if experts % n_shards and rows % n_shards == 0 else Shard(0)

    fully_shard(routed.experts, reshard_after_forward=reshard, shard_placement_fn=placement, **options)


def exchange_tokens(group, ep):
    """The function for the place of model.py's `send_nowhere`, where `ep` processes share the experts."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    def send(rows, ends):
        n_sent = ends.diff(prepend=ends.new_zeros(1))  # (E,): rows of this process for each expert
        n_received = torch.empty_like(n_sent)  # (ep * E / ep,): rows of each process for each expert here
        dist.all_to_all_single(n_received, n_sent, group=group)
        n_received = n_received.view(ep, -1)
        # The host must know the sizes of what it sends. On a GPU this waits for the router.
        sent, received = n_sent.view(ep, -1).sum(dim=1).tolist(), n_received.sum(dim=1).tolist()
        rows = all_to_all_single_autograd(rows, received, sent, group)
        # The rows of one process come after those of another, each sorted by expert: sort all by expert.
        experts = torch.arange(n_received.size(1), device=rows.device).repeat(ep)
        experts = experts.repeat_interleave(n_received.flatten(), output_size=sum(received))
        order = experts.argsort(stable=True)
        back = order.argsort()

        def send_back(rows):
            return all_to_all_single_autograd(rows.index_select(0, back), sent, received, group)

        return rows.index_select(0, order), n_received.sum(dim=0).cumsum(dim=0), send_back

    return send


def remember_choice(router):
    """The `context_fn` of a checkpoint whose second forward pass takes the experts that the first one chose.

    A choice made again might differ in the last bit, and then the gradients would be those of other experts.
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
    """Adds up once an iteration how many tokens went to each expert, and tells the routers.

    model: the whole model. stages: {index: module} of this process, where it is cut into pipeline stages.
    """

    def __init__(self, model, stages, processes, tp):
        self.names = list(find_experts(model))  # also of those that other pipeline stages have
        self.processes, self.tp = processes, tp
        self.routers = {}
        for stage in stages.values():
            self.routers |= {name: routed.router for name, routed in find_experts(stage).items()}
        self.n_experts = model.config.n_experts if self.names else 0
        self.n_tokens = None  # (routers of the model, E): tokens of the last iteration, on every process

    def set_loss_scale(self, loss_scale):
        """Set what the losses of the routers, like the model's, are multiplied by: a tensor or a number."""
        for router in self.routers.values():
            router.loss_scale = loss_scale / self.tp  # each tensor-parallel rank adds the whole loss

    def load_max(self):
        """{} or one item: tokens of the busiest expert of any block, as a multiple of the block's mean."""
        if self.n_tokens is None:
            return {}
        n_tokens = self.n_tokens.float()
        return dict(moe_load_max=(n_tokens / n_tokens.mean(dim=1, keepdim=True)).max().item())

    def loads(self):
        """{} or one item: for each block with experts, each expert's share of the last iteration's tokens."""
        if self.n_tokens is None:
            return {}
        shares = self.n_tokens.double() / self.n_tokens.sum(dim=1, keepdim=True)
        return dict(moe_loads=[[round(share, 4) for share in block] for block in shares.tolist()])

    def forget(self):
        """Leave out the tokens since the last update."""
        for router in self.routers.values():
            router.n_tokens = None

    @torch.no_grad()
    def update(self, is_applied):
        """Rebalance all routers. is_applied: a tensor of 1, or 0 where the update was left out."""
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
            router.rebalance(self.n_tokens[self.names.index(name)].float(), is_applied)
        self.forget()
