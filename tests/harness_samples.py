"""Run tasks of lm-evaluation-harness on a model, by us or by its own backend, and write every answer.

    python tests/harness_samples.py SOURCE INCLUDE OUT TASK... [--hf] [--tp=2] [--zero_stage=3]
"""
import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from kilogpt.evaluate.harness import HarnessModel
from kilogpt.evaluate.open_model import open_model
from kilogpt.evaluate.scorer import Scorer

if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('source')
    parser.add_argument('include')
    parser.add_argument('out')
    parser.add_argument('tasks', nargs='+')
    parser.add_argument('--hf', action='store_true')
    parser.add_argument('--tp', type=int, default=1)
    parser.add_argument('--zero_stage', type=int, default=0)
    options = parser.parse_args()
    if options.hf:
        # In a batch the backend lets a text continue after its end until all are over.
        arguments = dict(pretrained=options.source, dtype='float32')
        model = dict(model='hf', model_args=arguments, device='cpu', batch_size=1)
    else:
        opened = open_model(options.source, 'best', '', 'cpu', 'float32', tp=options.tp,
                            zero_stage=options.zero_stage)
        scorer = Scorer(opened.parallel, opened.config, opened.dtype, opened.separator, 1024)
        model = dict(model=HarnessModel(scorer, opened.tokenizer))
    manager = TaskManager(include_path=options.include)
    results = simple_evaluate(**model, tasks=options.tasks, task_manager=manager, bootstrap_iters=0)
    if results is not None:
        answers = {}
        for task, samples in results['samples'].items():
            samples = sorted(samples, key=lambda sample: sample['doc_id'])
            answers[task] = [answer for sample in samples for answer in sample['resps']]
        with open(options.out, 'w') as file:
            json.dump(dict(answers=answers, results=results['results']), file)
    if not options.hf:
        opened.parallel.processes.leave(0)
