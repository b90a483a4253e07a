"""Scoring: tasks and samples of text while a model trains (docs/evaluate.md)."""
from kilogpt.keys.checks import check_at_least

eval_tasks = ''  # tasks to score as well: 'capitals, my/task.jsonl, core:eval_bundle'
eval_tasks_interval = 0  # iterations from one scoring of tasks to the next; 0 = eval_interval
eval_tasks_limit = 0  # score the first so many questions of each task; 0 = all
sample_interval = 0  # iterations from one sample of text to the next; 0 = none
sample_prompts = '\n'  # texts that the samples continue, separated by ||
sample_tokens = 100  # tokens in each sample


def check(config):
    """Raise ValueError for values that no run can have."""
    check_at_least(config, 1, 'sample_tokens')
    check_at_least(config, 0, 'eval_tasks_interval', 'eval_tasks_limit', 'sample_interval')
