"""Where the host waits for a pretended GPU, and mistakes that must be found."""
import pytest

from cuda_helpers import calls_in_streams, copies_from_pageable_memory, products_of, waits_of
from helpers import FAULTS

# Iterations 4 and 5 have settled, and neither logs, evaluates nor saves.
QUIET = '--max_iters=6 --log_interval=6 --eval_iters=0 --eval_interval=100 --keep_checkpoints=0 --n_layer=4'.split()
SETTLED = 4, 5
PLANTED = [FAULTS / 'planted_cuda.py']


@pytest.mark.parametrize('nproc, settings', [
    (1, '--dtype=float32'), (1, ''), (1, '--dtype=float16'), (1, '--optimizer=muon'), (1, '--on_spike=skip'),
    (1, '--mlp=moe'), (1, '--activation_checkpoint=full'), (1, '--zero_stage=3'), (1, '--compile=True'),
    (2, ''), (2, '--zero_stage=1'), (2, '--zero_stage=2'), (2, '--zero_stage=3'), (2, '--tp=2'), (2, '--cp=2'),
    (2, '--pp=2')])
def test_host_does_not_wait_between_log_lines(dry_run, nproc, settings):
    run = dry_run(*QUIET, '--dtype=bfloat16', *settings.split(), nproc=nproc)
    assert list(run.calls) == [1, 2, 3, 4, 5, 6]
    assert waits_of(run, SETTLED) == {}


def test_experts_on_several_gpus_wait_for_their_router_alone(dry_run):
    run = dry_run(*QUIET, '--dtype=bfloat16', '--mlp=moe', '--ep=2', nproc=2)
    assert waits_of(run, SETTLED).keys() == {'kilogpt/parallel/expert.py dispatch'}


@pytest.mark.parametrize('settings, collectives', [
    ('', {'ncclAllReduce'}), ('--zero_stage=1', {'ncclReduceScatter'}),
    ('--zero_stage=3', {'ncclAllGather', 'ncclReduceScatter'})])
def test_collectives_of_the_passes_are_not_in_the_stream_of_products(dry_run, settings, collectives):
    """A GPU can run them beside the computation. Those of the update are in its stream."""
    run = dry_run(*QUIET, '--dtype=bfloat16', *settings.split(), nproc=2)
    streams = {call: {stream for other, stream in run.streams[5] if other == call} for call, _ in run.streams[5]}
    assert all(found == {0} for call, found in streams.items() if call.startswith('product'))
    assert all(streams[call] and 0 not in streams[call] for call in collectives)


def test_async_tp_copies_beside_products_instead_of_collectives(dry_run):
    """Parts of a product start when their rows are there, in two streams; neither needs the host."""
    settings = *QUIET, '--n_layer=2', '--dtype=bfloat16', '--tp=2', '--compile=True'
    plain, run = (dry_run(*settings, f'--async_tp={async_tp}', nproc=2) for async_tp in (False, True))
    assert 'note        async_tp' not in run.stdout and waits_of(run, SETTLED) == {}
    for collective in 'ncclAllGather', 'ncclReduceScatter':
        found, usual = (calls_in_streams(other, collective).total() for other in (run, plain))
        assert found < usual / 2
    assert len(calls_in_streams(run, 'product in bfloat16')) == 2
    assert len(calls_in_streams(plain, 'product in bfloat16')) == 1


# --- planted mistakes ---------------------------------------------------------------------------------------

def test_hidden_item_is_found_by_its_place(dry_run):
    run = dry_run(*QUIET, faults=PLANTED, env=dict(FAULT='item'))
    assert waits_of(run, SETTLED) == {'tests/faults/planted_cuda.py hidden_item': 6}


def test_cpu_tensor_ends_the_run(dry_run):
    run = dry_run(*QUIET, faults=PLANTED, env=dict(FAULT='cpu_tensor'), check=False)
    assert 'with_cpu_tensor' in run.stderr and 'Expected all tensors to be on the same device' in run.stderr


def test_copies_to_memory_that_is_not_pinned_are_found(dry_run):
    settings = '--max_iters=5', '--save_interval=2', '--eval_iters=0'
    run = dry_run(*settings, faults=PLANTED, env=dict(FAULT='pageable'))
    assert copies_from_pageable_memory(run) == {'kilogpt/run/checkpoint.py _copy_to_host'}
    assert copies_from_pageable_memory(dry_run(*settings)) == set()


def test_wrong_dtype_of_products_is_found(dry_run):
    run = dry_run(*QUIET, '--dtype=float16', faults=PLANTED, env=dict(FAULT='bfloat16'))
    assert products_of(run) == {'product in bfloat16'}


def test_collective_in_another_order_is_found_by_both_names(dry_run):
    run = dry_run(*QUIET, nproc=2, faults=PLANTED, env=dict(FAULT='order'), check=False)
    assert run.returncode and 'collectives differ: rank 1 of 2 calls ncclAllReduce of 3 elements' in run.stderr


def test_kernel_with_more_shared_memory_than_an_h100_has_does_not_start():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def multiply(x, y, size: tl.constexpr):
        rows, columns = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
        at = rows * size + columns
        tl.store(y + at, tl.dot(tl.load(x + at), tl.load(x + size * size + at)))

    x = torch.zeros(2, 256, 256, device='cuda')
    with pytest.raises(triton.runtime.errors.OutOfResources, match='shared memory.*limit: 232448'):
        multiply[(1,)](x, x, 256, num_warps=8)
