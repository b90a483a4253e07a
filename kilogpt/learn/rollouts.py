"""The texts of training with rewards: drawn by the model that trains, in its layout, between two updates.

A text is a function of (seed, step, number of the prompt, number of the sample) and the weights, so that a run that
resumes draws the same ones, and another layout too, unless rounding decides a draw.
"""
import dataclasses
import json
import statistics

import numpy as np

from data.tokens.chat_template import ChatTemplate, check_messages
from data.loader import shuffled
from data.tokens.tokenizer import get_tokenizer
from kilogpt.evaluate import batches
from kilogpt.evaluate.hooks import SHOWN, Evaluation
from kilogpt.evaluate.scorer import Scorer
from kilogpt.generate.engine import Request
from kilogpt.generate.layouts import generate_in_layout
from kilogpt.learn.rewards import Rewards
from kilogpt.loading import separator_in
from kilogpt.parallel.apply import exchanged_weights
from kilogpt.run import Hook

TRAINING, VALIDATION = 0, 1  # which draws differ


@dataclasses.dataclass
class Text:
    """A text that continues a prompt. ids: its tokens, with the one that ends it unless it is cut off.

    old, reference: the log-probabilities of the ids, 0.0 where they are not needed.
    """
    prompt: list
    ids: list
    is_cut: bool
    reward: float | None = None  # None: not known
    advantage: float = 0.0
    old: list | float = 0.0
    reference: list | float = 0.0


def reward_hooks(run):
    """The hooks of a Run whose loss is 'rl'. ValueError or OSError, with one sentence, if its keys do not fit."""
    writer = Writer(run)
    hooks = [Rollouts(run, writer)]
    if run.config['rl_val_prompts']:
        hooks.append(PassRate(run, writer))
    return hooks


class Writer:
    """Draws texts and has them scored. All processes of a Run make the same calls."""

    def __init__(self, run):
        self.run, config, meta = run, run.config, run.start.meta
        if not meta.get('tokenizer'):
            raise ValueError(f'dataset {config["dataset"]!r} does not name its tokenizer, which loss=rl needs for its '
                             'prompts: name it in meta.json')
        self.config, self.tokenizer = config, get_tokenizer(meta)
        self.ends, self.template = frozenset(self.tokenizer.end_ids or self.tokenizer.document_end[-1:]), None
        separator = separator_in(dict(config=config, tokenizer=meta))
        self.scorer = Scorer(run.parallel, run.model_config, run.cluster.dtype, separator, poll=run.signals.poll)
        self.rewards = Rewards(config['rl_reward'], config['rl_reward_seconds']) if config['rl_reward'] else None

    def read_prompts(self, path):
        """[(row, ids of its prompt)] of a .jsonl file. ValueError names the row that cannot be used."""
        with open(path, encoding='utf-8') as file:
            rows = [json.loads(line) for line in file if line.strip()]
        room, found = self.config['block_size'] - self.config['rl_tokens'], []
        for number, row in enumerate(rows, start=1):
            try:
                ids = self._encode(row)
            except ValueError as error:
                raise ValueError(f'{path}, row {number}: {error}') from None
            if not 0 < len(ids) <= room:
                raise ValueError(f'{path}, row {number}: its prompt has {len(ids)} tokens, but block_size - rl_tokens '
                                 f'leaves room for {room}: change these keys, or the prompt')
            found.append((row, ids))
        if not found:
            raise ValueError(f'{path} has no prompts')
        return found

    def _encode(self, row):
        """The ids of a row's prompt: a text, or the messages of a conversation in the tokenizer's chat template."""
        if isinstance(row, dict) and 'messages' in row:
            if self.template is None:
                self.template = ChatTemplate(self.tokenizer)
                self.ends |= self.template.stop_ids
            if check_messages(row['messages'])[-1]['role'] == 'assistant':
                raise ValueError('its last message is an answer, which is what the model is to write: leave it out')
            return self.template.encode(row['messages'], add_generation_prompt=True)
        if not isinstance(row, dict) or not isinstance(row.get('prompt'), str):
            raise ValueError('it has neither a text `prompt` nor a list `messages`')
        return self.tokenizer.encode_prompt(row['prompt'])

    def write(self, rows, keys, greedy=False):
        """The Texts that continue rows, [(row, ids of its prompt)], with their rewards; None if the run ends.

        keys: for each, the integers on which its draws depend. greedy: take the likeliest tokens instead.
        """
        requests = [Request(ids, self.config['rl_tokens'], 0.0 if greedy else 1.0, stop_ids=self.ends,
                            seed=(self.config['seed'], *key)) for (_, ids), key in zip(rows, keys)]
        drawn = generate_in_layout(self.scorer, requests)
        texts = [Text(prompt, ids, ids[-1] not in self.ends) for (_, prompt), ids in zip(rows, drawn)]
        self._score(rows, texts)
        return None if self.run.ending else texts

    def text_of(self, text):
        return self.tokenizer.decode(text.ids if text.is_cut else text.ids[:-1])

    def _score(self, rows, texts):
        """Set the rewards of texts, which the main process asks for. An error ends the run, or leaves None."""
        if self.rewards is None:
            return
        found, sentence, processes = [], '', self.run.processes
        with self.run.cluster.watchdog.suspended():
            if processes.is_main:
                for (row, _), text in zip(rows, texts):
                    reward, problem = self._reward(row, self.text_of(text))
                    found.append(reward)
                    if problem:
                        sentence = f'the reward of row {json.dumps(row, ensure_ascii=False)[:SHOWN]}: {problem}'
                        if self.config['rl_reward_errors'] == 'end':
                            break
            found, sentence = processes.share((found, sentence))
        for text, reward in zip(texts, found):
            text.reward = reward
        if sentence and self.config['rl_reward_errors'] == 'end':
            self.run.end('failed', f'{sentence} (rl_reward_errors=skip leaves such texts out)', 1)
        elif sentence:
            processes.say(f'warning: {sentence}')

    def _reward(self, row, text):
        try:
            return self.rewards.score(row, text)
        except ValueError as error:
            return None, str(error)


class Rollouts(Hook):
    """Draws the texts of the coming updates, and gives them to the TextLoader of the run."""

    def __init__(self, run, writer):
        self.run, self.writer, self.loader, self.step = run, writer, run.loader, None
        self.config, self.prompts = run.config, writer.read_prompts(run.config['rl_prompts'])
        self.start = []  # [(name, weights at the start)], if they are the reference
        if self.config['rl_kl'] and not self.loader.teacher:
            self.start = [(name, parameter.detach().clone()) for name, parameter in run.parallel.named_parameters()]
        run.processes.say(f'  prompts     {len(self.prompts):,} in {self.config["rl_prompts"]}')

    def is_due(self, run):
        return not run.eval_only and run.iteration < run.max_iters and self.step != run.iteration // self.loader.updates

    def act(self, run):
        step, n_samples = run.iteration // self.loader.updates, self.config['rl_samples']
        n_prompts = self.loader.batch // n_samples
        rows, keys = [], []
        for number in range(step * n_prompts, (step + 1) * n_prompts):
            epoch, place = divmod(number, len(self.prompts))
            prompt = int(shuffled(np.array([place]), len(self.prompts), [self.config['seed'], epoch])[0])
            rows += [self.prompts[prompt]] * n_samples
            keys += [(TRAINING, step, number, sample) for sample in range(n_samples)]
        texts = self.writer.write(rows, keys)
        if texts is None:
            return False
        for first in range(0, len(texts), n_samples):
            set_advantages(texts[first:first + n_samples], self.config['rl_scale'])
        if self.loader.updates > 1:
            self._set(texts, 'old')
        if self.start:
            with exchanged_weights(run.parallel, self.start):
                self._set(texts, 'reference')
        self.step, self.loader.texts = step, dict(enumerate(texts))
        figures = describe_texts(texts, self.config['rl_pass'])
        run.log.write(dict(iter=run.iteration) | figures, f'texts at iteration {run.iteration}: ' + ', '.join(
            f'{name.replace("_", " ")} {value:.4g}' for name, value in figures.items()))
        return False

    def _set(self, texts, name):
        """Set the log-probabilities of texts under the weights that the model has now."""
        requests = [batches.Request(text.prompt + text.ids, len(text.prompt)) for text in texts]
        for text, found in zip(texts, self.writer.scorer.score_tokens(requests)):
            setattr(text, name, found[len(text.prompt):].tolist())

    def state(self):
        return dict(step=self.step, texts=[dataclasses.asdict(text) for text in self.loader.texts.values()])

    def load_state(self, state):
        self.step = state['step']
        self.loader.texts = {number: Text(**text) for number, text in enumerate(state['texts'])}

    def tensors(self):
        return [(f'{self.name}.{name}', weights) for name, weights in self.start]

    def close(self):
        if self.writer.rewards:
            self.writer.rewards.close()


def set_advantages(group, is_scaled):
    """Set the advantages of the texts of a prompt: their rewards less the mean (Liu et al. 2025, Dr. GRPO).

    is_scaled: divide by the standard deviation too, as GRPO does. A text without a reward has the advantage 0.
    """
    known = [text for text in group if text.reward is not None]
    mean = statistics.fmean(text.reward for text in known) if known else 0.0
    scale = statistics.stdev(text.reward for text in known) + 1e-4 if is_scaled and len(known) > 1 else 1.0
    for text in known:
        text.advantage = (text.reward - mean) / scale


def describe_texts(texts, least):
    """{name: figure} of texts. least: the reward from which a text has passed."""
    rewards = [text.reward for text in texts if text.reward is not None]
    figures = dict(length=statistics.fmean(len(text.ids) for text in texts),
                   cut_off=statistics.fmean(text.is_cut for text in texts))
    if rewards:
        figures = dict(reward=statistics.fmean(rewards),
                       passed=statistics.fmean(reward >= least for reward in rewards)) | figures
        figures['without_reward'] = len(texts) - len(rewards)
    return figures


def prompt_of(row):
    """What a row asks, as a text: its prompt, or the last message."""
    return row['messages'][-1]['content'] if 'messages' in row else row['prompt']


class PassRate(Evaluation):
    """Draws texts of held-out prompts at evaluations, and writes pass@1, and pass@N of N texts each."""

    def __init__(self, run, writer):
        super().__init__(run.config['eval_interval'], writer.scorer)
        self.writer, self.config = writer, run.config
        self.prompts = writer.read_prompts(run.config['rl_val_prompts'])[:run.config['rl_eval_prompts'] or None]

    def evaluate(self, run):
        n_samples, least = self.config['rl_eval_samples'], self.config['rl_pass']
        rows = [row for row in self.prompts for _ in range(n_samples)]
        keys = [(VALIDATION, number, sample) for number in range(len(self.prompts)) for sample in range(n_samples)]
        texts = self.writer.write(rows, keys, greedy=n_samples == 1)
        if texts is None:
            return
        groups = [texts[first:first + n_samples] for first in range(0, len(texts), n_samples)]
        passed = [[text.reward is not None and text.reward >= least for text in group] for group in groups]
        figures = {f'val_{name}': value for name, value in describe_texts(texts, least).items() if name != 'passed'}
        figures['pass@1'] = statistics.fmean(statistics.fmean(group) for group in passed)
        if n_samples > 1:
            figures[f'pass@{n_samples}'] = statistics.fmean(any(group) for group in passed)
        run.log.write(run.meter.stamp(run) | figures, f'held-out prompts at iteration {run.iteration}: ' + ', '.join(
            f'{name} {value:.4g}' for name, value in figures.items()))
        shown = [dict(prompt=prompt_of(row), text=self.writer.text_of(text), reward=text.reward)
                 for (row, _), text in list(zip(rows, texts))[:8]]
        run.log.samples(run.iteration, shown, SHOWN)
