"""Files of tasks: what a line may be, what a wrong one says, and what the figures are."""
import csv
import json
import math
import random
import statistics

import pytest

from helpers import run_forked
from data.tokens.tokenizer import CharTokenizer
from kilogpt.evaluate.core import read_core
from kilogpt.evaluate.tasks import Encoder, Score, encode_task, mean_ratio, read_task, score_task

TOKENIZER = CharTokenizer.from_text(map(chr, range(32, 128)))
pytestmark = pytest.mark.quick


class CountingScorer:
    """Scores a request by the sum of its scored ids, without a model."""

    def __init__(self):
        self.requests = []

    def score(self, requests):
        self.requests += requests
        return [(-float(sum(request.tokens[request.begin:])), sum(request.tokens) % 2 == 0) for request in requests]


def write(path, *lines):
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return str(path)


def score(path, block_size=1000, **options):
    task = read_task(path, **options)
    note = encode_task(task, Encoder(TOKENIZER, block_size))
    scorer = CountingScorer()
    return score_task(task, scorer), scorer.requests, note


def text_of(request):
    return TOKENIZER.decode(request.tokens[:request.begin]), TOKENIZER.decode(request.tokens[request.begin:])


def test_choices_follow_the_prompt_and_the_examples(tmp_path):
    path = write(tmp_path / 'a.jsonl',
                 dict(settings=dict(prompt='Q: {question}\\nA:', separator=' # ', description='Hello. ')),
                 dict(question='one', choices=['1', '2'], answer=0, example=True),
                 dict(question='two', choices=['1', '2'], answer='2', example=True),
                 dict(question='three', choices=['3', '44'], answer=0))
    _, requests, _ = score(path)
    examples = 'Hello. Q: one\\nA: 1 # Q: two\\nA: 2 # '
    assert [text_of(request) for request in requests] == [
        (f'{examples}Q: three\\nA:', ' 3'), (f'{examples}Q: three\\nA:', ' 44')]
    _, requests, _ = score(path, shots=1)
    assert text_of(requests[0])[0] == 'Hello. Q: one\\nA: 1 # Q: three\\nA:'
    _, requests, _ = score(path, shots=0)
    assert text_of(requests[0])[0] == 'Hello. Q: three\\nA:'


def test_accuracy_is_of_the_likeliest_choice_and_of_the_likeliest_per_byte(tmp_path):
    path = write(tmp_path / 'a.jsonl', dict(question='x', choices=['a', 'bb'], answer=0),
                 dict(question='x', choices=['z', '!!'], answer=0), dict(question='x', choices=['a', 'aaa'], answer=1))
    figures, requests, _ = score(path)
    nats = [-sum(TOKENIZER.encode(' ' + choice)) for choice in ('a', 'bb', 'z', '!!', 'a', 'aaa')]
    right = [nats[0] > nats[1], nats[2] > nats[3], nats[4] < nats[5]]
    per_byte = [nats[0] > nats[1] / 2, nats[2] > nats[3] / 2, nats[4] < nats[5] / 3]
    assert figures['accuracy'].value == pytest.approx(sum(right) / 3)
    assert figures['accuracy_norm'].value == pytest.approx(sum(per_byte) / 3)
    assert figures['accuracy'].stderr == pytest.approx(statistics.stdev(right) / math.sqrt(3))
    assert figures['chance'].value == 0.5
    assert score(path, limit=1)[0]['accuracy'] == Score(float(right[0]), None)


def test_answer_alone_and_last_word_are_scored_token_by_token(tmp_path):
    path = write(tmp_path / 'a.jsonl', dict(question='2 + 2 =', answer='4'), dict(question='one plus', answer='two'))
    figures, requests, _ = score(path)
    assert [text_of(request) for request in requests] == [('2 + 2 =', ' 4'), ('one plus', ' two')]
    nats = [sum(request.tokens[request.begin:]) for request in requests]
    assert figures['accuracy'].value == statistics.mean(sum(request.tokens) % 2 == 0 for request in requests)
    assert figures['perplexity'].value == pytest.approx(math.exp(statistics.mean(nats)))
    path = write(tmp_path / 'b.jsonl', dict(settings=dict(last_word=True)), dict(text='The quick brown fox'))
    assert [text_of(request) for request in score(path)[1]] == [('The quick brown', ' fox')]


def test_each_token_of_a_text_is_scored_once_in_pieces_of_block_size(tmp_path):
    (tmp_path / 'a.txt').write_text('abcdefghijklmnop')
    figures, requests, _ = score(str(tmp_path / 'a.txt'), block_size=6)
    assert [text_of(request) for request in requests] == [('a', 'bcdefg'), ('g', 'hijklm'), ('jklm', 'nop')]
    nats = sum(TOKENIZER.encode('bcdefghijklmnop'))
    assert figures['bpb'] == Score(pytest.approx(nats / math.log(2) / 16), None)
    path = write(tmp_path / 'b.jsonl', dict(text='ab c'), dict(text='ä'.encode('ascii', 'ignore').decode() + 'xyz'))
    nats = [sum(TOKENIZER.encode('b c')), sum(TOKENIZER.encode('yz'))]
    assert score(path)[0]['bpb'].value == pytest.approx(sum(nats) / math.log(2) / (4 + 3))


def test_text_begins_after_the_token_that_begins_texts():
    class WithBos(CharTokenizer):
        bos = 5
    tokenizer = WithBos('abcdef')
    encoder = Encoder(tokenizer, 4)
    assert encoder.pair('', 'ab') == ([5, 0, 1], 1)
    assert [request.tokens for request in encoder.pieces([0, 1, 2, 3, 4])] == [[5, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert Encoder(CharTokenizer('abcdef'), 4).pair('', 'ab') == ([0, 1], 1)  # without one, the first is not scored


def test_what_the_model_has_no_room_for_is_left_out_at_the_beginning_and_said(tmp_path):
    path = write(tmp_path / 'a.jsonl', dict(question='0123456789', choices=['a', 'b'], answer=0))
    _, requests, note = score(path, block_size=5)
    assert [text_of(request) for request in requests] == [('6789', ' a'), ('6789', ' b')]
    assert note == '2 texts of a are longer than block_size=5: the model does not see their beginnings'
    assert score(path)[2] is None


def test_ratio_has_the_standard_error_of_a_bootstrap():
    generator = random.Random(0)
    weights = [generator.randint(50, 150) for _ in range(400)]
    values = [weight * generator.gauss(1, 0.2) for weight in weights]
    ratios = []
    for _ in range(1000):
        drawn = generator.choices(range(400), k=400)
        ratios.append(sum(values[i] for i in drawn) / sum(weights[i] for i in drawn))
    found = mean_ratio(values, weights)
    assert found.value == pytest.approx(sum(values) / sum(weights))
    assert found.stderr == pytest.approx(statistics.stdev(ratios), rel=0.1)  # a thousand draws are within 7%


QUESTION = dict(question='q', choices=['a', 'b'], answer=0)


@pytest.mark.parametrize('content, sentence', [
    ('not json\n', 'a.jsonl, line 1 is not JSON'),
    ('\n[1]\n', 'a.jsonl, line 2 is [1], and not an object'),
    (dict(question='q', choices=['a', ' '], answer=0), "line 1: a choice is ' ': write some text"),
    (dict(question='q', choices=['a', 3], answer=0), 'line 1: a choice is 3: write some text'),
    (dict(question='q', answer=''), "line 1: answer is ''"),
    (dict(question='q', choices=['a', 'b'], answer=2), 'line 1: answer is 2, with 2 choices'),
    (dict(question='q', choices=['a'], answer=0), 'line 1: answer is 0, with 1 choices'),
    (dict(question='q', choices=['a', 'b']), 'line 1: answer is None'),
    (dict(choices=['a', 'b'], answer=0), 'line 1: question is None: a line has'),
    (dict(settings=dict(promt='x')), "line 1: the setting promt is 'x': choose of prompt (str)"),
    (dict(settings=dict(prompt='x')), "line 1: prompt is 'x': it must contain {question}"),
    (dict(settings=dict(last_word=1)), 'line 1: the setting last_word is 1'),
    ('', 'a.jsonl has 0 questions, and these must be of one kind'),
    (json.dumps(QUESTION) + '\n{"text": "b"}\n', 'a.jsonl has 2 questions, and these must be of one kind')])
def test_wrong_line_is_a_sentence(tmp_path, content, sentence):
    path = tmp_path / 'a.jsonl'
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:
        read_task(str(path))
    assert sentence in str(error.value)


def test_other_wrong_input_is_a_sentence(tmp_path):
    path = write(tmp_path / 'a.jsonl', QUESTION)
    for action, sentence in (
            (lambda: read_task('capital'), "there is no task 'capital': give a file of JSON lines, a text file (.txt), "
                                           'or one of capitals'),
            (lambda: read_task(path, shots=1), 'shots is 1, but'),
            (lambda: score(write(tmp_path / 'b.jsonl', dict(question='é', answer='a'))), "b: the character 'é' is not"),
            (lambda: score(path, block_size=1), "a: ' a'... has 2 tokens, but block_size is 1: shorten it"),
            (lambda: score(write(tmp_path / 'c.jsonl', dict(settings=dict(last_word=True)), dict(text='one'))),
             "line 2: text is 'one', of which no word comes before the last")):
        with pytest.raises(ValueError) as error:
            action()
        assert sentence in str(error.value)


# --- CORE ---------------------------------------------------------------------------------------------------

def write_bundle(folder):
    """An evaluation bundle with a task of each type; returns its data."""
    data = dict(
        choice=[dict(query=f'Pick {i}:', choices=[f'a{i}', f'bb{i}', f'ccc{i}'], gold=i % 3) for i in range(7)],
        schema=[dict(context_options=[f'He {i}', f'Sheila {i}'], continuation=f'ran {i}', gold=i % 2)
                for i in range(5)],
        words=[dict(context=f' The word is {i} ', continuation=f'x{i}') for i in range(6)])
    kinds = dict(choice='multiple_choice', schema='schema', words='language_modeling')
    (folder / 'eval_data' / 'deep').mkdir(parents=True)
    entries = ''
    for name, lines in data.items():
        write(folder / 'eval_data' / 'deep' / f'{name}.jsonl', *lines)
        entries += (f'- label: {name}\n  dataset_uri: deep/{name}.jsonl\n  num_fewshot: [2]\n'
                    f'  icl_task_type: {kinds[name]}\n' + ('  continuation_delimiter: ": "\n' * (name == 'words')))
    (folder / 'core.yaml').write_text(f'icl_tasks:\n{entries}')
    with open(folder / 'eval_meta_data.csv', 'w', newline='') as file:
        rows = csv.writer(file)
        rows.writerow(['Eval Task', 'Random baseline'])
        rows.writerows([['choice', 33.3], ['schema', 50], ['words', 0]])
    return data


def core_slowly(data, name, limit=None):
    """[(texts before, texts scored, number of the right one)] of each question, by the definition of the bundle."""
    lines = list(data[name])
    random.Random(1337).shuffle(lines)
    lines = lines[:limit]

    def parts(line):
        if name == 'choice':
            return [(line['query'], ' ' + choice) for choice in line['choices']], line['gold']
        if name == 'schema':
            return [(context, ' ' + line['continuation']) for context in line['context_options']], line['gold']
        return [(line['context'].strip(), ': ' + line['continuation'])], 0

    questions = []
    for number, line in enumerate(lines):
        others = [i for i in range(len(lines)) if i != number]
        before = ''
        for i in random.Random(1234 + number).sample(others, 2):
            pairs, gold = parts(lines[i])
            before += ''.join(pairs[gold]) + '\n\n'
        pairs, gold = parts(line)
        questions.append(([before + context for context, _ in pairs], [scored for _, scored in pairs], gold))
    return questions


@pytest.mark.parametrize('limit', [None, 4])
def test_core_asks_what_its_definition_says(tmp_path, limit):
    data = write_bundle(tmp_path)
    tasks = read_core(str(tmp_path), limit)
    assert {task.name: guessing for task, guessing in tasks} == pytest.approx(dict(choice=0.333, schema=0.5, words=0))
    tokenizer, answers = CharTokenizer.from_text(['\n', *map(chr, range(32, 128))]), set()
    for task, _ in tasks:
        encode_task(task, Encoder(tokenizer, 1000))
        scorer = CountingScorer()
        figures = score_task(task, scorer)
        slow, right, asked = core_slowly(data, task.name, limit), [], []
        for before, scored, gold in slow:
            asked += zip(before, scored)
            means = [statistics.mean(tokenizer.encode(text)) for text in scored]
            whole = [sum(tokenizer.encode(context + text)) for context, text in zip(before, scored)]
            right.append(whole[0] % 2 == 0 if task.name == 'words' else means.index(min(means)) == gold)
        assert [(tokenizer.decode(request.tokens[:request.begin]), tokenizer.decode(request.tokens[request.begin:]))
                for request in scorer.requests] == asked
        assert figures == dict(accuracy=Score(pytest.approx(statistics.mean(right)), figures['accuracy'].stderr))
        answers |= set(right)
    assert answers == {True, False}


@pytest.mark.parametrize('change, sentence', [
    (lambda folder: (folder / 'core.yaml').unlink(), 'has no core.yaml: set core to the folder'),
    (lambda folder: write(folder / 'eval_data/deep/choice.jsonl', dict(query='q', choices=['a', 'b'], gold=2)),
     'choice.jsonl, line 1: gold is 2, with 2 choices'),
    (lambda folder: (folder / 'eval_data/deep/words.jsonl').write_text('{"context": "a"}\n'),
     'words.jsonl, line 1: continuation is None'),
    (lambda folder: write(folder / 'eval_data/deep/words.jsonl', dict(context='a', continuation='b')),
     'words.jsonl has 1 questions, but each takes 2 others as examples')])
def test_wrong_bundle_is_a_sentence(tmp_path, change, sentence):
    write_bundle(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError) as error:
        read_core(str(tmp_path))
    assert sentence in str(error.value)


def test_limit_that_leaves_too_few_examples_is_a_sentence(tmp_path):
    write_bundle(tmp_path)
    with pytest.raises(ValueError, match='limit is 2, but choice takes 2 other questions as examples'):
        read_core(str(tmp_path), 2)


def test_core_is_the_mean_of_centred_accuracies(tmp_path, train):
    (tmp_path / 'bundle').mkdir()
    data = write_bundle(tmp_path / 'bundle')
    for name, lines in data.items():  # in the alphabet of the dataset
        path = tmp_path / 'bundle/eval_data/deep' / f'{name}.jsonl'
        path.write_text(path.read_text().upper().replace('"QUERY"', '"query"').replace('"CHOICES"', '"choices"').replace(
            '"GOLD"', '"gold"').replace('"CONTEXT_OPTIONS"', '"context_options"').replace(
            '"CONTEXT"', '"context"').replace('"CONTINUATION"', '"continuation"'))
    out_dir = train('--max_iters=1').out_dir
    run_forked('kilogpt.evaluate', out_dir, f'--tasks=core:{tmp_path}/bundle', f'--out={tmp_path}/out.json')
    scores = json.loads((tmp_path / 'out.json').read_text())
    centred = []
    for name, guessing in dict(choice=0.333, schema=0.5, words=0).items():
        centred.append((scores[f'task/{name}/accuracy'] - guessing) / (1 - guessing))
        assert scores[f'task/{name}/centred'] == pytest.approx(centred[-1])
    assert scores['task/CORE/score'] == pytest.approx(statistics.mean(centred))
    assert json.loads((out_dir / 'tasks.jsonl').read_text()) == scores
    assert scores['iter'] == 1 and scores['tokens'] == 12 * 32
