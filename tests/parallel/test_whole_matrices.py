"""Functions of whole matrices on 4 processes equal those on one, and buffers do not grow with processes."""
import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from helpers import free_port
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from kilogpt.parallel.whole_matrices import apply_to_whole_matrices, chunk_sizes, ranks_that_divide

pytestmark = pytest.mark.quick

# {sizes of a mesh's dimensions: dimensions of a matrix that they cut, None for replicas}
LAYOUTS = {(4,): [(None,), (0,), (1,)], (2, 2): [(None, 0), (0, 0), (0, 1)]}
SHAPES = (14, 6), (2, 12)  # ranks cut 14 rows unevenly, and outnumber 2 rows
NUMBERS = {1: torch.float32, 2: torch.bfloat16, 5: torch.float32}  # of matrices, and dtypes


class LargestBuffer(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes."""
    elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def scale(matrices):
    """A function of whole matrices: every part of the result depends on the whole matrix."""
    return matrices * matrices.sum(dim=(1, 2), keepdim=True)


def check_layouts(rank, port, world_size):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=world_size)
    for sizes, layouts in LAYOUTS.items():
        mesh = init_device_mesh('cpu', sizes)
        for cuts, shape, (n, dtype) in itertools.product(layouts, SHAPES, NUMBERS.items()):
            dimensions = list(zip(mesh.get_all_groups(), cuts))
            whole = torch.randint(-8, 8, (n, *shape), generator=torch.Generator().manual_seed(n)).to(dtype)
            with LargestBuffer() as buffers:
                results = apply_to_whole_matrices(scale, shape, cut_parts(whole, mesh, cuts), dimensions)
            assert results.equal(cut_parts(scale(whole), mesh, cuts)), (sizes, cuts, shape, n)
            assert buffers.elements <= 2 * whole.numel(), (sizes, cuts, shape, n)
    dist.barrier()
    dist.destroy_process_group()


def cut_parts(matrices, mesh, cuts):
    """The parts of matrices that this process holds. Inner mesh dimensions cut before outer ones."""
    for cut, ranks, coordinate in reversed(list(zip(cuts, mesh.shape, mesh.get_coordinate()))):
        if cut is not None:
            matrices = matrices.split(chunk_sizes(matrices.size(cut + 1), ranks), cut + 1)[coordinate]
    return matrices.contiguous()


@pytest.mark.parametrize('n, ranks, expected', [
    (2, 1024, 2), (3, 1024, 4), (48, 1024, 64), (100, 8, 8), (6, 7, 7), (2, 1021, 1), (1, 8, 1), (4, 6, 6)])
def test_replicas_divide_matrices_without_more_padding_than_matrices(n, ranks, expected):
    assert ranks_that_divide(n, ranks) == expected


def test_parts_of_results_equal_those_of_one_process_and_buffers_stay_small():
    torch.multiprocessing.start_processes(check_layouts, (free_port(), 4), nprocs=4, start_method='fork')
