"""Save, find and load checkpoints; import GPT-2's weights.

out_dir/ckpt/iter_00000250/ is a torch.distributed.checkpoint directory of tensors alone (weights as `model.<name>`, optimizer
moments as `optimizer.<name>.<kind>`), with state.json for all else a run needs to go on, and checksums.json. It is written
aside and renamed when complete, so one that is there is whole.
"""
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
        self.group = dist.new_group(backend='gloo') if dist.is_initialized() else None
        self.thread, self.pending, self.copies = ThreadPoolExecutor(1), None, {}

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
            on_gpu = any(_local(tensor).is_cuda for tensor in tensors.values())
            self.copies = DefaultStager(StagingOptions(use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False,
                                                       use_non_blocking_copy=on_gpu)).stage(tensors)
        else:  # as fast as memory goes, where the stager is a third of that on a CPU
            for key, tensor in tensors.items():
                _local(self.copies[key]).copy_(_local(tensor), non_blocking=True)
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
                    shutil.rmtree(stray)
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
                    shutil.rmtree(old + '.tmp')
            except OSError as error:
                problem = str(error)
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


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


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


def read_gpt2(source):
    """GPT-2's weights from a Hugging Face folder (config.json, model.safetensors), or downloaded by name.

    source: a folder, or 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'. Returns the GPTConfig arguments and a state dict
    under our names. OSError where it cannot be had, ValueError where it is no GPT-2.
    """
    from safetensors.torch import load_file
    folder = source
    if not os.path.isdir(source):
        if source not in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl'):
            raise ValueError(f'init_from is {source!r}: use scratch, resume, auto, gpt2, gpt2-medium, gpt2-large, gpt2-xl '
                             'or a folder of weights')
        import huggingface_hub
        try:
            folder = huggingface_hub.snapshot_download(f'openai-community/{source}',
                                                       allow_patterns=['config.json', 'model.safetensors'])
        except Exception as error:  # whatever the hub's client raises offline, and in its cache
            raise OSError(f'{source} is neither a folder nor in the Hugging Face cache, and could not be downloaded '
                          f'({type(error).__name__}): go online or give a folder with its config.json and '
                          'model.safetensors as init_from') from None
    for name in ('config.json', 'model.safetensors'):
        if not os.path.exists(os.path.join(folder, name)):
            raise OSError(f'{folder} has no {name}: it is no Hugging Face folder with safetensors weights')
    with open(os.path.join(folder, 'config.json'), encoding='utf-8') as file:
        theirs = json.load(file)
    usual = dict(model_type=['gpt2'], activation_function=['gelu_new', 'gelu'], layer_norm_epsilon=[1e-5],
                 n_inner=[None, 4 * theirs.get('n_embd', 0)], tie_word_embeddings=[True], scale_attn_weights=[True],
                 scale_attn_by_inverse_layer_idx=[False])
    odd = {key: theirs[key] for key, known in usual.items() if theirs.get(key, known[0]) not in known}
    if odd:
        raise ValueError(f'{folder} is not a GPT-2 as OpenAI made them: its config.json has {odd}')
    mlp = 'gelu_tanh' if theirs.get('activation_function', 'gelu_new') == 'gelu_new' else 'gelu'
    arguments = dict(block_size=theirs['n_positions'], vocab_size=theirs['vocab_size'], n_layer=theirs['n_layer'],
                     n_head=theirs['n_head'], n_embd=theirs['n_embd'], bias=True, mlp=mlp)
    ours = {}
    for name, tensor in load_file(os.path.join(folder, 'model.safetensors')).items():
        name = name.removeprefix('transformer.')
        if name.endswith(('.attn.bias', '.attn.masked_bias', 'lm_head.weight')):  # causal masks; the tied head
            continue
        if name.startswith('h.') and tensor.dim() == 2:
            tensor = tensor.t()  # GPT-2 stores (in, out)
        if '.c_attn.' in name:
            for part, piece in zip('qkv', tensor.chunk(3)):
                ours['transformer.' + name.replace('c_attn', f'c_{part}')] = piece
        else:
            ours['transformer.' + name] = tensor
    return arguments, ours


def padded(tensors):
    """A function (name, shape) -> that one of read_gpt2's tensors; rows that only the model has (vocabulary padding) are zero."""
    def value(name, shape):
        whole = torch.zeros(shape)
        whole[:len(tensors[name])] = tensors[name]
        return whole
    return value
