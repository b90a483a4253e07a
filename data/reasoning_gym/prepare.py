"""Make prompts of a task of reasoning-gym, which checks answers itself, and conversations with the right answers:

    pip install reasoning-gym
    python data/reasoning_gym/prepare.py --task=chain_sum --options='max_terms=2, max_digits=2' --tokenizer=bytes

train.jsonl and val.jsonl have a prompt in each row, for the keys rl_prompts and rl_val_prompts; no question is in both.
The conversations are a dataset, on which a model can be trained before; --rl_reward=reasoning_gym:chain_sum follows.
"""
import ast
import inspect
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.datasets import places_of
from data.make.messages import ConversationEncoder
from data.make.prepare import check_unused, write_dataset
from kilogpt.configurator import configure, exit_on_error
from kilogpt.learn.reward_process import open_task
from kilogpt.weights.any_tokenizer import find_tokenizer

task = ''  # a task of reasoning-gym, such as chain_sum
options = ''  # of the task, such as 'max_terms=2, max_digits=2'; '' = those of reasoning-gym
out = 'reasoning_gym'  # output folder: a name in data/, or a path; train.py's --dataset
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
tokenizer = 'gpt2'  # that of the model to train: its folder, run or org/name, whose chat template is used
size = 5000  # questions for training
val_size = 500  # held-out questions
seed = 1337  # determines the questions
configure(globals())


def parse_options(text):
    """{name: value} of a text such as 'max_terms=2, operators=["+"]'."""
    try:
        call = ast.parse(f'f({text})', mode='eval').body
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(f'options is {text!r}: it must be name=value, with commas between, where texts have quotes') from None


def draw_rows():
    """size + val_size rows with different questions. ValueError if the task does not have them, or not as JSON."""
    dataset_class, config_class = open_task(task)
    rows, n_wanted = {}, size + val_size
    try:
        config = config_class(**parse_options(options) | dict(seed=seed, size=2 * n_wanted))
        questions = dataset_class(config)
    except (TypeError, AssertionError) as error:
        names = ', '.join(name for name in inspect.signature(config_class).parameters if name not in ('seed', 'size'))
        raise ValueError(f'options is {options!r}, which {task} refuses: {error} (its options are {names})') from None
    for number in range(2 * n_wanted):
        entry = questions[number]
        row = dict(messages=[dict(role='user', content=entry['question'])], **entry)
        try:
            copy = json.loads(json.dumps(row))
            is_same = questions.score_answer(row['answer'], copy) == questions.score_answer(row['answer'], entry)
        except Exception as error:  # whatever a task of others raises for a row that was written and read
            raise ValueError(f'the task {task} cannot check a row that was written as JSON: {error}') from None
        if not is_same:
            raise ValueError(f'the task {task} scores its own answer differently once the row was written as JSON')
        rows.setdefault(entry['question'], copy)
        if len(rows) == n_wanted:
            return list(rows.values())
    raise ValueError(f'of {2 * n_wanted:,} questions of {task} only {len(rows):,} are different, but size + val_size is '
                     f'{n_wanted:,}: lower these, or set options')


def reader(rows):
    """The reader of a split of write_dataset: conversations, each a question and its answer."""
    def read(start):
        for row in rows[start:]:
            messages = [*row['messages'], dict(role='assistant', content=row['answer'])]
            yield json.dumps(dict(messages=messages, place=f'the question {row["question"]!r}')), True
    return read


if __name__ == '__main__':
    with exit_on_error():
        if size < 1 or val_size < 1:
            raise ValueError(f'size is {size} and val_size {val_size}: both must be at least 1')
        rows, origin = draw_rows(), f'reasoning-gym: {task} {options}'.strip()
        encoder = ConversationEncoder(find_tokenizer(tokenizer), 'assistant')
        check_unused(out, encoder, origin, overwrite)
        splits = dict(val=rows[:val_size], train=rows[val_size:])
        write_dataset(out, encoder, {split: reader(of_split) for split, of_split in splits.items()},
                      source=[task, options, size, val_size, seed], origin=origin, overwrite=overwrite, share='val_size')
        for split, of_split in splits.items():
            with open(os.path.join(places_of(out)[0], f'{split}.jsonl'), 'w', encoding='utf-8') as file:
                file.writelines(json.dumps(row) + '\n' for row in of_split)
