"""Weights of other software: nanoGPT's ckpt.pt, and Hugging Face folders of GPT-2, Llama and Qwen3.

Nothing in a file that is read can run code: tensors, plain values and JSON are all that is accepted.
"""
import dataclasses
import json
import os
import shutil

import torch

from data.loader import DATA, read_meta
from data.tokenizer import get_tokenizer
from kilogpt import checkpoint
from kilogpt.optim import build_adamw
from kilogpt.shards import write_json
from model import GPT, GPTConfig

GPT2_NAMES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # on the Hugging Face hub
GPT2_META = dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2')
GPT2_VOCAB_SIZES = (50257, 50304)  # the second is nanoGPT's, padded
NANOGPT_KEYS = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
MOMENTS = ('exp_avg', 'exp_avg_sq')  # AdamW's
# Tables with a row for each token: our model pads them to more rows than the vocabulary has.
TOKEN_TABLES = ('transformer.wte.weight', 'lm_head.weight')
# Parts of names in our model and in Llama, to be replaced in this order.
LLAMA_NAMES = (
    ('transformer.h.', 'model.layers.'), ('transformer.wte.', 'model.embed_tokens.'),
    ('transformer.ln_f.', 'model.norm.'), ('.ln_1.', '.input_layernorm.'),
    ('.ln_2.', '.post_attention_layernorm.'), ('.c_fc.', '.up_proj.'), ('.c_gate.', '.gate_proj.'),
    ('.mlp.c_proj.', '.mlp.down_proj.'), ('.attn.', '.self_attn.'), ('_attn.c_proj.', '_attn.o_proj.'),
    ('.c_q.', '.q_proj.'), ('.c_k.', '.k_proj.'), ('.c_v.', '.v_proj.'))


# --- reading ------------------------------------------------------------------------------------------------

def read_weights(source):
    """Read weights that were trained elsewhere.

    source: a Hugging Face folder of GPT-2, Llama or Qwen3 form (config.json, safetensors), a ckpt.pt of
    nanoGPT, or 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', which are downloaded.
    Returns the GPTConfig arguments, {our name: tensor} in the file's dtype (mapped into memory, not read
    yet), and the meta of the tokenizer, or None if the tokenizer is not known to be one of ours.
    OSError if the weights are not available, ValueError if our model cannot represent them.
    """
    if not os.path.exists(source) and source not in GPT2_NAMES:
        raise ValueError(f'init_from is {source!r}: use scratch, resume, auto, {", ".join(GPT2_NAMES)}, '
                         "a folder of weights or nanoGPT's ckpt.pt")
    read = read_nanogpt if os.path.isfile(source) else read_hugging_face
    try:
        arguments, weights, meta = read(source)
        config = GPTConfig(**arguments)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'the config of {source} lacks or garbles an entry '
                         f'({type(error).__name__}: {error})') from None
    with torch.device('meta'):
        expected = {name: tuple(p.shape) for name, p in GPT(config, seed=None).named_parameters()}
    for name in TOKEN_TABLES:
        if name in expected:
            expected[name] = (config.vocab_size, config.n_embd)
    for name in expected.keys() | weights.keys():
        shape = tuple(weights[name].shape) if name in weights else None
        if shape != expected.get(name):
            raise ValueError(f'{source} has {name} of shape {shape} where its config asks for '
                             f'{expected.get(name)}')
    return dataclasses.asdict(config), {name: weights[name] for name in expected}, meta


def find_initial(init_from, processes):
    """The weights that a new run starts from: (checkpoint, tensors, GPTConfig arguments).

    init_from: a run's folder, which gives its best checkpoint, or what read_weights takes, which gives
    tensors. The other of the two is None. Raises what read_weights raises, and ValueError if the checkpoint
    is damaged.
    """
    path = processes.share(checkpoint.find_best(init_from) if processes.is_main else None)
    if not path:
        arguments, tensors, _ = read_weights(init_from)
        return None, tensors, arguments
    if problem := checkpoint.damage_on_any(path, processes):
        raise ValueError(f'{path} is damaged ({problem}): delete it, and the next best is taken')
    return path, None, checkpoint.read_state(path)['model']


def pad_rows(tensor, shape, rows=slice(None)):
    """A float32 copy of rows of a tensor of read_weights, extended by rows of zeros to the model's shape."""
    start, stop, _ = rows.indices(shape[0])
    padded = torch.zeros(stop - start, *shape[1:])
    stored = tensor[start:stop]
    padded[:len(stored)] = stored
    return padded


def read_hugging_face(source):
    """GPTConfig arguments, {our name: tensor} and tokenizer meta of a folder, or of one of GPT2_NAMES."""
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
        tensors = tensors_from_llama(tensors)
    if arguments['tie_weights']:
        tensors.pop('lm_head.weight', None)
    is_gpt2 = theirs['model_type'] == 'gpt2' and theirs['vocab_size'] in GPT2_VOCAB_SIZES
    return arguments, tensors, ours.get('tokenizer', GPT2_META if is_gpt2 else None)


def download_gpt2(name):
    """The folder in the Hugging Face cache that holds one of GPT2_NAMES, downloaded if necessary."""
    import huggingface_hub
    try:
        return huggingface_hub.snapshot_download(f'openai-community/{name}',
                                                 allow_patterns=['config.json', 'model.safetensors'])
    except Exception as error:  # the hub's client raises errors of many kinds without a network
        raise OSError(f'{name} is neither a folder nor in the Hugging Face cache, and could not be '
                      f'downloaded ({type(error).__name__}): go online or give a folder with its config.json '
                      'and model.safetensors as init_from') from None


def find_safetensors(folder):
    """Names of a Hugging Face folder's safetensors files, one or several. OSError if a file is missing."""
    names = ['model.safetensors']
    index = os.path.join(folder, 'model.safetensors.index.json')
    if os.path.exists(index):
        names = sorted(set(read_json(index)['weight_map'].values()))
    for name in ('config.json', *names):
        if not os.path.exists(os.path.join(folder, name)):
            raise OSError(f'{folder} has no {name}: it is not a Hugging Face folder with safetensors weights')
    return names


def load_safetensors(folder, names):
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    tensors = {}
    for name in names:
        try:
            tensors |= load_file(os.path.join(folder, name))
        except SafetensorError as error:
            raise ValueError(f'{folder}/{name} is damaged ({error})') from None
    return tensors


def read_json(path):
    with open(path, encoding='utf-8') as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(f'{path} is not JSON ({error})') from None


def arguments_from_hugging_face(theirs, folder):
    """The GPTConfig arguments that a config.json stands for. ValueError if our model lacks a part of it."""
    kind = theirs.get('model_type')
    known = dict(model_type=['gpt2', 'llama', 'qwen3'], quantization_config=[None])
    if kind == 'gpt2':
        known |= dict(activation_function=['gelu_new', 'gelu', 'gelu_pytorch_tanh'],
                      scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False])
    else:
        known |= dict(hidden_act=['silu'], use_sliding_window=[False], partial_rotary_factor=[1.0, None],
                      layer_types=[None, ['full_attention'] * theirs.get('num_hidden_layers', 0)])
        if kind == 'qwen3':
            known |= dict(attention_bias=[False])
        else:
            known |= dict(mlp_bias=[theirs.get('attention_bias', False)])
    unknown = {key: theirs[key] for key in known if key in theirs and theirs[key] not in known[key]}
    rope = {}
    for key in ('rope_scaling', 'rope_parameters'):  # before and since version 5 of transformers
        rope |= theirs.get(key) or {}
        rope_type = rope.get('rope_type', rope.get('type', 'default'))
        if rope_type != 'default' or rope.keys() - {'rope_type', 'type', 'rope_theta'}:
            unknown[key] = rope
    if not kind or unknown:
        raise ValueError(f'{folder} is not a GPT-2, Llama or Qwen3 that our model can represent: '
                         f'its config.json has {unknown or "no model_type"}')
    if kind == 'gpt2':
        return arguments_from_gpt2(theirs)
    return arguments_from_llama(theirs, rope.get('rope_theta', theirs.get('rope_theta', 10000.0)))


def arguments_from_gpt2(theirs):
    return dict(
        block_size=theirs['n_positions'], vocab_size=theirs['vocab_size'],
        n_layer=theirs['n_layer'], n_head=theirs['n_head'],
        n_embd=theirs['n_embd'], n_hidden=theirs.get('n_inner') or 0,
        mlp='gelu' if theirs.get('activation_function') == 'gelu' else 'gelu_tanh',
        tie_weights=theirs.get('tie_word_embeddings', True), norm_eps=theirs.get('layer_norm_epsilon', 1e-5))


def arguments_from_llama(theirs, rope_theta):
    is_qwen3 = theirs['model_type'] == 'qwen3'
    return dict(
        block_size=theirs['max_position_embeddings'], vocab_size=theirs['vocab_size'],
        n_layer=theirs['num_hidden_layers'], n_head=theirs['num_attention_heads'],
        n_kv_head=theirs.get('num_key_value_heads') or 0,
        head_width=theirs.get('head_dim') or (128 if is_qwen3 else 0),
        n_embd=theirs['hidden_size'], n_hidden=theirs['intermediate_size'],
        pos='rope', norm='rmsnorm', mlp='swiglu', qk_norm=is_qwen3, bias=theirs.get('attention_bias', False),
        tie_weights=theirs.get('tie_word_embeddings', False), norm_eps=theirs.get('rms_norm_eps', 1e-6),
        rope_theta=float(rope_theta))


def load_nanogpt(path):
    """The content of a ckpt.pt, its tensors mapped into memory.

    The names in `model` lose torch.compile's prefix; the causal masks of old versions are left out.
    """
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        saved['model'] = {name.removeprefix('_orig_mod.'): tensor for name, tensor in saved['model'].items()
                          if not name.endswith('.attn.bias')}
        saved['model_args'].items()
    except OSError:
        raise
    except Exception as error:  # torch.load raises errors of many kinds for files of another format
        raise ValueError(f'{path} is not a ckpt.pt of nanoGPT, or holds more than tensors and plain values, '
                         f'which might run code: it was not loaded ({type(error).__name__})') from None
    return saved


def read_nanogpt(path):
    """GPTConfig arguments, {our name: tensor} and tokenizer meta of a ckpt.pt."""
    saved = load_nanogpt(path)
    arguments = {key: value for key, value in saved['model_args'].items() if key in NANOGPT_KEYS}
    weights = {name: tensor for name, tensor in saved['model'].items() if name != 'lm_head.weight'}  # tied
    default_meta = GPT2_META if arguments['vocab_size'] in GPT2_VOCAB_SIZES else None
    return arguments, split_qkv(weights), saved.get('tokenizer', default_meta)


# --- our tensors and theirs ---------------------------------------------------------------------------------

def split_qkv(tensors):
    """Split each c_attn, rows of queries, keys and values, into c_q, c_k and c_v; leave out causal masks."""
    split = {}
    for name, tensor in tensors.items():
        if '.attn.c_attn.' in name:
            for part, rows in zip('qkv', tensor.chunk(3)):
                split[name.replace('c_attn', f'c_{part}')] = rows
        elif not name.endswith(('.attn.bias', '.attn.masked_bias')):
            split[name] = tensor
    return split


def pack_qkv(tensors):
    """The inverse of split_qkv, in nanoGPT's order: token table, position table, blocks."""
    packed = {}
    for name in sorted(tensors, key=lambda name: ('.wte.' not in name, '.wpe.' not in name)):
        if '.attn.c_q.' in name:
            qkv = [tensors[name.replace('c_q', f'c_{part}')] for part in 'qkv']
            packed[name.replace('c_q', 'c_attn')] = torch.cat(qkv)
        elif '.attn.c_k.' not in name and '.attn.c_v.' not in name:
            packed[name] = tensors[name]
    return packed


def transpose_matrices(tensors):
    """Transpose the blocks' matrices: GPT-2 of Hugging Face has them (in, out), nanoGPT and we (out, in)."""
    return {name: tensor.t() if '.h.' in name and tensor.dim() == 2 else tensor
            for name, tensor in tensors.items()}


def tensors_from_gpt2(tensors):
    prefixed = {}  # older files leave out the prefix of the names
    for name, tensor in tensors.items():
        has_prefix = name.startswith(('transformer.', 'lm_head.'))
        prefixed[name if has_prefix else f'transformer.{name}'] = tensor
    return split_qkv(transpose_matrices(prefixed))


def tensors_to_gpt2(tensors):
    with_biases = dict(tensors)
    for name, tensor in tensors.items():
        if '.h.' in name or '.ln_f.' in name:
            with_biases.setdefault(name.replace('weight', 'bias'), torch.zeros(len(tensor)))
    return transpose_matrices(pack_qkv(with_biases))


def tensors_from_llama(tensors):
    for our_part, their_part in reversed(LLAMA_NAMES):
        tensors = {name.replace(their_part, our_part): tensor for name, tensor in tensors.items()}
    return tensors


def tensors_to_llama(tensors):
    for our_part, their_part in LLAMA_NAMES:
        tensors = {name.replace(our_part, their_part): tensor for name, tensor in tensors.items()}
    return tensors


# --- from a run ---------------------------------------------------------------------------------------------

def export_weights(source, target, which='best', dtype='float32'):
    """Write the weights of a run for other software. ValueError if the model has no standard form.

    source, which: as in checkpoint.choose. dtype: of the weights, 'float32', 'bfloat16' or 'float16'.
    target: a new file that ends in .pt, for nanoGPT, or a new folder, for Hugging Face.
    """
    path = checkpoint.choose(source, which)
    if not path:
        raise ValueError(f'there is no checkpoint to export in {source}')
    if os.path.exists(target):
        raise ValueError(f'{target} exists already: name another')
    if problem := checkpoint.damage(path):
        raise ValueError(f'{path} is damaged ({problem}): export another')
    state = checkpoint.read_state(path)
    config = GPTConfig(**state['model'])
    to_nanogpt = target.endswith('.pt')
    if unknown := keys_without_standard_form(config, to_nanogpt):
        lack = 'nanoGPT does not have' if to_nanogpt else 'no standard form has'
        raise ValueError(f'{path} has {", ".join(unknown)}, which {lack}: '
                         'it stays with our own sample.py and train.py')
    write = write_nanogpt if to_nanogpt else write_hugging_face
    write(target, path, config, state, getattr(torch, dtype))
    print(f'wrote {target} from {path}')


def keys_without_standard_form(config, to_nanogpt):
    """The entries of a GPTConfig, as 'key=value', that nanoGPT's or Hugging Face's form cannot represent."""
    if config.pos == 'learned' or to_nanogpt:
        known = dict(pos=['learned'], norm=['layernorm'], mlp=['gelu', 'gelu_tanh'],
                     n_kv_head=[config.n_head], qk_norm=[False], softcap=[0],
                     head_width=[config.n_embd / config.n_head])
    else:
        known = dict(pos=['rope'], norm=['rmsnorm'], mlp=['swiglu'], softcap=[0],
                     bias=[False] if config.qk_norm else [False, True])
    if to_nanogpt:
        known |= dict(mlp=['gelu'], tie_weights=[True], norm_eps=[1e-5], n_hidden=[4 * config.n_embd])
    return [f'{key}={getattr(config, key)}' for key in known if getattr(config, key) not in known[key]]


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
    if all('exp_avg' in their_state for their_state in states.values()):  # Muon's matrices have none
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
    """Write a checkpoint as a folder for transformers: GPT-2, Llama, or Qwen3 (Llama with QK-norm)."""
    from safetensors.torch import save_file
    weights, _ = load_unpadded(path, config, with_optimizer=False)
    tokenizer = get_tokenizer(state['tokenizer']) if state['tokenizer'] else None
    end = tokenizer.eot if tokenizer else None
    ends = dict(bos_token_id=end, eos_token_id=end)
    theirs = dict(
        vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights,
        torch_dtype=str(dtype).removeprefix('torch.'), pad_token_id=None, **ends,
        kilogpt=dict(model=dataclasses.asdict(config), tokenizer=state['tokenizer']))
    if config.pos == 'learned':
        theirs |= gpt2_config(config)
        tensors = tensors_to_gpt2(weights)
    else:
        theirs |= llama_config(config)
        tensors = tensors_to_llama(weights)
    os.makedirs(target)
    if tokenizer:
        for name, content in tokenizer.hugging_face(config.block_size).items():
            write_json(os.path.join(target, name), content)
    write_json(os.path.join(target, 'generation_config.json'), ends)
    tensor_file = os.path.join(target, 'model.safetensors')
    config_file = os.path.join(target, 'config.json')
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tensor_file, metadata=dict(format='pt'))
    write_json(config_file, theirs)
    shutil.copymode(config_file, tensor_file)  # safetensors lets no one but the owner read the file


def gpt2_config(config):
    """The entries of config.json that are GPT-2's."""
    return dict(
        architectures=['GPT2LMHeadModel'], model_type='gpt2',
        n_positions=config.block_size, n_ctx=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
        n_head=config.n_head, n_inner=config.n_hidden, layer_norm_epsilon=config.norm_eps,
        activation_function='gelu' if config.mlp == 'gelu' else 'gelu_new',
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama_config(config):
    """The entries of config.json that are Llama's or Qwen3's."""
    if config.qk_norm:
        kind = dict(architectures=['Qwen3ForCausalLM'], model_type='qwen3')
    else:
        kind = dict(architectures=['LlamaForCausalLM'], model_type='llama', mlp_bias=config.bias)
    return kind | dict(
        max_position_embeddings=config.block_size, hidden_size=config.n_embd,
        intermediate_size=config.n_hidden, hidden_act='silu', num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head, head_dim=config.head_width,
        attention_bias=config.bias, rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta)


# --- to a run -----------------------------------------------------------------------------------------------

def import_weights(source, out_dir, dataset=None):
    """Make out_dir a run's folder whose checkpoint holds the weights of other software.

    source: as in read_weights; a ckpt.pt gives its iteration, losses and AdamW's moments too.
    dataset: its meta.json names the tokenizer, if the source does not. ValueError if out_dir has checkpoints.
    """
    if checkpoint.find(out_dir):
        raise ValueError(f'{out_dir} has checkpoints already: name another folder')
    arguments, weights, meta = read_weights(source)
    if dataset:
        meta = read_meta(os.path.join(DATA, dataset))
    if meta and meta['vocab_size'] > arguments['vocab_size']:
        raise ValueError(f'{dataset or source} has {meta["vocab_size"]} tokens, the weights have '
                         f'{arguments["vocab_size"]}: name the dataset they were trained with, '
                         'once it is prepared')
    parameters = list(GPT(GPTConfig(**arguments), seed=None).named_parameters())
    for name, parameter in parameters:
        parameter.detach().copy_(pad_rows(weights[name], parameter.shape))
    saved = load_nanogpt(source) if os.path.isfile(source) else {}
    run = saved.get('config', {})
    iteration = saved.get('iter_num', 0)
    sequences = iteration * run.get('gradient_accumulation_steps', 0) * run.get('batch_size', 0)
    loss = saved.get('best_val_loss')
    loss = None if loss is None or loss >= 1e9 else float(loss)  # nanoGPT has 1e9 until it has evaluated
    state = dict(
        iteration=iteration, tokens=sequences * run.get('block_size', 0), val_loss=loss, best_val_loss=loss,
        skipped=[0, 0], wandb_id=None, scaler=torch.amp.GradScaler('cpu').state_dict(),
        model=arguments, tokenizer=meta, config=run)
    saver = checkpoint.Saver(out_dir, keep=1)
    path = saver.save(iteration, parameters, nanogpt_optimizer(saved, parameters), state)
    if saver.problem:
        raise OSError(f'{out_dir} could not be written ({saver.problem})')
    print(f'wrote {path}: continue with python sample.py --out_dir={out_dir}, '
          f'or train.py --init_from={out_dir}')


def nanogpt_optimizer(saved, parameters):
    """AdamW of our parameters with the moments in a ckpt.pt's content; None if the content has none."""
    moments = saved.get('optimizer', {}).get('state')
    if not moments:
        return None
    optimizer = build_adamw(parameters, 0.0, 0.0, (0.0, 0.0))
    names = [name for name in saved['model'] if name != 'lm_head.weight']
    names.sort(key=lambda name: saved['model'][name].dim() < 2)  # nanoGPT's optimizer takes matrices first
    step = torch.as_tensor(moments[0]['step']).float()
    for kind in MOMENTS:
        values = split_qkv({name: moments[i][kind] for i, name in enumerate(names)})
        for name, parameter in parameters:
            optimizer.state[parameter] |= {kind: pad_rows(values[name], parameter.shape), 'step': step}
    return optimizer
