"""Functions of whole matrices, such as Muon's, whose parts or copies are on different processes."""
import functools

import torch
import torch.distributed as dist

# Before torch 2.13 all_gather_single is called all_gather_into_tensor.
all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor


def apply_to_whole_matrices(function, matrix_shape, parts, dimensions):
    """Apply a function of whole matrices to n matrices of matrix_shape; returns the results' parts.

    parts (n, rows, columns): this process's parts of the matrices.
    dimensions: those of the mesh, outermost first, as (process group, the dimension of a matrix that its
    ranks cut as torch.chunk does, or None for replicas). Inner dimensions cut first, and evenly. The ranks of
    each dimension divide the n matrices, and each rank gets its matrices whole in that dimension.
    """
    if len(parts) == 0:
        return parts
    if not dimensions:
        return function(parts)
    (group, cut), *inner = dimensions
    apply_inside = functools.partial(apply_to_whole_matrices, function, matrix_shape, dimensions=inner)
    if cut is None:
        return _divide_among_replicas(apply_inside, parts, group)
    length = matrix_shape[cut]
    for inner_group, inner_cut in inner:
        if inner_cut == cut:
            length //= inner_group.size()
    lengths = chunk_sizes(length, group.size())  # the length of each rank's parts
    counts = chunk_sizes(len(parts), group.size())  # the number of matrices that each rank takes
    whole = _exchange(parts.split(counts), [counts[group.rank()]] * len(lengths), lengths, cut + 1, group)
    results = apply_inside(torch.cat(whole, dim=cut + 1))
    pieces = results.split(lengths, dim=cut + 1)
    return torch.cat(_exchange(pieces, counts, [lengths[group.rank()]] * len(counts), cut + 1, group))


def matrix_dimensions(parameter, world_size):
    """The `dimensions` of apply_to_whole_matrices for a DTensor, or a parameter that all processes have."""
    if not hasattr(parameter, 'placements'):
        return [(dist.group.WORLD, None)] if world_size > 1 else []
    dimensions, mesh = [], parameter.device_mesh
    stacked = parameter.dim() - 2  # 1 for the matrices of experts, which have a dimension of experts
    for name, placement in zip(mesh.mesh_dim_names, parameter.placements):
        cut = None if placement.is_replicate() else placement.dim - stacked
        if mesh[name].size() > 1 and cut != -1:  # ranks that cut between experts have whole matrices
            dimensions.append((mesh.get_group(name), cut))
    return dimensions


def chunk_sizes(length, ranks):
    """The sizes in which torch.chunk and DTensor cut a length for ranks. The last sizes may be 0."""
    size = -(-length // ranks)
    return [max(0, min(size, length - rank * size)) for rank in range(ranks)]


def _exchange(pieces, counts, lengths, dim, group):
    """Send pieces[r] to rank r; returns from each rank r counts[r] parts, lengths[r] long in dim."""
    shapes = []
    for count, length in zip(counts, lengths):
        shape = [count, *pieces[0].shape[1:]]
        shape[dim] = length
        shapes.append(torch.Size(shape))
    sent = torch.cat([piece.flatten() for piece in pieces])
    received = sent.new_empty(sum(shape.numel() for shape in shapes))
    dist.all_to_all_single(received, sent, [shape.numel() for shape in shapes],
                           [piece.numel() for piece in pieces], group=group)
    return [part.view(shape) for part, shape in zip(received.split([s.numel() for s in shapes]), shapes)]


def _divide_among_replicas(function, matrices, group):
    """function(matrices) for matrices that all ranks of a group have: each rank takes a share of them.

    If there are more ranks than matrices, the ranks form subgroups that each take all matrices. Results are
    gathered in shares of one size, and a gather over 1,024 ranks would need memory for 1,024 matrices.
    """
    ranks = ranks_that_divide(len(matrices), group.size())
    if ranks == 1:
        return function(matrices)
    group, size = _subgroup(group, ranks), -(-len(matrices) // ranks)
    share = matrices.new_zeros(size, *matrices.shape[1:])
    mine = function(matrices[group.rank() * size:][:size])
    share[:len(mine)] = mine
    results = matrices.new_empty(ranks * size, *matrices.shape[1:])
    all_gather(results, share, group=group)
    return results[:len(matrices)]


def ranks_that_divide(n, ranks):
    """How many of `ranks` divide n matrices: the divisor of `ranks` that leaves each the fewest to compute.

    All shares are padded to one size, and together to 2 n matrices at most.
    """
    divisors = [divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]
    return min((divisor for divisor in divisors if divisor * -(-n // divisor) <= 2 * n),
               key=lambda divisor: (-(-n // divisor), divisor))


@functools.cache
def _subgroup(group, size):
    """The process group of this process and its neighbours: `size` of a group's ranks, in their order."""
    if size == group.size():
        return group
    ranks, first = dist.get_process_group_ranks(group), group.rank() // size * size
    # Other processes do not have to call, such as those of a pipeline stage with other numbers of matrices.
    return dist.new_group(ranks[first:first + size], use_local_synchronization=True)
