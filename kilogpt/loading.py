"""Load a trained model and its tokenizer; generate text and measure the loss of a text with them.

sample.py uses it, and `kilogpt.load`, which returns a LoadedRun. The file is not called load.py, since an import of
that module would put it in the place of the function kilogpt.load. docs/text.md has examples.
"""
import dataclasses
import os
import sys

import torch

from data import storage
from data.documents import separator_of
from data.tokens.tokenizer import get_tokenizer
from kilogpt.devices.cpu_step import copy_for_text, describe
from kilogpt.generate.engine import Engine, ModelReader, Request
from kilogpt.layers.attention import starts_of
from kilogpt.parallel.dtensor import fill
from kilogpt.parallel.processes import find_device
from kilogpt.run import checkpoint
from kilogpt.run.metrics import describe_size, read_metrics
from kilogpt.settings import check_sampling
from kilogpt.weights import importing
from kilogpt.weights.tensors import pad_rows
from model import GPT, GPTConfig


class LoadedRun:
    """A trained model in Python, as kilogpt.load returns it.

    path: the checkpoint, or the source of the weights.
    model: the GPT in float32, on the device, in evaluation mode. tokenizer: a data.tokens.Tokenizer.
    config: {key: value} of the run, with the keys of train.py; of weights from elsewhere, those of the model.
    metrics: [{'iter': ..., 'loss': ..., 'val_loss': ..., ...}], a dict for each iteration that the run has
        logged, with the keys that docs/measuring.md lists; [] for weights from elsewhere.
    """

    def __init__(self, source, which, tokenizer, device):
        device = find_device(device)
        self.model, self.tokenizer, self.path, state = load_model(source.rstrip('/'), which, tokenizer)
        self.model.to(device).eval()
        self._prepared = None  # (what the model was, its copy for text)
        self.separator = separator_in(state)
        self.config = state.get('config', {}) | state['model']
        is_checkpoint = 'config' in state  # out_dir/ckpt/iter_*
        self.metrics = _metrics(os.path.dirname(os.path.dirname(self.path))) if is_checkpoint else []

    def __repr__(self):
        tokenizer = f'tokenizer {self.tokenizer.name}' if self.tokenizer.name else 'no tokenizer'
        size, n_lines = describe_size(self.model), len(self.metrics)
        return f'LoadedRun({self.path!r}: {size}, {tokenizer}, {n_lines} iterations in metrics)'

    def generate(self, prompt='\n', max_new_tokens=500, num_samples=None, temperature=0.8, top_k=200,
                 top_p=1.0, stop=False, seed=1337):
        """Return the prompt with its continuation, or a list of num_samples such texts.

        The arguments are the keys of sample.py, which gives the same texts with dtype=float32.
        """
        check_sampling(dict(num_samples=num_samples, max_new_tokens=max_new_tokens, temperature=temperature,
                            top_k=top_k, top_p=top_p, seed=seed))
        tokens = self.tokenizer.encode_prompt(prompt) or [self.tokenizer.eot or 0]  # the model needs at least one token
        requests = [Request(tokens, max_new_tokens, temperature, top_k, top_p, self.tokenizer.end_ids if stop else (),
                            seed=(seed, i)) for i in range(num_samples or 1)]
        Engine(ModelReader(self._model_for_text(), len(requests)), self.separator).complete(requests)
        texts = [prompt + self.tokenizer.decode(request.text_ids()) for request in requests]
        return texts[0] if num_samples is None else texts

    @torch.inference_mode()
    def _model_for_text(self):
        """The model, or on a CPU a copy that is faster at text and has the weights that the model has now."""
        if next(self.model.parameters()).device.type != 'cpu':
            return self.model
        # Someone may have changed the model since the last text.
        state = describe(self.model), [sum_bits(parameter) for parameter in self.model.parameters()]
        if self._prepared is None or self._prepared[0] != state:
            self._prepared = state, copy_for_text(self.model, torch.float32)
        return self._prepared[1]

    @torch.inference_mode()
    def loss(self, text):
        """Return the model's mean loss on a text, in nats per predicted token (all tokens but the first).

        As in train.py's evaluation, a text of more than block_size tokens is cut into pieces of block_size,
        and the model sees one piece at a time; with documents other than 'stream', it sees a document at a
        time. ValueError if the text has fewer than two tokens.
        """
        tokens = self.tokenizer.encode(text)
        if len(tokens) < 2:
            raise ValueError(f'{text!r} has {len(tokens)} token(s), but a loss needs two: give a longer text')
        tokens = torch.tensor(tokens, device=next(self.model.parameters()).device)
        block_size = self.model.config.block_size
        pieces = zip(tokens[:-1].split(block_size), tokens[1:].split(block_size))
        total = 0.0
        for x, y in pieces:
            total += self.model(x[None], y[None], starts_of(x[None], self.separator)).item()
        return total / (len(tokens) - 1)


def sum_bits(tensor):
    """Numbers that tell whether a tensor has changed, in a seventh of the time of a sum in float64.

    The sum is one of whole numbers modulo 2^64, so that the change of any single number changes it.
    """
    content = tensor.contiguous().view(-1).view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()
    n_whole = len(content) // 8 * 8
    return content[:n_whole].view(torch.int64).sum().item(), content[n_whole:].tolist()


def load_model(source, which='best', tokenizer=''):
    """Load a model: (GPT in float32 on the CPU, tokenizer, path, state).

    source: a run's folder, one of its checkpoints (out_dir/ckpt/iter_*), or a source of importing.read_weights.
    which: the 'best' or 'latest' checkpoint of a run.
    tokenizer: the tokenizer or dataset to use instead of the tokenizer that the source names; '' = that one.
    path: the checkpoint, or the source. state: the checkpoint's state.json; of other sources, only `model`.
    OSError if the weights are not available, ImportError without a library for them, ValueError if the
    arguments are wrong.
    """
    path, state, meta, tensors = open_source(source, which, tokenizer)
    model = GPT(GPTConfig(**state['model']), seed=None)
    fill_model(list(model.named_parameters()), path, tensors)
    return model, get_tokenizer(meta), path or source, state


def open_source(source, which, tokenizer):
    """(path of the checkpoint or None, state, the tokenizer's meta, {name: tensor} or None) of a source.

    The arguments and errors are those of load_model.
    """
    path, tensors = find_checkpoint(source, which), None
    if path:
        state = checkpoint.read_state(path)
        meta = state['tokenizer']
        if state.get('base'):  # adapters, which are merged into their base
            config, tensors = importing.open_run(path, state)
            state['model'] = dataclasses.asdict(config)
    else:
        arguments, tensors, meta = importing.read_weights(source)
        state = dict(model=arguments)
    vocab_size = state['model']['vocab_size']
    meta = importing.choose_tokenizer(tokenizer, meta, source, vocab_size) or dict(vocab_size=vocab_size)
    if not meta.get('tokenizer'):
        print(f'{source} does not name a tokenizer: prompts and texts are token ids; set tokenizer to its '
              'name (gpt2, for example) or to a dataset that has the same', file=sys.stderr)
    return path, state, meta, tensors


def fill_model(named_parameters, path, tensors):
    """Load a checkpoint, or tensors if there are any, into parameters that may be sharded."""
    if tensors is None:
        checkpoint.load(path, named_parameters)
    else:
        fill(named_parameters, lambda name, shape, rows: pad_rows(tensors[name], shape, rows))


def separator_in(state):
    """The token at which documents begin, for a run that was trained on documents one by one; else None.

    state: as from load_model.
    """
    if state.get('config', {}).get('documents', 'stream') == 'stream':
        return None
    return separator_of('the dataset of this run', state['tokenizer'])


def find_checkpoint(source, which):
    """The path of the checkpoint that checkpoint.choose means, or of another of the run if that is damaged.

    None if the source does not have checkpoints; ValueError if all are damaged.
    """
    if which not in ('best', 'latest'):
        raise ValueError(f'which is {which!r}: choose best or latest')
    path = checkpoint.choose(source, which)
    if not path:
        return None
    for path in dict.fromkeys([path, *checkpoint.find(source)]):
        problem = checkpoint.damage(path)
        if not problem:
            return path
        print(f'{path} is damaged ({problem})', file=sys.stderr)
    raise ValueError(f'every checkpoint of {source} is damaged: name another run')


def _metrics(out_dir):
    """A dict for each iteration with a line in out_dir/metrics.jsonl, which may not exist."""
    if not storage.exists(os.path.join(out_dir, 'metrics.jsonl')):
        return []
    lines, evals = read_metrics(out_dir)
    return [evals.get(i, {}) | lines.get(i, {}) for i in sorted(lines | evals)]
