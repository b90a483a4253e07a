"""Runs tasks of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness) on a model in any layout.

All processes run the harness with the same requests and share the work in the methods of HarnessModel. The
main process alone prints. Texts are encoded, cut and ended as by the harness's own backend for transformers
(lm_eval/models/huggingface.py), so that both give the same figures.
"""
import contextlib
import io
import logging
from collections import Counter, defaultdict

from data.tokens import until_end
from kilogpt.evaluate.suite import Score
from kilogpt.evaluate.tasks import Encoder, task_names
from kilogpt.generate.engine import Request
from kilogpt.generate.layouts import generate_in_layout

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ImportError(f'lm_eval needs lm-evaluation-harness ({error}): pip install lm-eval') from None

# What a task may say about how text is generated.
GENERATION = {'until', 'max_gen_toks', 'do_sample', 'temperature', 'top_k', 'top_p'}
SEED = 1234  # of drawn tokens: the seed that the harness gives to torch
MAX_LINES = 3  # questions that are left out and shown


class HarnessModel(TemplateLM):
    """A model as the harness sees it. scorer: a Scorer. tokenizer: a data.tokens.Tokenizer.

    unscored: {task: {number of a question: why it cannot be scored}}, whose answers mean nothing.
    """

    def __init__(self, scorer, tokenizer):
        super().__init__()
        self.scorer, self.tokenizer = scorer, tokenizer
        self.max_length = scorer.config.block_size
        self.encoder = Encoder(tokenizer, self.max_length)
        self.end = None if tokenizer.eot is None else tokenizer.decode([tokenizer.eot])
        self.unscored = defaultdict(dict)
        self.answers = {}  # {(a request, how many like it came before): answer}, for the second round of evaluate()

    @property
    def eot_token_id(self):
        return self.tokenizer.eot

    @property
    def prefix_token_id(self):
        return self.tokenizer.bos

    def tok_encode(self, string, add_special_tokens=None):
        """The ids of a text, which does not get a second prefix token if it begins with one."""
        has_prefix = self.prefix_token_id is not None and string.startswith(
            self.tokenizer.decode([self.prefix_token_id]))
        begins = add_special_tokens is not False and not has_prefix
        return self.tokenizer.encode_prompt(string) if begins else self.tokenizer.encode_places(string)[0]

    def loglikelihood(self, requests, disable_tqdm=True):
        return self._once('loglikelihood', requests, self._loglikelihoods)

    def _loglikelihoods(self, requests):
        self.asked = [request for request in requests if any(request.args)]
        answers = iter(super().loglikelihood(self.asked, True) if self.asked else ())
        return [next(answers) if any(request.args) else self._leave_out(request, 'it is empty') for request in requests]

    def _loglikelihood_tokens(self, requests, disable_tqdm=True):
        """[(log-likelihood, whether each token is the likeliest)] of the continuations of self.asked.

        requests: (texts, ids of the context, ids of the continuation).
        """
        encoded, answers = [], []
        for asked, (_, context, continuation) in zip(self.asked, requests):
            # Without a prefix token, the first token has nothing before it and is not scored.
            context = [] if context == [None] else context
            try:
                encoded.append(self.encoder.within(context + continuation, max(1, len(context))))
                answers.append(None)
            except ValueError as error:
                answers.append(self._leave_out(asked, error))
        scored = iter(self.scorer.score(encoded) if encoded else ())
        return [answer or next(scored) for answer in answers]

    def _leave_out(self, request, reason):
        self.unscored[request.task_name][request.doc_id] = str(reason)
        return 0.0, False

    def _once(self, kind, requests, compute):
        """The answers to requests, which compute(requests) gives; those of the first round are not computed again."""
        keys, seen = [], Counter()
        for request in requests:
            text = f'{kind} {request.args}'
            keys.append((text, seen[text]))
            seen[text] += 1
        new = [(key, request) for key, request in zip(keys, requests) if key not in self.answers]
        if new:
            self.answers |= zip([key for key, _ in new], compute([request for _, request in new]))
        return [self.answers[key] for key in keys]

    def loglikelihood_rolling(self, requests, disable_tqdm=True):
        """The log-likelihood of each text, in pieces."""
        return self._once('rolling', requests, self._rolling)

    def _rolling(self, requests):
        pieces = [self.encoder.pieces(self.tok_encode(*request.args)) for request in requests]
        scored = iter(self.scorer.score([piece for of_text in pieces for piece in of_text]))
        return [sum(next(scored)[0] for _ in of_text) for of_text in pieces]

    def generate_until(self, requests, disable_tqdm=True):
        """The text that continues each context, up to one of the stop strings."""
        return self._once('generate', requests, self._continue_all)

    def _continue_all(self, requests):
        prompts, untils = [], []
        for number, request in enumerate(requests):
            context, given = request.args
            settings = self._generation_settings(given)
            untils.append(settings['until'])
            # The defaults are those of transformers.
            temperature = settings.get('temperature', 1.0) if settings['do_sample'] else 0
            ids = self.tok_encode(context) or [self.prefix_token_id or 0]  # at least one token
            prompts.append(Request(
                ids, settings['max_gen_toks'], temperature, settings.get('top_k', 50), settings.get('top_p'),
                self.tokenizer.end_ids, self._ends_at(settings['until']), (SEED, number)))
        # Neighbours in the order of their ids begin alike, so that what they share is read once.
        order = sorted(range(len(prompts)), key=lambda number: prompts[number].ids)
        drawn = generate_in_layout(self.scorer, [prompts[number] for number in order])
        texts, tokenizer = {}, self.tokenizer
        for number, ids in zip(order, drawn):
            text = tokenizer.decode([i for i in until_end(ids, tokenizer) if i not in tokenizer.special_ids])
            texts[number] = postprocess_generated_text(text, untils[number], None)
        return [texts[number] for number in range(len(requests))]

    def _ends_at(self, until):
        """The is_over of a Request whose text ends with one of these strings."""
        def is_over(ids):
            # A stop string may be a special token, which the answer leaves out.
            text = self.tokenizer.decode(ids)
            return any(stop in text for stop in until)
        return is_over

    def _generation_settings(self, given):
        """What a task says about how text is generated, with the harness's defaults."""
        settings = normalize_gen_kwargs(given, default_max_gen_toks=256)
        if unknown := set(settings) - GENERATION:
            raise ValueError(f'generation_kwargs of a task has {", ".join(sorted(unknown))}, which kiloGPT '
                             f'does not know: use no others than {", ".join(sorted(GENERATION))}')
        if settings['max_gen_toks'] >= self.max_length:
            raise ValueError(f'a task generates up to {settings["max_gen_toks"]} tokens, but block_size is '
                             f'{self.max_length}: set max_gen_toks in its generation_kwargs to less')
        settings['until'] = handle_stop_sequences(settings['until'], self.end)
        return settings


def run_harness(scorer, opened, options):
    """({'task/NAME/FIGURE': Score}, {task: number of questions}) of the tasks in --lm_eval.

    Both are empty on all processes but the main one. ValueError if a task does not exist, OSError if its data
    cannot be had.
    """
    processes = opened.parallel.processes
    manager = TaskManager(include_path=options.lm_eval_include or None)
    names = task_names(options.lm_eval)
    for name in names:
        if not manager.match_tasks([name]):
            raise ValueError(f'lm-evaluation-harness has no task {name!r}: lm_eval ls tasks lists them, and '
                             '--lm_eval_include adds a folder of others')
    model = HarnessModel(scorer, opened.tokenizer)
    logging.getLogger('lm_eval').setLevel(logging.ERROR)
    with contextlib.ExitStack() as contexts:
        if not processes.is_main:
            contexts.enter_context(contextlib.redirect_stdout(io.StringIO()))
            contexts.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            # The harness's default. Other processes need no standard errors, which take a while.
            results, questions = evaluate(
                model, tasks=manager.match_tasks(names), task_manager=manager, num_fewshot=options.shots,
                limit=options.limit, log_samples=False, bootstrap_iters=100_000 if processes.is_main else 0)
        except OSError as error:
            raise OSError(f'the data of {options.lm_eval} cannot be had ({error})') from None
    if model.encoder.n_cut:
        processes.say(f'warning: {model.encoder.n_cut} texts are longer than block_size={model.max_length}: '
                      'the model does not see their beginnings')
    for task, reasons in model.unscored.items():
        for number, reason in list(reasons.items())[:MAX_LINES]:
            processes.say(f'warning: question {number} of {task} is left out: {reason}')
        if len(reasons) > MAX_LINES:
            processes.say(f'warning: {len(reasons)} questions of {task} are left out')
    if not processes.is_main:
        return {}, {}
    return scores_of(results['results']), questions


def evaluate(model, limit, **options):
    """(results of simple_evaluate, {task: number of questions}), without the questions that cannot be scored.

    ValueError if no question of a task can be.
    """
    results = simple_evaluate(model, limit=limit, **options)
    counts = results and {task: samples['effective'] for task, samples in results['n-samples'].items()}
    counts = model.scorer.parallel.processes.share(counts)  # other processes have no results
    numbers = {task: range(count) for task, count in counts.items()}
    if model.unscored:
        numbers = {task: [i for i in of_task if i not in model.unscored.get(task, ())] for task, of_task in numbers.items()}
        if empty := [task for task, of_task in numbers.items() if not of_task]:
            reason = next(iter(model.unscored[empty[0]].values()))
            raise ValueError(f'no question of {empty[0]} can be scored: {reason}')
        results = simple_evaluate(model, samples=numbers, **options)
    return results, {task: len(of_task) for task, of_task in numbers.items()}


def scores_of(results):
    """{'task/NAME/FIGURE': Score} of the harness's {task: {'FIGURE,FILTER': value}}.

    FIGURE keeps the name of a filter other than 'none': 'exact_match,strict-match'.
    """
    scores = {}
    for task, values in results.items():
        for key, value in values.items():
            figure, _, name = key.partition(',')
            if not name or figure.endswith('_stderr') or not isinstance(value, (int, float)):
                continue
            error = values.get(f'{figure}_stderr,{name}')
            shown = figure if name == 'none' else f'{figure},{name}'
            scores[f'task/{task}/{shown}'] = Score(value, error if isinstance(error, float) else None)
    return scores
