"""The data of a run: loaders of the training and validation split of one dataset, or of a mixture of several."""
import fractions
import math
import os

from data.checks import find_oddities
from data.datasets import fingerprint, open_dataset
from data.loader import TokenLoader
from data.mixtures import Schedule, parse_mixture, parse_phases
from data.storage import is_url


class TrainingData:
    """The data of a run: the sources of its dataset, and then the loaders of its splits.

    config: the keys of train.py. ValueError if a dataset does not exist or cannot be used. All processes of a run
    make the same calls.

    sources: of open_dataset. shards: their fingerprint. meta: the meta.json of the first.
    """

    def __init__(self, config, processes):
        self.processes, self.sources = processes, open_dataset(config['dataset'], processes)
        self.shards = processes.share(fingerprint(self.sources) if processes.is_main else None)
        self.meta = next(iter(self.sources.values())).meta

    def open_splits(self, vocab_size, config):
        """Set `train` and `val`, the loaders of the training and of the validation split.

        config: the keys of train.py. With eval_iters=0 the validation split is None, and its files may be missing.
        ValueError on all processes if they do not have the same data, or if the sources have no more epochs to
        give. The first process prints what is odd.
        """
        processes, sources = self.processes, self.sources
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
        if processes.local_rank == 0 and any(is_url(source.folder) for source in sources.values()):
            from data.cache import start_copying
            # The copying ends with this process, or when nobody refers to it.
            loaders[0].copying = start_copying(loaders[::-1], config['data_cache_gb'])
        self.train, self.val = loaders if 'val' in opened else (*loaders, None)

    def evaluations(self, count):
        """[(key of the loss, loader, number of sequences)] of an evaluation with `count` sequences of each split.

        The sources of a mixture are validated one by one, each with its part of the sequences.
        """
        if not self.val.is_mixture:
            return [('train_loss', self.train, count), ('val_loss', self.val, count)]
        n_each = -(-count // len(self.val.loaders))
        return [('train_loss', self.train, count),
                *((f'val_loss/{name}', loader, n_each) for name, loader in self.val.loaders.items())]

    def add_figures(self, losses, text, n):
        """An evaluation's losses, in bits per byte too, and what a mixture's sources have given to n sequences.

        text: {key of a loss: (nats of text, its bytes, tokens), or None if the tokenizer is not known}.
        A mixture's val_loss and val_bpb are the means of its sources' by the weights in `dataset`, in every phase.
        tokens/NAME and epochs/NAME are what the run has trained on.
        """
        figures = {key.replace('loss', 'bpb'): bits_per_byte([counts]) for key, counts in text.items()
                   if counts and key != 'train_loss'}
        if not self.val.is_mixture:
            return losses | figures
        weights = self.val.schedule.phases[0][1]
        keys = [f'val_loss/{name}' for name in self.val.loaders]
        figures['val_loss'] = sum(weight * losses[key] for key, weight in zip(keys, weights)) / sum(weights)
        if text[keys[0]]:
            figures['val_bpb'] = bits_per_byte([text[key] for key in keys], weights)
        for (name, part), given in zip(self.train.loaders.items(), self.train.schedule.counts(n).tolist()):
            figures[f'tokens/{name}'] = given * part.block_size
            figures[f'epochs/{name}'] = round(given / part.per_epoch, 4)
        return losses | figures


def open_training_split(sources, vocab_size, config):
    """The loader of a dataset's training split, in one process. sources, config: as in TrainingData."""
    return mix(open_sources(sources, 'train', vocab_size, config), config, 'train')


def open_sources(sources, split, vocab_size, config):
    """{name: TokenLoader} of a split of each source."""
    return {name: open_loader(source, split, vocab_size, config) for name, source in sources.items()}


def open_loader(source, split, vocab_size, config):
    """The TokenLoader of a split of a Source. config: the keys of train.py, some of which may lack."""
    documents, loss = config.get('documents', 'stream'), config.get('loss', 'cross_entropy')
    arguments = source.folder, split, config['block_size'], vocab_size, source.meta, config['seed']
    if loss == 'dpo':
        from data.pair_loader import PairLoader
        return PairLoader(*arguments)
    if source.meta.get('pairs'):
        raise ValueError(f'loss is {loss}, but {source.folder} has pairs of answers: set loss to dpo')
    if documents == 'stream':
        return TokenLoader(*arguments)
    from data.documents import DocumentLoader, PackedLoader, separator_of
    kind = PackedLoader if documents == 'pack' and split == 'train' else DocumentLoader
    return kind(*arguments, separator_of(*source))


def mix(loaders, config, split):
    """The loaders {name: TokenLoader} of a split as one; the loader itself if there is one without limits.

    config: the keys of train.py. ValueError if the run needs more sequences than max_epochs leaves it.
    """
    max_epochs, phases = config.get('max_epochs', 0), config.get('mixture_phases', '')
    if len(loaders) == 1 and not max_epochs and not phases:
        return next(iter(loaders.values()))
    if len({getattr(loader, 'separator', None) for loader in loaders.values()} - {None}) > 1:
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
    from data.mixture_loader import MixtureLoader
    return MixtureLoader(dict(zip(short_names(mixture), loaders.values())), schedule)


def short_names(names):
    """The last parts of paths, where these differ: names of sources in the log."""
    short = [os.path.basename(os.path.normpath(name)) for name in names]
    return short if len(set(short)) == len(short) else list(names)


def bits_per_byte(counts, weights=(1,)):
    """Bits per byte of several texts. counts: [(nats, bytes, tokens)] of each; weights: their shares of tokens."""
    nats, n_bytes = (sum(weight * values[i] / values[2] for weight, values in zip(weights, counts)) for i in (0, 1))
    return nats / math.log(2) / n_bytes
