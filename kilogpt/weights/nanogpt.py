"""Read and write nanoGPT's ckpt.pt, with AdamW's moments."""
import os

import torch

from kilogpt.optim import build_adamw
from kilogpt.run import checkpoint
from kilogpt.weights.checkpoint_tensors import TOKEN_TABLES, drop_copied_head
from kilogpt.weights.meaning import keys_that_differ
from kilogpt.weights.renaming import pack
from kilogpt.weights.tensors import checked, in_memory, narrowed
from model import GPT, GPTConfig

KEYS = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')  # of its model_args
MOMENTS = ('exp_avg', 'exp_avg_sq')  # in AdamW's state


# --- names --------------------------------------------------------------------------------------------------

def split_qkv(tensors):
    """Split each c_attn (rows of queries, keys, values) into c_q, c_k and c_v. tensors: {name: LazyTensor}."""
    split = {}
    for name, stored in tensors.items():
        if '.attn.c_attn.' in name:
            rows = max(1, -(-stored.shape[0] // 3))
            for part, start in zip('qkv', range(0, stored.shape[0], rows)):
                stop = min(start + rows, stored.shape[0])
                split[name.replace('c_attn', f'c_{part}')] = narrowed(stored, start, stop)
        else:
            split[name] = stored
    return split


def pack_qkv(tensors):
    """The inverse of split_qkv, in nanoGPT's order: token table, position table, blocks."""
    in_order = sorted(tensors, key=lambda name: ('.wte.' not in name, '.wpe.' not in name))
    parts = [f'.attn.c_{part}.' for part in 'qkv']
    return pack({name: tensors[name] for name in in_order}, '.attn.c_attn.', parts)


def keys_without_form(config):
    """The entries of a GPTConfig, as 'key=value', that nanoGPT does not have."""
    theirs = GPTConfig(**{key: getattr(config, key) for key in KEYS})
    return [f'{key}={getattr(config, key)}' for key in keys_that_differ(config, theirs)]


# --- reading ------------------------------------------------------------------------------------------------

def load_nanogpt(path):
    """The content of a ckpt.pt, with tensors mapped into memory; its `model` is {name: LazyTensor}.

    torch.compile's prefix is removed from the names in `model`. The causal masks of old versions are dropped,
    and so is the head, which is a copy of the token table unless someone has changed nanoGPT's model.
    """
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        saved['model_args'].items()
        model = {name.removeprefix('_orig_mod.'): in_memory(tensor)
                 for name, tensor in saved['model'].items()}
    except OSError:
        raise
    except Exception as error:  # for files of another format, torch.load raises many kinds of errors
        raise ValueError(f'{path} is not a ckpt.pt of nanoGPT, or has more than tensors and plain values, '
                         f'which might run code: it was not loaded ({type(error).__name__})') from None
    saved['model'] = {name: checked(stored, path, name, 'use other weights') for name, stored in model.items()
                      if not name.endswith('.attn.bias')}
    drop_copied_head(saved['model'])
    return saved


def open_model(saved):
    """(GPTConfig arguments, {our name: LazyTensor}) of the content of a ckpt.pt."""
    arguments = {key: value for key, value in saved['model_args'].items() if key in KEYS}
    arguments['tie_weights'] = 'lm_head.weight' not in saved['model']
    return arguments, split_qkv(saved['model'])


def open_moments(path, saved):
    """{our name: {kind: LazyTensor}} of AdamW's moments in a ckpt.pt; {} if it has none.

    saved: the content of the ckpt.pt.
    """
    state = saved.get('optimizer', {}).get('state')
    if not state:
        return {}
    # In nanoGPT's optimizer, matrices come first.
    names = sorted(saved['model'], key=lambda name: len(saved['model'][name].shape) < 2)
    moments = {}
    for kind in MOMENTS:
        in_file = {name: checked(in_memory(state[i][kind]), path, f'{kind} of {name}', 'use other weights')
                   for i, name in enumerate(names)}
        for name, stored in split_qkv(in_file).items():
            moments.setdefault(name, {})[kind] = stored
    return moments


# --- writing ------------------------------------------------------------------------------------------------

def load_unpadded(path, config):
    """{name: weight} and {name: optimizer state} of a checkpoint, without the padding of the vocabulary."""
    parameters = list(GPT(config, seed=None).named_parameters())
    optimizer = build_adamw(parameters, 0.0, 0.0, (0.0, 0.0))
    checkpoint.load(path, parameters, optimizer)
    weights = {name: parameter.detach() for name, parameter in parameters}
    states = {name: dict(optimizer.state[parameter]) for name, parameter in parameters}
    for name in weights.keys() & set(TOKEN_TABLES):
        weights[name] = weights[name][:config.vocab_size].clone()
        for kind in states[name].keys() - {'step'}:
            states[name][kind] = states[name][kind][:config.vocab_size].clone()
    return weights, states


def packed_in_memory(tensors):
    """pack_qkv of {name: tensor}: the same with nanoGPT's names."""
    packed = pack_qkv({name: in_memory(tensor) for name, tensor in tensors.items()})
    return {name: stored.whole() for name, stored in packed.items()}


def write_nanogpt(target, path, config, state, dtype):
    """Write a checkpoint as nanoGPT's ckpt.pt, with AdamW's moments if the run has them."""
    weights, states = load_unpadded(path, config)
    packed = packed_in_memory(weights)
    run = state['config']
    groups = [dict(params=[tensor for tensor in packed.values() if tensor.dim() >= 2],
                   weight_decay=run.get('weight_decay', 0.1)),
              dict(params=[tensor for tensor in packed.values() if tensor.dim() < 2], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=run.get('learning_rate', 6e-4),
                              betas=(run.get('beta1', 0.9), run.get('beta2', 0.95)))
    if all('exp_avg' in their_state for their_state in states.values()):  # Muon's matrices have no exp_avg
        step = states['transformer.wte.weight']['step']
        for kind in MOMENTS:
            for name, moment in packed_in_memory({name: states[name][kind] for name in weights}).items():
                adamw.state[packed[name]] |= {kind: moment, 'step': step}
    model = {name: tensor.to(dtype) for name, tensor in packed.items()}
    model['lm_head.weight'] = model['transformer.wte.weight']
    best = state['best_val_loss']
    content = dict(model=model, model_args={key: getattr(config, key) for key in KEYS},
                   iter_num=state['iteration'], best_val_loss=1e9 if best is None else best, config=run,
                   optimizer=adamw.state_dict(), tokenizer=state['tokenizer'])
    with open(target + '.tmp', 'wb') as file:
        torch.save(content, file)
    os.replace(target + '.tmp', target)
