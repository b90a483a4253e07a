"""Text on a CPU: linears with packed weights, and the step from token to token of a GPT as one C++ call.

A token of one text needs a few hundred small operations, each of which takes PyTorch longer to start than
to compute. cpu_step.cpp computes all of them in one call. It is not a second model: `is_computed` compares it
with the model's own `forward` first, on a small model of the same class and options. A model that differs,
since someone has edited model.py or since it has parts that cpu_step.cpp does not have, keeps its forward,
and only its linears read packed weights.
"""
import contextlib
import copy
import ctypes
import dataclasses
import functools
import mmap
import pathlib
import weakref
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p

import torch
from torch import nn

from kilogpt.devices import cpp
from kilogpt.devices.cpu import Int8Linear, PackedLinear, can_pack
from kilogpt.devices.parts import replace_all
from kilogpt.layers.attention import NormOverHeads
from kilogpt.layers.rope import is_dynamic, rope_tables

SOURCE = pathlib.Path(__file__).with_suffix('.cpp')
KINDS = ('float32', 'widened', 'bfloat16', 'int8')  # Kind in cpu_step.cpp
FORMS = ('gelu', 'gelu_tanh', 'relu2', 'swiglu', 'geglu')  # Form
NORMS = {nn.Identity: 0, nn.RMSNorm: 1, NormOverHeads: 1, nn.LayerNorm: 2}  # Norm.form
TOLERANCE = 1e-3  # of the largest logit: rounding in float32 stays below 1e-5 of it, after 30 blocks too


def problem():
    """Why cpu_step.cpp does not run in this process, in one line; None if it does."""
    if not torch.cpu.get_capabilities().get('avx512_vnni'):
        return cpp.NO_BFLOAT16
    return cpp.problem(library)


@functools.cache
def library():
    """cpu_step.cpp as a library. OpenMP in it is the one that PyTorch has loaded, with the same threads."""
    loaded = cpp.library(SOURCE, '-fno-signed-zeros', '-fassociative-math', '-fno-strict-aliasing')
    loaded.matrix_bytes.restype = loaded.input_bytes.restype = loaded.scratch_bytes.restype = c_int64
    loaded.input_bytes.argtypes = c_int64, c_int64
    loaded.scratch_bytes.argtypes = c_void_p, c_int64, c_int
    loaded.pack_matrix.argtypes = c_void_p, c_void_p, c_int
    loaded.unpack_outputs.argtypes = c_void_p, c_void_p, c_int64, c_void_p
    loaded.multiply.argtypes = c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int
    loaded.step.argtypes = c_void_p, c_void_p, c_int64, *[c_void_p] * 5, c_int64, c_void_p, c_int
    return loaded


# --- structures of cpu_step.cpp -----------------------------------------------------------------------------

class MatrixStruct(Structure):
    _fields_ = [('weight', c_void_p), ('scale', c_void_p), ('bias', c_void_p),
                ('inputs', c_int64), ('outputs', c_int64), ('kind', c_int64)]


class NormStruct(Structure):
    _fields_ = [('weight', c_void_p), ('bias', c_void_p), ('eps', c_double), ('form', c_int64)]


MATRICES = dict(q='attn.c_q', k='attn.c_k', v='attn.c_v', proj='attn.c_proj',
                fc='mlp.c_fc', gate='mlp.c_gate', out='mlp.c_proj')
NORMS_OF_BLOCK = dict(before_attention='ln_1', after_attention='ln_1_after',
                      before_mlp='ln_2', after_mlp='ln_2_after', q_norm='attn.q_norm', k_norm='attn.k_norm',
                      q_norm_all='attn.q_norm_all', k_norm_all='attn.k_norm_all')


class LayerStruct(Structure):
    _fields_ = [*((name, MatrixStruct) for name in MATRICES),
                *((name, NormStruct) for name in NORMS_OF_BLOCK),
                ('cos', c_void_p), ('sin', c_void_p), ('window', c_int64)]


class StoredStruct(Structure):
    _fields_ = [('keys', c_void_p), ('values', c_void_p), ('row_stride', c_int64), ('head_stride', c_int64),
                ('slot_stride', c_int64), ('slots', c_int64)]


NUMBERS = ('n_layer', 'width', 'n_head', 'n_kv_head', 'head_width', 'hidden', 'rotated', 'form',
           'is_parallel', 'block_size')
FACTORS = 'embedding_scale', 'residual_scale', 'q_scale', 'attention_softcap', 'logit_scale', 'softcap'


class ModelStruct(Structure):
    _fields_ = [('layers', POINTER(LayerStruct)), ('final_norm', NormStruct), ('head', MatrixStruct),
                ('embedding', c_void_p), ('positions', c_void_p), *((name, c_int64) for name in NUMBERS),
                *((name, c_double) for name in FACTORS)]


# --- linears ------------------------------------------------------------------------------------------------

class BlockedLinear(nn.Module):
    """A linear for inference whose weight is in the blocks in which cpu_step.cpp reads it.

    A row of the result does not depend on the other rows of x, nor on the number of threads.
    """

    def __init__(self, linear, kind, memory):
        """kind: one of KINDS. 'float32', and 'widened' if the weights have 8 bits of precision, are exact.

        memory: a Memory that the weight takes packed_bytes of.
        """
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.matrix = MatrixStruct(None, None, address(self.bias), inputs, outputs, KINDS.index(kind))
        self.row_bytes = library().input_bytes(self.matrix.kind, inputs)
        self.weight = memory.take(packed_bytes(linear, kind))
        self.scale = torch.empty(outputs + 31) if kind == 'int8' else None  # outputs in blocks of 32
        self.matrix.weight, self.matrix.scale = address(self.weight), address(self.scale)
        source = linear.weight.detach().float().contiguous()
        library().pack_matrix(ctypes.byref(self.matrix), address(source), torch.get_num_threads())

    def forward(self, x):
        """x (..., inputs) -> (..., outputs), of x's dtype."""
        rows = x.reshape(-1, x.size(-1)).float().contiguous()
        y = rows.new_empty(len(rows), self.matrix.outputs)
        scratch = rows.new_empty(max(1, len(rows)) * self.row_bytes, dtype=torch.uint8)
        library().multiply(ctypes.byref(self.matrix), rows.data_ptr(), len(rows), y.data_ptr(),
                           scratch.data_ptr(), torch.get_num_threads())
        return y.view(*x.shape[:-1], -1).to(x.dtype)


class PackedEmbedding(nn.Module):
    """The embedding that is tied to a head, whose packed weight it reads."""

    def __init__(self, head):
        super().__init__()
        self.matrix, self.width = head.matrix, head.matrix.inputs
        self.weight = torch.empty(0, self.width)  # for its dtype and device, which a cache takes

    def forward(self, idx):
        """idx (B, T) -> (B, T, width)."""
        ids = idx.contiguous()
        x = self.weight.new_empty(*idx.shape, self.width)
        library().unpack_outputs(ctypes.byref(self.matrix), ids.data_ptr(), ids.numel(), x.data_ptr())
        return x


def packed_bytes(linear, kind):
    """Bytes of a linear's packed weight, up to the next Memory.LINE."""
    outputs, inputs = linear.weight.shape
    matrix = MatrixStruct(None, None, None, inputs, outputs, KINDS.index(kind))
    return -(-library().matrix_bytes(ctypes.byref(matrix)) // Memory.LINE) * Memory.LINE


class Memory:
    """Memory for weights, in pages of 2 MB if the system has them: reading it is then twice as fast."""
    LINE = 64  # bytes of a line of the processor's cache, at which each weight begins

    def __init__(self, n_bytes):
        pages = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, 'MADV_HUGEPAGE'):
            with contextlib.suppress(OSError):  # of a system that was built without
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.rest = torch.frombuffer(pages, dtype=torch.uint8)

    def take(self, n_bytes):
        taken, self.rest = self.rest[:n_bytes], self.rest[n_bytes:]
        return taken


def address(tensor):
    """Where the numbers of a tensor are, None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def is_narrow(weight):
    """Whether bfloat16 has the numbers of a float32 weight exactly, as those of models that came in it."""
    return weight.dtype == torch.float32 and not bool((weight.view(torch.int32) & 0xffff).any())


# --- the step -----------------------------------------------------------------------------------------------

class FusedStep:
    """The forward of a GPT, which for one new token of each text is one call of cpu_step.cpp."""

    def __init__(self, model):
        """model: a GPT whose linears are BlockedLinears of one kind, and which is in float32 otherwise."""
        self._model = weakref.ref(model)  # whose forward this is; a circle would keep packed weights for a while
        config, n_layer = model.config, model.config.n_layer
        self.layers = (LayerStruct * n_layer)()
        for i, block in enumerate(model.transformer.h.values()):
            modules = dict(block.named_modules())
            for name, path in MATRICES.items():
                if path in modules:
                    setattr(self.layers[i], name, modules[path].matrix)
            for name, path in NORMS_OF_BLOCK.items():
                setattr(self.layers[i], name, norm_struct(modules[path]))
            self.layers[i].window = config.window_of(i)
        wpe = model.transformer.wpe.weight if config.pos == 'learned' else None
        block = next(iter(model.transformer.h.values()))
        self.struct = ModelStruct(
            self.layers, norm_struct(model.transformer.ln_f), model.lm_head.matrix,
            None if config.tie_weights else address(model.transformer.wte.weight), address(wpe), n_layer,
            config.n_embd, config.n_head, config.n_kv_head, config.head_width, config.n_hidden,
            config.rotary_width if config.pos == 'rope' else 0,
            FORMS.index(config.mlp), config.parallel_block, config.block_size, config.embedding_scale,
            config.residual_scale, block.attn.q_scale, config.attention_softcap, config.logit_scale,
            config.softcap)
        self.tables, self.scratch = {}, torch.empty(0, dtype=torch.uint8)

    model = property(lambda self: self._model())

    def __call__(self, idx, targets=None, starts=None, pairs=None, reference=None, cache=None, tokens=None):
        """As GPT.forward."""
        is_step = cache is not None and targets is None and idx.dim() == 2 and idx.size(1) == 1
        if not is_step or self.model.training or torch.is_grad_enabled():
            return type(self.model).forward(self.model, idx, targets, starts, pairs, reference, cache, tokens)
        return self.step(idx, starts, cache)

    def step(self, idx, starts, cache):
        """idx (B, 1) -> logits (B, 1, vocab_size), which continue the texts in the cache."""
        config, rows, n_threads = self.model.config, idx.size(0), torch.get_num_threads()
        of_cache, lengths, after = cache.extent(rows, 1)
        config.check_length(cache.ends[1] if cache.ends else int(after.max()))
        self.make_tables(cache.size)
        stored = (StoredStruct * config.n_layer)(*(
            (layer.keys.data_ptr(), layer.values.data_ptr(), *layer.keys.stride()[:3], layer.keys.size(2))
            for layer in cache.layers.values()))
        starts = torch.zeros_like(lengths) if starts is None else starts[:, -1].expand(rows)
        numbers = torch.stack((idx[:, 0], torch.arange(len(cache.lengths))[of_cache], lengths, starts))
        logits = torch.empty(rows, 1, config.vocab_size)
        needed = library().scratch_bytes(ctypes.byref(self.struct), rows, n_threads)
        if len(self.scratch) < needed:
            self.scratch = torch.empty(needed, dtype=torch.uint8)
        library().step(ctypes.byref(self.struct), stored, rows, *(row.data_ptr() for row in numbers),
                       logits.data_ptr(), config.vocab_size, self.scratch.data_ptr(), n_threads)
        cache.advance(after)
        return logits

    def make_tables(self, length):
        """Let RoPE's tables have at least `length` positions."""
        config = self.model.config
        if config.pos != 'rope' or self.tables and self.tables['whole'][0].size(1) >= length:
            return
        self.tables = {name: [part.float().contiguous() for part in table] for name, table
                       in rope_tables(config, torch.arange(length)[None], length).items()}
        for i, layer in enumerate(self.layers):
            table = self.tables.get(config.rope_of(i))
            layer.cos, layer.sin = (None, None) if table is None else map(address, table)


def norm_struct(norm):
    if type(norm) is nn.Identity:
        return NormStruct()
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    return NormStruct(address(norm.weight), address(getattr(norm, 'bias', None)), eps, NORMS[type(norm)])


# --- which models it computes -------------------------------------------------------------------------------

def pack_linears(model, kind):
    """Put BlockedLinears in the place of a model's linears, and of an embedding that is tied to its head."""
    linears = [(parent, name) for parent in model.modules() for name, child in parent.named_children()
               if type(child) is nn.Linear]
    if kind == 'float32' and all(is_narrow(getattr(*place).weight) for place in linears):
        kind = 'widened'
    memory = Memory(sum(packed_bytes(getattr(*place), kind) for place in linears))
    for place in linears:
        setattr(*place, BlockedLinear(getattr(*place), kind, memory))
    if model.config.tie_weights and type(model.lm_head) is BlockedLinear:
        if type(model.transformer.wte) is nn.Embedding:
            model.transformer.wte = PackedEmbedding(model.lm_head)


def prepare_for_text(model, dtype, quantize='none', n_rows=1):
    """Make a GPT in float32 on the CPU fast at text, in place: for inference alone.

    dtype: of its products. quantize: 'int8' to keep weights in 8 bits. n_rows: texts in most steps.
    Returns in one line why it is not as fast as it could be here, or None.
    """
    model.eval()
    failure = problem()
    if failure:
        prepare_without_compiler(model, dtype, quantize, n_rows)
        is_expected = failure == cpp.NO_BFLOAT16
        return None if is_expected else f'kilogpt/devices/cpu_step.cpp cannot be compiled: {failure}'
    kind = 'int8' if quantize == 'int8' else str(dtype).removeprefix('torch.')
    if kind not in KINDS:  # float16, in which no processor is faster
        model.to(dtype)
        return None
    can_fuse = is_computed(model)
    pack_linears(model, kind)
    if can_fuse:
        model.forward = FusedStep(model)
    give_back_memory()
    return None


def prepare_without_compiler(model, dtype, quantize, n_rows):
    """prepare_for_text by PyTorch's own operations."""
    if quantize == 'int8':
        replace_all(model, nn.Linear, Int8Linear)
    if can_pack(dtype):  # the rest stays in float32, in which attention to a long text is faster on a CPU
        replace_all(model, nn.Linear, lambda linear: PackedLinear(linear, dtype, n_rows))
    else:
        model.to(dtype)


def copy_for_text(model, dtype, quantize='none', n_rows=1):
    """A model with the same parameters after prepare_for_text, which leaves the given one as it is."""
    shared = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    prepare_for_text(shared, dtype, quantize, n_rows)
    return shared


def give_back_memory():
    """Give freed memory back to the system, such as that of weights before they were packed."""
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # of glibc
    if trim:
        trim(0)


def is_computed(model):
    """Whether cpu_step.cpp computes what the forward of this GPT computes."""
    config = model.config
    has_others = (config.mlp == 'moe' or config.attention_gate or config.attention_conv or config.mlp_conv
                  or config.lora_rank or any(map(config.has_value_embedding, range(config.n_layer))))
    if has_others or is_dynamic(config.rope_scaling) or any(p.dtype != torch.float32 for p in model.parameters()):
        return False
    n_kv_head, per_group = min(2, config.n_kv_head), config.n_head // config.n_kv_head
    small = dataclasses.replace(
        config, n_kv_head=n_kv_head, n_head=n_kv_head * per_group, n_embd=48, n_hidden=72, vocab_size=70,
        block_size=16, window=min(config.window, 5))
    try:
        small = type(model)(small, seed=None).eval()
        return describe(model) == describe(small) and is_same_step(small)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):  # of edited code
        return False


def describe(model):
    """What a model consists of, without its widths, to see whether someone has changed parts of one."""
    parts = {}
    for name, module in model.named_modules():
        values = {key: value for key, value in vars(module).items()
                  if isinstance(value, (bool, float, str)) or callable(value)}
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        parts[name] = type(module), {key: value for key, value in values.items() if key != 'training'}, hooks
    return parts


@torch.no_grad()
def is_same_step(model):
    """Whether a small model, whose weights are drawn here, gives the same logits in steps of one call."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, parameter.size(-1) ** -0.5, generator=generator)
        if parameter.dim() == 1:
            parameter.mul_(0.3 * parameter.numel() ** 0.5).add_(1.0)
    tokens = torch.randint(model.config.vocab_size, (2, 6), generator=generator)

    def read():
        cache = model.new_cache(2)
        parts = [model.forward(part, cache=cache) for part in tokens.split([4, 1, 1], dim=1)]
        return torch.cat(parts, dim=1)[..., :model.config.vocab_size]

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, small operations wait for the other threads
    expected = read()
    pack_linears(model, 'float32')
    model.forward = FusedStep(model)
    found = read()
    torch.set_num_threads(n_threads)
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())
