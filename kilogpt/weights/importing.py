"""Read weights of other software: Hugging Face folders, GGUF files, and nanoGPT's ckpt.pt. exporting.py writes them.

A model that is larger than memory is read and written tensor by tensor. Reading a file never runs code from
it: only tensors, plain values and JSON are accepted.
"""
import contextlib
import dataclasses
import math
import os
from functools import partial

import torch

from data import hub, storage
from data.tokens import copy_tokenizer, tokenizer_folder
from data.tokens.json_tokenizer import JsonTokenizer, load_tokenizer
from kilogpt.configurator import announced
from kilogpt.optim import build_adamw
from kilogpt.run import checkpoint
from kilogpt.weights import families, nanogpt, peft
from kilogpt.weights.adapters import digest_of, merged, plain_config
from kilogpt.weights.any_tokenizer import find_meta, unpack
from kilogpt.weights.checkpoint_tensors import drop_copied_head, expected_shapes, open_weights
from kilogpt.weights.folders import open_folder, read_json, refuse_quantized
from kilogpt.weights.tensors import checked, pad_rows
from model import GPT, GPTConfig

GPT2_META = dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2')
GPT2_VOCAB_SIZES = (50257, 50304)  # nanoGPT pads to the second
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights that our model can take


# --- reading ------------------------------------------------------------------------------------------------

def read_weights(source):
    """Open weights that were trained elsewhere.

    source: a Hugging Face folder (config.json, and safetensors or pytorch_model.bin), a file that ends with
    .gguf, a ckpt.pt of nanoGPT, or a name on the hub, as hub.is_name takes it, from where they are downloaded.
    Returns (GPTConfig arguments, {our name: LazyTensor}, meta of the tokenizer). Tensors have the file's dtype.
    The meta is None if the tokenizer is not one of ours. A head that differs from the token table is kept,
    even if the file says that the two are tied.
    OSError if the weights are not available, ValueError if our model cannot represent them. NaN and infinity
    are a ValueError when the tensor that has them is read.
    """
    if storage.is_url(source):
        with contextlib.suppress(FileNotFoundError):
            source = storage.local_copy(source)
    if hub.is_name(source) and (place := hub.parse(source)).path:
        source = hub.fetch_file(place)
    if not os.path.exists(source) and not hub.is_name(source):
        raise ValueError(f"{source!r} does not exist: name a run's folder, a checkpoint (ckpt/iter_*), "
                         f"a Hugging Face folder, a GGUF file, nanoGPT's ckpt.pt, org/name on the hub, or "
                         f"{', '.join(hub.GPT2_NAMES)} (and --init_from of train.py takes scratch, resume, auto)")
    read = read_hugging_face
    if os.path.isfile(source):
        read = read_nanogpt if is_nanogpt(source) else read_gguf_file
    try:
        arguments, weights, meta = read(source)
        check_types(source, arguments, meta)
        with naming(source):
            config = GPTConfig(**arguments)
        expected = expected_shapes(config)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [''])[0]
        raise ValueError(f'the config of {source} has a missing or wrong entry '
                         f'({type(error).__name__}: {first_line})') from None
    for name in sorted(expected.keys() | weights.keys()):
        shape = weights[name].shape if name in weights else None
        if shape != expected.get(name):
            raise ValueError(f'{source} has {name} with shape {shape}, but its config requires '
                             f'{expected.get(name)}')
        if weights[name].dtype not in DTYPES:
            raise ValueError(f'{source} has {name} in {weights[name].dtype}, and may be quantized: use '
                             'weights in float32, bfloat16 or float16')
    return dataclasses.asdict(config), {name: weights[name] for name in expected}, meta


@contextlib.contextmanager
def naming(source, action='loaded'):
    """A context in which a ValueError gets the name of the source of the weights."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'{source} cannot be {action}: {error}') from None


def check_types(source, arguments, meta):
    """ValueError unless GPTConfig arguments and a tokenizer's meta have values of their types."""
    for field in dataclasses.fields(GPTConfig):
        value = arguments.get(field.name, field.default)
        is_right = type(value) is field.type or (field.type is float and type(value) is int)
        if not is_right or (field.type is float and not math.isfinite(value)):
            raise ValueError(f'the config of {source} has a missing or wrong entry: {field.name} would be '
                             f'{value!r}, but must be of type {field.type.__name__}')
    if meta is not None and not (isinstance(meta, dict) and type(meta.get('vocab_size')) is int):
        raise ValueError(f'{source} names a tokenizer without its vocab_size: remove the entry tokenizer')


def check_finite_values(weights):
    """Read all of {name: LazyTensor}, one tensor at a time: ValueError if a tensor has NaN or infinity."""
    for stored in weights.values():
        stored.whole()


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


def read_hugging_face(source):
    """(GPTConfig arguments, {our name: LazyTensor}, tokenizer meta) of a folder, or of a name on the hub."""
    folder = source if os.path.isdir(source) else fetch_weights(source)
    hf_config, tensors = open_folder(folder)
    arguments, tensors = from_standard_form(hf_config, tensors, folder)
    return arguments, tensors, find_tokenizer(folder, hf_config)


def read_gguf_file(path):
    """(GPTConfig arguments, {our name: LazyTensor}, tokenizer meta) of a GGUF file."""
    from kilogpt.weights.gguf.files import read_gguf
    hf_config, tensors, write_tokenizer = read_gguf(path)
    tensors = {name: checked(stored, path, name, 'use other weights') for name, stored in tensors.items()}
    arguments, tensors = from_standard_form(hf_config, tensors, path)
    return arguments, tensors, unpack(path, write_tokenizer) if write_tokenizer else None


def from_standard_form(hf_config, tensors, source):
    """(GPTConfig arguments, {our name: LazyTensor}) from config.json's entries and {their name: LazyTensor}."""
    arguments = families.arguments_of(hf_config, source)
    ours = hf_config.get('kilogpt', {})  # added by our own export
    arguments['dropout'] = ours.get('model', {}).get('dropout', 0.0)
    with naming(source):
        tensors = families.to_ours(tensors, hf_config, arguments)
    if hf_config['model_type'] == 'gpt2' and ours and not ours['model']['bias']:
        biases = [name for name in tensors if name.endswith('.bias')]
        if not any(tensors[name].whole().any() for name in biases):  # GPT-2 has biases, our model had none
            arguments['bias'] = False
            tensors = {name: stored for name, stored in tensors.items() if name not in biases}
    if arguments['tie_weights']:
        drop_copied_head(tensors)
        arguments['tie_weights'] = 'lm_head.weight' not in tensors
    return arguments, tensors


def read_nanogpt(path):
    """(GPTConfig arguments, {our name: LazyTensor}, tokenizer meta) of a ckpt.pt."""
    saved = nanogpt.load_nanogpt(path)
    arguments, tensors = nanogpt.open_model(saved)
    default_meta = GPT2_META if arguments['vocab_size'] in GPT2_VOCAB_SIZES else None
    return arguments, tensors, saved.get('tokenizer', default_meta)


def is_nanogpt(source):
    """Whether a source of read_weights is a ckpt.pt of nanoGPT."""
    return os.path.isfile(source) and not source.endswith('.gguf')


def find_tokenizer(folder, hf_config):
    """The meta of the tokenizer of a Hugging Face folder, or None. hf_config: the content of its config.json."""
    if 'tokenizer' in hf_config.get('kilogpt', {}):
        meta = hf_config['kilogpt']['tokenizer']
        return meta | {'folder': folder} if meta and 'digest' in meta else meta
    if hf_config['model_type'] == 'gpt2' and hf_config['vocab_size'] in GPT2_VOCAB_SIZES:
        return GPT2_META
    if os.path.exists(os.path.join(folder, JsonTokenizer.name)):
        return load_tokenizer(folder).meta()
    return None


def fetch_weights(name):
    """The folder with the weights of a name on the hub, downloaded if necessary and if our model can have them.

    The errors of hub.fetch, and ValueError for a model of another kind, before its weights are downloaded.
    """
    if read_config(name):
        read_arguments(name)
    return hub.fetch(hub.parse(name), hub.choose_weights)


def read_config(name):
    """The content of config.json of a name on the hub; {} without one."""
    folder = hub.fetch(hub.parse(name), hub.choose_config)
    path = os.path.join(folder, 'config.json')
    return read_json(path) if os.path.exists(path) else {}


def read_arguments(name):
    """The GPTConfig arguments of a name on the hub, of which the config alone is downloaded."""
    hf_config = read_config(name)
    kinds = hf_config.get('architectures') or []
    arguments = families.arguments_of(hf_config, name)
    if kinds and not any(kind.endswith(('ForCausalLM', 'LMHeadModel')) for kind in kinds):
        raise ValueError(f'{name} is of the kind {", ".join(kinds)} (architectures in its config.json), which does not '
                         'write text: name a model whose kind ends in ForCausalLM')
    refuse_quantized(name, hf_config)
    return arguments


# --- from a run ---------------------------------------------------------------------------------------------

def open_run(path, state):
    """(GPTConfig, {our name: LazyTensor}) of a checkpoint, whose adapters are merged into their base.

    state: its state.json. ValueError if the base is not there, or if it is another one.
    """
    config = GPTConfig(**state['model'])
    if not config.lora_rank:
        return config, open_weights(path, config)
    weights = open_weights(path, config, open_base(state['base'], path))
    return plain_config(config), merged(weights, config)


def open_source(source):
    """(GPTConfig arguments, {our name: LazyTensor}, tokenizer meta) of a run, or of a source of read_weights."""
    path = checkpoint.choose(source)
    if not path:
        return read_weights(source)
    state = checkpoint.read_state(path)
    config, weights = open_run(path, state)
    return dataclasses.asdict(config), weights, state['tokenizer']


def open_base(base, path):
    """{our name: LazyTensor} of the base of adapters.

    base: as in state.json. path: of the checkpoint of the adapters.
    """
    source = base['source']
    if not (storage.is_url(source) or os.path.exists(source) or hub.is_name(source)):
        raise ValueError(f'{path} holds adapters for {source}, which does not exist: put that base there '
                         'again, or a link to it')
    _, weights, _ = open_source(source)
    digest = digest_of(weights)
    if digest != base['digest']:
        raise ValueError(f'{path} holds adapters for {source}, which has other weights now (digest {digest} '
                         f'instead of {base["digest"]}): put the former weights there, or train new adapters '
                         f'by --init_from={source} and another out_dir')
    return weights


# --- to a run -----------------------------------------------------------------------------------------------

def import_weights(source, out_dir, tokenizer='', base=''):
    """Make a run's folder out_dir with a checkpoint of weights of other software.

    source: as in read_weights, or adapters of PEFT, in a folder or on the hub, whose base is `base`, as in
    open_source, if they do not name it. The iteration, losses and AdamW's moments of a ckpt.pt are also imported.
    tokenizer: as in choose_tokenizer. ValueError if out_dir has checkpoints.
    """
    if checkpoint.find(out_dir):
        raise ValueError(f'{out_dir} already has checkpoints: choose another folder')
    if hub.is_name(source) and not hub.parse(source).path and not read_config(source):
        source = fetch_weights(source)  # a folder, perhaps of adapters
    if peft.is_adapter(source):
        arguments, weights, meta, base = read_adapter(source, base)
    else:
        arguments, weights, meta = read_weights(source)
    meta = choose_tokenizer(tokenizer, meta, source, arguments['vocab_size'])
    with announced(f'reading {source}'):
        check_finite_values(weights)
    saved = nanogpt.load_nanogpt(source) if is_nanogpt(source) else {}
    run = saved.get('config', {})
    iteration = saved.get('iter_num', 0)
    sequences = iteration * run.get('gradient_accumulation_steps', 0) * run.get('batch_size', 0)
    loss = saved.get('best_val_loss')
    loss = None if loss is None or loss >= 1e9 else float(loss)  # nanoGPT has 1e9 before an evaluation
    state = dict(
        iteration=iteration, tokens=sequences * run.get('block_size', 0), val_loss=loss, best_val_loss=loss,
        skipped=[0, 0], wandb_id=None, scaler=torch.amp.GradScaler('cpu').state_dict(),
        model=arguments, tokenizer=meta, config=run, base=base or None)
    saver = checkpoint.Saver(out_dir, keep=1)
    copy_tokenizer(meta, tokenizer_folder(out_dir))
    with torch.device('meta'):
        model = GPT(GPTConfig(**arguments), seed=None)
    parameters = [(name, p) for name, p in model.named_parameters() if name in weights]
    values = {f'model.{name}': partial(pad_rows, weights[name], p.shape) for name, p in parameters}
    optimizer = nanogpt_optimizer(source, saved, parameters, values)
    with announced(f'writing {out_dir}'):
        path = saver.save(iteration, parameters, optimizer, state, values=values)
    if saver.problem:
        raise OSError(f'{out_dir} could not be written ({saver.problem})')
    print(f'wrote {path}: continue with python sample.py --out_dir={out_dir}, '
          f'or train.py --init_from={out_dir}')


def read_adapter(folder, base):
    """(GPTConfig arguments, {our name: LazyTensor}, tokenizer meta, base for state.json) of adapters of PEFT.

    base: the source of its base, or '' for the one that adapter_config.json names.
    """
    entries = peft.read_entries(folder)
    base = base or peft.base_of(entries)
    arguments, weights, meta = open_source(base)
    keys, adapters = peft.read_adapter(folder, entries, GPTConfig(**arguments))
    arguments |= keys
    expected = expected_shapes(GPTConfig(**arguments))
    for name, stored in adapters.items():
        if stored.shape != expected[name]:
            raise ValueError(f'{folder} has {name} with shape {stored.shape}, but the base {base} requires '
                             f'{expected[name]}: name its base with --base')
    return arguments, adapters, meta, describe_base(base, weights)


def describe_base(source, weights):
    """What state.json keeps of a base. source: as in open_source. weights: {our name: LazyTensor}."""
    if hub.is_name(source):
        source = hub.pinned(source)
    elif not storage.is_url(source):
        source = os.path.abspath(checkpoint.choose(source) or source)
    return dict(source=source, digest=digest_of(weights))


def describe_weights(source):
    """The {'source', 'digest'} of any weights, those of a run's adapters merged. source: as in open_source."""
    return describe_base(source, open_source(source)[1])


def nanogpt_optimizer(path, saved, parameters, values):
    """AdamW with the moments in a ckpt.pt, on the meta device like the parameters; None if it has no moments.

    saved: the content of the ckpt.pt. values: as in `Saver.save`; the moments are added.
    """
    moments = nanogpt.open_moments(path, saved)
    if not moments:
        return None
    optimizer = build_adamw(parameters, 0.0, 0.0, (0.0, 0.0))
    step = torch.as_tensor(saved['optimizer']['state'][0]['step']).float()
    for name, parameter in parameters:
        check_finite_values(moments[name])
        optimizer.state[parameter]['step'] = step
        values[f'optimizer.{name}.step'] = lambda: step
        for kind, stored in moments[name].items():
            optimizer.state[parameter][kind] = torch.empty_like(parameter)
            values[f'optimizer.{name}.{kind}'] = partial(pad_rows, stored, parameter.shape)
    return optimizer
