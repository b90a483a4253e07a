"""Read and write weights of other software: nanoGPT's ckpt.pt, Hugging Face folders of GPT-2, Llama, Qwen3.

Reading a file never runs code from it: only tensors, plain values and JSON are accepted.
"""
import contextlib
import dataclasses
import functools
import json
import os
import shutil

import torch
import torch.distributed as dist

from data.datasets import find_meta
from data.json_tokenizer import JsonTokenizer, copy_tokenizer, load_tokenizer, portable, tokenizer_folder
from data.tokenizer import describe_tokenizer, get_tokenizer
from kilogpt import checkpoint
from kilogpt.configurator import announced
from kilogpt.convert.hugging_face import (
    arguments_from_hugging_face, gpt2_config, keys_without_standard_form, llama_config, pack_qkv, split_qkv,
    tensors_from_gpt2, tensors_from_llama, tensors_to_gpt2, tensors_to_llama)
from kilogpt.checkpoint_files import check_finite, write_json
from kilogpt.optim import build_adamw
from model import GPT, GPTConfig

GPT2_NAMES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # on the Hugging Face hub
GPT2_META = dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2')
GPT2_VOCAB_SIZES = (50257, 50304)  # nanoGPT pads to the second
NANOGPT_KEYS = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
MOMENTS = ('exp_avg', 'exp_avg_sq')  # in AdamW's state
# Tables with a row for each token. Our model pads them to more rows than the vocabulary has.
TOKEN_TABLES = ('transformer.wte.weight', 'lm_head.weight')


# --- reading ------------------------------------------------------------------------------------------------

def read_weights(source):
    """Read weights that were trained elsewhere.

    source: a Hugging Face folder of GPT-2, Llama or Qwen3 (config.json and safetensors), a ckpt.pt of
    nanoGPT, or 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', which are downloaded.
    Returns (GPTConfig arguments, {our name: tensor}, meta of the tokenizer). Tensors have the file's dtype
    and are mapped into memory. The meta is None if the tokenizer is not one of ours. A head that differs from
    the token table is kept, even if the file says that the two are tied.
    OSError if the weights are not available, ValueError if our model cannot represent them or if NaN or
    infinity is in them. Of several processes, each looks for these in a share of the tensors.
    """
    if not os.path.exists(source) and source not in GPT2_NAMES:
        raise ValueError(f"{source!r} does not exist: name a run's folder, a checkpoint (ckpt/iter_*), "
                         f"a Hugging Face folder, nanoGPT's ckpt.pt, or {', '.join(GPT2_NAMES)} "
                         '(and --init_from of train.py takes scratch, resume, auto)')
    read = read_nanogpt if os.path.isfile(source) else read_hugging_face
    try:
        arguments, weights, meta = read(source)
        config = GPTConfig(**arguments)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'the config of {source} has a missing or wrong entry '
                         f'({type(error).__name__}: {error})') from None
    with torch.device('meta'):
        expected = {name: tuple(p.shape) for name, p in GPT(config, seed=None).named_parameters()}
    for name in TOKEN_TABLES:
        if name in expected:
            expected[name] = (config.vocab_size, config.n_embd)
    for name in expected.keys() | weights.keys():
        shape = tuple(weights[name].shape) if name in weights else None
        if shape != expected.get(name):
            raise ValueError(f'{source} has {name} with shape {shape}, but its config requires '
                             f'{expected.get(name)}')
    return dataclasses.asdict(config), {name: weights[name] for name in expected}, meta


def choose_tokenizer(name, stored, source, vocab_size):
    """The meta of the tokenizer to use with a model: find_meta(name), or the stored meta if the name is ''.

    ValueError if the tokenizer has more tokens than the vocab_size of the model of `source`.
    """
    meta = find_meta(name) if name else stored
    if meta and meta['vocab_size'] > vocab_size:
        raise ValueError(
            f'{name or source} has {meta["vocab_size"]} tokens, but the model of {source} has {vocab_size}: '
            'set --tokenizer to the tokenizer of its training, or to a dataset that has the same')
    return meta


def pad_rows(tensor, shape, rows=slice(None)):
    """A float32 copy of a tensor's rows, with rows of zeros up to the model's shape."""
    start, stop, _ = rows.indices(shape[0])
    padded = torch.zeros(stop - start, *shape[1:])
    stored = tensor[start:stop]
    padded[:len(stored)] = stored
    return padded


def read_hugging_face(source):
    """(GPTConfig arguments, {our name: tensor}, tokenizer meta) of a folder, or of one of GPT2_NAMES."""
    folder = source if os.path.isdir(source) else download_gpt2(source)
    tensor_files = find_safetensors(folder)
    theirs = read_json(os.path.join(folder, 'config.json'))
    arguments = arguments_from_hugging_face(theirs, folder)
    ours = theirs.get('kilogpt', {})  # added by our own export
    arguments['dropout'] = ours.get('model', {}).get('dropout', 0.0)
    tensors = load_safetensors(folder, tensor_files)
    if theirs['model_type'] == 'gpt2':
        tensors = tensors_from_gpt2(tensors)
        biases = [name for name in tensors if name.endswith('.bias')]
        exported_without_bias = ours and not ours['model']['bias']
        if exported_without_bias and not any(tensors[name].any() for name in biases):
            arguments['bias'] = False
            for name in biases:
                del tensors[name]
    else:
        tensors = tensors_from_llama(tensors, theirs['model_type'], arguments.get('router_balance'))
    if arguments['tie_weights']:
        drop_copied_head(tensors)
        arguments['tie_weights'] = 'lm_head.weight' not in tensors
    return arguments, tensors, find_tokenizer(folder, theirs)


def find_tokenizer(folder, theirs):
    """The meta of the tokenizer of a Hugging Face folder, or None. theirs: the content of its config.json."""
    if 'tokenizer' in theirs.get('kilogpt', {}):
        meta = theirs['kilogpt']['tokenizer']
        return meta | {'folder': folder} if meta and 'digest' in meta else meta
    if theirs['model_type'] == 'gpt2' and theirs['vocab_size'] in GPT2_VOCAB_SIZES:
        return GPT2_META
    if os.path.exists(os.path.join(folder, JsonTokenizer.name)):
        return load_tokenizer(folder).meta()
    return None


def download_gpt2(name):
    """The folder in the Hugging Face cache that holds one of GPT2_NAMES, downloaded if necessary."""
    import huggingface_hub
    names = ['config.json', 'model.safetensors']
    find = functools.partial(huggingface_hub.snapshot_download, f'openai-community/{name}',
                             allow_patterns=names)
    with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError):
        folder = find(local_files_only=True)
        if all(os.path.exists(os.path.join(folder, each)) for each in names):
            return folder
    try:
        # The client asks a hub that does not answer again and again, for minutes. This asks once.
        huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=3)
        return find()
    except Exception as error:  # without a network, the hub's client raises many kinds of errors
        raise OSError(f'{name} is neither a folder nor in the Hugging Face cache, and could not be '
                      f'downloaded ({type(error).__name__}): go online or give a folder with its config.json '
                      'and model.safetensors as init_from') from None


def find_safetensors(folder):
    """[name] of a Hugging Face folder's safetensors files. OSError if a file is missing."""
    names = ['model.safetensors']
    index = os.path.join(folder, 'model.safetensors.index.json')
    if os.path.exists(index):
        names = sorted(set(read_json(index)['weight_map'].values()))
    for name in ('config.json', *names):
        if not os.path.exists(os.path.join(folder, name)):
            raise OSError(f'{folder} has no {name}: it is not a Hugging Face folder with safetensors weights '
                          'and has no checkpoint in ckpt/')
    return names


def load_safetensors(folder, names):
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    tensors = {}
    for name in names:
        path = os.path.join(folder, name)
        try:
            in_file = load_file(path)
        except SafetensorError as error:
            raise ValueError(f'{path} is damaged ({error})') from None
        check_share(path, in_file)
        tensors |= in_file
    return tensors


def check_share(path, tensors):
    """`check_finite` for this process's share of a file's tensors."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    check_finite(path, [*tensors.items()][rank::world_size], 'use other weights')


def drop_copied_head(tensors):
    """Delete the output head from {name: tensor} if it equals the token table: tied weights are one."""
    if tensors.keys() >= {*TOKEN_TABLES} and torch.equal(*(tensors[name] for name in TOKEN_TABLES)):
        del tensors['lm_head.weight']


def read_json(path):
    with open(path, encoding='utf-8') as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(f'{path} is not JSON ({error})') from None


def load_nanogpt(path):
    """The content of a ckpt.pt, with tensors mapped into memory.

    torch.compile's prefix is removed from the names in `model`. The causal masks of old versions are dropped,
    and so is the head, which is a copy of the token table unless someone has changed nanoGPT's model.
    """
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        saved['model'] = {name.removeprefix('_orig_mod.'): tensor for name, tensor in saved['model'].items()
                          if not name.endswith('.attn.bias')}
        drop_copied_head(saved['model'])
        saved['model_args'].items()
    except OSError:
        raise
    except Exception as error:  # for files of another format, torch.load raises many kinds of errors
        raise ValueError(f'{path} is not a ckpt.pt of nanoGPT, or has more than tensors and plain values, '
                         f'which might run code: it was not loaded ({type(error).__name__})') from None
    return saved


def read_nanogpt(path):
    """(GPTConfig arguments, {our name: tensor}, tokenizer meta) of a ckpt.pt."""
    saved = load_nanogpt(path)
    arguments = {key: value for key, value in saved['model_args'].items() if key in NANOGPT_KEYS}
    arguments['tie_weights'] = 'lm_head.weight' not in saved['model']
    check_share(path, saved['model'])
    default_meta = GPT2_META if arguments['vocab_size'] in GPT2_VOCAB_SIZES else None
    return arguments, split_qkv(saved['model']), saved.get('tokenizer', default_meta)


# --- from a run ---------------------------------------------------------------------------------------------

def export_weights(source, target, which='best', dtype='float32', tokenizer=''):
    """Write the weights of a run for other software. ValueError if the model has no standard form.

    source, which: as in checkpoint.choose. dtype: 'float32', 'bfloat16' or 'float16'.
    tokenizer: as in choose_tokenizer.
    target: a new file that ends with .pt for nanoGPT, or a new folder for Hugging Face.
    """
    path = checkpoint.choose(source, which)
    if not path:
        raise ValueError(f'there is no checkpoint to export in {source}')
    if os.path.exists(target):
        raise ValueError(f'{target} already exists: choose another target')
    if problem := checkpoint.damage(path):
        raise ValueError(f'{path} is damaged ({problem}): export another checkpoint')
    state = checkpoint.read_state(path)
    config = GPTConfig(**state['model'])
    to_nanogpt = target.endswith('.pt')
    if unknown := keys_without_standard_form(config, to_nanogpt):
        lack = 'nanoGPT does not have' if to_nanogpt else 'no standard form has'
        raise ValueError(f'{path} has {", ".join(unknown)}, which {lack}: '
                         'use the checkpoint with our own sample.py and train.py')
    state['tokenizer'] = choose_tokenizer(tokenizer, state['tokenizer'], path, config.vocab_size)
    write = write_nanogpt if to_nanogpt else write_hugging_face
    with announced(f'writing {target}'):
        write(target, path, config, state, getattr(torch, dtype))
    print(f'wrote {target} from {path}')


def load_unpadded(path, config, with_optimizer):
    """{name: weight} and {name: optimizer state} of a checkpoint, without the padding of the vocabulary."""
    parameters = list(GPT(config, seed=None).named_parameters())
    optimizer = build_adamw(parameters, 0.0, 0.0, (0.0, 0.0))
    checkpoint.load(path, parameters, optimizer if with_optimizer else None)
    weights = {name: parameter.detach() for name, parameter in parameters}
    states = {name: dict(optimizer.state[parameter]) for name, parameter in parameters}
    for name in weights.keys() & set(TOKEN_TABLES):
        weights[name] = weights[name][:config.vocab_size].clone()
        for kind in states[name].keys() - {'step'}:
            states[name][kind] = states[name][kind][:config.vocab_size].clone()
    return weights, states


def write_nanogpt(target, path, config, state, dtype):
    """Write a checkpoint as nanoGPT's ckpt.pt, with AdamW's moments if the run has them."""
    weights, states = load_unpadded(path, config, with_optimizer=True)
    packed = pack_qkv(weights)
    run = state['config']
    groups = [dict(params=[tensor for tensor in packed.values() if tensor.dim() >= 2],
                   weight_decay=run.get('weight_decay', 0.1)),
              dict(params=[tensor for tensor in packed.values() if tensor.dim() < 2], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=run.get('learning_rate', 6e-4),
                              betas=(run.get('beta1', 0.9), run.get('beta2', 0.95)))
    if all('exp_avg' in their_state for their_state in states.values()):  # Muon's matrices have no exp_avg
        step = states['transformer.wte.weight']['step']
        for kind in MOMENTS:
            for name, moment in pack_qkv({name: states[name][kind] for name in weights}).items():
                adamw.state[packed[name]] |= {kind: moment, 'step': step}
    model = {name: tensor.to(dtype) for name, tensor in packed.items()}
    model['lm_head.weight'] = model['transformer.wte.weight']
    best = state['best_val_loss']
    content = dict(model=model, model_args={key: getattr(config, key) for key in NANOGPT_KEYS},
                   iter_num=state['iteration'], best_val_loss=1e9 if best is None else best, config=run,
                   optimizer=adamw.state_dict(), tokenizer=state['tokenizer'])
    with open(target + '.tmp', 'wb') as file:
        torch.save(content, file)
    os.replace(target + '.tmp', target)


def write_hugging_face(target, path, config, state, dtype):
    """Write a checkpoint as a folder for transformers: GPT-2, Llama, Qwen3, or a mixture of experts."""
    from safetensors.torch import save_file
    weights, _ = load_unpadded(path, config, with_optimizer=False)
    tokenizer = get_tokenizer(state['tokenizer']) if describe_tokenizer(state['tokenizer']) else None
    end = tokenizer.eot if tokenizer else None
    ends = dict(bos_token_id=end, eos_token_id=end)
    theirs = dict(
        vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights,
        torch_dtype=str(dtype).removeprefix('torch.'), pad_token_id=None, **ends,
        kilogpt=dict(model=dataclasses.asdict(config), tokenizer=portable(state['tokenizer'])))
    if config.pos == 'learned':
        theirs |= gpt2_config(config)
        tensors = tensors_to_gpt2(weights)
    else:
        theirs |= llama_config(config)
        tensors = tensors_to_llama(weights, config)
    os.makedirs(target)
    if tokenizer:
        tokenizer.save(target, config.block_size)
    write_json(os.path.join(target, 'generation_config.json'), ends)
    tensor_file = os.path.join(target, 'model.safetensors')
    config_file = os.path.join(target, 'config.json')
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tensor_file, metadata=dict(format='pt'))
    write_json(config_file, theirs)
    shutil.copymode(config_file, tensor_file)  # safetensors makes a file that only its owner can read


# --- to a run -----------------------------------------------------------------------------------------------

def import_weights(source, out_dir, tokenizer=''):
    """Make a run's folder out_dir with a checkpoint of weights of other software.

    source: as in read_weights. The iteration, losses and AdamW's moments of a ckpt.pt are also imported.
    tokenizer: as in choose_tokenizer. ValueError if out_dir has checkpoints.
    """
    if checkpoint.find(out_dir):
        raise ValueError(f'{out_dir} already has checkpoints: choose another folder')
    arguments, weights, meta = read_weights(source)
    meta = choose_tokenizer(tokenizer, meta, source, arguments['vocab_size'])
    parameters = list(GPT(GPTConfig(**arguments), seed=None).named_parameters())
    with announced(f'reading {source}'):
        for name, parameter in parameters:
            parameter.detach().copy_(pad_rows(weights[name], parameter.shape))
    saved = load_nanogpt(source) if os.path.isfile(source) else {}
    run = saved.get('config', {})
    iteration = saved.get('iter_num', 0)
    sequences = iteration * run.get('gradient_accumulation_steps', 0) * run.get('batch_size', 0)
    loss = saved.get('best_val_loss')
    loss = None if loss is None or loss >= 1e9 else float(loss)  # nanoGPT has 1e9 before an evaluation
    state = dict(
        iteration=iteration, tokens=sequences * run.get('block_size', 0), val_loss=loss, best_val_loss=loss,
        skipped=[0, 0], wandb_id=None, scaler=torch.amp.GradScaler('cpu').state_dict(),
        model=arguments, tokenizer=meta, config=run)
    saver = checkpoint.Saver(out_dir, keep=1)
    copy_tokenizer(meta, tokenizer_folder(out_dir))
    with announced(f'writing {out_dir}'):
        path = saver.save(iteration, parameters, nanogpt_optimizer(source, saved, parameters), state)
    if saver.problem:
        raise OSError(f'{out_dir} could not be written ({saver.problem})')
    print(f'wrote {path}: continue with python sample.py --out_dir={out_dir}, '
          f'or train.py --init_from={out_dir}')


def nanogpt_optimizer(path, saved, parameters):
    """AdamW for our parameters, with the moments in a ckpt.pt; None if it has no moments.

    saved: the content of the ckpt.pt.
    """
    moments = saved.get('optimizer', {}).get('state')
    if not moments:
        return None
    optimizer = build_adamw(parameters, 0.0, 0.0, (0.0, 0.0))
    # In nanoGPT's optimizer, matrices come first.
    names = sorted(saved['model'], key=lambda name: saved['model'][name].dim() < 2)
    step = torch.as_tensor(moments[0]['step']).float()
    for kind in MOMENTS:
        values = {name: moments[i][kind] for i, name in enumerate(names)}
        check_share(path, {f'{kind} of {name}': value for name, value in values.items()})
        values = split_qkv(values)
        for name, parameter in parameters:
            optimizer.state[parameter] |= {kind: pad_rows(values[name], parameter.shape), 'step': step}
    return optimizer
