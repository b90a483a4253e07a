"""Conversations as data: the forms of a line, the tokens that are targets, and the loss over them."""
import functools
import json
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import numpy as np
import pyarrow.parquet
import pytest
import torch

from data.batches import Batches
from data.datasets import find_sources
from data.documents import DocumentLoader, PackedLoader
from data.flags import BEGIN, CONTEXT, begins_of, ids_of, targets_of
from data.loader import TokenLoader
from data.make.messages import ConversationEncoder, conversation_splits, more_of, read_conversations, to_messages
from data.make.prepare import write_dataset
from data.tokens.chat_template import ChatTemplate
from data.tokens.tokenizer import CharTokenizer
from helpers import curve, run_forked
from kilogpt.parallel.layout import Layout
from model import GPT, GPTConfig

TOKENIZER = CharTokenizer.from_text(['\n', *map(chr, range(32, 127))])
ANSWERS = [('Hello', 'Hi!'), ('2+2?', '4'), ('Why is the sky blue, and not green?', 'Light is scattered.'),
           ('Bye', 'See you soon'), ('More', 'No'), ('What?', 'That')]


def conversation(*turns):
    roles = 'user', 'assistant'
    return [dict(role=roles[i % 2], content=text) for i, text in enumerate(turns)]


@pytest.mark.parametrize('row, turns', [
    (dict(messages=conversation('a', 'b', 'c', 'd')), ('a', 'b', 'c', 'd')),
    (dict(conversations=[{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]), ('a', 'b')),
    (dict(prompt='a', completion='b'), ('a', 'b')),
    (dict(prompt=conversation('a'), completion=[dict(role='assistant', content='b')]), ('a', 'b')),
    (dict(instruction='a', input='', output='b'), ('a', 'b')),
    (dict(instruction='a', input='more', output='b'), ('a\n\nmore', 'b'))])
def test_forms_of_a_line(row, turns):
    assert to_messages(row) == conversation(*turns)


def test_system_history_tools_and_entries_of_turns_are_kept():
    row = dict(instruction='a', output='b', system='Be brief.', history=[['c', 'd']])
    assert to_messages(row) == [dict(role='system', content='Be brief.'), *conversation('c', 'd', 'a', 'b')]
    turns = [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b', 'weight': 0}]
    assert to_messages(dict(conversations=turns))[1] == dict(role='assistant', content='b', weight=0)
    tools = [dict(type='function')]
    assert more_of(dict(tools=tools)) == more_of(dict(tools=json.dumps(tools))) == dict(tools=tools)
    assert more_of(dict(chat_template_kwargs=dict(enable_thinking=False), tools='')) == dict(enable_thinking=False)
    with pytest.raises(ValueError, match='tools that are 5: they must be a list'):
        more_of(dict(tools=5))


def test_field_of_unknown_meaning_is_named_once(tmp_path, capsys):
    path = tmp_path / 'rows.jsonl'
    path.write_text('\n'.join(json.dumps(dict(messages=conversation('a', 'b'), persona='pirate', id=i)) for i in range(3)))
    assert len(list(read_conversations(str(path)))) == 3
    assert capsys.readouterr().err == f"{path}: the field 'persona' of its rows is not used\n"


def test_nulls_that_parquet_adds_are_not_in_the_text(tmp_path):
    rows = [dict(messages=[dict(role='user', content='x', name=None), dict(
        role='assistant', content=None, tool_calls=[dict(function=dict(name=name, arguments={key: 'v'}))])])
        for name, key in (('rate', 'of'), ('weather', 'city'))]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'rows.parquet')
    read = [each['messages'] for each in read_conversations(str(tmp_path / 'rows.parquet'))]
    assert [messages[1]['tool_calls'] for messages in read] == [row['messages'][1]['tool_calls'] for row in rows]
    assert read[0][0] == dict(role='user', content='x')


def write_chats(path, conversations):
    path.write_text(''.join(json.dumps(dict(messages=conversation(*turns))) + '\n' for turns in conversations))


@pytest.fixture(scope='module')
def chats(tmp_path_factory):
    """A dataset of short conversations in characters, in both splits."""
    folder = tmp_path_factory.mktemp('chats')
    write_chats(folder / 'chats.jsonl', [pair + ANSWERS[i % 5] * (i % 3) for i, pair in enumerate(ANSWERS * 60)])
    encoder = ConversationEncoder(TOKENIZER, 'assistant')
    splits = {'train': conversation_splits([str(folder / 'chats.jsonl')], 0)['train']}
    write_dataset(str(folder / 'data'), encoder, splits | dict(val=splits['train']))
    return folder / 'data'


def test_answers_and_their_ends_are_targets_and_the_rest_is_context(chats):
    tokens = np.fromfile(chats / 'train.bin', '<u4')
    text = TOKENIZER.decode(ids_of(tokens).tolist())
    assert text.startswith('User: Hello\nAssistant: Hi!\nUser: 2+2?\nAssistant: 4\n')
    targets = targets_of(tokens)
    answers = ''.join(TOKENIZER.decode([i]) if i >= 0 else '|' for i in targets[:60].tolist())
    assert [part for part in answers.split('|') if part][:2] == [' Hi!\n', ' 4\n']
    begins = np.flatnonzero(begins_of(tokens, None))
    assert len(begins) == 360 and all(text[i:].startswith('User: ') for i in begins[:10])
    meta = json.loads((chats / 'meta.json').read_text())
    assert meta['flags'] is True and meta['roles'] == 'assistant' and meta['dtype'] == 'uint32'


def test_command_writes_the_same_from_one_and_two_processes_and_says_what_is_wrong(tmp_path):
    write_chats(tmp_path / 'a.jsonl', [('Hi', f'Answer {i}') for i in range(300)])
    for n in (1, 2):
        run_forked('data/conversations/prepare.py', f'--input={tmp_path}/a.jsonl', '--tokenizer=bytes',
                   f'--out={tmp_path}/{n}', f'--num_proc={n}', '--val_fraction=0.2')
    for name in ('train.bin', 'val.bin'):
        assert (tmp_path / '1' / name).read_bytes() == (tmp_path / '2' / name).read_bytes()
    n_val = begins_of(np.fromfile(tmp_path / '1/val.bin', '<u4'), None).sum()
    assert 40 <= n_val <= 80  # of 300, a fifth is drawn
    page = run_forked('data.look', tmp_path / '1').stdout
    assert 'of the tokens are targets, the messages of: assistant' in page and '\nAssistant:[ Answer ' in page
    run_forked('data/conversations/prepare.py', f'--input={tmp_path}/a.jsonl', '--tokenizer=bytes', '--roles=user',
               f'--out={tmp_path}/user', '--num_proc=1')
    page = run_forked('data.look', tmp_path / 'user').stdout
    assert 'of the tokens are targets, the messages of: user' in page and '[User: Hi\n]Assistant: Answer ' in page
    for content, sentence in (
            ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}',
             'conversation 1: message 1, of the role assistant, is empty'),
            ('{"messages": [{"role": "robot", "content": "a"}]}', 'the role robot is not system, user or assistant'),
            ('{"messages": [{"role": "user", "content": "a"}]}', 'conversation 1 has no message of assistant'),
            ('{"messages": 3}', 'messages is 3: it must be a list'),
            ('{"text": "a"}', 'no conversation, only text'), ('[3]', 'has the row 3, which must be an object')):
        (tmp_path / 'b.jsonl').write_text(content + '\n')
        done = run_forked('data/conversations/prepare.py', f'--input={tmp_path}/b.jsonl', '--tokenizer=bytes',
                          f'--out={tmp_path}/b', '--num_proc=1', '--val_fraction=0', check=False)
        assert done.returncode == 1 and sentence in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.parametrize('keys', [{}, dict(lora_rank=4)], ids=['all weights', 'adapters'])
@pytest.mark.parametrize('kind', ['stream', 'mask', 'pack'])
def test_loss_and_gradients_are_those_of_the_answers_one_by_one(chats, kind, keys, monkeypatch):
    """In float64, within 1e-10: sums of the same numbers in another order."""
    cast = torch.Tensor.float  # the model casts to float32 in places
    monkeypatch.setattr(torch.Tensor, 'float', lambda self: self if self.dtype == torch.float64 else cast(self))
    meta = find_sources(str(chats)).popitem()[1].meta
    loader = dict(stream=TokenLoader, mask=DocumentLoader, pack=PackedLoader)[kind](
        str(chats), 'train', 64, meta['vocab_size'], meta, 1, *([] if kind == 'stream' else [None]))
    numbers = np.arange(12)
    x, y, *starts = loader.train_batch(numbers)
    assert loader.count_targets(loader.train_batch, numbers) == (y >= 0).sum() > 0.1 * y.size
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=96, n_layer=2, n_head=2, n_embd=16, pos='rope', **keys)).double()
    for name, parameter in model.named_parameters():
        if name.endswith('lora_B'):  # with B = 0 the gradients of A would be zero
            torch.nn.init.normal_(parameter, std=0.1)
    model(*map(torch.from_numpy, (x, y, *starts))).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all('.lora_' in name for name in trained) == bool(keys)
    found = {name: parameter.grad.clone() for name, parameter in trained.items()}
    model.zero_grad()
    total = 0
    begins = starts[0] if starts else np.zeros_like(x)
    for row, (ids, targets) in enumerate(zip(x, y)):
        for begin in np.unique(begins[row]):
            document = begins[row] == begin
            answers = targets[document] >= 0
            if not answers.any():
                continue
            logits = model(torch.from_numpy(ids[document])[None])[0]
            losses = torch.nn.functional.cross_entropy(
                logits[torch.from_numpy(answers)], torch.from_numpy(targets[document][answers]), reduction='sum')
            losses.backward()
            total += losses.item()
    with torch.no_grad():
        assert model(*map(torch.from_numpy, (x, y, *starts))).item() == pytest.approx(total, rel=1e-12)
    for name, parameter in trained.items():
        assert parameter.grad.abs().max() > 1e-6, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize('kind', [TokenLoader, DocumentLoader, PackedLoader])
def test_answers_that_are_cut_are_counted_and_told(kind, tmp_path):
    """Each token's id is its place in the file, so that rows say where they were cut."""
    rng = np.random.default_rng(0)
    begins, answer_of, n_answers = [], [], 0
    while len(answer_of) < 3000:
        begins.append(len(answer_of))
        for turn in range(rng.integers(1, 4)):  # a document may begin with an answer, and context precedes others
            answer_of += [None] * rng.integers(turn > 0, 4) + [n_answers] * rng.integers(2, 50)
            n_answers += 1
    tokens = np.arange(len(answer_of), dtype='<u4')
    tokens[begins] |= BEGIN
    tokens[[answer is None for answer in answer_of]] |= CONTEXT
    tokens.tofile(tmp_path / 'train.bin')
    meta = dict(vocab_size=len(tokens), dtype='uint32', flags=True)
    loader = kind(str(tmp_path), 'train', 32, len(tokens), meta, 1, *([] if kind is TokenLoader else [None]))
    x, y, *_ = loader.train_batch(np.arange(loader.per_epoch))
    begun, n_cut = set(), 0
    for row in x:
        for i, place in enumerate(row):
            answer, following = answer_of[place], answer_of[(place + 1) % len(tokens)]
            if following is not None and following != answer:
                begun.add(following)
            is_cut = (i == 0 or row[i - 1] != place - 1) and place not in begins
            n_cut += following is not None and following == answer and is_cut
    assert loader.per_epoch < 256 and n_cut > 10 and len(begun) > 0.9 * n_answers
    assert loader.describe()[0] == (f'targets     {(y >= 0).mean():.1%} of the tokens: those of answers, of which '
                                    f'{len(begun)} begin and {n_cut} are cut in {loader.per_epoch} sequences')


def test_iteration_without_any_target_changes_nothing_but_by_weight_decay(train, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 65, 4000).astype('<u4') | CONTEXT
    tokens[::40] |= BEGIN
    for split in ('train', 'val'):
        tokens.tofile(tmp_path / f'{split}.bin')
    (tmp_path / 'meta.json').write_text('{"vocab_size": 65, "dtype": "uint32", "flags": true}')
    run = train(f'--dataset={tmp_path}', '--max_iters=3', '--eval_interval=3', '--weight_decay=0', '--documents=mask')
    assert all(line['loss'] == 0 and line['grad_norm'] == 0 for line in run.lines.values())
    assert run.evals[3]['val_loss'] is None and run.returncode == 0
    assert 'targets     0.0% of the tokens' in run.stdout


@pytest.mark.parametrize('documents', ['stream', 'pack'])
def test_run_on_answers_resumes_to_the_bit_and_logs_their_loss(train, chats, documents):
    arguments = [f'--dataset={chats}', f'--documents={documents}', '--pos=rope']
    whole = train(*arguments)
    assert whole.lines[12]['loss'] < whole.lines[1]['loss'] and whole.evals[12]['val_bpb'] > 0
    assert 'of the tokens: those of answers' in whole.stdout
    part = train(*arguments, '--max_iters=6')
    rest = train(*arguments, '--init_from=resume', out_dir=part.out_dir)
    assert curve(rest) == curve(whole)


def test_default_template_is_that_of_the_prepared_text():
    messages = conversation('Hello', 'Hi!')
    assert ChatTemplate(TOKENIZER).render(messages) == 'User: Hello\nAssistant: Hi!\n'


def test_each_process_counts_its_own_rows_once(chats):
    """Five sequences in a batch, two processes; batch 1 is made again. Nothing is read beyond the end."""
    meta = find_sources(str(chats)).popitem()[1].meta
    loader, layout = TokenLoader(str(chats), 'train', 64, meta['vocab_size'], meta, 1), Layout(2)
    counts, read = [Queue(), Queue()], [[], []]  # what each process sends to the other, and the sequences it has read

    def batches_of(rank):
        def read_rows(numbers):
            read[rank] += numbers[numbers >= 0].tolist()
            return loader.train_batch(numbers)

        def sum_later(numbers):
            counts[rank].put(numbers['targets'])
            total = functools.cache(lambda: numbers['targets'] + counts[1 - rank].get())
            return lambda: (dict(targets=total()), [])

        return Batches(loader, read_rows, lambda batch: 5 * batch + np.arange(5), steps=lambda total: 2,
                       rows=lambda total, step: layout.rows(rank, total, 2, step), positions=slice(None),
                       device=torch.device('cpu'), sum_later=sum_later, end=4)

    expected = [int((loader.train_batch(5 * batch + np.arange(5))[1] >= 0).sum()) for batch in (0, 1, 1, 2, 3)]
    assert len({*expected}) > 1
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda batches: [batches.count_targets(batch) for batch in (0, 1, 1, 2, 3)],
                         map(batches_of, (0, 1)))
        assert [*found] == [expected, expected]
    assert sorted(read[0] + read[1]) == [*range(20)]
