"""kilogpt.plan as a user runs it: its proposals run, and bad input is one sentence."""
import dataclasses
import json
import os
import re
import shlex
import sys

import pytest
import write_layouts
from helpers import ROOT, TINY, run_forked, run_script
from test_models import formula_inputs

from kilogpt import machines
from kilogpt.configurator import config_of
from kilogpt.plan import __main__ as plan
from kilogpt.plan import memory_model
from kilogpt.plan.planner import Planner

MACHINE = machines.Machine(
    'two cores', 'cpu', 8e9, 'float32', 5e10, {'float32': [[64, 2e10], [512, 5e10]]}, {'float32': 2e10}, 1e10,
    node_link=1e9, network=1e9, per_node=2, latency=1e-3, overlap=0.0, cores=2)


@pytest.fixture
def run_plan(monkeypatch, capsys):
    """Function that runs the command in this process; returns (its output, its exit message or None)."""
    def run_plan(*arguments):
        monkeypatch.setattr(sys, 'argv', ['plan', *map(str, arguments)])
        monkeypatch.chdir(ROOT)
        problem = None
        try:
            plan.main()
        except SystemExit as exit:
            problem = exit.code
        return capsys.readouterr().out, problem
    return run_plan


@pytest.fixture
def machine_file(tmp_path):
    path = tmp_path / 'machine.json'
    machines.write_machine(MACHINE, path)
    return path


def test_plan_prints_the_fastest_layouts_their_command_and_popular_layouts(run_plan):
    printed, problem = run_plan('config/gpt2_xl_fsdp.py', '--gpus=16', '--gpu=h100', '--price=2.5',
                                '--n_layer=12')
    assert problem is None
    first, table, *_ = printed.split('\n\n')
    assert first.endswith(' on 16 × H100, 512 sequences of 1,024 tokens an iteration, bfloat16')
    header, *rows = table.splitlines()
    assert len(rows) == 10 and header.split()[-1] == 'price'
    times = [float(row.partition('batch_size=')[2].split()[4].replace(',', '')) for row in rows]
    assert times == sorted(times) and all(row.startswith(('dp', 'pp', 'tp')) for row in rows)
    command = 'torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500'
    assert f'{command} \\\n    train.py config/gpt2_xl_fsdp.py --n_layer=12' in printed
    tried = printed.partition('popular layouts:\n')[2]
    assert 'tp=8 ' in tried and 'n_head=25 cannot be split over tp=8' in tried


def test_config_that_asks_for_the_device_is_asked_on_the_planned_one(run_plan, machine_file, dataset):
    """config/quickstart.py has another model on a CPU than on a GPU, wherever the plan is made."""
    for gpu, n_params in (('H100', '9,492,096'), (machine_file, '426,752')):
        printed, problem = run_plan('config/quickstart.py', f'--dataset={dataset}', '--gpus=2', f'--gpu={gpu}')
        assert problem is None and printed.startswith(f'{n_params} parameters on 2 × ')


def test_plan_of_a_dataset_that_is_not_prepared_says_whose_vocabulary_it_takes(tmp_path, capsys, monkeypatch):
    arguments = 'config/quickstart.py', f'--dataset={tmp_path}', '--gpus=1', '--as_given'
    monkeypatch.setattr(sys, 'argv', ['plan', *arguments])
    plan.main()
    printed, note = capsys.readouterr()
    assert printed.startswith('28,759,680 parameters on 1 × ')
    assert note == f"{tmp_path} is not prepared: the vocabulary is GPT-2's\n"


def test_links_of_processes_that_share_cores_are_as_measured_on_shared_cores():
    machine = dataclasses.replace(MACHINE, shared=dict(node_link=2e8, latency=5e-3, redistribute=1e-3))
    assert machine.with_processes(2) is machine
    four, eight = machine.with_processes(4), machine.with_processes(8)
    assert four.rate('float32', 64) == 1e10 and four.bandwidth == 5e9 and four.launch == 2 * machine.launch
    assert (four.node_link, four.latency, four.redistribute) == (2e8, 5e-3, 1e-3)
    assert (eight.node_link, eight.latency, eight.redistribute) == (1e8, 1e-2, 2e-3)
    assert MACHINE.with_processes(4).node_link == 5e8  # if not measured, by their share of a core


def test_json_has_a_row_for_each_layout_that_fits(run_plan):
    printed, _ = run_plan('config/gpt2_xl_fsdp.py', '--gpus=2', '--gpu=A100 40GB', '--json')
    rows = json.loads(printed)
    assert len(rows) > 20 and [row['ms'] for row in rows] == sorted(row['ms'] for row in rows)
    for row in rows:
        assert {'keys', 'memory_gb', 'ms', 'tokens_per_sec', 'mfu', 'memory', 'milliseconds'} <= row.keys()
        assert row['memory_gb'] == pytest.approx(sum(row['memory'].values())) and row['memory_gb'] <= 40
        assert row['ms'] == pytest.approx(sum(row['milliseconds'].values()))
        assert row['tokens_per_sec'] == pytest.approx(8 * 64 * 1024 / row['ms'] * 1000)
        assert 0 < row['mfu'] < 0.6
        keys = row['keys']
        assert keys['batch_size'] * keys['gradient_accumulation_steps'] == 8 * 64


def test_model_of_weights_is_planned_and_not_that_of_the_keys(train, dataset, tmp_path):
    shape = ['--n_layer=3', '--n_embd=64', *'--pos=rope --norm=rmsnorm --mlp=swiglu --n_kv_head=2'.split()]
    run, folder = train(*shape, '--max_iters=1', '--eval_iters=0').out_dir, tmp_path / 'weights'
    run_forked('kilogpt.convert', 'export', run, folder)
    for keys in ([], ['--lora_rank=4', '--lora_base_dtype=bfloat16', '--dropout=0.1']):
        rows = []
        for start in ([f'--dataset={dataset}', *shape], [f'--init_from={run}'], [f'--init_from={folder}']):
            config = config_of(os.path.join(ROOT, 'train.py'), [*TINY, *start, *keys])
            rows.append(Planner(config, MACHINE, 1).row_as_given())
        assert rows[0] == rows[1] == rows[2]
    adapted = train(f'--init_from={run}', '--lora_rank=4', '--max_iters=1', '--eval_iters=0').out_dir
    for source, sentence in ((adapted, f'the model is that of {adapted}\n'), (folder, f'the model is that of {folder}\n'),
                             ('absent', "init_from is 'absent', which is not here: the model is that of the keys\n")):
        done = run_forked('kilogpt.plan', *TINY, f'--init_from={source}', '--gpus=1', '--as_given', '--json')
        assert sentence in done.stderr
        moments = json.loads(done.stdout)[0]['memory']['moments']
        is_adapted = moments < json.loads(done.stdout)[0]['memory']['parameters'] / 4
        assert is_adapted == (source == adapted)


def test_hybrid_is_planned(run_plan):
    rows = {}
    for pattern in ('A', 'D', 'DA'):
        printed, _ = run_plan('config/quickstart.py', f'--mixer_pattern={pattern}', '--gpus=2', '--as_given', '--json')
        rows[pattern], = json.loads(printed)
    for part in ('parameters', 'activations'):
        attention, recurrence, both = (rows[pattern]['memory'][part] for pattern in ('A', 'D', 'DA'))
        assert attention < both < recurrence and both == pytest.approx((attention + recurrence) / 2, rel=0.01)


def test_as_given_predicts_only_the_layout_of_the_config(run_plan):
    arguments = ['config/llama_7b_tp_fsdp.py', '--gpus=64', '--as_given']
    row, = json.loads(run_plan(*arguments, '--json')[0])
    assert (row['keys']['tp'], row['keys']['zero_stage'], row['dp'], row['micro_batch']) == (2, 3, 32, 4)
    printed, _ = run_plan(*arguments)
    assert 'tp2 dp32 zero3 rep8' in printed and 'GB: parameters' in printed
    assert 'does not fit into the 24 GB of RTX 4090' in run_plan(*arguments, '--gpu=RTX 4090')[0]
    # the same tokens on twice as many GPUs take half of the time, and more communication
    wider, = json.loads(run_plan(arguments[0], '--gpus=128', '--as_given', '--json', '--dp_replicate=16')[0])
    assert 0.5 < wider['ms'] / row['ms'] < 0.55


@pytest.mark.parametrize('arguments, message', [
    (['--gpu=H1000'], "--gpu is 'H1000': choose one of B200, .*T4, or a file written by python -m"),
    (['--gpu=missing.json'], '--gpu=missing.json: No such file'),
    (['--gpu=config.json'], 'is not a file written by python -m kilogpt.plan --calibrate'),
    (['--gpus=12'], '12 GPUs do not fill whole nodes of 8'),
    (['--gpus=0'], '--gpus and --gpus_per_node must be at least 1'),
    (['--ranks=first'], "--ranks takes numbers such as 0,511,1023, but is 'first'"),
    (['--gpus=2', '--gpu=T4', '--dtype=float32', '--n_embd=16000'],
     'no layout on 2 × T4 fits; the closest is dp2 zero3 full offload batch_size=1, which needs [\\d.,]+'),
    (['--n_headd=3'], "unknown key 'n_headd' in the command line; did you mean n_head"),
    (['config/absent.py'], "config file 'config/absent.py' does not exist"),
    (['--as_given', '--mlp=moe', '--ep=3', '--gpus=6', '--gpus_per_node=6', '--zero_stage=2'],
     'ep=3 does not divide n_experts=8: set ep to one of 1, 2, 4, 8'),
    (['--load_imbalance=0.9'], '--load_imbalance is 0.9, but the busiest process has at least the mean'),
    (['--n_head=7'], 'n_embd=1600 is not divisible by n_head=7'),
    (['--as_given', '--tp=2'], 'n_head=25 cannot be split over tp=2'),
    (['--as_given', '--tokens_per_iter=1e6'], "use the config's batch"),
])
def test_bad_input_is_one_sentence(run_plan, tmp_path, monkeypatch, arguments, message):
    (tmp_path / 'config.json').write_text('{"name": "not a machine"}')
    arguments = [argument.replace('=config.json', f'={tmp_path}/config.json') for argument in arguments]
    printed, problem = run_plan('config/gpt2_xl_fsdp.py', *arguments)
    assert re.match(f'error: .*{message}', problem) and '\n' not in problem, problem


def test_name_of_a_gpu_is_found_without_its_spaces_and_capitals():
    assert [machines.find_machine(name).name for name in ('RTX4090', 'h100-pcie')] == ['RTX 4090', 'H100 PCIe']


@pytest.mark.quick
@pytest.mark.parametrize('device, nodes, link, network', [
    ('cuda', 2, None, 1e9), ('cuda', 1, None, 37.5e9), ('cuda', 2, 200, 18.75e9), ('cpu', 1, None, 1e9)])
def test_network_is_measured_or_as_the_link_says(tmp_path, device, nodes, link, network):
    path = tmp_path / 'cluster.json'
    machines.write_machine(dataclasses.replace(MACHINE, device=device, nodes=nodes), path)
    assert machines.find_machine(str(path), link).network == network


def test_search_proposes_nothing_that_train_would_refuse(machine_file):
    """Each row passes train.py's checks, and train.py would not change a micro-batch."""
    config = config_of(os.path.join(ROOT, 'train.py'), [*TINY, '--gradient_accumulation_steps=4'])
    planner = Planner(config, machines.find_machine(str(machine_file)), 4)
    rows = planner.search()
    assert {row['keys']['pp'] for row in rows} == {1, 2, 4}
    assert {row['keys']['tp'] * row['keys']['cp'] for row in rows} == {1, 2, 4}
    for row in rows:
        layout = planner.layout(row['keys'])
        batch_size = row['keys']['batch_size']
        assert layout.split_notes(batch_size * row['keys']['gradient_accumulation_steps'], batch_size) == []


def test_experts_are_planned_by_their_active_parameters(run_plan):
    """Only active experts count for FLOPs; all experts count for memory."""
    def row(*arguments):
        shape = '--n_layer=2 --n_embd=512 --n_head=8 --mlp=moe --expert_hidden=256 --n_shared_experts=1'
        shape += ' --zero_stage=2 --moe_every=2 --gradient_accumulation_steps=64'
        return json.loads(run_plan(*shape.split(), '--gpus=8', '--as_given', '--json', *arguments)[0])[0]

    few, many, divided = row('--n_experts=8'), row('--n_experts=32'), row('--n_experts=32', '--ep=8')
    more = 24 * 3 * 512 * 256 + 24 * 512  # parameters of 24 experts in one of two blocks, and their routers'
    assert many['memory']['moments'] - few['memory']['moments'] == pytest.approx(8 * more / 8e9, rel=0.001)
    # Only the routers are larger: a token goes to the same number of experts.
    assert many['mfu'] * many['ms'] == pytest.approx(few['mfu'] * few['ms'], rel=0.001)
    assert divided['memory']['moments'] == many['memory']['moments']
    assert divided['milliseconds']['ep'] > many['milliseconds']['ep'] == 0
    busier = row('--n_experts=32', '--ep=8', '--load_imbalance=2')
    assert busier['milliseconds']['ep'] > divided['milliseconds']['ep']
    assert busier['memory']['activations'] > divided['memory']['activations']


@pytest.mark.slow
def test_search_of_experts_proposes_what_train_accepts(machine_file):
    config = config_of(os.path.join(ROOT, 'train.py'), [
        *TINY, '--gradient_accumulation_steps=4', '--mlp=moe', '--n_experts=4'])
    planner = Planner(config, machines.find_machine(str(machine_file)), 4)
    rows = planner.search()
    assert {row['keys']['ep'] for row in rows} == {1, 2, 4}
    for row in rows:
        planner.layout(row['keys'])


@pytest.mark.slow
def test_proposed_command_runs(run_plan, dataset, tmp_path, machine_file):
    """The command line of the first row runs as it is printed."""
    shape = [*TINY, f'--dataset={dataset}', '--max_iters=1', '--gradient_accumulation_steps=4']
    printed, _ = run_plan(*shape, '--gpus=2', '--gpus_per_node=2', f'--gpu={machine_file}')
    found = re.search(r'^torchrun (.*) \\\n    train.py (.*)$', printed, re.M)
    assert found[1] == '--standalone --nproc_per_node=2'
    done = run_script('train.py', *shlex.split(found[2]), f'--out_dir={tmp_path}/out', nproc=2)
    assert 'iter 1: loss' in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('name, gpus, gpu', [
    ('gpt2_xl_fsdp', 8, 'A100'), ('llama_7b_tp_fsdp', 64, 'H100'), ('gpt_70b_3d', 1024, 'H100'),
    ('qwen3_30b_a3b', 64, 'H100')])
def test_config_has_the_best_layout_or_names_it(name, gpus, gpu):
    """A comment that begins with "The planner's layout:" has the keys in which the best row differs."""
    path = os.path.join(ROOT, 'config', f'{name}.py')
    config = config_of(os.path.join(ROOT, 'train.py'), [path, '--dtype=bfloat16'])
    planner = Planner(config, machines.find_machine(gpu), gpus)
    best, given = planner.search()[0], planner.row_as_given()
    text = re.sub(r'\\?\n#\s*', ' ', open(path).read())
    named = set(re.search(r"The planner's layout: ((--\w+=\w+ *)+)", text)[1].split())
    changed = {f'--{key}={value}' for key, value in best['keys'].items() if planner.config[key] != value}
    assert named == changed - {'--pp_schedule=1f1b'}
    speedup = re.search(r'([\d.]+) times as fast', text)[1]
    assert float(speedup) == pytest.approx(given['ms'] / best['ms'], abs=0.006)


# --- docs/layouts.md ----------------------------------------------------------------------------------------

@pytest.mark.slow
def test_tables_of_the_page_are_what_the_formulas_say():
    text = write_layouts.PAGE.read_text('utf-8')
    assert text == write_layouts.page_with_tables(text), 'run python dev/write_layouts.py'


@pytest.mark.parametrize('tp, cp, mlp', [(1, 1, 'gelu'), (2, 1, 'relu2'), (1, 2, 'swiglu')])
def test_formulas_of_the_page_are_those_of_the_code(tp, cp, mlp):
    """Activations of a block in each mode, within 3%: the page leaves out a log-sum-exp for each head."""
    text = write_layouts.PAGE.read_text('utf-8')
    rows = dict(re.findall(r'^\| (a block|`selective`|`full`) \| ([^,|]*)', text, re.M))
    assert len(rows) == 3
    for name, formula in rows.items():
        mode = {'a block': 'none'}.get(name, name.strip('`'))
        shape, layout, work = formula_inputs(4, [
            *TINY, *'--n_embd=512 --block_size=256 --n_kv_head=2 --zero_stage=2 --dtype=bfloat16'.split(),
            f'--mlp={mlp}', f'--tp={tp}', f'--cp={cp}', f'--activation_checkpoint={mode}'], device='cuda')
        config = shape.config
        values = dict(B=work.micro_batch, T=256, C=512, g=0.5, tp=tp, cp=cp,
                      f=(4 if mlp == 'swiglu' else 2) * config.n_hidden / 512)
        formula = re.sub(r'(\d) ?(?=[a-zA-Z(])|(?<=[BTC]) (?=[TC(])', r'\1*', formula)
        formula = formula.replace('(tp cp)', '(tp*cp)')
        expected = eval(formula, {}, values)
        if cp > 1 and mode == 'none':  # the result of attention, both before and after its exchange
            expected += 2 * values['B'] * 256 * 512 / cp
        kept = memory_model.block_activations(config, layout, work, False).kept
        assert kept == pytest.approx(expected, rel=0.03), (name, formula)
