"""Export and import weights, and show the content of a checkpoint.

    python -m kilogpt.convert export out-quickstart quickstart-hf   write a folder for transformers
    python -m kilogpt.convert export out-quickstart model.gguf      write a file for llama.cpp
    python -m kilogpt.convert export out-quickstart ckpt.pt         write a checkpoint of nanoGPT
    python -m kilogpt.convert import ckpt.pt out-imported           make a run's folder to sample or train
    python -m kilogpt.convert inspect out-quickstart                print iteration, losses, config, weights
"""
import argparse
import math
import os
import re

import torch

from data import hub
from data.storage import is_url
from data.tokens.tokenizer import describe_tokenizer
from kilogpt.configurator import announced, exit_on_error
from kilogpt.run import checkpoint
from kilogpt.run.checkpoint_files import check_finite
from kilogpt.weights.checkpoint_tensors import open_checkpoint
from kilogpt.weights.exporting import export_weights
from kilogpt.weights.importing import check_finite_values, import_weights, is_nanogpt, read_weights
from kilogpt.weights.nanogpt import load_nanogpt
from model import GPT, GPTConfig

STATE_KEYS = ('iteration', 'tokens', 'val_loss', 'best_val_loss')
NANOGPT_STATE_KEYS = ('iter_num', 'best_val_loss')
RUN_KEYS = ('dataset', 'batch_size', 'gradient_accumulation_steps', 'block_size', 'learning_rate',
            'max_iters', 'optimizer', 'weight_decay', 'dtype', 'seed')


def inspect(source, which='best'):
    """Print the content of a run's checkpoint or of a source of read_weights. ValueError if damaged."""
    path = checkpoint.choose(source, which)
    if path:
        print_checkpoint(path)
    else:
        print_foreign_weights(source)


def print_checkpoint(path):
    if problem := checkpoint.damage(path):
        raise ValueError(f'{path} is damaged: {problem}')
    with announced(f'reading {path}'):
        for key, tensor in open_checkpoint(path).items():
            check_finite(path, [(key, tensor.whole())], 'delete this checkpoint to use another one')
    state = checkpoint.read_state(path)
    print_row(path, {key: state[key] for key in STATE_KEYS} | dict(checksums='correct'))
    print_config(state['model'], state['config'], state['tokenizer'])
    if state.get('base'):
        print_row('base', state['base'])
    stored = {key: torch.empty(found.size, dtype=found.properties.dtype, device='meta')
              for key, found in checkpoint.stored_tensors(path).items()}
    with torch.device('meta'):
        model = GPT(GPTConfig(**state['model']), seed=None)
    weights = {name: stored[f'model.{name}'] for name, parameter in model.named_parameters()
               if parameter.requires_grad or not state.get('base')}
    moments = [tensor for key, tensor in stored.items() if key.startswith('optimizer.')]
    print_parameters(weights, moments)


def print_foreign_weights(source):
    arguments, weights, meta = read_weights(source)
    with announced(f'reading {source}'):
        check_finite_values(weights)
    saved = load_nanogpt(source) if is_nanogpt(source) else {}
    print_row(source, {key: saved[key] for key in NANOGPT_STATE_KEYS if key in saved})
    print_config(arguments, saved.get('config', {}), meta)
    moments = []
    for state in saved.get('optimizer', {}).get('state', {}).values():
        moments += state.values()
    print_parameters(weights, moments)


def print_config(arguments, run, meta):
    print_row('model', arguments)
    print_row('run', {key: run[key] for key in RUN_KEYS if key in run})
    print(f'tokenizer: {describe_tokenizer(meta) or "unknown"}')


def print_row(title, entries):
    if entries:
        values = {key: float(value) if torch.is_tensor(value) else value for key, value in entries.items()}
        print(f'{title}: ' + ', '.join(f'{key} {value}' for key, value in values.items()))


def print_parameters(weights, moments):
    """Print a table of weights, with one row for all blocks, and the number of bytes.

    weights: {name: a tensor or LazyTensor}.
    """
    blocks_of_row = {}
    for name, tensor in weights.items():
        block = re.search(r'(?<=\.h\.)\d+', name)
        pattern = re.sub(r'(?<=\.h\.)\d+', '{}', name)
        row = pattern, tuple(tensor.shape), str(tensor.dtype).removeprefix('torch.'), math.prod(tensor.shape)
        blocks_of_row.setdefault(row, []).append(int(block[0]) if block else None)
    for (pattern, shape, dtype, count), blocks in blocks_of_row.items():
        span = f'{min(blocks)}..{max(blocks)}' if len(blocks) > 1 else blocks[0]
        print(f'{pattern.format(span):<44} {str(shape):<16} {dtype:<9} {len(blocks) * count:>14,}')
    total = sum(math.prod(tensor.shape) for tensor in weights.values())
    optimizer_bytes = count_bytes(moments)
    suffix = f', and {optimizer_bytes:,} bytes of optimizer state' if optimizer_bytes else ''
    print(f'{total:,} parameters in {count_bytes(weights.values()):,} bytes{suffix}')


def count_bytes(tensors):
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def build_parser():
    parser = argparse.ArgumentParser(prog='python -m kilogpt.convert', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    which = dict(choices=('best', 'latest'), default='best',
                 help="the run's checkpoint with the smallest validation loss (default), or the latest")
    tokenizer = dict(default='', help='for weights that do not name their tokenizer: gpt2, bytes, or a '
                                      'dataset, a run, a GGUF file, a folder or org/name that has the same')

    command = commands.add_parser('export', help="write a run's weights for other programs")
    command.add_argument('source', metavar='OUT_DIR', help="a run's folder, or one of its ckpt/iter_*")
    command.add_argument('target', metavar='TARGET',
                         help='a new folder for transformers, or a new file that ends with .gguf for '
                              'llama.cpp or with .pt for nanoGPT')
    command.add_argument('--which', **which)
    command.add_argument('--dtype', choices=('float32', 'bfloat16', 'float16', 'q8_0'), default='float32',
                         help='dtype of the weights (default: float32); q8_0, of 8 bits, is for GGUF')
    command.add_argument('--family', default='',
                         help='the model_type to write, such as qwen3 (default: the first that fits)')
    command.add_argument('--tokenizer', **tokenizer)
    command.add_argument('--adapter', action='store_true',
                         help='write the adapters of a run with lora_rank alone, in a folder for peft')

    command = commands.add_parser('import', help="make a run's folder from weights trained elsewhere")
    command.add_argument('source', metavar='SOURCE',
                         help="a Hugging Face folder, a GGUF file, nanoGPT's ckpt.pt, org/name or "
                              'org/name@revision on the Hugging Face hub, or a folder of peft with adapters')
    command.add_argument('out_dir', metavar='OUT_DIR', help='a folder without checkpoints')
    command.add_argument('--tokenizer', '--dataset', **tokenizer)
    command.add_argument('--base', default='',
                         help='for adapters: their base model (default: the one that the folder names)')

    command = commands.add_parser('inspect', help='print iteration, losses, config and parameters')
    command.add_argument('source', metavar='SOURCE',
                         help="a run's folder, one of its ckpt/iter_*, or a SOURCE of import")
    command.add_argument('--which', **which)
    return parser


def main(argv=None):
    options = vars(build_parser().parse_args(argv))
    command = {'export': export_weights, 'import': import_weights, 'inspect': inspect}[options.pop('command')]
    with exit_on_error():
        source = options['source']
        if not (is_url(source) or os.path.exists(source) or hub.is_name(source)):
            raise ValueError(f'{source!r} does not exist')
        command(**options)


if __name__ == '__main__':
    main()
