"""Write the weights of a run for other software: folders of Hugging Face and PEFT, GGUF files, nanoGPT's ckpt.pt."""
import dataclasses
import os
import shutil
import tempfile

import torch

from data import hub
from data.tokens import portable
from data.tokens.chat_template import DEFAULT_TEMPLATE, find_template
from data.tokens.tokenizer import CharTokenizer, describe_tokenizer, get_tokenizer
from kilogpt.configurator import announced
from kilogpt.run import checkpoint
from kilogpt.run.checkpoint_files import write_json
from kilogpt.weights import families, nanogpt, peft
from kilogpt.weights.adapters import plain_config
from kilogpt.weights.checkpoint_tensors import open_weights
from kilogpt.weights.importing import choose_tokenizer, naming, open_base, open_run
from kilogpt.weights.model_card import write_adapter_card, write_model_card
from kilogpt.weights.safetensors_files import write_safetensors
from model import GPTConfig


def export_weights(source, target, which='best', dtype='float32', tokenizer='', family='', adapter=False):
    """Write the weights of a run for other software. ValueError if the model has no standard form.

    adapter: write a run's adapters alone, for PEFT, rather than merge them into their base.

    source, which: as in checkpoint.choose. dtype: 'float32', 'bfloat16', 'float16', or 'q8_0' for GGUF.
    tokenizer: as in choose_tokenizer. family: as in families.entries_of.
    target: a new file that ends with .pt for nanoGPT or with .gguf for llama.cpp, or a new folder for
    Hugging Face.
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
    to_nanogpt, to_gguf = target.endswith('.pt'), target.endswith('.gguf')
    if dtype == 'q8_0' and not to_gguf:
        raise ValueError(f'dtype is q8_0, which only a GGUF file can have: let {target} end with .gguf')
    if to_nanogpt and (unknown := nanogpt.keys_without_form(config)):
        raise ValueError(f'{path} has {", ".join(unknown)}, which nanoGPT does not have: '
                         'use the checkpoint with our own sample.py and train.py')
    if adapter and (to_nanogpt or to_gguf or not config.lora_rank):
        raise ValueError(f'--adapter writes the adapters of a run into a folder, but {path} has lora_rank='
                         f'{config.lora_rank}, and the target is {target}: leave --adapter out')
    state['tokenizer'] = choose_tokenizer(tokenizer, state['tokenizer'], path, config.vocab_size)
    with announced(f'writing {target}'):
        if to_nanogpt:
            nanogpt.write_nanogpt(target, path, config, state, getattr(torch, dtype))
        else:
            with naming(path, 'exported'):
                entries = families.entries_of(plain_config(config), family)
            tokenizer = get_tokenizer(state['tokenizer']) if describe_tokenizer(state['tokenizer']) else None
            end = tokenizer.eot if tokenizer else None
            entries |= dict(bos_token_id=end, eos_token_id=end, pad_token_id=None)
            if adapter:
                write_adapters(target, path, state, entries, tokenizer, dtype)
            else:
                config, weights = open_run(path, state)
                tensors = families.to_hf_names(weights, entries, config)
                write = write_gguf_file if to_gguf else write_hugging_face
                write(target, config, state, entries, tensors, tokenizer, dtype)
    print(f'wrote {target} from {path}')


def write_adapters(target, path, state, entries, tokenizer, dtype):
    """Write a folder for PEFT: a run's adapters, the tokenizer, and the base, for transformers, if only we can read it.

    path: of the checkpoint. The other arguments are those of write_hugging_face.
    """
    config, base = GPTConfig(**state['model']), state['base']
    weights = open_base(base, path)
    if not is_for_transformers(base['source']):
        base = base | dict(source=os.path.join(os.path.abspath(target), 'base'))
    try:
        peft.write_adapter(target, open_weights(path, config, weights), config, base, entries['model_type'],
                           getattr(torch, dtype))
        if tokenizer:
            save_tokenizer(tokenizer, target, config, state)
        write_adapter_card(target, config, state, base['source'])
        if base is not state['base']:
            untrained = state | dict(iteration=0, val_loss=None, config={})  # the base is not what the run trained
            write_hugging_face(base['source'], plain_config(config), untrained, entries,
                               families.to_hf_names(weights, entries, plain_config(config)), tokenizer, dtype)
            print(f'{state["base"]["source"]} is nothing that peft can load: it is in {base["source"]} too')
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def is_for_transformers(source):
    """Whether a source of read_weights is one that transformers loads too: a name on the hub, or its folder."""
    is_folder = os.path.exists(os.path.join(source, 'config.json')) and not checkpoint.choose(source)
    return is_folder or hub.is_name(source) and not hub.parse(source).path


def write_gguf_file(target, config, state, entries, tensors, tokenizer, dtype):
    """Write a GGUF file. The arguments are those of write_hugging_face."""
    from kilogpt.weights.gguf.files import write_gguf
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is None or isinstance(tokenizer, CharTokenizer):  # llama.cpp does not know alphabets
            write_gguf(target, entries, tensors, None, dtype)
        else:
            save_tokenizer(tokenizer, folder, config, state)
            write_gguf(target, entries, tensors, folder, dtype)


def save_tokenizer(tokenizer, folder, config, state):
    """Write the files of a run's tokenizer, with the template by which its conversations were written.

    Without a template of its own that is the default one, which other programs do not know.
    """
    tokenizer.save(folder, config.block_size)
    if state['tokenizer'].get('flags') and not find_template(tokenizer.files):
        with open(os.path.join(folder, 'chat_template.jinja'), 'w', encoding='utf-8') as file:
            file.write(DEFAULT_TEMPLATE)


def write_hugging_face(target, config, state, entries, tensors, tokenizer, dtype):
    """Write a folder for transformers.

    state: of the checkpoint. entries: of config.json. tensors: {their name: LazyTensor}. tokenizer: or None.
    """
    theirs = entries | dict(torch_dtype=dtype, dtype=dtype, kilogpt=dict(
        model=dataclasses.asdict(config), tokenizer=portable(state['tokenizer'])))
    os.makedirs(target)
    try:
        if tokenizer:
            save_tokenizer(tokenizer, target, config, state)
        if not os.path.exists(os.path.join(target, 'generation_config.json')):
            ends = {key: entries[key] for key in ('bos_token_id', 'eos_token_id')}
            write_json(os.path.join(target, 'generation_config.json'), ends)
        write_model_card(target, config, state, entries, dtype)
        write_safetensors(target, tensors, getattr(torch, dtype))
        write_json(os.path.join(target, 'config.json'), theirs)  # last: a folder without it is not complete
    except BaseException:
        shutil.rmtree(target)
        raise
