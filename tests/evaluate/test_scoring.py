"""Layouts give the log-likelihoods that one row at a time gives on one process."""
import json
import shutil

import hypothesis
import pytest
import torch
from hypothesis import strategies
from test_parallel import MODERN

import kilogpt
from helpers import FAULTS, run_forked
from kilogpt.evaluate.batches import Group, Request, find_groups, pack_groups
from kilogpt.layers.attention import starts_of
from kilogpt.parallel.scoring import Recorder
from model import GPT, GPTConfig

MODELS = dict(
    learned='--bias', rope=MODERN, capped=f'{MODERN} --attention_softcap=2 --softcap=3',
    moe='--mlp=moe --n_experts=4 --n_active_experts=2 --expert_hidden=16 --pos=rope',
    window='--window=5 --window_pattern=SL --pos=rope', mask='--documents=mask --pos=rope --window=7',
    untied='--tie_weights=False --norm=rmsnorm --mlp=swiglu --pos=rope')
CASES = [  # (model, processes, arguments): each model, and each kind of layout
    ('rope', 2, ''), ('rope', 2, '--tp=2'), ('mask', 2, '--cp=2'), ('window', 1, '--batch_tokens=40'), ('moe', 1, ''),
    ('learned', 2, '--pp=2 --pp_schedule=zbv')]
SLOW_CASES = [
    ('rope', 3, '--zero_stage=3'), ('rope', 2, '--pp=2'), ('moe', 2, '--ep=2 --zero_stage=3'),
    ('moe', 4, '--tp=2 --pp=2'), ('capped', 4, '--cp=2 --zero_stage=3'), ('mask', 4, '--tp=2'),
    ('untied', 2, '--pp=2 --pp_schedule=interleavedzb'), ('window', 2, '--pp=2 --pp_schedule=dualpipev')]
TOLERANCE = 1e-4  # of log-likelihoods in nats, in float32, of up to 31 tokens


# Contexts that are shared, or not, of very different lengths; the model reads 32 tokens.
LONG = 'ONCE UPON A TIME IN A FAR'
QUESTIONS = [
    dict(question='A', choices=['B', 'CDE'], answer=0),
    dict(question=LONG, choices=['LAND', 'C', 'SEA'], answer=1),
    dict(question=LONG + ' OFF', choices=['9', '10'], answer='9'),
    # These two are read together, the shorter one with padding before it.
    dict(question='THE QUICK BROWN FOX', choices=['A', 'OF'], answer=1),
    dict(question='A LAZY DOG SLEEPS OVER', choices=['X', 'IT'], answer=1),
    dict(question='WHO\nCOMES\nTHERE IN THE NIGHT', choices=['A\nB', 'NOBODY'], answer=1),
    dict(question='THE CAT SAT ON THE MAT AND THE DOG SAT ON THE CAT', choices=['X', 'YY', 'ZZZ', '!'], answer=2)]


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
    """Files of questions and a text."""
    folder = tmp_path_factory.mktemp('tasks')
    (folder / 'choices.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in QUESTIONS))
    (folder / 'words.jsonl').write_text('{"settings": {"last_word": true}}\n' + ''.join(
        json.dumps(dict(text=text)) + '\n' for text in ('A B', 'THE SHORT ONE', LONG)))
    (folder / 'text.txt').write_text('FIRST LINE\nAND ANOTHER\n' * 7)
    return folder


@pytest.fixture(scope='module')
def runs(train, dataset, tmp_path_factory):
    """A function: the out_dir of a run of a model, which is trained once, on documents that line ends separate."""
    found, documents = {}, tmp_path_factory.mktemp('documents') / 'lines'
    shutil.copytree(dataset, documents)
    meta = json.loads((dataset / 'meta.json').read_text()) | dict(separator=0)
    (documents / 'meta.json').write_text(json.dumps(meta))

    def run(model):
        if model not in found:
            # Few iterations: an overconfident model would have nats beyond the precision of float32.
            found[model] = train(*MODELS[model].split(), f'--dataset={documents}', '--max_iters=4',
                                 '--lr_decay_iters=4', '--eval_iters=1', '--eval_interval=4').out_dir
        return found[model]
    return run


@pytest.fixture(scope='module')
def expected(runs, tasks):
    """A function: the details that a model gives by itself, one row after another, in float64."""
    found = {}

    def of(model):
        if model not in found:
            loaded = kilogpt.load(str(runs(model)))
            found[model] = [score_slowly(loaded, *pair) for pair in pairs(tasks)]
        return found[model]
    return of


def pairs(tasks):
    """(context, continuation) of all that the files ask, in order. A text is cut as block_size=32 demands."""
    for line in QUESTIONS:
        for choice in line['choices']:
            yield line['question'], ' ' + choice
    for text in ('A B', 'THE SHORT ONE', LONG):
        context, _, word = text.rpartition(' ')
        yield context, ' ' + word
    text = (tasks / 'text.txt').read_text()
    for begin in range(1, len(text), 32):
        end = min(begin + 32, len(text))
        yield text[max(0, end - 33):begin], text[begin:end]


def score_slowly(loaded, context, continuation):
    """(log-likelihood, whether each token was the likeliest) by the logits of one row."""
    tokens = loaded.tokenizer.encode(context + continuation)[-33:]
    n_scored = len(loaded.tokenizer.encode(continuation))
    x = torch.tensor([tokens[:-1]])
    with torch.no_grad():
        logits = loaded.model.double()(x, starts=starts_of(x, loaded.separator))[0, -n_scored:]
    targets = torch.tensor(tokens[-n_scored:])
    nats = logits.double().log_softmax(dim=-1).gather(1, targets[:, None]).sum().item()
    return nats, bool((logits.argmax(dim=-1) == targets).all())


@pytest.mark.parametrize('model, nproc, arguments', [
    *CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_layout_scores_as_one_row_at_a_time(runs, expected, tasks, tmp_path, model, nproc, arguments):
    names = ', '.join(str(tasks / name) for name in ('choices.jsonl', 'words.jsonl', 'text.txt'))
    run_forked('kilogpt.evaluate', runs(model), f'--tasks={names}', f'--details={tmp_path}/details.jsonl',
               '--device=cpu', '--dtype=float32', *arguments.split(), nproc=nproc)
    found = []
    for line in map(json.loads, (tmp_path / 'details.jsonl').read_text().splitlines()):
        found += zip(line['nats'], line['is_likeliest'])
    assert len(found) == len(expected(model)) == 17 + 3 + 5
    for (nats, is_likeliest), (slow_nats, slow_is_likeliest) in zip(found, expected(model)):
        assert nats == pytest.approx(slow_nats, abs=TOLERANCE)
        assert is_likeliest == slow_is_likeliest


def test_bars_are_for_the_terminal_of_the_first_process(runs, tasks):
    first, second = run_forked('kilogpt.evaluate', runs('learned'), f'--tasks={tasks}/choices.jsonl', '--device=cpu',
                               nproc=2, faults=[FAULTS / 'terminal.py']).outputs
    assert 'tasks: ' in first and 'passes: ' in first
    assert 'tasks: ' not in second and 'passes: ' not in second


# --- batches ------------------------------------------------------------------------------------------------

REQUESTS = strategies.lists(strategies.tuples(strategies.integers(0, 3), strategies.integers(1, 60),
                                              strategies.integers(1, 20)), min_size=1, max_size=30)


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(REQUESTS, strategies.integers(80, 2000))
def test_batches_have_each_request_once_and_share_what_is_equal(shapes, most_tokens):
    requests = [Request([kind] * context + [7 + number] * own, context)
                for number, (kind, context, own) in enumerate(shapes)]
    groups = find_groups(requests, most_tokens)
    assert sorted(number for group in groups for number in group.numbers) == list(range(len(requests)))
    for group in groups:
        shared = [tuple(requests[number].tokens[:group.n_shared]) for number in group.numbers]
        assert len(set(shared)) == 1
        assert all(requests[number].begin > group.n_shared for number in group.numbers)
        assert len(group.numbers) > 1 or group.n_shared == 0
    for kind in (True, False):
        batches = pack_groups([group for group in groups if (group.n_shared > 0) == kind], requests, most_tokens, 80)
        for batch in batches:
            n_shared = max(group.n_shared for group in batch)
            n_own = max(group.longest(requests) for group in batch)
            rows = sum(len(group.numbers) for group in batch)
            assert n_shared + n_own <= 80
            assert len(batch) == 1 or rows * (n_shared + n_own) <= most_tokens
        assert sum(len(batch) for batch in batches) == sum((group.n_shared > 0) == kind for group in groups)


def test_choices_of_a_question_share_its_context_and_examples_before_all_questions_too():
    examples, questions = list(range(600)), [[1000 + i] * 60 for i in range(3)]
    requests = [Request(examples + question + [2000 + choice], 660) for question in questions for choice in range(4)]
    assert find_groups(requests, 10_000) == [Group(list(range(12)), 600)]
    assert find_groups(requests, 3000) == [Group(list(range(i, i + 4)), 659) for i in (0, 4, 8)]
    alone = [Request([i] * 40 + [9], 40) for i in range(3)]
    assert [group.n_shared for group in find_groups(alone, 10_000)] == [0, 0, 0]


def test_loss_that_asks_for_each_targets_loss_is_recorded():
    """An edit of Loss.of_logits in model.py may take the sum itself, and another one in training."""
    model = GPT(GPTConfig(vocab_size=11, n_layer=1, n_embd=32, n_head=4)).eval()
    loss, tokens = model.loss, torch.arange(8).view(1, 8)
    loss.of_logits = lambda logits, targets: loss.cross_entropy(logits[:, :11], targets, 11, reduction='none').sum()
    recorder = Recorder(loss)
    with torch.no_grad():
        expected, model.loss = model(tokens, tokens), recorder
        total = model(tokens, tokens)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(recorder.take().nats.sum(), expected)
