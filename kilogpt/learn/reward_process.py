"""The process that runs a file of rewards, its argument: reads a line of JSON for each text, and answers with one.

Rewards are other people's code. What they print goes to stderr, so that it does not meet the answers.
"""
import json
import math
import os
import runpy
import sys


def main():
    answers = os.fdopen(os.dup(1), 'w', encoding='utf-8')
    os.dup2(2, 1)
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[1]))  # and not the folder of this file
    try:
        reward = runpy.run_path(sys.argv[1])['reward']
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


def is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def describe(error):
    return f'{type(error).__name__}: {error}'


if __name__ == '__main__':
    main()
