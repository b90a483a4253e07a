"""The arithmetic of a profile, on traces written by hand."""
import json

import pytest

from kilogpt.run import profiler

pytestmark = pytest.mark.quick


def event(cat, name, start, duration, tid=1):
    """An event of a trace. start, duration: in milliseconds."""
    return dict(ph='X', cat=cat, name=name, ts=1000 * start, dur=1000 * duration, tid=tid)


CPU_EVENTS = [
    event('user_annotation', 'data', 0, 5),
    event('cpu_op', 'aten::to', 1, 2),
    event('cpu_op', 'aten::linear', 10, 30),
    event('cpu_op', 'aten::addmm', 12, 20),
    event('cpu_op', 'aten::scaled_dot_product_attention', 40, 20),
    event('cpu_op', 'aten::bmm', 45, 10),
    event('cpu_op', 'aten::relu', 60, 10),
    event('user_annotation', 'optimizer', 80, 10),
    event('cpu_op', 'aten::mul', 82, 3),
    event('cpu_op', 'gloo:all_reduce', 65, 10, tid=2),
    event('cpu_op', 'aten::mm', 0, 50, tid=3),  # a computation of another thread, which does not count
]
GPU_EVENTS = [
    event('gpu_memcpy', 'Memcpy HtoD (Pinned -> Device)', 0, 5),
    event('kernel', 'nvjet_hsh_128x', 10, 30),
    event('kernel', 'pytorch_flash::flash_fwd_kernel', 40, 20),
    event('kernel', 'triton_poi_fused_relu', 60, 10),
    event('kernel', 'multi_tensor_apply_kernel<FusedAdam>', 80, 10),
    event('kernel', 'ncclDevKernel_AllReduce', 65, 10, tid=2),
    event('cpu_op', 'aten::mm', 0, 100),
]


@pytest.mark.parametrize('events', [CPU_EVENTS, GPU_EVENTS], ids=['cpu', 'gpu'])
def test_overlapping_events_count_once_and_the_rest_is_idle(tmp_path, events):
    """One iteration of 100 ms."""
    events = [event('user_annotation', 'ProfilerStep#6', 0, 100), *events]
    (tmp_path / 'profiler.json').write_text(json.dumps(dict(traceEvents=events)))
    expected = {'matmul': 30, 'attention': 20, 'other compute': 10, 'optimizer': 10, 'collectives': 5,
                'data': 5, 'idle': 20}
    assert profiler.breakdown(*profiler.read_trace(tmp_path / 'profiler.json')) == pytest.approx(expected)


def test_losses_are_the_waits_for_data_of_a_gpu_and_short_operators_of_a_cpu(tmp_path):
    """The host waits for data from 3 to 9 ms, and the GPU has no work from 5 ms on. Two operators take 10 µs each."""
    waiting = event('user_annotation', 'data', 3, 6)
    short = [event('cpu_op', name, start, 0.01) for name, start in (('aten::relu', 70.5), ('aten::mm', 71))]
    results = {}
    for name, events in dict(gpu=[waiting, *GPU_EVENTS], cpu=[*short, *CPU_EVENTS]).items():
        path = tmp_path / f'{name}.json'
        path.write_text(json.dumps(dict(traceEvents=[event('user_annotation', 'ProfilerStep#6', 0, 100), *events])))
        results[name] = profiler.losses(*profiler.read_trace(path))
    assert results['gpu'] == (pytest.approx(4), {})
    assert results['cpu'] == (0.0, {'other compute': pytest.approx(0.01), 'matmul': pytest.approx(0.01)})


def collective(name, dims, types):
    return dict(name=name, args={'Input Dims': dims, 'Input type': types})


def test_each_collective_counts_its_whole_tensor_once():
    """A functional collective becomes a c10d operator. The event of gloo has the type of a list."""
    events = [
        collective('_c10d_functional::all_gather_into_tensor', [[4, 8], [], []],
                   ['c10::BFloat16', 'Scalar', '']),
        collective('c10d::allgather_into_tensor_coalesced_', [[[8, 8]], [[4, 8]], [], []],
                   ['TensorList', 'TensorList', '', 'Scalar']),
        collective('gloo:all_gather', [[4, 8]], ['c10::BFloat16']),
        collective('c10d::_reduce_scatter_base_', [[5], [10], [], []], ['double', 'double', '', 'Scalar']),
        collective('c10d::alltoall_base_', [[6], [6], []], ['float', 'float', '']),
        collective('c10d::barrier', [[], []], ['', '']),
    ]
    steps = [None, None]  # two iterations
    assert profiler.bytes_moved(events, steps) == {'all_gather': 64, 'reduce_scatter': 40, 'all_to_all': 12}


def test_type_of_a_list_is_in_the_event_of_nccl():
    args = {'dtype': 'BFloat16', 'In msg nelems': 16, 'Out msg nelems': 16}
    events = [collective('c10d::allreduce_', [[[16]], []], ['TensorList', '']),
              dict(name='record_param_comms', args=args)]
    assert profiler.bytes_moved(events, [None]) == {'all_reduce': 32}


@pytest.mark.parametrize('name, category', [
    ('aten::bmm', 'attention'), ('BaddbmmBackward0', 'attention'), ('aten::_softmax', 'attention'),
    ('autograd::engine::evaluate_function: SoftmaxBackward0', 'attention'),
    ('kilogpt::attention_backward', 'attention'), ('aten::addmm', 'matmul'), ('aten::mm', 'matmul'),
    ('aten::_grouped_mm', 'matmul'), ('aten::_scaled_mm', 'matmul'),
    ('aten::_log_softmax', 'other compute'), ('LogSoftmaxBackward0', 'other compute'),
    ('cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>', 'other compute'),
    ('kilogpt::activation', 'other compute')])
def test_category_follows_from_the_name(name, category):
    assert profiler._category(name) == category
