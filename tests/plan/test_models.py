"""The planner's formulas, compared with real runs, PyTorch's pipeline schedules and published runs."""
import dataclasses
import itertools
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import FAULTS, ROOT, run_script
from published import ROWS, predict
from test_parallel import BASE, MODELS, MODERN
from torch.distributed.pipelining import schedules

from data.make.prepare import write_random_tokens
from kilogpt.configurator import config_of
from kilogpt.parallel.layout import SCHEDULES, SPLIT_BACKWARD, Layout
from kilogpt.plan import memory_model, time_model
from kilogpt.plan.measured import mixer_bytes
from kilogpt.plan.shape import Shape
from model import GPT, GPTConfig

# --- memory -------------------------------------------------------------------------------------------------

SHAPE = '--n_embd=128 --block_size=64 --eval_iters=0 --keep_checkpoints=0 --max_iters=4'.split()
# Every token goes to every expert, so that all experts have the same load.
EXPERTS = f'{MODELS["moe"]} --n_active_experts=4 --expert_hidden=128'
MUON = MODELS['muon']
HYBRID = '--mixer_pattern=DA --n_kv_head=0'  # in the place of attention in every other block
LATENT = '--pos=rope --norm=rmsnorm --n_kv_head=0 --kv_latent=48 --q_latent=40'
# {processes: [arguments]}. The formulas are for what the compiler keeps on a GPU. On a CPU it keeps other tensors.
CASES = {
    1: ['--bias', MODERN, f'{MODERN} --zero_stage=3 --activation_checkpoint=full', EXPERTS, HYBRID, LATENT],
    2: ['', '--zero_stage=1', f'{MODERN} --zero_stage=3', '--zero_stage=2 --cpu_offload',
        '--tp=2 --activation_checkpoint=selective', f'{MODERN} --cp=2', f'{MUON} --zero_stage=1',
        *(f'--pp=2 --pp_schedule={schedule}' for schedule in ('1f1b', 'zbv', 'dualpipev')),
        f'{EXPERTS} --ep=2', f'{EXPERTS} --pp=2 --activation_checkpoint=selective',
        *(f'{model} --{keys}' for model in (HYBRID, LATENT)
          for keys in ('zero_stage=3', 'tp=2', 'cp=2', 'pp=2', 'activation_checkpoint=selective'))]}


def formula_inputs(nproc, arguments, device='cpu'):
    """(Shape, Layout, Work) of a run of train.py on the dataset of the tests."""
    config = config_of(os.path.join(ROOT, 'train.py'), arguments)
    degrees = 'zero_stage', 'dp_replicate', 'tp', 'cp', 'pp', 'pp_schedule', 'ep'
    layout = Layout(nproc, *(config[key] for key in degrees))
    fields = {key: config[key] for key in GPTConfig.__dataclass_fields__ if key in config}
    with torch.device('meta'):
        model = GPT(GPTConfig(vocab_size=65, **fields), seed=None)
    work = memory_model.Work.of(config | dict(load_imbalance=1.0), layout, device)
    return Shape(model), layout, work


@pytest.mark.slow
@pytest.mark.parametrize('nproc, dtype', [(1, 'float32'), (1, 'bfloat16'), (2, 'float32')])
def test_memory_is_what_runs_hold(train_all, nproc, dtype):
    """Parameters, gradients and moments of the fullest process within 1%, the peak within 10%.

    With experts in a pipeline, selective checkpointing keeps less than the formulas say: within 12%.
    """
    arguments = {case: [*case.split(), *SHAPE, f'--dtype={dtype}'] for case in CASES[nproc]}
    runs = train_all(arguments, base=BASE, nproc=nproc, faults=[FAULTS / 'peak_bytes.py'])
    wrong = []
    for name, run in runs.items():
        shape, layout, work = formula_inputs(nproc, [*BASE, *arguments[name]])
        measured = [json.load(open(f'{run.out_dir}.peak.{rank}')) for rank in range(nproc)]
        states = [memory_model.state(shape, layout, work, rank) for rank in range(layout.pp)]
        expected = {part: max(state[part] for state in states) for part in states[0]}
        expected['peak'] = sum(memory_model.memory(shape, layout, work).values())
        is_of_both = EXPERTS in name and '--pp=2 --activation_checkpoint=selective' in name
        tolerances = dict(parameters=0.01, gradients=0.01, moments=0.01, peak=0.12 if is_of_both else 0.1)
        for part, tolerance in tolerances.items():
            found = max(counted[part] for counted in measured)
            if expected[part] != pytest.approx(found, rel=tolerance):
                wrong.append((name, part, expected[part], found))
    assert wrong == []


def test_memory_is_what_a_sharded_run_holds(train):
    """One layout, in the default tests; the slow test above does the same for others."""
    arguments = ['--bias', '--zero_stage=2', *SHAPE]
    run = train(*arguments, base=BASE, nproc=2, faults=[FAULTS / 'peak_bytes.py'])
    shape, layout, work = formula_inputs(2, [*BASE, *arguments])
    measured = json.load(open(f'{run.out_dir}.peak.0'))
    state, parts = memory_model.state(shape, layout, work, 0), memory_model.memory(shape, layout, work)
    assert {part: measured[part] for part in state} == pytest.approx(state, rel=0.01)
    assert sum(parts.values()) == pytest.approx(measured['peak'], rel=0.1)
    assert {'parameters', 'gradients', 'moments', 'gathered', 'activations', 'logits'} <= parts.keys()


@pytest.mark.parametrize('tp', [1, 2])
def test_measured_attention_keeps_what_the_formula_says(tp):
    """Latent attention and recurrences have no formula. That of attention shows that the measurement is right."""
    config = GPTConfig(n_embd=96, n_head=4, n_layer=1, n_kv_head=2, head_width=32, pos='rope', norm='rmsnorm')
    found = mixer_bytes(config, 'A', tp, 4)
    assert found.saved == (4 * (2 * 4 + 2 * 2) * 32 + 4 * 4) / tp
    assert found.products == 4 * ((4 + 2 * 2) * 32 / tp + 96) and found.result == 4 * 4 * 32 / tp


@pytest.mark.parametrize('mixer, keys', [('A', dict(kv_latent=24)), ('D', dict(mixer_pattern='D'))])
def test_adapters_of_narrow_weights_do_not_change_what_a_mixer_keeps(mixer, keys):
    config = GPTConfig(n_embd=48, n_head=4, n_layer=1, pos='rope', lora_rank=4, lora_base_dtype='int8',
                       **keys)
    plain = dataclasses.replace(config, lora_rank=0, lora_base_dtype='float32')
    assert mixer_bytes(config, mixer, 1, 4) == mixer_bytes(plain, mixer, 1, 4)


def test_hybrid_has_the_parameters_of_both_mixers():
    shape, layout, work = formula_inputs(1, [*BASE, '--n_layer=3', '--mixer_pattern=DA', '--n_kv_head=0'])
    total = shape.totals(shape.stages(layout, work.block_size)[0], layout)[0].split
    assert total == sum(parameter.numel() for parameter in shape.model.parameters())
    assert memory_model.state(shape, layout, work, 0)['gradients'] == 4 * total


@pytest.mark.slow
@pytest.mark.parametrize('nproc, keys', [
    (2, '--zero_stage=2'), (2, '--tp=2'), (2, '--zero_stage=1 --lora_targets=c_q,c_v'), (1, '--lora_base_dtype=int8')])
def test_frozen_weights_have_neither_gradients_nor_moments(train, nproc, keys):
    shape_of_base = [*MODERN.split(), *SHAPE]
    base = train(*shape_of_base, '--keep_checkpoints=1', '--max_iters=1', base=BASE).out_dir
    arguments = [*shape_of_base, *keys.split(), '--lora_rank=4']
    run = train(*arguments, f'--init_from={base}', base=BASE, nproc=nproc, faults=[FAULTS / 'peak_bytes.py'])
    shape, layout, work = formula_inputs(nproc, [*BASE, *arguments])
    measured = json.load(open(f'{run.out_dir}.peak.0'))
    state, parts = memory_model.state(shape, layout, work, 0), memory_model.memory(shape, layout, work)
    assert state['gradients'] < state['parameters'] / 5
    del state['parameters']
    assert {part: measured[part] for part in state} == pytest.approx(state, rel=0.01)
    # Activations beside adapters are predicted up to 2 MB too high here.
    assert sum(parts.values()) == pytest.approx(measured['peak'], rel=0.12)


# Runs on CPUs whose memory is mostly: the state and its copies for saves, activations, a large vocabulary.
# The second iteration saves in the background, so the copies exist in the last one.
SAVES = '--keep_checkpoints=1 --eval_iters=1 --eval_interval=2 --max_iters=3 --gradient_accumulation_steps=1'
RESIDENT = dict(
    state='--n_layer=3 --n_embd=768 --block_size=32 --batch_size=1',
    activations='--n_layer=4 --n_embd=256 --block_size=256 --batch_size=8',
    vocabulary='--n_layer=2 --n_embd=256 --block_size=512 --batch_size=2 --mlp=swiglu')


@pytest.mark.slow
@pytest.mark.parametrize('case, nproc, zero_stage', [
    ('state', 1, 0), ('activations', 1, 0), ('vocabulary', 1, 0), ('state', 2, 0), ('state', 2, 1), ('state', 2, 3)])
def test_resident_memory_on_a_cpu_is_as_predicted_at_start(train, tmp_path, case, nproc, zero_stage):
    """`mem_gb` is within 20% of the line that train.py prints."""
    arguments = [*SAVES.split(), *RESIDENT[case].split(), f'--zero_stage={zero_stage}']
    if case == 'vocabulary':
        write_random_tokens(tmp_path, 49152)
        arguments.append(f'--dataset={tmp_path}')
    run = train(*arguments, runner=run_script, nproc=nproc)  # a forked process would share memory with its parent
    predicted = float(re.search(r'memory +([\d.]+) GB predicted', run.stdout).group(1))
    assert predicted == pytest.approx(run.lines[3]['mem_gb'], rel=0.2)


def test_processes_on_cpus_share_the_copies_for_saves():
    copies = {}
    for zero_stage, nproc in ((0, 1), (0, 2), (1, 2), (3, 2)):
        arguments = [*BASE, '--keep_checkpoints=1', f'--zero_stage={zero_stage}']
        copies[zero_stage, nproc] = memory_model.memory(*formula_inputs(nproc, arguments))['copies']
        assert memory_model.memory(*formula_inputs(nproc, arguments, device='cuda'))['copies'] == 0
    whole = copies.pop((0, 1))
    assert whole > 0
    assert copies == pytest.approx(dict.fromkeys(copies, whole / 2), rel=0.02)


def test_offloaded_state_is_not_on_the_gpu():
    arguments = [*BASE, '--zero_stage=3', '--cpu_offload']
    shape, layout, work = formula_inputs(2, arguments, device='cuda')
    parts = memory_model.memory(shape, layout, work)
    assert parts['parameters'] == parts['moments'] == parts['gradients'] == 0 < parts['gathered']


# --- pipelines ----------------------------------------------------------------------------------------------

def orders(pp, micro_steps, pp_schedule):
    """[[(stage, kind) of each computation] of each rank], in the order of PyTorch's schedule.

    Kinds: F = forward, B = backward, I and W = the halves of backward for inputs and for weights.
    """
    schedule, chunks = SCHEDULES[pp_schedule]
    stages = SimpleNamespace(num_stages=pp * chunks, group_size=pp, group_rank=0, submod=None)
    build = getattr(schedules, schedule)
    ranks = []
    for actions in build([stages] * chunks if chunks > 1 else stages, micro_steps).pipeline_order.values():
        computations = []
        for action in filter(None, actions):
            for part in action.sub_actions or [action]:
                if part.is_compute_op:
                    computations.append((part.stage_index, part.computation_type.value))
        ranks.append(computations)
    return ranks


# Durations by kind. WHOLE is for activation_checkpoint 'full', which does not split the backward pass.
SPLIT = dict(F=1, B=2, I=1, W=1)
WHOLE = dict(F=1, B=3, I=3, W=0)


def simulated_bubble(pp, micro_steps, pp_schedule, durations=SPLIT):
    """Idle share of a pipeline of equal stages, by simulation. Sending takes no time."""
    chunks, queues = SCHEDULES[pp_schedule][1], orders(pp, micro_steps, pp_schedule)
    # {(stage, way): times when micro-batches leave the stage, in the order of their arrival}
    exits = {key: [] for key in itertools.product(range(pp * chunks), ('forward', 'backward'))}
    exits[-1, 'forward'] = exits[pp * chunks, 'backward'] = [0] * micro_steps
    clock = [0] * pp
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                stage, kind = queue[0]
                duration = durations[kind]
                if kind == 'W':  # needs nothing from other stages
                    clock[rank] += duration
                else:
                    before, way = (stage - 1, 'forward') if kind == 'F' else (stage + 1, 'backward')
                    arrivals, done = exits[before, way], exits[stage, way]
                    if len(arrivals) == len(done):
                        break  # the next micro-batch has not arrived yet
                    clock[rank] = max(clock[rank], arrivals[len(done)]) + duration
                    done.append(clock[rank])
                queue.pop(0)
    return 1 - (durations['F'] + durations['B']) * chunks * micro_steps / max(clock)


@pytest.mark.parametrize('pp_schedule', SPLIT_BACKWARD)
def test_schedules_that_may_not_split_their_backward_pass_idle_longer(pp_schedule):
    for pp, micro_steps in ((2, 4), (2, 10), (4, 8), (4, 20)):
        found = time_model.bubble(pp, micro_steps, pp_schedule, splits_backward=False)
        simulated = simulated_bubble(pp, micro_steps, pp_schedule, WHOLE)
        tolerance = 0.2 if pp_schedule == 'dualpipev' else 1e-6
        assert found == pytest.approx(simulated, rel=tolerance), (pp, micro_steps)
        assert found > 2 * time_model.bubble(pp, micro_steps, pp_schedule), (pp, micro_steps)


@pytest.mark.parametrize('pp', [2, 3, 4])
@pytest.mark.parametrize('pp_schedule', SCHEDULES)
def test_pipelines_idle_and_hold_as_much_as_in_pytorchs_schedules(pp, pp_schedule):
    for micro_steps in (2 * pp, 3 * pp, 5 * pp):
        found = time_model.bubble(pp, micro_steps, pp_schedule)
        assert found == pytest.approx(simulated_bubble(pp, micro_steps, pp_schedule)), micro_steps
        layout = Layout(pp, pp=pp, pp_schedule=pp_schedule)
        for rank, computations in enumerate(orders(pp, micro_steps, pp_schedule)):
            held = most = halves = most_halves = 0
            for _, kind in computations:
                held += {'F': 1, 'B': -1, 'W': -1}.get(kind, 0)
                halves += {'I': 1, 'W': -1}.get(kind, 0)
                most, most_halves = max(most, held), max(most_halves, halves)
            in_flight = memory_model.micro_batches_in_flight(layout, micro_steps, rank)
            assert in_flight == most, (micro_steps, rank)
            last = {'interleavedzb': rank + 1, 'dualpipev': rank + 1, 'zbv': 2 * rank + 1}
            assert last.get(pp_schedule, 0) == most_halves, (micro_steps, rank)


# --- published runs -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('row', [
    pytest.param(row, marks=[] if row.model == '8B' else pytest.mark.slow) for row in ROWS])
def test_published_runs_are_predicted(row):
    """Tokens/s within 20% and memory within 15%, except the rows that docs/layouts.md lists as misses."""
    tokens_per_sec, gib = predict(row)
    is_near = abs(tokens_per_sec / row.tokens_per_sec - 1) < 0.2
    if row.gib:
        is_near = is_near and abs(gib / row.gib - 1) < 0.15
    assert is_near == (not row.misses), (tokens_per_sec, gib)
