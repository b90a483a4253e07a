"""CORE: 22 tasks on which DCLM compares base models (Li et al. 2024, arXiv 2406.11794, 3.5 and appendix G).

The bundle of their files is that of nanochat: core.yaml lists the tasks, eval_meta_data.csv has the score that
guessing gives, and eval_data/ has the questions. Accuracies are centred, so that 0 is guessing and 1 is
perfect, and CORE is the mean of the 22.
"""
import csv
import os
import random

from kilogpt.evaluate.tasks import Question, Task, of_type, read_entries

SEPARATOR = '\n\n'
FILES = 'core.yaml', 'eval_meta_data.csv', 'eval_data'
# The questions are shuffled before a limit, and the examples of each question are drawn, from these seeds.
SHUFFLE_SEED, EXAMPLES_SEED = 1337, 1234


def read_core(folder, limit=None):
    """[(Task, share of right answers by guessing)] of a bundle. limit: the questions of each task.

    ValueError if a file has another form, OSError if it cannot be read, ImportError without PyYAML.
    """
    try:
        import yaml
    except ImportError:
        raise ImportError('reading core.yaml needs PyYAML: pip install pyyaml') from None
    for name in FILES:
        if not os.path.exists(os.path.join(folder, name)):
            raise ValueError(f'{folder} has no {name}: set core to the folder of the evaluation bundle, '
                             'eval_bundle')
    with open(os.path.join(folder, 'core.yaml'), encoding='utf-8') as file:
        entries = yaml.safe_load(file)['icl_tasks']
    with open(os.path.join(folder, 'eval_meta_data.csv'), encoding='utf-8') as file:
        guessing = {row['Eval Task']: float(row['Random baseline']) / 100 for row in csv.DictReader(file)}
    tasks = []
    for entry in entries:
        label = entry['label']
        if label not in guessing:
            raise ValueError(f'eval_meta_data.csv in {folder} has no row for {label}, which core.yaml lists')
        tasks.append((read_core_task(folder, entry, limit), guessing[label]))
    return tasks


def read_core_task(folder, entry, limit):
    """The Task of an entry of core.yaml."""
    kind, shots = entry['icl_task_type'], entry['num_fewshot'][0]
    if kind not in READERS:
        raise ValueError(f'core.yaml: {entry["label"]} is of type {kind!r}: known are {", ".join(READERS)}')
    delimiter = entry.get('continuation_delimiter', ' ')
    path = os.path.join(folder, 'eval_data', entry['dataset_uri'])
    questions = [READERS[kind](line, delimiter, place) for place, line in read_entries(path)]
    if len(questions) <= shots:
        raise ValueError(f'{path} has {len(questions)} questions, but each takes {shots} others as examples')
    random.Random(SHUFFLE_SEED).shuffle(questions)
    questions = questions[:limit]
    texts = [question.pairs[question.answer] for question in questions]
    chosen = []
    for number, question in enumerate(questions):
        others = [other for other in range(len(questions)) if other != number]
        if len(others) < shots:
            raise ValueError(f'limit is {limit}, but {entry["label"]} takes {shots} other questions as '
                             f'examples: set limit to {shots + 1} or more')
        examples = random.Random(EXAMPLES_SEED + number).sample(others, shots)
        before = ''.join(''.join(texts[i]) + SEPARATOR for i in examples)
        pairs = [(before + context, continuation) for context, continuation in question.pairs]
        chosen.append(Question(question.kind, pairs, question.answer, question.sizes))
    return Task(entry['label'], chosen, per_token=True)


def read_multiple_choice(line, delimiter, place):
    """A query and choices, of which `gold` is right."""
    query, choices = of_type(line, 'query', str, place), of_type(line, 'choices', list, place)
    pairs = [(query, delimiter + choice) for choice in choices]
    return Question('choice', pairs, gold_of(line, choices, place))


def read_schema(line, delimiter, place):
    """Contexts, of which `gold` is right, and one continuation."""
    contexts = of_type(line, 'context_options', list, place)
    continuation = of_type(line, 'continuation', str, place)
    return Question('choice', [(context, delimiter + continuation) for context in contexts],
                    gold_of(line, contexts, place))


def read_language_modeling(line, delimiter, place):
    """A context and the continuation that the model is to find likeliest, token by token."""
    context, continuation = of_type(line, 'context', str, place), of_type(line, 'continuation', str, place)
    return Question('cloze', [(context.strip(), delimiter + continuation)])


READERS = dict(multiple_choice=read_multiple_choice, schema=read_schema,
               language_modeling=read_language_modeling)


def gold_of(line, choices, place):
    gold = line.get('gold')
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(f'{place}: gold is {gold!r}, with {len(choices)} choices: give the number of the '
                         'right one')
    return gold
