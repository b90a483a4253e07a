"""Puts a trained model on the processes of torchrun, in a layout, to evaluate it."""
from typing import NamedTuple

import torch

from data.tokens.tokenizer import get_tokenizer
from kilogpt.devices import host
from kilogpt.loading import fill_model, open_source, separator_in
from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.processes import Processes, resolve_dtype
from model import GPT, GPTConfig


class OpenModel(NamedTuple):
    """A model that is laid out. path: its checkpoint, or the source of its weights, which has the state."""
    parallel: Parallel
    config: GPTConfig
    dtype: str
    tokenizer: object
    separator: int | None
    path: str
    state: dict


def open_model(source, which, tokenizer, device, dtype, **degrees):
    """The OpenModel of a source, on all processes of torchrun.

    source, which, tokenizer: as in load_model. device, dtype: as the keys of train.py. degrees: arguments of
    Layout. ValueError if there is no such model or layout, or if the source does not name its tokenizer.
    """
    processes = Processes(device)
    layout = Layout(processes.world_size, **degrees)
    processes.join(layout)
    host.prepare(processes.say)
    path, state, meta, tensors = open_source(source, which, tokenizer)
    if not meta.get('tokenizer'):
        raise ValueError(f'{source} does not name its tokenizer, without which texts cannot be scored: set '
                         '--tokenizer to its name, to a tokenizer.json, or to a dataset that has the same')
    config = GPTConfig(**state['model'])
    with torch.device('meta'):
        model = GPT(config, seed=None)
    parallel = Parallel(processes, layout)
    dtype = resolve_dtype(dtype, processes.device)
    shape = dict(batch_size=1, gradient_accumulation_steps=layout.dp * layout.n_stages, block_size=config.block_size)
    parallel.parallelize(model, shape, dtype)
    fill_model(parallel.named_parameters(), path, tensors)
    parallel.train(False)
    return OpenModel(parallel, config, dtype, get_tokenizer(meta), separator_in(state), path or source, state)
