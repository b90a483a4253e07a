r"""Score a trained model on tasks.

    python -m kilogpt.evaluate out-quickstart --tasks=capitals
    python -m kilogpt.evaluate out-quickstart --tasks="my/questions.jsonl, my/text.txt, core:eval_bundle"
    torchrun --standalone --nproc_per_node=8 -m kilogpt.evaluate out-gpt2-xl --tasks=core --zero_stage=3
    python -m kilogpt.evaluate HuggingFaceTB/SmolLM2-135M --lm_eval=hellaswag,arc_easy --limit=100
    python -m kilogpt.evaluate HuggingFaceTB/SmolLM2-135M-Instruct --reference=mypairs
    python -m kilogpt.evaluate out-teacher --teach=shakespeare_char --top_k=32

A source is what sample.py takes: the folder of a run, one of its checkpoints, weights of other programs, org/name.
A task is a file of questions, one JSON object a line; a text (.txt), for bits per byte; the name of a file in
data/tasks; or core, the 22 tasks of DCLM's CORE. docs/evaluate.md describes the files, and what each figure
means. The scores are the same in every layout. For the folder of a run, they are added to OUT_DIR/tasks.jsonl.

--lm_eval runs tasks of lm-evaluation-harness instead (pip install lm-eval), with its own files and figures.
--reference computes what DPO needs of the model from which it starts, and writes it beside the dataset
(docs/finetune.md). --teach writes the probabilities that the model gives the next token, for each token of a
dataset, from which a smaller model then learns (docs/rewards.md).
"""
import argparse
import json
import os
import time

from data.storage import is_url
from kilogpt.configurator import exit_on_error
from kilogpt.evaluate.open_model import open_model
from kilogpt.evaluate.reference import write_reference
from kilogpt.evaluate.scorer import Scorer
from kilogpt.evaluate.suite import Suite, as_line, details


def build_parser():
    parser = argparse.ArgumentParser(prog='python -m kilogpt.evaluate', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', metavar='SOURCE', help="a run's folder, or weights, as init_from of sample.py")
    parser.add_argument('--tasks', default='', help='tasks, separated by commas')
    parser.add_argument('--lm_eval', default='', help='tasks of lm-evaluation-harness, separated by commas')
    parser.add_argument('--lm_eval_include', default='', help='folder with more task files of lm-evaluation-harness')
    parser.add_argument('--reference', default='', help='a dataset of pairs, whose reference the model is to be')
    parser.add_argument('--teach', default='', help='a dataset, for which the model is to be the teacher')
    parser.add_argument('--top_k', type=int, default=32, help='with --teach: likeliest tokens to keep (32)')
    parser.add_argument('--temperature', type=float, default=1.0, help='with --teach: as distill_temperature (1.0)')
    parser.add_argument('--shots', type=int, help='examples before each question (default: all that a file has)')
    parser.add_argument('--limit', type=int, help='score the first so many questions of each task (default: all)')
    parser.add_argument('--out', default='', help='a JSON file for the scores')
    parser.add_argument('--details', default='', help='a file for the log-likelihoods of each question, with --tasks')
    parser.add_argument('--which', choices=('best', 'latest'), default='best', help="the run's checkpoint (best)")
    parser.add_argument('--tokenizer', default='', help='for weights that do not name theirs: as in sample.py')
    parser.add_argument('--device', default='auto', help='as in train.py (auto)')
    parser.add_argument('--dtype', default='auto', help='as in train.py (auto)')
    parser.add_argument('--batch_tokens', type=int, default=0, help='tokens that the model reads at a time '
                                                                    '(default: 4,096, on a GPU 32,768)')
    for key in ('tp', 'cp', 'pp', 'ep'):
        parser.add_argument(f'--{key}', type=int, default=1, help='degree, as in train.py (1)')
    parser.add_argument('--zero_stage', type=int, default=0, help='3 shards the parameters, as in train.py (0)')
    parser.add_argument('--pp_schedule', default='1f1b', help='as in train.py (1f1b)')
    return parser


def main(argv=None):
    options = build_parser().parse_args(argv)
    with exit_on_error():
        check_options(options)
        opened = open_model(options.source, options.which, options.tokenizer, options.device, options.dtype,
                            tp=options.tp, cp=options.cp, pp=options.pp, ep=options.ep,
                            zero_stage=options.zero_stage, pp_schedule=options.pp_schedule)
        processes = opened.parallel.processes
        processes.say(f'{opened.path}: {describe_place(opened)}')
        scorer = Scorer(opened.parallel, opened.config, opened.dtype, opened.separator, options.batch_tokens,
                        shows_progress=True)
        if options.reference:
            write_reference(scorer, opened, options.reference)
            processes.leave(0)
        if options.teach:
            from kilogpt.evaluate.teaching import write_teacher
            write_teacher(opened, options.teach, options.top_k, options.temperature)
            processes.leave(0)
        if options.lm_eval:
            from kilogpt.evaluate.harness import run_harness  # a library that few have
            scores, questions = run_harness(scorer, opened, options)
        else:
            scores, questions = score_tasks(scorer, opened, options)
        if processes.is_main:
            print_table(scores, questions)
            keep(describe_model(opened) | as_line(scores), opened, options)
    processes.leave(0)


def check_options(options):
    if sum(map(bool, (options.tasks, options.lm_eval, options.reference, options.teach))) != 1:
        raise ValueError('set one of --tasks, such as --tasks=capitals, --lm_eval, --reference, and --teach')
    for key, least in dict(limit=1, shots=0, batch_tokens=0, top_k=1).items():
        if (getattr(options, key) or least) < least:
            raise ValueError(f'{key} is {getattr(options, key)}: it must be at least {least}')
    if not options.temperature > 0:
        raise ValueError(f'temperature is {options.temperature}: it must be above 0')


def describe_place(opened):
    parallel = opened.parallel
    place = f'{parallel.processes.device}, {opened.dtype}'
    return place if parallel.layout.world_size == 1 else f'{place}, {parallel.layout.describe()}'


def score_tasks(scorer, opened, options):
    """({'task/NAME/FIGURE': Score}, {task: number of questions}) of the tasks in --tasks."""
    suite = Suite(options.tasks, opened.parallel.processes, opened.tokenizer, opened.config.block_size,
                  options.shots, options.limit)
    for note in suite.notes:
        opened.parallel.processes.say(f'warning: {note}')
    began = time.perf_counter()
    scores = suite.score(scorer)
    seconds = time.perf_counter() - began
    if options.details and opened.parallel.processes.is_main:
        with open(options.details, 'w', encoding='utf-8') as file:
            file.writelines(json.dumps(line) + '\n' for line in details(suite.tasks))
        print(f'wrote {options.details}')
    n_texts = sum(len(requests) for task in suite.tasks for requests in task.requests)
    opened.parallel.processes.say(f'{n_texts} texts in {seconds:.1f}s')
    return scores, {task.name: len(task.questions) for task in suite.tasks}


def print_table(scores, questions):
    """A line for each figure: task, questions, figure, value and standard error."""
    keys = [key.split('/', 2)[1:] for key in scores]
    task_width = max(len(task) for task, _ in [('task', ''), *keys])
    figure_width = max(len(figure) for _, figure in [('', 'figure'), *keys])
    print(f'{"task":<{task_width}}  {"questions":>9}  {"figure":<{figure_width}}  {"value":>8}')
    for (task, figure), score in zip(keys, scores.values()):
        count = f'{questions[task]:,}' if task in questions else ''
        error = '' if score.stderr is None else f' ± {score.stderr:.4f}'
        print(f'{task:<{task_width}}  {count:>9}  {figure:<{figure_width}}  {score.value:>8.4f}{error}')


def describe_model(opened):
    """The first keys of a line: as far as the source is a checkpoint, those of an evaluation line."""
    state, line = opened.state, dict(source=opened.path)
    if 'iteration' in state:
        line |= dict(iter=state['iteration'], tokens=state['tokens'])
    return line


def keep(line, opened, options):
    """Write a line to --out, and for a checkpoint of a run to tasks.jsonl in the folder of the run."""
    if options.out:
        with open(options.out, 'w', encoding='utf-8') as file:
            json.dump(line, file, indent=1)
        print(f'wrote {options.out}')
    out_dir = os.path.dirname(os.path.dirname(opened.path))
    if 'iter' in line and not is_url(out_dir):
        path = os.path.join(out_dir, 'tasks.jsonl')
        with open(path, 'a', encoding='utf-8') as file:
            file.write(json.dumps(line) + '\n')
        print(f'added the scores to {path}')


if __name__ == '__main__':
    main()
