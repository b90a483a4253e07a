"""DPO: pairs of answers as data, the loss against the formula of the paper, and runs that learn to prefer."""
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.datasets import REFERENCE, REFERENCE_FILE, find_sources
from data.flags import BEGIN, CONTEXT, REJECTED, begins_of, ids_of, pair_begins_of, targets_of
from data.make.messages import ConversationEncoder, conversation_splits
from data.make.pairs import PairEncoder, read_pairs, to_pair
from data.make.prepare import write_dataset
from data.pair_loader import PairLoader
from data.tokens.json_tokenizer import JsonTokenizer
from data.tokens.tokenizer import CharTokenizer
import kilogpt
from helpers import assert_near, curve, first_iterations, run_forked
from kilogpt.evaluate.reference import reference_of
from kilogpt.layers.preferences import PreferenceLoss, use_preferences
from model import GPT, GPTConfig
from test_chat_template import write_folder

TOKENIZER = CharTokenizer.from_text(['\n', *map(chr, range(32, 127))])


def message(role, content):
    return dict(role=role, content=content)


USER, GOOD, BAD = message('user', 'a'), message('assistant', 'b'), message('assistant', 'c')
HH = '\n\nHuman: a\n\nAssistant: '


@pytest.mark.parametrize('row', [
    dict(prompt='a', chosen='b', rejected='c'),
    dict(prompt=[USER], chosen=[GOOD], rejected=[BAD]),
    dict(prompt='a', chosen=[GOOD | dict(id=3)], rejected='c'),
    dict(prompt='a', chosen=[USER, GOOD], rejected=[USER, BAD], score_chosen=3),
    dict(chosen=[USER, GOOD], rejected=[USER, BAD]),
    dict(chosen=f'{HH}b', rejected=f'{HH}c')])
def test_forms_of_a_line(row):
    assert to_pair(row) == ([USER], [GOOD], [BAD])


@pytest.mark.parametrize('row, sentence', [
    (dict(prompt='a', chosen='b'), 'it has no rejected, only prompt, chosen: give'),
    (dict(text='a'), 'it has no chosen and no rejected, only text'),
    (dict(prompt='a', chosen='b', rejected='b'), 'chosen and rejected are the same'),
    (dict(prompt='z', chosen=[USER, GOOD], rejected=[USER, BAD]), 'chosen begins with .* but prompt with .*: leave'),
    (dict(chosen=[USER, GOOD], rejected=[message('user', 'z'), BAD]), 'give both the same prompt'),
    (dict(chosen=[USER, GOOD], rejected=[USER, GOOD, USER, BAD]), 'one of the conversations continues the other'),
    (dict(prompt='a', chosen=3, rejected='b'), 'messages is 3: it must be a list')])
def test_bad_line_gets_a_sentence(row, sentence):
    with pytest.raises(ValueError, match=sentence):
        to_pair(row)


def write_pairs(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def rows_of_pairs(count, seed=0):
    """Pairs of which the answer with digits is chosen and the one with letters rejected."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(count):
        words = [''.join(rng.choice(list(letters), rng.integers(4, 9))) for letters in ('0123456789', 'abcdefgh')]
        rows.append(dict(prompt=f'Q{number}', chosen=words[0], rejected=words[1]))
    return rows


@pytest.fixture(scope='module')
def pairs(tmp_path_factory):
    """The folder of a dataset of short pairs in characters, whose reference is random."""
    folder = tmp_path_factory.mktemp('pairs')
    write_pairs(folder / 'pairs.jsonl', rows_of_pairs(400))
    splits = conversation_splits([str(folder / 'pairs.jsonl')], 0.2, read_pairs)
    write_dataset(str(folder / 'data'), PairEncoder(TOKENIZER, 'assistant'), splits)
    for split in ('train', 'val'):
        tokens = np.fromfile(folder / 'data' / f'{split}.bin', '<u4')
        reference = np.random.default_rng(0).normal(-4, 1, len(tokens)).astype('<f4')
        reference.tofile(folder / 'data' / f'{split}.bin{REFERENCE}')
    return folder / 'data'


def test_answers_are_targets_and_the_rejected_document_has_a_flag(pairs):
    tokens = np.fromfile(pairs / 'train.bin', '<u4')
    begins = np.flatnonzero(begins_of(tokens, None))
    assert (pair_begins_of(tokens[begins]) == [True, False] * (len(begins) // 2)).all()
    first, second = tokens[:begins[1]], tokens[begins[1]:begins[2]]
    assert (first & REJECTED == 0).all() and (second & REJECTED > 0).all()
    row = next(row for row in rows_of_pairs(400)
               if TOKENIZER.decode(ids_of(first).tolist()).startswith(f'User: {row["prompt"]}\n'))
    for document, answer in ((first, row['chosen']), (second, row['rejected'])):
        assert TOKENIZER.decode(ids_of(document).tolist()) == f'User: {row["prompt"]}\nAssistant: {answer}\n'
        targets = targets_of(document)
        assert TOKENIZER.decode(targets[targets >= 0].tolist()) == f'{answer}\n'  # both begin with the space
    assert json.loads((pairs / 'meta.json').read_text())['pairs'] is True


def test_answers_in_the_prompt_do_not_count_even_where_the_template_writes_them_in_another_way(tmp_path):
    template = ("{% for m in messages %}{{ m.role ~ ':' ~ (m.content if loop.last or m.role == 'user' else '...') }}"
                "<|end|>{% endfor %}{{ 'assistant:' if add_generation_prompt }}")
    tokenizer = JsonTokenizer(write_folder(tmp_path, template, ['<|end|>'], eos='<|end|>'))
    pair = dict(place='a', messages=[USER, GOOD, USER], chosen=[message('assistant', 'fox')], rejected=[BAD])
    tokens = PairEncoder(tokenizer, 'assistant').encode_to_numpy(json.dumps(pair))
    documents = tokens[tokens & REJECTED == 0], tokens[tokens & REJECTED > 0]
    for document, answer in zip(documents, ('fox', 'c')):
        text = f'user:a<|end|>assistant:...<|end|>user:a<|end|>assistant:{answer}<|end|>'
        assert tokenizer.decode(ids_of(document).tolist()) == text
        assert tokenizer.decode([i for i in targets_of(document).tolist() if i >= 0]) == f'{answer}<|end|>'


def test_command_draws_splits_by_prompts_and_shows_pairs(tmp_path):
    rows = [dict(prompt=f'Q{i // 3}', chosen=f'yes {i}', rejected='no') for i in range(600)]
    write_pairs(tmp_path / 'a.jsonl', rows)
    for n in (1, 2):
        run_forked('data/preferences/prepare.py', f'--input={tmp_path}/a.jsonl', '--tokenizer=bytes',
                   f'--out={tmp_path}/{n}', f'--num_proc={n}', '--val_fraction=0.2')
    found = {}
    for split in ('train', 'val'):
        assert (tmp_path / f'1/{split}.bin').read_bytes() == (tmp_path / f'2/{split}.bin').read_bytes()
        text = bytes(ids_of(np.fromfile(tmp_path / f'1/{split}.bin', '<u4')).astype('u1').tolist()).decode()
        found[split] = {line for line in text.splitlines() if line.startswith('User: Q')}
    assert not found['train'] & found['val'] and len(found['train'] | found['val']) == 200
    run_forked('data/preferences/prepare.py', f'--input={tmp_path}/a.jsonl', '--tokenizer=bytes', f'--out={tmp_path}/1',
               '--num_proc=1', '--val_fraction=0.2')  # the same again
    page = run_forked('data.look', tmp_path / '1').stdout
    assert 'what follows is about pairs' in page and '\n    rejected:\nUser: Q' in page and '[no\n]' in page
    for content, sentence in (('{"prompt": "a", "chosen": "b", "rejected": ""}', 'pair 1, rejected: message 1, of the role'),
                              ('{"prompt": "a", "chosen": "b"}', 'a.jsonl, pair 1: it has no rejected'),
                              ('{"prompt": "a", "chosen": "b ", "rejected": "b"}', 'the answer has no token of its own')):
        (tmp_path / 'a.jsonl').write_text(content + '\n')
        done = run_forked('data/preferences/prepare.py', f'--input={tmp_path}/a.jsonl', '--tokenizer=bytes',
                          f'--out={tmp_path}/b', '--num_proc=1', '--val_fraction=0', check=False)
        assert done.returncode == 1 and sentence in done.stderr and 'Traceback' not in done.stderr


def open_pairs(pairs, block_size=160, seed=1):
    meta = find_sources(str(pairs)).popitem()[1].meta
    return PairLoader(str(pairs), 'train', block_size, meta['vocab_size'], meta, seed)


def test_rows_have_whole_pairs_with_their_reference(pairs):
    loader = open_pairs(pairs)
    tokens = np.fromfile(pairs / 'train.bin', '<u4')
    values = np.fromfile(pairs / f'train.bin{REFERENCE}', '<f4')
    begins = [*np.flatnonzero(pair_begins_of(tokens)), len(tokens)]
    known = {}  # {bytes of a pair's targets: the log-probabilities of these}
    for begin, end in zip(begins, begins[1:]):
        targets = targets_of(tokens[begin:end])
        known[targets[targets >= 0].tobytes()] = values[begin:end][targets >= 0]
    numbers = np.arange(loader.per_epoch)
    x, y, starts, signed, reference = loader.train_batch(numbers)
    assert ((y >= 0) == (signed != 0)).all()
    found = []
    for row in range(len(numbers)):
        for number in np.unique(signed[row][signed[row] > 0]):
            places = abs(signed[row]) == number
            np.testing.assert_array_equal(known[y[row][places].tobytes()], reference[row][places])
            chosen, rejected = signed[row] == number, signed[row] == -number
            assert chosen.any() and rejected.any()
            assert len(np.unique(starts[row][chosen])) == len(np.unique(starts[row][rejected])) == 1
            begin, = np.unique(starts[row][rejected])
            assert begin > np.flatnonzero(chosen)[-1]
            assert TOKENIZER.decode(x[row][begin:begin + 6].tolist()) == 'User: '
            found.append(y[row][places].tobytes())
    assert loader.count_targets(loader.train_batch, numbers) == len(found) > 0.7 * (len(begins) - 1)
    assert not loader.train_batch(np.full(2, -1))[3].any()


def in_float64(monkeypatch):
    cast = torch.Tensor.float  # the model casts to float32 in places
    monkeypatch.setattr(torch.Tensor, 'float', lambda self: self if self.dtype == torch.float64 else cast(self))


def losses_by_the_paper(model, batch, beta):
    """Equation 7 of Rafailov et al. 2023 for each pair, answer by answer: [(loss, margin of the rewards)]."""
    x, y, starts, signed, reference = batch
    found = []
    for row in range(len(x)):
        for number in np.unique(signed[row][signed[row] > 0]):
            ratios = []
            for sign in (1, -1):
                targets = np.flatnonzero(signed[row] == sign * number)
                document = slice(starts[row][targets[0]], targets[-1] + 1)
                log_p = model(torch.from_numpy(x[row][document])[None])[0].log_softmax(dim=-1)
                places = torch.from_numpy(targets - document.start)
                log_p = log_p[places, torch.from_numpy(y[row][targets])].sum()
                ratios.append(log_p - reference[row][targets].astype(np.float64).sum())
            margin = beta * (ratios[0] - ratios[1])
            found.append((-torch.log(1 / (1 + torch.exp(-margin))), margin.item()))
    return found


@pytest.mark.parametrize('form', ['whole', 'parts'])
def test_loss_and_gradients_are_those_of_the_paper(pairs, form, monkeypatch):
    """In float64, within 1e-9: sums of the same numbers in another order."""
    in_float64(monkeypatch)
    loader, beta = open_pairs(pairs), 0.3
    batch = loader.train_batch(np.arange(6))
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=160, vocab_size=96, n_layer=2, n_head=2, n_embd=16, pos='rope')).double()
    expected = losses_by_the_paper(model, batch, beta)
    assert len(expected) == loader.count_targets(loader.train_batch, np.arange(6)) > 9
    sum(loss for loss, _ in expected).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    use_preferences(model, beta)
    if form == 'parts':
        monkeypatch.setattr('model.MAX_LOGITS', 50 * 128)
    tensors = [torch.from_numpy(array) for array in batch[:4]] + [torch.from_numpy(batch[4]).double()]
    loss = model(*tensors)
    loss.backward()
    assert loss.item() == pytest.approx(sum(loss.item() for loss, _ in expected), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-9), name
        assert parameter.grad.abs().max() > 1e-6, name
    margins = [margin for _, margin in expected]
    assert float(model.sums['reward_margin']) == pytest.approx(sum(margins), rel=1e-12)
    assert float(model.sums['reward_accuracy']) == sum(margin > 0 for margin in margins)
    with torch.no_grad():
        assert model(*tensors).item() == pytest.approx(loss.item(), rel=1e-12)


def test_loss_is_ln_2_where_the_policy_is_the_reference():
    reference = torch.randn(2, 8)
    signed = torch.tensor([[0, 1, 1, 0, -1, -1, 0, 0], [1, -1, 0, 3, 3, -3, 0, 0]])
    preferences = PreferenceLoss(0.1, dict(reward_margin=0.0, reward_accuracy=0.0))
    assert preferences(-reference.flatten(), signed, reference).item() == pytest.approx(3 * math.log(2), rel=1e-7)
    assert preferences.sums['reward_margin'] == preferences.sums['reward_accuracy'] == 0
    assert preferences(torch.randn(16), torch.zeros_like(signed), reference).item() == 0


# --- runs ---------------------------------------------------------------------------------------------------

SHAPE = '--block_size=160 --pos=rope --batch_size=2 --documents=pack'.split()
DPO = [*SHAPE, '--loss=dpo']


@pytest.fixture(scope='module')
def start(train, tmp_path_factory):
    """(the folder of a run on the rejected answers, that of pairs with its log-probabilities)."""
    folder = tmp_path_factory.mktemp('start')
    rows = rows_of_pairs(400)
    write_pairs(folder / 'pairs.jsonl', rows)
    write_pairs(folder / 'chats.jsonl', [dict(prompt=row['prompt'], completion=row['rejected']) for row in rows])
    for name, encoder, read in (('pairs', PairEncoder, read_pairs), ('chats', ConversationEncoder, None)):
        splits = conversation_splits([str(folder / f'{name}.jsonl')], 0.2, read)
        write_dataset(str(folder / name), encoder(TOKENIZER, 'assistant'), splits)
    base = train(f'--dataset={folder}/chats', *SHAPE, '--eval_iters=0').out_dir
    evaluate(base, folder / 'pairs')
    return base, folder / 'pairs'


def evaluate(source, pairs, *arguments, **options):
    return run_forked('kilogpt.evaluate', source, f'--reference={pairs}', '--device=cpu', '--dtype=float32', *arguments,
                      **options)


def test_margins_rise_on_held_out_pairs(train, start):
    base, pairs = start
    run = train(f'--init_from={base}', f'--dataset={pairs}', *DPO)
    for split in ('train', 'val'):
        assert run.evals[0][f'{split}_loss'] == pytest.approx(math.log(2), abs=1e-6)
        assert run.evals[0][f'{split}_reward_margin'] == pytest.approx(0, abs=1e-5)
        margins = [run.evals[i][f'{split}_reward_margin'] for i in (0, 6, 12)]
        assert margins == sorted(margins) and margins[-1] > 0.5
        assert run.evals[12][f'{split}_loss'] < 0.5 and run.evals[12][f'{split}_reward_accuracy'] > 0.9
    assert run.lines[12]['reward_margin'] > 0.5 and run.lines[12]['reward_accuracy'] > 0.9
    assert 'val_bpb' not in run.evals[12] and ' of them whole; others do not count' in run.stdout
    assert ', margin ' in run.stdout and ', accuracy ' in run.stdout


def test_run_resumes_to_the_bit_in_other_micro_batches_and_not_with_another_reference(train, start, tmp_path):
    base, pairs = start
    arguments = [f'--init_from={base}', f'--dataset={pairs}', *DPO]
    whole = train(*arguments)
    part = train(*arguments, '--max_iters=6')
    rest = train(*arguments, '--init_from=resume', out_dir=part.out_dir)
    assert curve(rest) == curve(whole)
    in_one = train(*arguments, '--batch_size=6', '--gradient_accumulation_steps=1')
    assert_near(first_iterations(in_one, 4), first_iterations(whole, 4))
    copy = shutil.copytree(pairs, tmp_path / 'pairs')
    values = np.fromfile(copy / f'train.bin{REFERENCE}', '<f4')
    (values * 1.1).tofile(copy / f'train.bin{REFERENCE}')
    arguments[1] = f'--dataset={copy}'
    other = train(*arguments, '--max_iters=6')
    assert other.lines[1]['loss'] != whole.lines[1]['loss']
    (values * 1.2).tofile(copy / f'train.bin{REFERENCE}')
    refused = train(*arguments, '--init_from=resume', out_dir=other.out_dir, check=False)
    assert refused.returncode == 1 and 'has changed since' in refused.stderr and REFERENCE in refused.stderr


@pytest.mark.parametrize('nproc, arguments', [
    (2, '--cp=2'), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (3, '--zero_stage=3'), (2, '--pp=2 --pp_schedule=zbv'), (4, '--tp=2 --cp=2')))])
def test_reference_is_the_same_in_every_layout(start, tmp_path, nproc, arguments):
    base, pairs = start
    copy = shutil.copytree(pairs, tmp_path / 'pairs')
    for split in ('train', 'val'):
        (copy / f'{split}.bin{REFERENCE}').unlink()
    evaluate(base, copy, *arguments.split(), nproc=nproc)
    assert (copy / REFERENCE_FILE).read_text() == (pairs / REFERENCE_FILE).read_text()
    for split in ('train', 'val'):
        expected, found = (np.fromfile(folder / f'{split}.bin{REFERENCE}', '<f4') for folder in (pairs, copy))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        is_target = targets_of(np.fromfile(pairs / f'{split}.bin', '<u4')) >= 0
        assert (expected[is_target] < 0).all() and not expected[~is_target].any()


def test_reference_is_what_the_model_gives_an_answer(start):
    base, pairs = start
    tokens, values = (np.fromfile(pairs / name, kind) for name, kind in (
        ('val.bin', '<u4'), (f'val.bin{REFERENCE}', '<f4')))
    begin, end = np.flatnonzero(begins_of(tokens, None))[[3, 4]]
    ids = torch.from_numpy(ids_of(tokens[begin:end]).astype(np.int64))
    log_p = kilogpt.load(str(base), device='cpu').model(ids[None, :-1])[0].log_softmax(dim=-1)
    expected = log_p.gather(1, ids[1:, None])[:, 0].detach().numpy()
    is_target = targets_of(tokens[begin + 1:end]) >= 0
    np.testing.assert_allclose(values[begin + 1:end][is_target], expected[is_target], rtol=0, atol=1e-5)


def test_document_that_is_too_long_for_the_model_has_no_reference():
    tokens = np.arange(12, dtype='<u4')
    tokens[[0, 4]] |= BEGIN | CONTEXT  # documents of 4 and 8 tokens, of which the model reads all but the last
    scorer = SimpleNamespace(score_tokens=lambda requests: [np.full(len(each.tokens), -2.0) for each in requests])
    bar = SimpleNamespace(update=lambda count: None)
    assert reference_of(tokens, scorer, 7, bar).tolist() == [0, -2, -2, -2, 0] + 7 * [-2]
    assert reference_of(tokens, scorer, 6, bar).tolist() == [0, -2, -2, -2] + 8 * [0]
    assert not reference_of(tokens, scorer, 2, bar).any()


def test_run_without_a_whole_pair_changes_nothing_but_by_weight_decay(train, start):
    base, pairs = start
    run = train(f'--init_from={base}', f'--dataset={pairs}', *DPO, '--block_size=16', '--weight_decay=0',
                '--max_iters=3', '--eval_interval=3')
    assert all(line['loss'] == 0 and line['grad_norm'] == 0 for line in run.lines.values())
    assert run.evals[3]['val_loss'] is None and ' 0.0% of them whole' in run.stdout


def test_what_cannot_be_trained_gets_a_sentence(train, start, tmp_path):
    base, pairs = start
    chats = pairs.parent / 'chats'
    other = train(f'--init_from={base}', f'--dataset={pairs}', *DPO, '--max_iters=1').out_dir
    bare, changed = (shutil.copytree(pairs, tmp_path / name) for name in ('bare', 'changed'))
    (bare / REFERENCE_FILE).unlink()
    tokens = np.fromfile(changed / 'train.bin', '<u4')
    tokens[[3, -3]] ^= 1
    tokens.tofile(changed / 'train.bin')
    of_base = [f'--init_from={base}', *DPO]
    cases = [
        ([*of_base, f'--dataset={bare}'], f'run python -m kilogpt.evaluate {base} --reference={bare}'),
        ([*of_base, f'--dataset={pairs}', f'--init_from={other}'], 'but training starts from'),
        ([*of_base, f'--dataset={changed}'], 'have changed since the reference was computed'),
        ([*of_base, f'--dataset={chats}'], f'loss is dpo, but dataset {str(chats)!r} does not have pairs'),
        ([*of_base, f'--dataset={pairs}:0.5, {bare}:0.5'], 'takes one dataset as it is'),
        ([*of_base, f'--dataset={pairs}', '--max_epochs=1'], 'takes one dataset as it is'),
        ([*of_base, f'--dataset={pairs}', '--loss=cross_entropy'], 'set loss to dpo'),
        ([*of_base, f'--dataset={pairs}', '--documents=mask'], 'set documents to pack'),
        ([*of_base, f'--dataset={pairs}', '--dpo_beta=0'], 'dpo_beta is 0.0: it must be above 0'),
        ([*of_base, f'--dataset={pairs}', '--loss=ppo'], "loss is 'ppo': choose one of cross_entropy, dpo"),
        ([*DPO, f'--dataset={pairs}'], "init_from is 'scratch', but loss=dpo needs a trained model")]
    for arguments, sentence in cases:
        run = train(*arguments, check=False)
        assert run.returncode == 1 and sentence in run.stderr and 'Traceback' not in run.stderr, (sentence, run.stderr)
    (bare / 'meta.json').write_text(json.dumps(json.loads((bare / 'meta.json').read_text()) | dict(tokenizer='gpt2')))
    done = evaluate(base, bare, check=False)
    assert done.returncode == 1 and 'prepare the pairs with the tokenizer of this model' in done.stderr
    assert '--init_from' not in done.stderr and '--dataset' not in done.stderr
    for arguments, sentence in ((['--tasks=capitals'], 'set one of --tasks'), ([], None)):
        done = evaluate(base, chats, *arguments, check=False)
        assert done.returncode == 1 and (sentence or 'does not have pairs of answers') in done.stderr
