"""The process that computes rewards: reads a line of JSON for each text, and answers with one.

Its argument is a file with reward(row, text), or reasoning_gym:TASK.

Rewards are other people's code. What they print goes to stderr, so that it does not meet the answers.
"""
import difflib
import json
import math
import os
import re
import runpy
import sys

REASONING = 'reasoning_gym:'


def main():
    answers = os.fdopen(os.dup(1), 'w', encoding='utf-8')
    os.dup2(2, 1)
    try:
        reward = open_reward(sys.argv[1])
    except Exception as error:
        print(json.dumps(dict(error=describe(error))), file=answers, flush=True)
        return
    print(json.dumps(dict(ready=True)), file=answers, flush=True)
    for line in sys.stdin:
        try:
            value = reward(*json.loads(line))
            answer = dict(reward=float(value)) if is_number(value) else dict(error=f'it is {value!r}, not a number')
        except Exception as error:
            answer = dict(error=describe(error))
        print(json.dumps(answer), file=answers, flush=True)


def open_reward(name):
    """reward(row, text), of a file or of a task of reasoning-gym."""
    if name.startswith(REASONING):
        sys.path.pop(0)  # the folder of this file
        return reward_of_task(name.removeprefix(REASONING))
    sys.path[0] = os.path.dirname(os.path.abspath(name))
    return runpy.run_path(name)['reward']


def open_task(name):
    """(class of the dataset, class of its options) of a task of reasoning-gym. ValueError if there is none."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f'reasoning-gym cannot be imported ({error}): pip install reasoning-gym') from None
    tasks = reasoning_gym.factory.DATASETS
    if name not in tasks:
        similar = ', '.join(difflib.get_close_matches(name, tasks, 5, 0.4) or sorted(tasks))
        raise ValueError(f'reasoning-gym does not have the task {name!r}: choose one such as {similar}')
    return tasks[name]


def reward_of_task(name):
    """reward(row, text) of a task of reasoning-gym. The answer is the content of the last <answer>, or the whole text."""
    dataset_class, config_class = open_task(name)
    task = dataset_class(config_class())

    def reward(row, text):
        *_, answer = text, *re.findall('<answer>(.*?)</answer>', text, re.S)
        return float(task.score_answer(answer.strip(), row))
    return reward


def is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def describe(error):
    return f'{type(error).__name__}: {error}'


if __name__ == '__main__':
    main()
