"""The batches of training with a teacher's probabilities, or of texts that the model has drawn itself."""
import json
import os

import numpy as np

from data.datasets import NUMBERS, TEACHER_FILE, Source, fingerprint
from kilogpt.learn.teacher import open_teacher


def open_loader(run):
    """The loader of the training batches of a Run whose loss is 'distill' or 'rl'."""
    config = run.config
    teacher = open_teacher(run) if config['teacher'] else None
    if config['loss'] == 'rl':
        return TextLoader(config, teacher)
    if teacher:
        return TaughtLoader(run.data.train, lambda sequences, x, starts: teacher.numbers(
            x, starts, config['distill_top_k'], config['distill_temperature']))
    return TaughtLoader(run.data.train, StoredTeacher(run).numbers)


class TaughtLoader:
    """A loader whose targets (B, T, 2 k + 2), int32, have the numbers of a teacher, as Distillation takes them.

    Those of its other batches, of evaluations, do not, so that losses there are cross-entropies.
    loader: a loader of the training split. numbers(sequences, x, starts): teacher_numbers (B, T, 2 k + 1) of the
    inputs x of training sequences. starts: as in GPT.forward, or None.
    """

    def __init__(self, loader, numbers):
        self.loader, self.numbers = loader, numbers
        self.has_flags, self.read_ahead = loader.has_flags, loader.read_ahead

    def train_batch(self, sequences):
        x, y, *others = self.loader.train_batch(sequences)
        numbers = self.numbers(sequences, x, others[0] if others else None)
        return x, np.concatenate((y[..., None].astype(np.int32), numbers), axis=-1), *others

    def count_targets(self, read, numbers):
        return self.loader.count_targets(self.loader.train_batch, numbers)


class StoredTeacher:
    """What kilogpt.evaluate --teach wrote beside the dataset of a Run: `numbers` of each token of its stream.

    ValueError, with the command, if there is none, or if it is of other tokens or for other keys.
    """

    def __init__(self, run):
        config, loader, (source, *more) = run.config, run.data.train, run.data.sources.values()
        command = (f'python -m kilogpt.evaluate TEACHER --teach={config["dataset"]} --top_k={config["distill_top_k"]} '
                   f'--temperature={config["distill_temperature"]}')
        path = os.path.join(source.folder, TEACHER_FILE)
        if more or loader.is_mixture:
            raise ValueError(f'dataset is {config["dataset"]!r}, but a teacher beside the data is one of a dataset as it '
                             'is: set teacher to its weights, which then stay in memory')
        if not os.path.exists(path):
            raise ValueError(f"loss is distill, but {source.folder} has no {TEACHER_FILE}: run {command}, or set teacher "
                             'to weights that stay in memory')
        with open(path, encoding='utf-8') as file:
            facts = json.load(file)
        if facts['shards'] != fingerprint({'': Source(source.folder, {})}):
            raise ValueError(f'the token files in {source.folder} have changed since its teacher read them: run {command}')
        if facts['temperature'] != config['distill_temperature'] or facts['top_k'] < config['distill_top_k']:
            raise ValueError(f'the teacher in {source.folder} has top_k={facts["top_k"]} and temperature='
                             f'{facts["temperature"]}, but distill_top_k is {config["distill_top_k"]} and '
                             f'distill_temperature {config["distill_temperature"]}: change these, or run {command}')
        run.processes.say(f'the teacher is {facts["source"]} (digest {facts["digest"]})')
        self.loader, self.k, self.all_k = loader, min(config['distill_top_k'], facts['top_k']), facts['top_k']
        self.values = np.memmap(os.path.join(source.folder, NUMBERS), '<i4', 'r').reshape(-1, 2 * self.all_k + 1)

    def numbers(self, sequences, x, starts):
        places = self._places(sequences)
        values = self.values[places.ravel()].reshape(*places.shape, -1)
        ids, bits = values[..., :self.all_k], values[..., self.all_k:]
        if self.k < self.all_k:  # all others together
            log_p = bits.view('<f4')
            rest = np.logaddexp.reduce(log_p[..., self.k:], axis=-1, keepdims=True)
            ids, bits = ids[..., :self.k], np.concatenate((log_p[..., :self.k], rest), axis=-1).view('<i4')
        return np.concatenate((ids, bits), axis=-1)

    def _places(self, sequences):
        """The positions (B, T) of inputs in the stream."""
        loader, places = self.loader, np.zeros((len(sequences), self.loader.block_size), np.int64)
        for row in np.flatnonzero(sequences >= 0):
            if loader.packs_rows:
                begin, _, pieces = loader._row(int(sequences[row]))
                places[row] = np.concatenate([np.arange(begin + at, begin + at + length) for at, length in pieces])
            else:
                places[row] = loader.train_starts(sequences[row:row + 1])[0] + np.arange(loader.block_size)
        return places % loader.n_tokens


class TextLoader:
    """A loader of the texts that Rollouts draws, a row each, with what RewardLoss takes of them.

    config: the keys of train.py. teacher: a Teacher, whose log-probabilities are the reference, or None.
    texts: {number of a row: Text}. A row without a text is padding.
    """
    has_flags, read_ahead = False, 0

    def __init__(self, config, teacher):
        self.block_size, self.teacher, self.texts = config['block_size'], teacher, {}
        self.batch, self.updates = config['batch_size'] * config['gradient_accumulation_steps'], config['rl_updates']

    def train_batch(self, sequences):
        shape = len(sequences), self.block_size
        x, y, starts = np.zeros(shape, np.int64), np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        advantages, known = np.zeros(shape, np.float32), np.zeros((*shape, 2), np.float32)
        for row, number in enumerate(sequences.tolist()):
            text = self.texts.get(number % self.batch) if number >= 0 else None
            if text:
                tokens, places = text.prompt + text.ids, slice(len(text.prompt) - 1, len(text.prompt) + len(text.ids) - 1)
                x[row, :len(tokens) - 1], y[row, places] = tokens[:-1], text.ids
                advantages[row, places] = text.advantage
                known[row, places, 0], known[row, places, 1] = text.old, text.reference
        if self.teacher and self.texts:
            known[..., 1] = np.where(y >= 0, self.teacher.log_p(x, y), 0.0)
        return x, y, starts, advantages, known

    def count_targets(self, read, numbers):
        """The number of drawn tokens in an iteration, of all processes."""
        return max(1, sum(len(text.ids) for text in self.texts.values()))
