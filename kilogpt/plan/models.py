"""The model that a config of train.py describes, without a run: of the keys, of a checkpoint, or of other weights."""
import dataclasses
import os
import sys

from data import hub
from data.datasets import dataset_folder, find_shards, read_meta
from data.mixtures import parse_mixture
from kilogpt.keys import initial_weights
from kilogpt.layers.options import ADAPTER_KEYS
from kilogpt.run import checkpoint
from kilogpt.weights.importing import read_arguments, read_weights
from model import GPTConfig


def arguments_of_weights(weights):
    """The GPTConfig arguments of the weights that a run starts from, or None: they are '', or elsewhere.

    Of a name on the hub, the config alone is downloaded.
    """
    if not weights:
        return None
    if path := checkpoint.choose(weights):
        return checkpoint.read_state(path)['model']
    if hub.is_name(weights) and not hub.parse(weights).path:
        try:
            return read_arguments(weights)
        except OSError as error:
            print(error, file=sys.stderr)
            return None
    return read_weights(weights)[0] if os.path.exists(weights) else None


def missing_dataset(config):
    """The folder that a new model's vocabulary would come from, if nothing is prepared there; else None."""
    first, *_ = parse_mixture(config['dataset'])
    folder = dataset_folder(first)
    return None if find_shards(folder, 'train') else folder


def model_config(config):
    """The GPTConfig of a config of train.py. If the dataset is missing, the vocabulary of a new model is GPT-2's."""
    keys = {field.name: config[field.name] for field in dataclasses.fields(GPTConfig) if field.name in config}
    arguments = arguments_of_weights(initial_weights(config['init_from']))
    if arguments is None:
        first, *_ = parse_mixture(config['dataset'])
        return GPTConfig(vocab_size=read_meta(dataset_folder(first))['vocab_size'], **keys)
    if not arguments.get('lora_rank'):
        arguments = arguments | {key: keys[key] for key in ADAPTER_KEYS}
    return GPTConfig(**arguments | dict(dropout=keys['dropout']))
