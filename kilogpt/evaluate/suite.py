"""The tasks that a key names, made ready for a model, and what a model scores on them."""
from data.fetch import fetch_core
from kilogpt.evaluate.core import read_core
from kilogpt.evaluate.tasks import Encoder, Score, encode_task, mean, read_task, score_task, task_names


class Suite:
    """Tasks for one tokenizer and one block_size.

    names: 'capitals, my/task.jsonl, core:eval_bundle'. core alone fetches the bundle of CORE's files.
    processes: those that all make this Suite. shots, limit: as in read_task.
    ValueError, OSError or ImportError, with one sentence, if a task cannot be had.
    notes: sentences about texts of which the model does not see all.
    """

    def __init__(self, names, processes, tokenizer, block_size, shots=None, limit=None):
        self.tasks, self.guessing = [], {}  # guessing: {name of a task of CORE: its accuracy by guessing}
        for name in task_names(names):
            if name == 'core' or name.startswith('core:'):
                folder = name.removeprefix('core').lstrip(':') or fetch_on_each_node(processes)
                for task, guessing in read_core(folder, limit):
                    self.tasks.append(task)
                    self.guessing[task.name] = guessing
            else:
                self.tasks.append(read_task(name, shots, limit))
        if not self.tasks:
            raise ValueError(f'tasks is {names!r}: name at least one')
        names_of_all = [task.name for task in self.tasks]
        repeated = {name for name in names_of_all if names_of_all.count(name) > 1}
        if repeated:
            raise ValueError(f'tasks has {", ".join(sorted(repeated))} more than once: rename one of '
                             'the files')
        encoder = Encoder(tokenizer, block_size)
        self.notes = [note for note in (encode_task(task, encoder) for task in self.tasks) if note]

    def score(self, scorer):
        """{'task/NAME/FIGURE': Score} of all tasks, or None if the scorer was ended.

        Of CORE's tasks there is `centred` too, on the scale on which guessing is 0 and 1 is perfect. CORE's
        score is the mean of these.
        """
        scores, centred = {}, []
        for task in scorer.progress(self.tasks, 'tasks'):
            figures = score_task(task, scorer)
            if figures is None:
                return None
            if task.name in self.guessing:
                guessing = self.guessing[task.name]
                centred.append((figures['accuracy'].value - guessing) / (1 - guessing))
                figures['centred'] = Score(centred[-1], None)
            scores |= {f'task/{task.name}/{figure}': score for figure, score in figures.items()}
        if centred:
            scores['task/CORE/score'] = Score(mean(centred).value, None)
        return scores


def details(tasks):
    """Yield a dict for each question of scored tasks: log-likelihoods in nats, and the right answer."""
    for task in tasks:
        for number, (question, scores) in enumerate(zip(task.questions, task.scores)):
            yield dict(task=task.name, question=number, kind=question.kind, answer=question.answer,
                       nats=[likelihood for likelihood, _ in scores],
                       is_likeliest=[bool(is_likeliest) for _, is_likeliest in scores])


def fetch_on_each_node(processes):
    """The folder of fetch_core, which one process of each node calls first."""
    if processes.local_rank == 0:
        fetch_core()
    processes.barrier()
    return fetch_core()


def as_line(scores):
    """The keys and values of a log's line: each score, and its standard error beside it."""
    line = {}
    for key, score in scores.items():
        line[key] = score.value
        if score.stderr is not None:
            line[f'{key}_stderr'] = score.stderr
    return line


def describe(scores):
    """The scores in one line, without chances and standard errors: one figure of each task, and CORE."""
    shown = {}
    for key, score in scores.items():
        _, task, figure = key.split('/')
        if task not in shown and figure != 'chance':
            shown[task] = f'{task} {figure} {score.value:.4f}'
    return ', '.join(shown.values())
