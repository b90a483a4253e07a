"""Context parallelism: each process has a part of each sequence, and in attention some of the heads."""
import math

from kilogpt.devices.parts import find_parts, replace_parts


def exchange_heads(model, mesh):
    """Let attention see whole sequences, with a part of the heads on each rank (DeepSpeed-Ulysses), in place.

    An all-to-all turns q, k, v (B, heads, T / cp, D) into (B, heads / cp, T, D), and another all-to-all turns
    the result back. Key/value heads are repeated if there are fewer of them than ranks. A recurrence is treated
    likewise, with its gates (B, heads, T / cp); there heads of queries and keys are repeated.
    A convolution gets the end of the part before. A loss that needs whole rows gathers them. In both cases the
    sum of all ranks' gradients goes back. While model.n_sequence_parts is 1, each rank has whole sequences.
    mesh: of one dimension, over the ranks that share sequences.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def redistribute(x, source, target):
        x = DTensor.from_local(x, mesh, [Shard(source)], run_check=False)
        return x.redistribute(placements=[Shard(target)]).to_local()

    def gather_rows(x):
        x = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def positions_before(x, n):
        """The last n positions of the part before; the first part has none, and does not use what it gets."""
        last = gather_rows(x[:, -n:].contiguous())  # (B, ranks * n, F)
        start = (mesh.get_local_rank() - 1) % mesh.size() * n
        return last[:, start:start + n]

    def gather_sequence(module, inputs):
        if model.n_sequence_parts == 1:
            return None
        gathered = []
        for x in inputs:
            repeats = mesh.size() // math.gcd(mesh.size(), x.size(1))  # 1 for all but the fewer heads
            gathered.append(redistribute(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x, 2, 1))
        return tuple(gathered)

    def divide_sequence(module, inputs, output):
        return None if model.n_sequence_parts == 1 else redistribute(output, 1, 2)

    for owner, name in find_parts(model, 'attention') + find_parts(model, 'recurrence'):
        mixer = getattr(owner, name)
        mixer.register_forward_pre_hook(gather_sequence)
        mixer.register_forward_hook(divide_sequence)
    replace_parts(model, 'positions_before', lambda zeros_before: positions_before)
    replace_parts(model, 'whole_rows', lambda whole_rows: gather_rows)
