"""Tasks: files of JSON lines with questions, the requests that score them, and what follows from the scores.

docs/evaluate.md describes the form of the files.
"""
import json
import math
import os
import pathlib
from dataclasses import dataclass, field
from typing import NamedTuple

from kilogpt.evaluate.batches import Request

HERE = pathlib.Path(__file__).parents[2] / 'data' / 'tasks'
SETTINGS = dict(prompt='{question}', delimiter=' ', separator='\n\n', description='', last_word=False)


class Score(NamedTuple):
    """A figure of a task. stderr: its standard error over the questions; None with fewer than two."""
    value: float
    stderr: float | None


@dataclass
class Question:
    """kind: 'choice' (contexts and continuations are choices), 'cloze' (one) or 'text' (a text in pieces).

    pairs: [(context, continuation)] to score. answer: the number of the right choice. sizes: bytes of each.
    """
    kind: str
    pairs: list
    answer: int = 0
    sizes: list = field(default_factory=list)
    words: int = 0


@dataclass
class Task:
    """A task. per_token: whether choices are compared by their means over tokens, as in CORE."""
    name: str
    questions: list
    per_token: bool = False
    requests: list = field(default_factory=list)  # of each question, once encode_task has set them
    scores: list = field(default_factory=list)  # (log-likelihood, is likeliest) of each request, by question


# --- files --------------------------------------------------------------------------------------------------

def find_task(name):
    """The path of a task: a file, or the name of one in data/tasks. ValueError if there is neither."""
    known = sorted(os.path.splitext(file)[0] for file in os.listdir(HERE) if file.endswith('.jsonl'))
    for path in (name, os.path.join(HERE, f'{name}.jsonl')):
        if os.path.isfile(path):
            return path
    raise ValueError(f'there is no task {name!r}: give a file of JSON lines, a text file (.txt), or one of '
                     f'{", ".join(known)}')


def task_names(tasks):
    """The names or paths in the value of a key: 'capitals, my/task.jsonl'."""
    return [name.strip() for name in tasks.split(',') if name.strip()]


def read_task(name, shots=None, limit=None):
    """The Task of a file of questions, or of a text file (.txt), which is one text.

    shots: how many of the file's examples come before each question; None = all. limit: the first so many
    questions. ValueError, with the line, if the file has another form; OSError if it cannot be read.
    """
    path = find_task(name)
    short = os.path.splitext(os.path.basename(path))[0]
    if path.endswith('.txt'):
        with open(path, encoding='utf-8') as file:
            return Task(short, [text_question(file.read())])
    settings, examples, questions = SETTINGS, [], []
    for place, entry in read_entries(path):
        if 'settings' in entry:
            settings = read_settings(entry['settings'], place)
            continue
        question = read_entry(entry, settings, place)
        if entry.get('example'):
            examples.append(question)
        else:
            questions.append(question)
    if len({question.kind for question in questions}) != 1:
        raise ValueError(f'{path} has {len(questions)} questions, and these must be of one kind: all with '
                         'choices, all with an answer alone, or all texts')
    if shots and shots > len(examples):
        raise ValueError(f'shots is {shots}, but {path} has {len(examples)} examples: mark more lines with '
                         '"example": true, or set shots to less')
    before = settings['description'] + ''.join(
        solved(example) + settings['separator'] for example in examples[:shots])
    for question in questions:
        if question.kind != 'text':
            question.pairs = [(before + context, continuation) for context, continuation in question.pairs]
    return Task(short, questions[:limit])


def read_entries(path):
    """Yield (place, object) of each line of a file of JSON lines. ValueError, with the line, for others."""
    with open(path, 'rb') as file:
        for number, line in enumerate(file, 1):
            place = f'{path}, line {number}'
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise ValueError(f'{place} is not JSON ({error}): write one object a line') from None
            if not isinstance(entry, dict):
                raise ValueError(f'{place} is {str(entry)[:60]}, and not an object: write one object a line')
            yield place, entry


def read_settings(given, place):
    """SETTINGS with those of a file's line; ValueError for unknown ones, or values of another type."""
    for key, value in given.items() if isinstance(given, dict) else [('settings', given)]:
        if type(value) is not type(SETTINGS.get(key)):
            known = [f'{name} ({type(default).__name__})' for name, default in SETTINGS.items()]
            raise ValueError(f'{place}: the setting {key} is {value!r}: choose of {", ".join(known)}')
    settings = SETTINGS | given
    if '{question}' not in settings['prompt']:
        raise ValueError(f'{place}: prompt is {settings["prompt"]!r}: it must contain {{question}}')
    return settings


def read_entry(entry, settings, place):
    """The Question of a line: with choices, with an answer alone, or a text."""
    if 'text' in entry:
        text = of_type(entry, 'text', str, place)
        return cloze_question(text, settings, place) if settings['last_word'] else text_question(text)
    context = settings['prompt'].replace('{question}', of_type(entry, 'question', str, place))
    if 'choices' not in entry:
        answer = of_type(entry, 'answer', str, place)
        check_choice(answer, place)
        return Question('cloze', [(context, settings['delimiter'] + answer)], sizes=[len(answer.encode())])
    choices = of_type(entry, 'choices', list, place)
    for choice in choices:
        check_choice(choice, place)
    answer = entry.get('answer')
    if answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices) or len(choices) < 2:
        raise ValueError(f'{place}: answer is {answer!r}, with {len(choices)} choices: give at least two '
                         'choices, and the number of the right one from 0 on, or its text')
    return Question('choice', [(context, settings['delimiter'] + choice) for choice in choices], answer,
                    [len(choice.encode()) for choice in choices])


def of_type(entry, key, kind, place):
    """entry[key], which must be of that type and not empty."""
    value = entry.get(key)
    if type(value) is not kind or not value:
        raise ValueError(f'{place}: {key} is {value!r}: a line has question, choices and answer, or question '
                         'and answer, or text')
    return value


def check_choice(choice, place):
    if type(choice) is not str or not choice.strip():
        raise ValueError(f'{place}: a choice is {choice!r}: write some text')


def text_question(text):
    return Question('text', [('', text)], sizes=[len(text.encode())], words=len(text.split()))


def cloze_question(text, settings, place):
    """The last word of a text is the answer, as in LAMBADA (Paperno et al. 2016)."""
    context, _, word = text.rstrip().rpartition(' ')
    if not context.strip():
        raise ValueError(f'{place}: text is {text!r}, of which no word comes before the last: write more')
    return Question('cloze', [(context, ' ' + word)], sizes=[len(word.encode())])


def solved(question):
    """A question with its right answer, as an example."""
    context, continuation = question.pairs[question.answer]
    return context + continuation


# --- requests -----------------------------------------------------------------------------------------------

class Encoder:
    """Makes Requests of texts. start: the token before each text; None = a text begins with itself."""

    def __init__(self, tokenizer, block_size):
        self.tokenizer, self.block_size = tokenizer, block_size
        self.start = [] if tokenizer.bos is None else [tokenizer.bos]
        self.n_cut = 0  # requests whose beginnings were left out

    def pair(self, context, continuation):
        """The Request that scores a continuation. ValueError if the model cannot read all of it."""
        tokens = self.start + self.tokenizer.encode(context + continuation)
        before = os.path.commonprefix([tokens, self.start + self.tokenizer.encode(context)])
        begin = max(1, len(before))
        return self.within(tokens, begin)

    def within(self, tokens, begin):
        """The Request of tokens, without those of its beginning for which the model has no room."""
        excess = max(0, len(tokens) - 1 - self.block_size)
        if begin - excess < 1 or begin >= len(tokens):
            text = self.tokenizer.decode(tokens[begin:])
            if begin >= len(tokens):
                raise ValueError(f'{text or self.tokenizer.decode(tokens)!r} has no token that could be '
                                 'scored: put some text before it')
            raise ValueError(f'{text[:60]!r}... has {len(tokens) - begin} tokens, but block_size is '
                             f'{self.block_size}: shorten it')
        self.n_cut += excess > 0
        return Request(tokens[excess:], begin - excess)

    def pieces(self, tokens):
        """Requests that score all tokens of a text, each once: pieces of block_size that see nothing before.

        The last piece is as long as the others, and its beginning is not scored again. So does
        lm-evaluation-harness. A first token without one before it is not scored.
        """
        tokens, requests, done = self.start + tokens, [], 1
        while done < len(tokens):
            end = min(done + self.block_size, len(tokens))
            begin = max(0, end - 1 - self.block_size)
            requests.append(Request(tokens[begin:end], done - begin))
            done = end
        return requests

    def requests(self, question):
        """The Requests of a Question."""
        if question.kind == 'text':
            return self.pieces(self.tokenizer.encode(question.pairs[0][1]))
        return [self.pair(*pair) for pair in question.pairs]


# --- figures ------------------------------------------------------------------------------------------------

def encode_task(task, encoder):
    """Set the requests of a Task; returns a sentence about those whose beginnings were left out, or None."""
    encoder.n_cut = 0
    try:
        task.requests = [encoder.requests(question) for question in task.questions]
    except ValueError as error:
        raise ValueError(f'{task.name}: {error}') from None
    if encoder.n_cut:
        return (f'{encoder.n_cut} texts of {task.name} are longer than block_size={encoder.block_size}: '
                'the model does not see their beginnings')
    return None


def score_task(task, scorer):
    """{figure: Score} of a Task with requests, or None if the scorer was ended."""
    scored = scorer.score([request for requests in task.requests for request in requests])
    if scored is None:
        return None
    scored = iter(scored)
    task.scores = [[next(scored) for _ in requests] for requests in task.requests]
    answered = list(zip(task.questions, task.requests, task.scores))
    return FIGURES[task.questions[0].kind](answered, task.per_token)


def choice_figures(answered, per_token):
    """Shares of right answers: by the whole log-likelihood, and per byte of a choice (in CORE, per token)."""
    accuracy, normalised = [], []
    for question, requests, scores in answered:
        nats = [likelihood for likelihood, _ in scores]
        sizes = question.sizes
        if per_token:
            sizes = [len(request.tokens) - request.begin for request in requests]
        accuracy.append(best(nats) == question.answer)
        normalised.append(best([nat / size for nat, size in zip(nats, sizes)]) == question.answer)
    if per_token:
        return dict(accuracy=mean(normalised))
    chance = sum(1 / len(question.pairs) for question, _, _ in answered) / len(answered)
    return dict(accuracy=mean(accuracy), accuracy_norm=mean(normalised), chance=Score(chance, None))


def best(values):
    return values.index(max(values))


def cloze_figures(answered, per_token):
    """The share of answers of which each token was the likeliest, and exp(mean nats of an answer)."""
    accuracy = mean([all(is_likeliest for _, is_likeliest in scores) for _, _, scores in answered])
    if per_token:
        return dict(accuracy=accuracy)
    nats = mean([-sum(likelihood for likelihood, _ in scores) for _, _, scores in answered])
    perplexity = math.exp(min(nats.value, 700))
    return dict(accuracy=accuracy, perplexity=Score(perplexity, nats.stderr and nats.stderr * perplexity))


def text_figures(answered, per_token):
    """Bits per byte of all texts together, and perplexity per word."""
    nats = [-sum(likelihood for likelihood, _ in scores) for _, _, scores in answered]
    bits = [nat / math.log(2) for nat in nats]
    words = mean_ratio(nats, [question.words for question, _, _ in answered])
    perplexity = math.exp(min(words.value, 700))
    return dict(bpb=mean_ratio(bits, [question.sizes[0] for question, _, _ in answered]),
                word_perplexity=Score(perplexity, words.stderr and words.stderr * perplexity))


FIGURES = dict(choice=choice_figures, cloze=cloze_figures, text=text_figures)


def mean(values):
    """The Score that is the mean of values."""
    return mean_ratio(values, [1] * len(values))


def mean_ratio(values, weights):
    """The Score sum(values) / sum(weights), with the error of a ratio estimator (Cochran 1977, 2.11)."""
    n, ratio = len(values), sum(values) / max(sum(weights), 1e-9)
    if n < 2:
        return Score(ratio, None)
    squares = sum((value - ratio * weight) ** 2 for value, weight in zip(values, weights))
    return Score(ratio, math.sqrt(squares * n / (n - 1)) / sum(weights))
