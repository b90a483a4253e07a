"""Runs that are evaluated while they train: bits per byte, tasks, samples, and that training does not notice."""
import json
import math

import numpy as np
import pytest
import torch

import kilogpt
from helpers import assert_same_tensors, curve, newest_tensors
from kilogpt.generate.draw import draw_alike, uniform
from kilogpt.layers.attention import starts_of

LAYOUTS = dict(one=(1, ''), compiled=(1, '--compile=True'), dp2=(2, ''), zero3=(2, '--zero_stage=3'), tp2=(2, '--tp=2'),
               pp2=(2, '--pp=2 --pp_schedule=zbv'), cp2=(2, '--cp=2'), dropout=(2, '--dropout=0.2'))
SLOW = 'compiled', 'cp2', 'dropout', 'zero3', 'one', 'tp2', 'pp2'
EVALUATED = ['--eval_tasks_interval=2', '--sample_interval=3', '--sample_prompts=A||ROME AND', '--sample_tokens=6']
SHORT = ['--max_iters=6', '--eval_interval=3']


def lines_of(out_dir, key):
    return [line for line in map(json.loads, (out_dir / 'metrics.jsonl').read_text().splitlines()) if key in line]


@pytest.fixture(scope='module')
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp('tasks') / 'mine.jsonl'
    path.write_text('{"question": "ROME", "choices": ["A", "BE"], "answer": 1}\n'
                    '{"question": "AND SO IT IS WITH ALL THE OTHERS", "choices": ["A", "BEC"], "answer": 1}\n')
    return path


@pytest.mark.drawn(3)
@pytest.mark.parametrize('layout', [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
                                    for name in LAYOUTS])
def test_evaluation_changes_nothing_in_training(train, questions, layout):
    nproc, arguments = LAYOUTS[layout]
    arguments = [*SHORT, *arguments.split()]
    plain = train(*arguments, nproc=nproc)
    evaluated = train(*arguments, f'--eval_tasks={questions}', *EVALUATED, nproc=nproc)
    assert curve(plain) == curve(evaluated) and len(plain.lines) == 6
    assert plain.evals == evaluated.evals
    assert_same_tensors(newest_tensors(plain.out_dir), newest_tensors(evaluated.out_dir))
    assert [line['iter'] for line in lines_of(evaluated.out_dir, 'task/mine/accuracy')] == [0, 2, 4, 6]


@pytest.fixture(scope='module')
def of_one_process(train, questions):
    return train(*SHORT, f'--eval_tasks={questions}', *EVALUATED)


@pytest.mark.drawn(2)
@pytest.mark.parametrize('layout', [
    pytest.param(name, marks=pytest.mark.slow) for name in ('pp2', 'dp2', 'tp2', 'zero3', 'cp2')])
def test_layout_has_the_scores_and_samples_of_one_process(train, questions, of_one_process, layout):
    nproc, arguments = LAYOUTS[layout]
    run = train(*SHORT, f'--eval_tasks={questions}', *EVALUATED, *arguments.split(), nproc=nproc)
    for line, expected in zip(lines_of(run.out_dir, 'task/mine/accuracy'),
                              lines_of(of_one_process.out_dir, 'task/mine/accuracy')):
        assert line.keys() == expected.keys()
        assert {key: line[key] for key in line if key != 'seconds'} == pytest.approx(
            {key: expected[key] for key in line if key != 'seconds'}, abs=1e-4)
    samples = (run.out_dir / 'samples.jsonl').read_text()
    assert samples == (of_one_process.out_dir / 'samples.jsonl').read_text()
    assert [(sample['iter'], sample['prompt'], len(sample['text'])) for sample in map(json.loads, samples.splitlines())
            ] == [(iteration, prompt, 6) for iteration in (0, 3, 6) for prompt in ('A', 'ROME AND')]
    assert run.stdout.count('sample at iteration') == 6 and run.stdout.count('tasks at iteration 2: mine accuracy') == 1


def test_limit_scores_the_first_questions_alone(train, questions):
    run = train('--max_iters=1', '--eval_interval=1', f'--eval_tasks={questions}', '--eval_tasks_limit=1')
    line = lines_of(run.out_dir, 'task/mine/accuracy')[-1]
    assert line['task/mine/accuracy'] in (0, 1) and 'task/mine/accuracy_stderr' not in line  # of one question


def test_samples_are_those_that_the_model_draws_without_a_cache(of_one_process):
    loaded = kilogpt.load(str(of_one_process.out_dir), which='latest')
    assert len({uniform((1337, row), step) for row in range(3) for step in range(3)}) == 9
    last = [json.loads(line) for line in (of_one_process.out_dir / 'samples.jsonl').read_text().splitlines()[-2:]]
    for row, sample in enumerate(last):
        tokens = loaded.tokenizer.encode(sample['prompt'])
        for step in range(6):
            with torch.no_grad():
                logits = loaded.model(torch.tensor([tokens]))[:, -1]
            tokens += draw_alike(logits, [uniform((1337, row), step)], 0.8, 200, None)
        assert loaded.tokenizer.decode(tokens) == sample['prompt'] + sample['text']


def test_hook_that_chooses_weights_chooses_those_of_tasks_and_samples(train, questions, tmp_path):
    fault = tmp_path / 'zero_weights.py'
    fault.write_text("""import contextlib
from kilogpt.run import Hooks
original = Hooks.weights_for_evaluation
def other_weights(chosen):
    @contextlib.contextmanager
    def context():
        with original(chosen):
            print('weights are chosen')
            yield
    return context()
Hooks.weights_for_evaluation = other_weights
""")
    run = train('--max_iters=2', '--eval_interval=2', f'--eval_tasks={questions}', faults=[fault])
    assert run.stdout.count('weights are chosen') == 4  # for losses and for tasks, before training and after


def test_tensorboard_and_an_earlier_run_have_their_samples(train, questions, tmp_path):
    arguments = ['--max_iters=2', '--eval_interval=2', f'--eval_tasks={questions}', '--sample_interval=2',
                 '--tensorboard=True']
    train(*arguments, out_dir=tmp_path / 'out')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / 'out' / 'tensorboard'))
    events.Reload()
    assert 'task/mine/accuracy' in events.Tags()['scalars'] and 'sample/0/text_summary' in events.Tags()['tensors']
    train(*arguments, out_dir=tmp_path / 'out')
    assert len((tmp_path / 'out' / 'samples.jsonl').read_text().splitlines()) == 2
    assert len(list((tmp_path / 'out').glob('earlier-*/samples.jsonl'))) == 1


@pytest.mark.parametrize('arguments, sentence', [
    (['--eval_tasks=nothing'], "there is no task 'nothing'"),
    (['--eval_tasks=,'], "tasks is ','"),
    (['--sample_interval=1', '--sample_tokens=0'], 'sample_tokens is 0: it must be at least 1'),
    (['--sample_interval=-1'], 'sample_interval is -1: it cannot be negative'),
    (['--sample_interval=1', '--sample_prompts=é'], "the character 'é' is not among")])
def test_wrong_key_is_a_sentence(train, arguments, sentence):
    run = train(*arguments, '--max_iters=1', check=False)
    assert run.returncode == 1 and sentence in run.stderr and 'Traceback' not in run.stderr


# --- bits per byte ------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def documents(dataset, tmp_path_factory):
    """The dataset, with a table in which tokens have 1 to 4 bytes, and token 0 none."""
    folder = tmp_path_factory.mktemp('bits') / 'data'
    folder.mkdir()
    for name in ('train.bin', 'val.bin', 'meta.json'):
        (folder / name).write_bytes((dataset / name).read_bytes())
    tokens = np.fromfile(folder / 'val.bin', '<u2')
    tokens[::7] = 0  # many, among the targets of each process
    tokens.tofile(folder / 'val.bin')
    (folder / 'token_bytes.json').write_text(json.dumps([0] + [1 + i % 4 for i in range(64)]))
    return folder


@pytest.mark.drawn(3)
@pytest.mark.parametrize('layout', [
    'one', *(pytest.param(name, marks=pytest.mark.slow) for name in ('tp2', 'pp2', 'dp2', 'compiled', 'cp2'))])
@pytest.mark.parametrize('kind', ['mask', pytest.param('stream', marks=pytest.mark.slow)])
def test_bits_per_byte_are_of_the_targets_that_are_text(train, documents, layout, kind):
    meta = json.loads((documents / 'meta.json').read_text()) | dict(separator=0)
    (documents / 'meta.json').write_text(json.dumps(meta))
    nproc, arguments = LAYOUTS[layout]
    run = train(f'--dataset={documents}', '--max_iters=2', '--eval_interval=2', f'--documents={kind}',
                *arguments.split(), nproc=nproc)
    loaded = kilogpt.load(str(run.out_dir), which='latest')
    tokens = np.fromfile(documents / 'val.bin', '<u2').astype(np.int64)
    sizes = np.array(json.loads((documents / 'token_bytes.json').read_text()))
    available = (len(tokens) - 1) // 32
    nats = n_bytes = 0
    for start in np.arange(16) * available // 16 * 32:  # eval_iters=4 times batch_size=4 sequences
        x, y = torch.from_numpy(tokens[start:start + 32]), torch.from_numpy(tokens[start + 1:start + 33])
        with torch.no_grad():
            logits = loaded.model(x[None], starts=starts_of(x[None], loaded.separator))[0].double()
        losses = -logits.log_softmax(dim=-1).gather(1, y[:, None])[:, 0]
        nats += losses[y != 0].sum().item()
        n_bytes += sizes[y.numpy()].sum()
    # Sums of float32 losses, of which the smaller part is subtracted, are exact to some 1e-6.
    assert run.evals[2]['val_bpb'] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
    assert f'val bpb {run.evals[2]["val_bpb"]:.4f}' in run.stdout


def test_dataset_without_a_tokenizer_has_no_bits_per_byte(train, dataset, tmp_path):
    for name in ('train.bin', 'val.bin'):
        (tmp_path / name).write_bytes((dataset / name).read_bytes())
    (tmp_path / 'meta.json').write_text('{"vocab_size": 65, "dtype": "uint16"}')
    run = train(f'--dataset={tmp_path}', '--max_iters=1')
    assert 'val_bpb' not in run.evals[1] and 'val bpb' not in run.stdout
