"""What a run logs, and what it measures on any system."""
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers import ROOT
from kilogpt.plan import calibrate
from kilogpt.run import metrics
from kilogpt.trackers import trackers
from kilogpt.training.cluster import set_aside

pytestmark = pytest.mark.quick


def test_training_line_has_seconds_only_in_the_file(tmp_path, capsys):
    line = dict(iter=100, loss=2.5123, grad_norm=0.5, lr=1e-3, dt_ms=30.1, tokens_per_sec=12345.6, mfu=0.1234,
                mem_gb=1.5, tokens=1000, seconds=12.5)
    log = metrics.Metrics(tmp_path, is_main=True)
    log.train(line, eta_seconds=3725)
    log.train(dict(line, mfu=None, slowest_rank=3, lag_ms=1.25), eta_seconds=0)  # None as on a CPU
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == ('iter 100: loss 2.5123, time 30.10ms, mfu 12.34%, 12,346 tok/s, grad norm 0.500, '
                     'lr 1.00e-03, mem 1.50GB, eta 1:02:05')
    assert 'time 30.10ms, 12,346 tok/s' in second and second.endswith('eta 0:00:00, rank 3 last by 1.2ms')
    assert json.loads((tmp_path / 'metrics.jsonl').read_text().splitlines()[0]) == line


# A package `trackio` that raises an error in one place.
DYING_TRACKER = """
import sys
from types import SimpleNamespace


class Run:
    def log(self, values, step):
        fail('log')

    def finish(self):
        fail('finish')


def fail(here):
    if here == {place!r}:
        raise OSError('planted')


def init(**arguments):
    fail('init')
    return Run()


sys.modules['trackio'] = SimpleNamespace(init=init)
"""


def trackers_with(run):
    """Trackers with a run of wandb."""
    opened = trackers.Trackers('', {})
    tracker = trackers.Wandb.__new__(trackers.Wandb)
    tracker.run, tracker.step = run, 0
    opened.opened.append(tracker)
    return opened


def test_stall_of_a_save_counts_the_iterations_that_it_slowed(tmp_path):
    """Training waits 50 ms in the call, and two iterations of usually 100 ms take 500 ms together.

    wandb drops lines of earlier steps, so the line of the save gets the newest step.
    """
    line = dict(loss=2.5, grad_norm=0.5, lr=1e-3, dt_ms=100.0, tokens_per_sec=1.0, mem_gb=1.0)
    log, steps = metrics.Metrics(tmp_path, is_main=True), []
    log.trackers = trackers_with(SimpleNamespace(log=lambda line, step: steps.append(step), finish=lambda: None))
    log.train(dict(iter=10, **line), eta_seconds=0)
    log.save_started(SimpleNamespace(under_way=False, problem=None), 'path', 10, seconds=0.05, clock=1.0)
    log.train(dict(iter=12, **line | dict(dt_ms=250.0)), eta_seconds=0)
    for _ in range(2):  # the second call has nothing to write
        log.save_written(12, clock=1.5)
    log.close()
    found = [json.loads(text) for text in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert len(found) == 3 and found[2] == dict(iter=10, ckpt_stall_ms=pytest.approx(350))
    assert steps == [10, 12, 12]


def test_run_continues_offline_if_wandb_does_not_answer(tmp_path, monkeypatch, capsys):
    """A server that answers with an error, such as an unknown project, ends the run at once instead."""
    wandb = pytest.importorskip('wandb')
    answers, calls = ['giving up after 3 attempt(s):\n deadline exceeded', 'returned error 403: denied'], []

    def init(**arguments):
        calls.append(arguments)
        if arguments.get('mode') != 'offline':
            raise wandb.errors.CommError(answers.pop(0))
        return 'offline run'

    monkeypatch.setattr(wandb, 'init', init)
    monkeypatch.setenv('WANDB_FINISH_TIMEOUT', '600')
    assert trackers.start_wandb(dir='out', project='p') == 'offline run'
    assert calls[0]['settings'] == dict(init_timeout=30.0) and calls[1]['project'] == 'p'
    warning, = capsys.readouterr().err.splitlines()
    assert 'attempt(s): deadline exceeded' in warning and 'wandb sync' in warning and 'out/wandb' in warning
    with pytest.raises(ValueError, match='wandb_log=True, but returned error 403.* WANDB_MODE=offline'):
        trackers.start_wandb(dir='out', project='p')


def test_run_survives_the_death_of_the_process_of_wandb(tmp_path, capsys):
    """The log has every line, and the next checkpoint still has the id of the run in wandb."""
    def fail(*arguments, **options):
        raise ConnectionResetError('Connection lost')

    log = metrics.Metrics(tmp_path, is_main=True)
    log.trackers, log.wandb_id = trackers_with(SimpleNamespace(log=fail, finish=fail)), 'abc'
    for iteration in (10, 20):
        log.eval(dict(iter=iteration, train_loss=4.0, val_loss=4.0))
    log.close()
    assert log.wandb_id == 'abc' and len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 2
    warning, = capsys.readouterr().err.splitlines()
    assert 'wandb has failed (ConnectionResetError: Connection lost). Training continues without it' in warning


@pytest.mark.parametrize('place', ['init', 'log', 'finish'])
def test_tracker_that_dies_never_ends_a_run(tmp_path, train, place):
    """trackio raises at its start, in each line, or at its end: the run says so once and has every line."""
    fault = tmp_path / 'fault.py'
    fault.write_text(DYING_TRACKER.format(place=place))
    run = train('--trackio=True', faults=[fault])
    assert run.stderr.count('warning: trackio has failed (OSError: planted). Training continues without it') == 1
    assert run.returncode == 0 and len(run.lines) == 12 and 'Traceback' not in run.stderr, run.stderr


@pytest.mark.slow
def test_trackio_gets_the_numbers_of_the_log(train, tmp_path):
    """A resumed run continues the newest run of its name."""
    pytest.importorskip('trackio')
    env = dict(TRACKIO_DIR=str(tmp_path))
    arguments = '--trackio=True', '--wandb_project=p', '--wandb_run_name=r'
    train(*arguments, env=env)
    run = train(*arguments, '--max_iters=6', env=env)
    resumed = train(*arguments, '--init_from=resume', out_dir=run.out_dir, env=env)
    with contextlib.closing(sqlite3.connect(tmp_path / 'p.db')) as database:
        rows = database.execute('select run_id, step, metrics from metrics order by id').fetchall()
    identities = list(dict.fromkeys(identity for identity, _, _ in rows))
    losses = {step: json.loads(values)['loss'] for identity, step, values in rows
              if identity == identities[-1] and 'loss' in json.loads(values)}
    assert len(identities) == 2 and losses == {i: line['loss'] for i, line in resumed.lines.items()}
    assert len(losses) == 12


@pytest.mark.parametrize('key, package', [('trackio', 'trackio'), ('wandb_log', 'wandb')])
def test_package_of_a_tracker_that_is_missing_is_said_before_training(train, tmp_path, key, package):
    fault = tmp_path / 'fault.py'
    fault.write_text(f'import sys; sys.modules[{package!r}] = None')
    run = train(f'--{key}=True', faults=[fault], check=False)
    assert run.stderr == f'error: {key}=True needs {package}: pip install {package}, or set --{key}=False\n'
    assert run.returncode == 1 and not run.lines


@pytest.mark.parametrize('value', [float('nan'), float('inf'), float('-inf')])
def test_value_that_is_not_finite_is_null(tmp_path, value):
    log = metrics.Metrics(tmp_path, is_main=True)
    log.eval(dict(iter=0, train_loss=4.0, val_loss=value))
    assert json.loads((tmp_path / 'metrics.jsonl').read_text()) == dict(iter=0, train_loss=4.0, val_loss=None)


def test_best_rate_of_a_cpu_is_that_of_its_fastest_product(monkeypatch):
    """With AMX, small products reach a third of the FLOP/s of large ones; other units are the opposite."""
    dtypes = []
    for fastest in calibrate.TIMED_PRODUCTS:
        def measured_flops(*shape, fastest=fastest):
            dtypes.append(shape[3])
            return 4e12 if shape[:3] == fastest else 1.3e12

        monkeypatch.setattr(calibrate, 'measured_flops', measured_flops)
        assert calibrate.best_flops('bfloat16') == calibrate.best_flops('float16') == 4e12
    assert set(dtypes) == {torch.bfloat16, torch.float32}  # float16 is computed in float32
    monkeypatch.undo()
    assert 1e8 < calibrate.best_flops('float32') < 1e15


def test_peak_memory_is_measured_and_is_0_if_unknown(monkeypatch):
    """Windows does not have the module `resource`."""
    cpu = torch.device('cpu')
    assert 0.05 < metrics.peak_memory_gb(cpu) < 1000
    monkeypatch.setitem(sys.modules, 'resource', None)
    monkeypatch.setattr(metrics, 'read_text', lambda path: '')
    assert metrics.peak_memory_gb(cpu) == 0.0


@pytest.mark.slow
def test_peak_memory_leaves_out_that_of_the_parent():
    """Linux's getrusage starts at the peak of the process that launched this one."""
    code = 'import torch; from kilogpt.run import metrics; print(metrics.peak_memory_gb(torch.device("cpu")))'
    held = bytearray(os.urandom(1000) * 1_500_000)
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.05 < float(done.stdout) < len(held) / 2e9


def test_tensorboard_has_the_scalars_of_the_log_each_once_after_a_resume(train):
    """The run loses its checkpoint at 12, and resumes from the one at 6."""
    accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    run = train('--tensorboard=True', '--save_interval=6', '--keep_checkpoints=9')
    shutil.rmtree(run.out_dir / 'ckpt' / 'iter_00000012')
    resumed = train('--tensorboard=True', '--init_from=resume', out_dir=run.out_dir)
    events = accumulator.EventAccumulator(str(run.out_dir / 'tensorboard')).Reload()
    for key, lines in dict(loss=resumed.lines, lr=resumed.lines, val_loss=resumed.evals).items():
        found = [(event.step, event.value) for event in events.Scalars(key)]
        assert found == [(i, pytest.approx(line[key])) for i, line in lines.items()]
    lines, evals = metrics.read_metrics(run.out_dir)  # with all keys
    assert set(events.Tags()['scalars']) == ({'ckpt_stall_ms'} | lines[1].keys() | evals[0].keys()) - {'iter', 'mfu'}  # a CPU has none
    assert len(resumed.lines) == 12 and list(resumed.evals) == [0, 6, 12]
    assert len(os.listdir(run.out_dir / 'tensorboard')) == 2
    earlier = set_aside(run.out_dir)
    assert len(os.listdir(os.path.join(earlier, 'tensorboard'))) == 2


def test_unwritable_tensorboard_warns_and_a_missing_one_is_an_error(tmp_path, monkeypatch, capsys):
    pytest.importorskip('tensorboard')
    log = metrics.Metrics(tmp_path, is_main=True, config=dict(tensorboard=True))

    def fail(*arguments):
        raise OSError('no space left')

    monkeypatch.setattr(log.trackers.opened[0].writer, 'add_scalar', fail)
    for iteration in range(2):
        log.eval(dict(iter=iteration, train_loss=4.0, val_loss=4.0))
    log.close()
    assert capsys.readouterr().err.count('TensorBoard has failed (OSError: no space left)') == 1
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    with pytest.raises(ValueError, match='tensorboard=True needs TensorBoard: pip install tensorboard'):
        metrics.Metrics(tmp_path, is_main=True, config=dict(tensorboard=True))


@pytest.mark.parametrize('peak, expected', [(100.0, [0.5, 2.0]), (None, [None, None])])
def test_mfu_is_a_share_of_a_known_peak_and_otherwise_left_out(monkeypatch, peak, expected):
    monkeypatch.setattr(metrics, 'peak_flops', lambda device, dtype: peak)
    seconds = iter([1.0, 0.25])
    run = SimpleNamespace(iteration=1, tokens=10, clock=SimpleNamespace(lap=lambda _: (1, next(seconds))))
    cluster = SimpleNamespace(processes=SimpleNamespace(device=torch.device('cpu'), world_size=1),
                              layout=SimpleNamespace(tp=1), dtype='float32')
    monkeypatch.setattr(metrics, 'flops_per_token', lambda model, lengths: 5)
    monkeypatch.setattr(metrics, 'describe_size', lambda model: '')
    model = SimpleNamespace(num_params=lambda: 7)
    meter = metrics.Meter(model, [], cluster, started=0)
    lines = [meter.line(run, 10, 8, 1e-3, torch.ones(()), torch.ones(()), {}, {}) for _ in range(2)]
    assert [line['mfu'] for line in lines] == expected
