"""Save, find and load checkpoints; weights in and out.

    python checkpoint.py export out-shakespeare-char shakespeare-hf
    python checkpoint.py import ckpt.pt out-imported
    python checkpoint.py inspect out-shakespeare-char

out_dir/ckpt/iter_00000250/ is a torch.distributed.checkpoint directory of tensors alone (weights as `model.<name>`, optimizer
moments as `optimizer.<name>.<kind>`), with state.json for all else a run needs to go on, and checksums.json. It is written
aside and renamed when complete, so one that is there is whole.
"""
import argparse
import dataclasses
import fcntl
import glob
import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from kilogpt.configurator import exit_on_error
from data.loader import read_meta
from data.tokenizer import get_tokenizer
from model import GPT, GPTConfig
from kilogpt.optim import build_adamw, local_part

warnings.filterwarnings('ignore', 'torch.distributed is disabled')  # DCP says that one process is one process


def find(out_dir):
    """Paths of the complete checkpoints of a run, the newest first."""
    folders = [path for path in glob.glob(os.path.join(glob.escape(out_dir), 'ckpt', 'iter_*'))
               if re.fullmatch(r'iter_\d+', os.path.basename(path)) and os.path.exists(os.path.join(path, '.metadata'))]
    return sorted(folders, key=lambda path: int(path.rsplit('_', 1)[1]), reverse=True)


def find_best(out_dir):
    """The complete checkpoint of least validation loss; the newest where none was evaluated; None where there is none."""
    folders = find(out_dir)
    return min(folders, key=_val_loss, default=None)


def _val_loss(path):
    try:
        loss = read_state(path)['val_loss']
    except (OSError, ValueError, KeyError):  # damaged: not the best, and not a reason to fail here
        loss = None
    return float('inf') if loss is None or loss != loss else loss


def read_state(path):
    """state.json of a checkpoint: all that is no tensor."""
    with open(os.path.join(path, 'state.json'), encoding='utf-8') as file:
        return json.load(file)


class Saver:
    """Saves the checkpoints of a run. All processes call it alike, and write together, one checkpoint at a time.

    A save in the background costs training a copy of the tensors to host memory, which is kept for the next: 12 bytes a
    parameter for AdamW, divided by the processes. What was due meanwhile waits. A save that fails (a full disk, a
    folder gone) leaves what was there, prints a warning, and sets `problem` to it until the next has succeeded.
    """

    def __init__(self, out_dir, keep):
        """keep: complete checkpoints besides the best. In a process group: called by every process."""
        self.folder, self.out_dir, self.keep, self.problem = os.path.join(out_dir, 'ckpt'), out_dir, keep, None
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # of its own, since another thread talks in it
        self.group = dist.new_group(backend='gloo', group_desc='checkpoint') if dist.is_initialized() else None
        # of one OpenMP thread: a second pool of them, even if it idles, makes libgomp wake up the first one's slowly, at half the speed
        self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.pending, self.copies = None, {}

    def save(self, iteration, parameters, optimizer, state, background=False):
        """Save a checkpoint, then delete all but the newest and the best; returns its path.

        parameters: [(name, parameter)], those of one name being copies. optimizer: was given its parameters with their names.
        state: JSON-serialisable; `val_loss` in it (a float or None) is what makes a checkpoint the best.
        """
        self.wait()
        tensors = self._mine(_tensors(parameters, optimizer))
        path = os.path.join(self.folder, f'iter_{iteration:08d}')
        self.pending = self.thread.submit(self._write, path, self._copied(tensors) if background else tensors, state)
        if not background:
            self.wait()
        return path

    def prepare(self, parameters, optimizer):
        """Have the host memory for the copies ready before the first save in the background, which need not wait for it then."""
        if not self.copies and self.pending is None:
            self.pending = self.thread.submit(self._copied, self._mine(_tensors(parameters, optimizer)))

    def wait(self):
        """Until no save is under way."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def _mine(self, tensors):
        """Of tensors that every process holds whole each saves its part; of sharded ones DCP sorts out the copies."""
        whole = [key for key, tensor in tensors if tensor.dim() and not hasattr(tensor, 'placements')]
        others = {key for i, key in enumerate(whole) if i % self.world_size != self.rank}
        return {key: tensor for key, tensor in tensors if key not in others}

    def _copied(self, tensors):
        if self.copies.keys() != tensors.keys():
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
            on_gpu = any(local_part(tensor).is_cuda for tensor in tensors.values())
            self.copies = DefaultStager(StagingOptions(use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False,
                                                       use_non_blocking_copy=on_gpu)).stage(tensors)
        else:  # as fast as memory goes, where the stager is a third of that on a CPU
            for key, tensor in tensors.items():
                local_part(self.copies[key]).copy_(local_part(tensor), non_blocking=True)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        return self.copies

    def _write(self, path, tensors, state):
        import torch.distributed.checkpoint as dcp  # here, since it takes half a second that a start need not wait for
        aside = path + '.tmp'
        checksums, problem = {}, None
        try:
            if self.rank == 0:
                for stray in glob.glob(os.path.join(glob.escape(self.folder), '*.tmp')):  # a save that was killed
                    shutil.rmtree(stray, ignore_errors=True)  # what stays is tried again; the others wait here
            if self.group:
                dist.barrier(self.group)
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(aside), process_group=self.group)
            checksums = _checksums(aside, f'__{self.rank}_*')
        except (Exception, dcp.api.CheckpointException) as error:  # whatever storage raises: training goes on
            problem = _cause(error)
        if self.group:
            gathered = [None] * self.world_size
            dist.all_gather_object(gathered, (checksums, problem), group=self.group)
            checksums = {name: value for part, _ in gathered for name, value in part.items()}
            problem = next((problem for _, problem in gathered if problem), None)
        if self.rank == 0 and not problem:
            try:
                _write_json(os.path.join(aside, 'state.json'), state)
                checksums |= _checksums(aside, '.metadata') | _checksums(aside, 'state.json')
                _write_json(os.path.join(aside, 'checksums.json'), checksums)
                _sync(aside)
                shutil.rmtree(path, ignore_errors=True)  # a damaged one that this run went back behind
                os.rename(aside, path)
                _sync(self.folder)
                for old in set(find(self.out_dir)[self.keep:]) - {find_best(self.out_dir)}:
                    os.rename(old, old + '.tmp')  # at once, so that none is there in part
                    shutil.rmtree(old + '.tmp', ignore_errors=True)  # the new one is saved all the same
            except OSError as error:
                problem = str(error)
        if self.group:  # so that all agree on whether to save once more
            outcome = [problem]
            dist.broadcast_object_list(outcome, src=0, group=self.group)
            problem = outcome[0]
        self.problem = problem
        if self.rank == 0 and problem:
            shutil.rmtree(aside, ignore_errors=True)
            last = next(iter(find(self.out_dir)), 'none')
            print(f'warning: {path} could not be saved ({problem}); the last good checkpoint is {last}. Make room or mend '
                  'the folder before the next save', file=sys.stderr, flush=True)


def _cause(error):
    """What went wrong in a save, in a line; DCP wraps it, with the traceback of each process."""
    while getattr(error, 'failures', None):
        error = next(iter(error.failures.values()))[0]
    return f'{type(error).__name__}: {(str(error).strip().splitlines() or [""])[0]}'


def damage(path, rank=0, world_size=1):
    """What is wrong with a checkpoint, in words, or None. Of several processes each reads its part of the files."""
    try:
        with open(os.path.join(path, 'checksums.json'), encoding='utf-8') as file:
            expected = sorted(json.load(file).items())
    except (OSError, ValueError):
        return 'checksums.json cannot be read'
    for name, checksum in expected[rank::world_size]:
        found = _checksums(path, name).get(name)
        if found is None:
            return f'{name} is missing'
        if found != checksum:
            return f'{name} is not as it was written'
    return None


def load(path, parameters, optimizer=None):
    """Fill parameters ([(name, parameter)], sharded or not) and optimizer from a checkpoint. ValueError where the model differs."""
    import torch.distributed.checkpoint as dcp
    reader = _reader(path)
    stored = reader.read_metadata().state_dict_metadata
    for name, parameter in parameters:
        found = stored.get(f'model.{name}')
        if found is None or found.size != parameter.shape:
            raise ValueError(f'{path} holds {tuple(found.size) if found else "nothing"} where the model has '
                             f'{name} {tuple(parameter.shape)}')
    if optimizer is not None:
        for name, parameter in _named(optimizer):
            prefix = f'optimizer.{name}.'
            for key in stored:
                if key.startswith(prefix):
                    kind, dtype = key.removeprefix(prefix), stored[key].properties.dtype
                    if stored[key].size == parameter.shape:  # a moment is laid out as its parameter is
                        optimizer.state[parameter][kind] = torch.zeros_like(parameter.detach(), dtype=dtype)
                    else:  # the step: a fused optimizer wants it beside the parameter, others on the CPU
                        device = parameter.device if optimizer.defaults.get('fused') else 'cpu'
                        optimizer.state[parameter][kind] = torch.zeros(stored[key].size, dtype=dtype, device=device)
    tensors, copies = {}, []
    for key, tensor in _tensors(parameters, optimizer):
        if key in tensors:
            copies.append((tensor, tensors[key]))
        tensors.setdefault(key, tensor)
    dcp.load(tensors, storage_reader=reader)
    for tensor, original in copies:
        tensor.copy_(original)


def _reader(path):
    """DCP's reader of a checkpoint, but its pickled .metadata may name no more than what DCP writes there: it runs nothing."""
    from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

    class Unpickler(pickle.Unpickler):
        allowed = {(kind.__module__, kind.__qualname__): kind for kind in (
            metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata,
            metadata.TensorProperties, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
            pathlib.PosixPath, pathlib.WindowsPath, torch.Size, torch.serialization._get_layout)}

        def find_class(self, module, name):
            module = module.removesuffix('._local')  # pathlib's, from Python 3.13 on
            found = self.allowed.get((module, name), getattr(torch, name, None) if module == 'torch' else None)
            if (module, name) not in self.allowed and not isinstance(found, torch.dtype):
                raise ValueError(f'{path}/.metadata names {module}.{name}, which no checkpoint of ours does: it was not loaded')
            return found

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            with open(os.path.join(path, '.metadata'), 'rb') as file:
                found = Unpickler(file).load()
            found.storage_meta.load_id = self.load_id
            return found

    return Reader(path)


def lock(out_dir, patience=30):
    """Hold out_dir against other runs, which would delete each other's checkpoints; the file to keep open meanwhile.

    One that still ends (of an elastic run on a node that was left out) is waited for, so many seconds. Raises ValueError then.
    """
    file = open(os.path.join(out_dir, '.lock'), 'a', encoding='utf-8')
    for waited in range(patience + 1):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if waited == 0:
                print(f'waiting for the run that is still at work in {out_dir}', flush=True)
            time.sleep(waited < patience)
        except OSError:  # storage that knows no locks
            break
    else:
        raise ValueError(f'another run is at work in {out_dir}: set another --out_dir, or end that one')
    return file


def set_aside(out_dir):
    """Move what an earlier run left in out_dir into a folder of its own within; returns that, or None if there is no run."""
    if not find(out_dir) and not os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
        return None
    folder = os.path.join(out_dir, time.strftime('earlier-%Y%m%d-%H%M%S'))
    os.makedirs(folder)
    for name in ('ckpt', 'metrics.jsonl', 'config.json'):
        if os.path.exists(os.path.join(out_dir, name)):
            os.rename(os.path.join(out_dir, name), os.path.join(folder, name))
    return folder


def _named(optimizer):
    return [pair for group in optimizer.param_groups for pair in zip(group['param_names'], group['params'])]


def _tensors(parameters, optimizer):
    """[(key in a checkpoint, tensor)]; tensors of one key are copies of each other."""
    tensors = [(f'model.{name}', parameter.detach()) for name, parameter in parameters]
    if optimizer is not None:
        tensors += [(f'optimizer.{name}.{kind}', tensor) for name, parameter in _named(optimizer)
                    for kind, tensor in optimizer.state.get(parameter, {}).items()]
    return tensors


def _checksums(folder, pattern):
    """{file name: [bytes, CRC-32]} of the files of a folder that match a pattern."""
    checksums = {}
    for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
        size, crc = 0, 0
        with open(path, 'rb') as file:
            while chunk := file.read(2 ** 24):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        checksums[os.path.basename(path)] = [size, crc]
    return checksums


def _sync(folder):
    """The names in a folder to disk; its files have been."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _write_json(path, content):
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


# --- weights that travel: Hugging Face folders, nanoGPT's ckpt.pt. Nothing in them is unpickled but tensors and plain values.

_GPT2_NAMES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')
_NANOGPT_KEYS = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')
_GPT2_META = dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2')
_TABLES = 'transformer.wte.weight', 'lm_head.weight'  # have rows of padding here, and nowhere else
_LLAMA_NAMES = [('transformer.h.', 'model.layers.'), ('transformer.wte.', 'model.embed_tokens.'), ('transformer.ln_f.', 'model.norm.'),
                ('.ln_1.', '.input_layernorm.'), ('.ln_2.', '.post_attention_layernorm.'), ('.c_fc.', '.up_proj.'),
                ('.c_gate.', '.gate_proj.'), ('.mlp.c_proj.', '.mlp.down_proj.'), ('.attn.', '.self_attn.'),
                ('_attn.c_proj.', '_attn.o_proj.'), ('.c_q.', '.q_proj.'), ('.c_k.', '.k_proj.'), ('.c_v.', '.v_proj.')]


def read_weights(source):
    """Weights trained elsewhere.

    source: a Hugging Face folder of GPT-2, Llama or Qwen3 form (config.json, safetensors), a ckpt.pt of nanoGPT, or 'gpt2',
    'gpt2-medium', 'gpt2-large', 'gpt2-xl', to be downloaded. Returns the GPTConfig arguments, a state dict under our names in
    the file's dtype (mapped, not read), and the meta of the tokenizer, None where it is not known to be one of ours.
    OSError where it cannot be had, ValueError where it is nothing we have.
    """
    if not os.path.exists(source) and source not in _GPT2_NAMES:
        raise ValueError(f'init_from is {source!r}: use scratch, resume, auto, {", ".join(_GPT2_NAMES)}, a folder of weights '
                         "or nanoGPT's ckpt.pt")
    try:
        arguments, weights, meta = _read_nanogpt(source) if os.path.isfile(source) else _read_hf(source)
        config = GPTConfig(**arguments)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'the config of {source} lacks or garbles an entry ({type(error).__name__}: {error})') from None
    with torch.device('meta'):
        expected = {name: p.shape for name, p in GPT(config, seed=None).named_parameters()}
    expected |= {name: torch.Size((config.vocab_size, config.n_embd)) for name in _TABLES if name in expected}
    for name in expected.keys() | weights.keys():
        shape = weights[name].shape if name in weights else None
        if shape != expected.get(name):
            raise ValueError(f'{source} has {name} of shape {shape and tuple(shape)} where its config asks for '
                             f'{tuple(expected[name]) if name in expected else None}')
    return dataclasses.asdict(config), {name: weights[name] for name in expected}, meta


def padded(tensors):
    """A function (name, shape) -> that one of read_weights' tensors; rows that only the model has (vocabulary padding) are zero."""
    def value(name, shape):
        whole = torch.zeros(shape)
        whole[:len(tensors[name])] = tensors[name]
        return whole
    return value


def _read_json(path):
    with open(path, encoding='utf-8') as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(f'{path} is not JSON ({error})') from None


def _read_hf(folder):
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    if not os.path.isdir(folder):
        import huggingface_hub
        name = folder
        try:
            folder = huggingface_hub.snapshot_download(f'openai-community/{name}',
                                                       allow_patterns=['config.json', 'model.safetensors'])
        except Exception as error:  # whatever the hub's client raises offline, and in its cache
            raise OSError(f'{name} is neither a folder nor in the Hugging Face cache, and could not be downloaded '
                          f'({type(error).__name__}): go online or give a folder with its config.json and '
                          'model.safetensors as init_from') from None
    names, index = ['model.safetensors'], os.path.join(folder, 'model.safetensors.index.json')
    if os.path.exists(index):
        names = sorted(set(_read_json(index)['weight_map'].values()))
    for name in ('config.json', *names):
        if not os.path.exists(os.path.join(folder, name)):
            raise OSError(f'{folder} has no {name}: it is no Hugging Face folder with safetensors weights')
    theirs = _read_json(os.path.join(folder, 'config.json'))
    arguments, ours = _from_hf_config(theirs, folder), theirs.get('kilogpt', {})
    arguments['dropout'] = ours.get('model', {}).get('dropout', 0.0)
    tensors = {}
    for name in names:
        try:
            tensors |= load_file(os.path.join(folder, name))
        except SafetensorError as error:
            raise ValueError(f'{folder}/{name} is damaged ({error})') from None
    if theirs['model_type'] == 'gpt2':
        tensors = {name if name.startswith(('transformer.', 'lm_head.')) else f'transformer.{name}': tensor
                   for name, tensor in tensors.items()}
        # GPT-2 stores (in, out)
        tensors = _unpacked({name: tensor.t() if '.h.' in name and tensor.dim() == 2 else tensor
                             for name, tensor in tensors.items()})
        biases = {name for name in tensors if name.endswith('.bias')}
        if ours and not ours['model']['bias'] and not any(tensors[name].any() for name in biases):  # as we export those without
            arguments['bias'] = False
            tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
    else:
        for our_name, their_name in reversed(_LLAMA_NAMES):
            tensors = {name.replace(their_name, our_name): tensor for name, tensor in tensors.items()}
    if arguments['tie_weights']:
        tensors.pop('lm_head.weight', None)
    known = theirs['model_type'] == 'gpt2' and theirs['vocab_size'] in (50257, 50304)
    return arguments, tensors, ours.get('tokenizer', _GPT2_META if known else None)


def _from_hf_config(theirs, folder):
    """The GPTConfig arguments that a config.json stands for. ValueError where it has what our model has not."""
    kind = theirs.get('model_type')
    usual = dict(model_type=['gpt2', 'llama', 'qwen3'], quantization_config=[None])
    if kind == 'gpt2':
        usual |= dict(activation_function=['gelu_new', 'gelu', 'gelu_pytorch_tanh'], scale_attn_weights=[True],
                      scale_attn_by_inverse_layer_idx=[False])
    else:
        usual |= dict(hidden_act=['silu'], use_sliding_window=[False], partial_rotary_factor=[1.0, None],
                      layer_types=[None, ['full_attention'] * theirs.get('num_hidden_layers', 0)])
        usual |= dict(attention_bias=[False]) if kind == 'qwen3' else dict(mlp_bias=[theirs.get('attention_bias', False)])
    odd = {key: theirs[key] for key, known in usual.items() if key in theirs and theirs[key] not in known}
    rope = {}
    for key in ('rope_scaling', 'rope_parameters'):  # the latter is what transformers writes since its version 5
        rope |= theirs.get(key) or {}
        if rope.get('rope_type', rope.get('type', 'default')) != 'default' or rope.keys() - {'rope_type', 'type', 'rope_theta'}:
            odd[key] = rope
    if not kind or odd:
        raise ValueError(f'{folder} is no GPT-2, Llama or Qwen3 that our model can be: its config.json has '
                         f'{odd or "no model_type"}')
    if kind == 'gpt2':
        return dict(block_size=theirs['n_positions'], vocab_size=theirs['vocab_size'], n_layer=theirs['n_layer'],
                    n_head=theirs['n_head'], n_embd=theirs['n_embd'], n_hidden=theirs.get('n_inner') or 0,
                    mlp='gelu' if theirs.get('activation_function') == 'gelu' else 'gelu_tanh',
                    tie_weights=theirs.get('tie_word_embeddings', True), norm_eps=theirs.get('layer_norm_epsilon', 1e-5))
    return dict(block_size=theirs['max_position_embeddings'], vocab_size=theirs['vocab_size'], n_layer=theirs['num_hidden_layers'],
                n_head=theirs['num_attention_heads'], n_kv_head=theirs.get('num_key_value_heads') or 0,
                n_embd=theirs['hidden_size'], n_hidden=theirs['intermediate_size'],
                head_width=theirs.get('head_dim') or (128 if kind == 'qwen3' else 0), pos='rope', norm='rmsnorm', mlp='swiglu',
                qk_norm=kind == 'qwen3', bias=theirs.get('attention_bias', False),
                tie_weights=theirs.get('tie_word_embeddings', False), norm_eps=theirs.get('rms_norm_eps', 1e-6),
                rope_theta=float(rope.get('rope_theta', theirs.get('rope_theta', 10000.0))))


def _load_nanogpt(path):
    """The content of a ckpt.pt, its tensors mapped into memory, those of the model without torch.compile's prefix."""
    try:
        saved = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        saved['model'] = {name.removeprefix('_orig_mod.'): tensor for name, tensor in saved['model'].items()
                          if not name.endswith('.attn.bias')}  # old nanoGPT's causal mask
        saved['model_args'].items()
    except OSError:
        raise
    except Exception as error:  # whatever torch.load raises for what is no archive, or more than tensors and plain values
        raise ValueError(f"{path} is no ckpt.pt of nanoGPT, or holds more than tensors and plain values, which might run code: "
                         f'it was not loaded ({type(error).__name__})') from None
    return saved


def _read_nanogpt(path):
    saved = _load_nanogpt(path)
    arguments = {key: value for key, value in saved['model_args'].items() if key in _NANOGPT_KEYS}
    weights = _unpacked({name: tensor for name, tensor in saved['model'].items() if name != 'lm_head.weight'})  # it is tied
    return arguments, weights, saved.get('tokenizer', _GPT2_META if arguments['vocab_size'] in (50257, 50304) else None)


def _unpacked(tensors):
    """GPT-2's names to ours: c_attn's rows to c_q, c_k and c_v; the causal masks left out."""
    ours = {}
    for name, tensor in tensors.items():
        if '.attn.c_attn.' in name:
            ours |= {name.replace('c_attn', f'c_{part}'): piece for part, piece in zip('qkv', tensor.chunk(3))}
        elif not name.endswith(('.attn.bias', '.attn.masked_bias')):
            ours[name] = tensor
    return ours


def _packed(tensors):
    """Our names to GPT-2's, in nanoGPT's order: the inverse of _unpacked."""
    packed = {}
    for name in sorted(tensors, key=lambda name: ('.wte.' not in name, '.wpe.' not in name)):
        if '.attn.c_q.' in name:
            packed[name.replace('c_q', 'c_attn')] = torch.cat([tensors[name.replace('c_q', f'c_{part}')] for part in 'qkv'])
        elif '.attn.c_k.' not in name and '.attn.c_v.' not in name:
            packed[name] = tensors[name]
    return packed


def _path(source, which):
    """The checkpoint meant by a run's folder or one of its ckpt/iter_*; None where there is none."""
    if os.path.exists(os.path.join(source, '.metadata')):
        return source
    return find_best(source) if which == 'best' else next(iter(find(source)), None)


def export_weights(source, target, which='best', dtype='float32'):
    """Write the weights of a run (its folder, or one of its checkpoints) as others read them; ValueError where they could not.

    target: a path that ends in .pt, for nanoGPT's ckpt.pt, or a Hugging Face folder: GPT-2, Llama or Qwen3 with tokenizer files.
    """
    path = _path(source, which)
    if not path or os.path.exists(target):
        raise ValueError(f'{target} is there already: name another' if path else f'there is no checkpoint to export in {source}')
    if problem := damage(path):
        raise ValueError(f'{path} is damaged ({problem}): export another')
    state = read_state(path)
    config = GPTConfig(**state['model'])
    nanogpt = target.endswith('.pt')
    needs = dict(pos=['rope'], norm=['rmsnorm'], mlp=['swiglu'], softcap=[0], bias=[False, not config.qk_norm])
    if config.pos == 'learned' or nanogpt:
        needs = dict(pos=['learned'], norm=['layernorm'], mlp=['gelu', 'gelu_tanh'], n_kv_head=[config.n_head], qk_norm=[False],
                     softcap=[0], head_width=[config.n_embd / config.n_head])
    if nanogpt:
        needs |= dict(mlp=['gelu'], tie_weights=[True], norm_eps=[1e-5], n_hidden=[4 * config.n_embd])
    odd = [f'{key}={getattr(config, key)}' for key, allowed in needs.items() if getattr(config, key) not in allowed]
    if odd:
        raise ValueError(f"{path} has {', '.join(odd)}, which {'nanoGPT has not' if nanogpt else 'no standard form has'}: "
                         'it stays with our own sample.py and train.py')
    model = GPT(config, seed=None)
    parameters = list(model.named_parameters())
    optimizer = build_adamw(parameters, 0.0, 0.0, (0.0, 0.0))
    load(path, parameters, optimizer if nanogpt else None)

    def whole(value):  # {name: value of its parameter}, without the vocabulary's padding
        return {name: value(p)[:config.vocab_size].clone() if name in _TABLES else value(p) for name, p in parameters}
    moments = {}
    if all('exp_avg' in optimizer.state[p] for p in model.parameters()):  # AdamW's, and wanted
        moments = {kind: whole(lambda p: optimizer.state[p][kind]) for kind in ('exp_avg', 'exp_avg_sq')}
        state['step'] = optimizer.state[parameters[0][1]]['step']
    write = _export_nanogpt if nanogpt else _export_hf
    write(target, whole(torch.Tensor.detach), moments, config, state, getattr(torch, dtype))
    print(f'wrote {target} from {path}')


def _export_nanogpt(target, tensors, moments, config, state, dtype):
    tensors, run = _packed(tensors), state['config']
    matrices, vectors = ([tensor for tensor in tensors.values() if (tensor.dim() >= 2) == kind] for kind in (True, False))
    adamw = torch.optim.AdamW([dict(params=matrices, weight_decay=run.get('weight_decay', 0.1)), dict(params=vectors, weight_decay=0.0)],
                              lr=run.get('learning_rate', 6e-4), betas=(run.get('beta1', 0.9), run.get('beta2', 0.95)))
    for kind, values in moments.items():
        for name, value in _packed(values).items():
            adamw.state[tensors[name]] |= {kind: value, 'step': state['step']}
    weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    weights['lm_head.weight'] = weights['transformer.wte.weight']
    model_args, best = {key: getattr(config, key) for key in _NANOGPT_KEYS}, state['best_val_loss']
    content = dict(model=weights, model_args=model_args, iter_num=state['iteration'], best_val_loss=1e9 if best is None else best,
                   config=run, optimizer=adamw.state_dict(), tokenizer=state['tokenizer'])
    with open(target + '.tmp', 'wb') as file:
        torch.save(content, file)
    os.replace(target + '.tmp', target)


def _export_hf(target, tensors, moments, config, state, dtype):
    tokenizer = get_tokenizer(state['tokenizer']) if state['tokenizer'] else None
    end = tokenizer.eot if tokenizer else None
    ends = dict(bos_token_id=end, eos_token_id=end)
    theirs = dict(vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights, torch_dtype=str(dtype).split('.')[1],
                  pad_token_id=None, **ends, kilogpt=dict(model=dataclasses.asdict(config), tokenizer=state['tokenizer']))
    if config.pos == 'learned':
        for name in [name for name in tensors if '.h.' in name or '.ln_f.' in name]:  # GPT-2 has biases
            tensors.setdefault(name.replace('weight', 'bias'), torch.zeros(len(tensors[name])))
        tensors = {name: tensor.t() if '.h.' in name and tensor.dim() == 2 else tensor for name, tensor in _packed(tensors).items()}
        theirs |= dict(
            architectures=['GPT2LMHeadModel'], model_type='gpt2', n_positions=config.block_size, n_ctx=config.block_size,
            n_embd=config.n_embd, n_layer=config.n_layer, n_head=config.n_head, n_inner=config.n_hidden,
            layer_norm_epsilon=config.norm_eps, activation_function='gelu' if config.mlp == 'gelu' else 'gelu_new',
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        for our_name, their_name in _LLAMA_NAMES:
            tensors = {name.replace(our_name, their_name): tensor for name, tensor in tensors.items()}
        theirs |= dict(
            architectures=['Qwen3ForCausalLM' if config.qk_norm else 'LlamaForCausalLM'],
            model_type='qwen3' if config.qk_norm else 'llama', max_position_embeddings=config.block_size,
            hidden_size=config.n_embd, intermediate_size=config.n_hidden,
            num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
            head_dim=config.head_width, hidden_act='silu', rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta,
            attention_bias=config.bias, **{} if config.qk_norm else dict(mlp_bias=config.bias))
    from safetensors.torch import save_file
    os.makedirs(target)
    if tokenizer:
        for name, content in tokenizer.hugging_face(config.block_size).items():
            _write_json(os.path.join(target, name), content)
    _write_json(os.path.join(target, 'generation_config.json'), ends)
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
              os.path.join(target, 'model.safetensors'), metadata=dict(format='pt'))
    _write_json(os.path.join(target, 'config.json'), theirs)
    # safetensors keeps its file to the owner
    shutil.copymode(os.path.join(target, 'config.json'), os.path.join(target, 'model.safetensors'))


def import_weights(source, out_dir, dataset=None):
    """Make out_dir a run's folder, its checkpoint what read_weights(source) gives, with AdamW's moments where a ckpt.pt has them.

    dataset: whose meta.json names the tokenizer, where source does not. ValueError where out_dir has checkpoints.
    """
    if find(out_dir):
        raise ValueError(f'{out_dir} has checkpoints already: name another folder')
    arguments, weights, meta = read_weights(source)
    if dataset:
        meta = read_meta(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data', dataset))
    if meta and meta['vocab_size'] > arguments['vocab_size']:
        raise ValueError(f'{dataset or source} has {meta["vocab_size"]} tokens, the weights have {arguments["vocab_size"]}: '
                         'name the dataset they were trained with, once it is prepared')
    model, value = GPT(GPTConfig(**arguments), seed=None), padded(weights)
    parameters = list(model.named_parameters())
    for name, p in parameters:
        p.detach().copy_(value(name, p.shape))
    saved = _load_nanogpt(source) if os.path.isfile(source) else {}
    optimizer, run, iteration, loss = None, saved.get('config', {}), saved.get('iter_num', 0), saved.get('best_val_loss')
    moments = saved.get('optimizer', {}).get('state')
    if moments:  # numbered in nanoGPT's order, matrices first
        optimizer = build_adamw(parameters, 0.0, 0.0, (0.0, 0.0))
        theirs = [name for name in saved['model'] if name != 'lm_head.weight']
        theirs.sort(key=lambda name: saved['model'][name].dim() < 2)
        for kind in ('exp_avg', 'exp_avg_sq'):
            value = padded(_unpacked({name: moments[i][kind] for i, name in enumerate(theirs)}))
            for name, p in parameters:
                optimizer.state[p] |= {kind: value(name, p.shape), 'step': torch.as_tensor(moments[0]['step']).float()}
    loss = None if loss is None or loss >= 1e9 else float(loss)  # nanoGPT's for none
    tokens = iteration * run.get('gradient_accumulation_steps', 0) * run.get('batch_size', 0) * run.get('block_size', 0)
    saver = Saver(out_dir, keep=1)
    path = saver.save(iteration, parameters, optimizer, dict(
        iteration=iteration, tokens=tokens, val_loss=loss, best_val_loss=loss, skipped=[0, 0], wandb_id=None,
        scaler=torch.amp.GradScaler('cpu').state_dict(), model=arguments, tokenizer=meta, config=run))
    if saver.problem:
        raise OSError(f'{out_dir} could not be written ({saver.problem})')
    print(f'wrote {path}: go on with python sample.py --out_dir={out_dir}, or train.py --init_from={out_dir}')


def inspect(source, which='best'):
    """Print what a run's folder, a checkpoint, a Hugging Face folder or a ckpt.pt holds; a damaged checkpoint is a ValueError."""
    path, moments, more = _path(source, which), [], {}
    if path:
        if problem := damage(path):
            raise ValueError(f'{path} is damaged: {problem}')
        state = read_state(path)
        arguments, meta, run = state['model'], state['tokenizer'], state['config']
        more = {key: state[key] for key in ('iteration', 'tokens', 'val_loss', 'best_val_loss')} | dict(checksums='hold')
        stored = {key: torch.empty(found.size, dtype=found.properties.dtype, device='meta')
                  for key, found in _reader(path).read_metadata().state_dict_metadata.items()}
        weights = {key.removeprefix('model.'): tensor for key, tensor in stored.items() if key.startswith('model.')}
        moments = [tensor for key, tensor in stored.items() if key.startswith('optimizer.')]
    else:
        arguments, weights, meta = read_weights(source)
        saved = _load_nanogpt(source) if os.path.isfile(source) else {}
        more, run = {key: saved[key] for key in ('iter_num', 'best_val_loss') if key in saved}, saved.get('config', {})
        moments = [tensor for state in saved.get('optimizer', {}).get('state', {}).values() for tensor in state.values()]

    def row(title, entries):
        if entries:
            print(f'{title}: ' + ', '.join(f'{key} {float(value) if torch.is_tensor(value) else value}'
                                          for key, value in entries.items()))
    row(path or source, more)
    row('model', arguments)
    row('run', {key: run[key] for key in ('dataset', 'batch_size', 'gradient_accumulation_steps', 'block_size', 'learning_rate',
                                          'max_iters', 'optimizer', 'weight_decay', 'dtype', 'seed') if key in run})
    print(f'tokenizer: {meta["tokenizer"] if meta else "not known"}')
    rows = {}
    for name, tensor in weights.items():  # blocks alike in one
        block = re.search(r'(?<=\.h\.)\d+', name)
        key = re.sub(r'(?<=\.h\.)\d+', '{}', name), tuple(tensor.shape), str(tensor.dtype).split('.')[1], tensor.numel()
        rows.setdefault(key, []).append(int(block[0]) if block else None)
    for (name, shape, dtype, count), blocks in rows.items():
        span = f'{min(blocks)}..{max(blocks)}' if len(blocks) > 1 else blocks[0]
        print(f'{name.format(span):<44} {str(shape):<16} {dtype:<9} {len(blocks) * count:>14,}')
    total, (size, held) = sum(map(torch.numel, weights.values())), (
        sum(tensor.numel() * tensor.element_size() for tensor in tensors) for tensors in (weights.values(), moments))
    print(f'{total:,} parameters in {size:,} bytes' + (f', and {held:,} bytes of optimizer state' if held else ''))


lock_folder = lock
Saver.allocate = Saver.prepare


def find_undamaged(out_dir, processes):
    """(path, state) of a run's newest checkpoint that no process finds damaged; (None, {}) if there is none."""
    for path in find(out_dir):
        problem = damage(path, processes.rank, processes.world_size)
        if problem:
            print(f'{path} is damaged ({problem}): going back to the one before it', flush=True)
        if not processes.any(problem):
            return path, read_state(path)
    return None, {}


def find_initial(init_from, processes):
    path = find_best(init_from)
    if not path:
        arguments, tensors, _ = read_weights(init_from)
        return None, tensors, arguments
    if problem := damage(path, processes.rank, processes.world_size):
        raise ValueError(f'{path} is damaged ({problem}): delete it, and the next best is taken')
    return path, None, read_state(path)['model']


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='Weights in and out, and what a checkpoint holds.')
    commands = parser.add_subparsers(dest='command', required=True)
    which = dict(choices=('best', 'latest'), default='best', help="a run's checkpoint of least loss (default), or the last")
    command = commands.add_parser('export', help="a run's weights to a Hugging Face folder, or to nanoGPT's ckpt.pt")
    command.add_argument('source', help="a run's out_dir, or one of its ckpt/iter_*")
    command.add_argument('target', help='a new folder, for transformers; or a file that ends in .pt, for nanoGPT')
    command.add_argument('--which', **which)
    command.add_argument('--dtype', choices=('float32', 'bfloat16', 'float16'), default='float32', help='of the weights (float32)')
    command = commands.add_parser('import', help="weights trained elsewhere to a run's folder")
    command.add_argument('source', help="a Hugging Face folder (GPT-2, Llama, Qwen3), nanoGPT's ckpt.pt, gpt2, gpt2-medium, ...")
    command.add_argument('out_dir', help='a folder without checkpoints')
    command.add_argument('--dataset', help='in data/: its meta.json names the tokenizer, where the source does not')
    command = commands.add_parser('inspect', help='what is in a checkpoint: iteration, losses, config, parameters')
    command.add_argument('source', help="a run's out_dir, one of its ckpt/iter_*, or what import takes")
    command.add_argument('--which', **which)
    options = vars(parser.parse_args())
    with exit_on_error():
        if not os.path.exists(options['source']) and options['source'] not in _GPT2_NAMES:
            raise ValueError(f'there is no {options["source"]!r}')
        {'export': export_weights, 'import': import_weights, 'inspect': inspect}[options.pop('command')](**options)
