"""Hooks that evaluate a run while it trains: scores on tasks, and samples of text."""
from data.tokens import until_end
from data.tokens.tokenizer import get_tokenizer
from kilogpt.evaluate.scorer import Scorer
from kilogpt.evaluate.suite import Suite, as_line, describe
from kilogpt.generate.engine import Request
from kilogpt.generate.layouts import generate_in_layout
from kilogpt.loading import separator_in
from kilogpt.run import Hook

SHOWN = 200  # characters of a sample on the console


class Evaluation(Hook):
    """Evaluates the model every `interval` iterations and at the end, and changes nothing in training."""

    def __init__(self, interval, scorer):
        self.interval, self.scorer = interval, scorer

    def is_due(self, run):
        return run.eval_only or run.iteration % self.interval == 0 or run.iteration >= run.max_iters

    def act(self, run):
        with run.clock.paused(), run.hooks.weights_for_evaluation():
            self.evaluate(run)
        return False


class Tasks(Evaluation):
    """Scores tasks. suite: a Suite."""

    def __init__(self, interval, scorer, suite):
        super().__init__(interval, scorer)
        self.suite = suite

    def evaluate(self, run):
        scores = self.suite.score(self.scorer)
        if scores is not None:
            run.log.tasks(run.meter.stamp(run) | as_line(scores), describe(scores))


class Samples(Evaluation):
    """Continues prompts. prompts: texts. n_tokens: of each sample."""

    def __init__(self, interval, scorer, tokenizer, prompts, n_tokens, seed):
        super().__init__(interval, scorer)
        self.tokenizer, self.prompts, self.n_tokens, self.seed = tokenizer, prompts, n_tokens, seed
        begin = 0 if tokenizer.bos is None else tokenizer.bos  # the model needs at least one token
        self.ids = [tokenizer.encode_prompt(prompt) or [begin] for prompt in prompts]

    def evaluate(self, run):
        requests = [Request(ids, self.n_tokens, 0.8, 200, stop_ids=self.tokenizer.end_ids, seed=(self.seed, number))
                    for number, ids in enumerate(self.ids)]
        drawn = generate_in_layout(self.scorer, requests, is_shared=False)
        if drawn is None:
            return
        samples = []
        for prompt, ids in zip(self.prompts, drawn):
            samples.append(dict(prompt=prompt, text=self.tokenizer.decode(until_end(ids, self.tokenizer))))
        run.log.samples(run.iteration, samples, SHOWN)


def evaluation_hooks(run):
    """The hooks that the keys eval_tasks and sample_interval of a Run ask for, in a list.

    ValueError, OSError or ImportError, with one sentence, if the keys ask for what does not exist.
    """
    keys, meta = run.config, run.start.meta
    if not meta.get('tokenizer'):
        raise ValueError('eval_tasks and sample_interval need the tokenizer, which the meta.json of the '
                         'dataset does not name: name it there, or leave these keys out')
    separator = separator_in(dict(config=keys, tokenizer=meta))
    scorer = Scorer(run.parallel, run.model_config, run.cluster.dtype, separator, poll=run.signals.poll)
    tokenizer, found = get_tokenizer(meta), []
    if keys['eval_tasks']:
        suite = Suite(keys['eval_tasks'], run.processes, tokenizer, run.model_config.block_size,
                      limit=keys['eval_tasks_limit'] or None)
        for note in suite.notes:
            run.processes.say(f'warning: {note}')
        interval = keys['eval_tasks_interval'] or keys['eval_interval']
        found.append(Tasks(interval, scorer, suite))
    if keys['sample_interval']:
        prompts = keys['sample_prompts'].split('||')
        found.append(Samples(keys['sample_interval'], scorer, tokenizer, prompts,
                             keys['sample_tokens'], keys['seed']))
    return found
