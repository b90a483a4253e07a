"""The loaders of a run: of the training and validation split of one dataset, or of a mixture of several."""
import fractions
import functools
import math
import os

import numpy as np

from data.cache import start_copying
from data.checks import find_oddities
from data.documents import DocumentLoader, PackedLoader, separator_of
from data.loader import TokenLoader
from data.mixtures import Schedule, parse_mixture, parse_phases
from data.pair_loader import PairLoader

BLOCK = 4096  # sequences whose places are found in one call
DOCUMENTS = 512  # documents in a sample of their lengths


def open_splits(sources, vocab_size, config, processes):
    """The loaders of a dataset's training and validation splits. All processes of a run call this.

    sources: of open_dataset. config: the keys of train.py. With eval_iters=0 the validation split is None,
    and its files may be missing. ValueError on all processes if they do not have the same data, or if the
    sources have no more epochs to give. The first process prints what is odd.
    """
    splits = ('train', 'val') if config['eval_iters'] > 0 else ('train',)
    opened = {split: open_sources(sources, split, vocab_size, config) for split in splits}
    sizes = [loader.n_tokens for loaders in opened.values() for loader in loaders.values()]
    if processes.any(sizes != processes.share(sizes)):
        folders = ', '.join(source.folder for source in sources.values())
        raise ValueError(f'{folders} does not hold the same data on every node ({sizes[0]:,} training tokens '
                         'here): copy one folder to all of them')
    if processes.is_first:
        for name, source in sources.items():
            for sentence in find_oddities(*source, [opened[split][name] for split in splits]):
                print(f'warning: {sentence}', flush=True)
    loaders = [mix(opened[split], config, split) for split in splits]
    if processes.local_rank == 0:
        # The copying ends with this process, or when nobody refers to it.
        loaders[0].copying = start_copying(loaders[::-1], config['data_cache_gb'])
    return loaders if 'val' in opened else (*loaders, None)


def open_training_split(sources, vocab_size, config):
    """The loader of a dataset's training split, in one process. sources, config: as in open_splits."""
    return mix(open_sources(sources, 'train', vocab_size, config), config, 'train')


def open_sources(sources, split, vocab_size, config):
    """{name: TokenLoader} of a split of each source."""
    return {name: open_loader(source, split, vocab_size, config) for name, source in sources.items()}


def open_loader(source, split, vocab_size, config):
    """The TokenLoader of a split of a Source. config: the keys of train.py, some of which may lack."""
    documents, loss = config.get('documents', 'stream'), config.get('loss', 'cross_entropy')
    arguments = source.folder, split, config['block_size'], vocab_size, source.meta, config['seed']
    if loss == 'dpo':
        return PairLoader(*arguments)
    if source.meta.get('pairs'):
        raise ValueError(f'loss is {loss}, but {source.folder} has pairs of answers: set loss to dpo')
    if documents == 'stream':
        return TokenLoader(*arguments)
    kind = PackedLoader if documents == 'pack' and split == 'train' else DocumentLoader
    return kind(*arguments, separator_of(*source))


def mix(loaders, config, split):
    """The loaders {name: TokenLoader} of a split as one; the loader itself if there is one without limits.

    config: the keys of train.py. ValueError if the run needs more sequences than max_epochs leaves it.
    """
    max_epochs, phases = config.get('max_epochs', 0), config.get('mixture_phases', '')
    if len(loaders) == 1 and not max_epochs and not phases:
        return next(iter(loaders.values()))
    if len({getattr(loader, 'separator', None) for loader in loaders.values()}) > 1:
        raise ValueError('the sources of the mixture have different separators in their meta.json: prepare '
                         'them with the same, or set documents to stream')
    mixture = parse_mixture(config['dataset'])
    steps, limits = [(0, mixture)], None
    if split == 'train':
        steps += [(-(-tokens // config['block_size']), phase)
                  for tokens, phase in parse_phases(phases, mixture)]
        limits = [max_epochs * loader.per_epoch for loader in loaders.values()] if max_epochs else None
    schedule = Schedule([(begin, [fractions.Fraction(phase.get(name, 0)) for name in mixture])
                         for begin, phase in steps], limits)
    needed = config['max_iters'] * config['batch_size'] * config['gradient_accumulation_steps']
    if schedule.end < needed and not config['eval_only']:
        raise ValueError(
            f'max_epochs={max_epochs} leaves {schedule.end:,} sequences to train on, but '
            f'{config["max_iters"]:,} iterations take {needed:,}: raise max_epochs, or set max_iters to '
            f'{schedule.end * config["max_iters"] // needed:,} or less')
    return MixtureLoader(dict(zip(short_names(mixture), loaders.values())), schedule)


def short_names(names):
    """The last parts of paths, where these differ: names of sources in the log."""
    short = [os.path.basename(os.path.normpath(name)) for name in names]
    return short if len(set(short)) == len(short) else list(names)


class MixtureLoader(TokenLoader):
    """The training or validation splits of several sources as one.

    loaders: {name: TokenLoader of one split}. Their streams follow one another, so that a stream position
    names a source too. schedule: the Schedule of the training sequences.
    """

    def __init__(self, loaders, schedule):
        self.loaders, self.schedule = loaders, schedule
        self.parts = parts = list(loaders.values())
        self.block_size = parts[0].block_size
        self.vocab_size, self.data_vocab_size = parts[0].vocab_size, parts[0].data_vocab_size
        self.paths, self.shards = (sum((getattr(part, name) for part in parts), [])
                                   for name in ('paths', 'shards'))
        self.dtype = np.result_type(*(part.dtype for part in parts))
        self.has_flags = any(part.has_flags for part in parts)
        self.sizes = np.concatenate([part.sizes for part in parts])
        self.ends = np.cumsum(self.sizes)
        self.n_tokens = int(self.ends[-1])
        self.begins = np.cumsum([0, *(part.n_tokens for part in parts)])  # of the sources' streams
        self._starts_in = functools.lru_cache(4)(self._starts_in)

    def train_batch(self, sequences):
        if not isinstance(self.parts[0], PackedLoader):
            return super().train_batch(sequences)
        sources, within = self.schedule.locate(np.maximum(sequences, 0))
        within[sequences < 0] = -1
        rows_of = {source: np.flatnonzero(sources == source) for source in np.unique(sources).tolist()}
        batches = [self.parts[source].train_batch(within[rows]) for source, rows in rows_of.items()]
        order = np.argsort(np.concatenate(list(rows_of.values())))
        return tuple(np.concatenate(arrays)[order] for arrays in zip(*batches))

    def train_starts(self, sequences):
        starts = np.full(len(sequences), -1, dtype=np.int64)
        blocks = np.where(sequences < 0, -1, sequences // BLOCK)
        for block in set(blocks.tolist()) - {-1}:
            rows = blocks == block
            starts[rows] = self._starts_in(block)[sequences[rows] % BLOCK]
        return starts

    def _starts_in(self, block):
        """Stream positions of a block of training sequences. Cached: steps ask for blocks in order."""
        sources, within = self.schedule.locate(block * BLOCK + np.arange(BLOCK))
        starts = np.zeros(BLOCK, np.int64)
        for source, part in enumerate(self.parts):
            rows = sources == source
            # A stream is a circle.
            starts[rows] = self.begins[source] + part.train_starts(within[rows]) % part.n_tokens
        return starts

    def read(self, start, length):
        """Read from a stream position on, within the circle of its source."""
        source = int(np.searchsorted(self.begins, start, side='right')) - 1
        return self.parts[source].read(start - int(self.begins[source]), length)

    def more_arrays(self, tokens):
        return self.parts[0].more_arrays(tokens)

    def eval_starts(self, count):
        """Stream positions of up to `count` evaluation sequences, of each source its share in training."""
        return np.concatenate([begin + part.eval_starts(int(n)) for part, begin, n in zip(
            self.parts, self.begins, self.schedule.counts(count))])

    def document_lengths(self):
        """The lengths of documents in a sample, in which each source has about its share."""
        lengths = []
        for part, n in zip(self.parts, self.schedule.counts(DOCUMENTS).tolist()):
            lengths += part.document_lengths()[:n]
        return lengths

    def describe(self):
        lines = []
        for begin, weights, _ in self.schedule.phases:
            place = f'from sequence {begin:,} on, ' if begin else ''
            shares = [f'{name} {weight / sum(weights):.4g}' for name, weight in zip(self.loaders, weights)]
            lines.append(f'mixture     {place}{", ".join(shares)}')
        sizes = [f'{name} {part.n_tokens:,}' for name, part in self.loaders.items()]
        lines.append(f'tokens      {", ".join(sizes)}')
        for name, part in self.loaders.items():
            lines += [f'{line}, in {name}' for line in part.describe()]
        return lines

    @property
    def place(self):
        return ', '.join(part.place for part in self.parts)


def evaluations(train_loader, val_loader, count):
    """[(key of the loss, loader, number of sequences)] of an evaluation with `count` sequences of each split.

    The sources of a mixture are validated one by one, each with its part of the sequences.
    """
    if not isinstance(val_loader, MixtureLoader):
        return [('train_loss', train_loader, count), ('val_loss', val_loader, count)]
    n_each = -(-count // len(val_loader.loaders))
    return [('train_loss', train_loader, count),
            *((f'val_loss/{name}', loader, n_each) for name, loader in val_loader.loaders.items())]


def add_figures(losses, text, train_loader, val_loader, n):
    """An evaluation's losses, in bits per byte too, and what a mixture's sources have given to n sequences.

    text: {key of a loss: (nats of text, its bytes, tokens), or None if the tokenizer is not known}.
    A mixture's val_loss and val_bpb are the means of its sources' by the weights in `dataset`, in every phase.
    tokens/NAME and epochs/NAME are what the run has trained on.
    """
    figures = {key.replace('loss', 'bpb'): bits_per_byte([counts]) for key, counts in text.items()
               if counts and key != 'train_loss'}
    if not isinstance(val_loader, MixtureLoader):
        return losses | figures
    weights = val_loader.schedule.phases[0][1]
    keys = [f'val_loss/{name}' for name in val_loader.loaders]
    figures['val_loss'] = sum(weight * losses[key] for key, weight in zip(keys, weights)) / sum(weights)
    if text[keys[0]]:
        figures['val_bpb'] = bits_per_byte([text[key] for key in keys], weights)
    for (name, part), given in zip(train_loader.loaders.items(), train_loader.schedule.counts(n).tolist()):
        figures[f'tokens/{name}'] = given * part.block_size
        figures[f'epochs/{name}'] = round(given / part.per_epoch, 4)
    return losses | figures


def bits_per_byte(counts, weights=(1,)):
    """Bits per byte of several texts. counts: [(nats, bytes, tokens)] of each; weights: their shares of tokens."""
    nats, n_bytes = (sum(weight * values[i] / values[2] for weight, values in zip(weights, counts)) for i in (0, 1))
    return nats / math.log(2) / n_bytes
