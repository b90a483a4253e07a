"""Attention and activations by cpu_kernels.cpp, for CPUs that multiply in bfloat16 (AVX512-BF16, AMX)."""
import functools
import pathlib

import torch
from torch.nn import functional as F

from kilogpt.devices import cpp
from kilogpt.devices.cpp import NO_BFLOAT16

SOURCE = pathlib.Path(__file__).with_suffix('.cpp')


def is_usable(processes, notes):
    """Whether cpu_kernels.cpp runs on all processes, which must be on CPUs. The first call compiles the file.

    notes: gets the reason if the processors support cpu_kernels.cpp, but it does not run.
    """
    if processes.device.type != 'cpu':
        return False
    failure = processes.first_problem(problem())
    if failure and failure[1] != NO_BFLOAT16:
        notes.append('the model could be faster: kilogpt/devices/cpu_kernels.cpp cannot be compiled '
                     f'(rank {failure[0]}: {failure[1]})')
    return not failure


def problem():
    """Why cpu_kernels.cpp does not run in this process, in one line; None if it does."""
    return cpp.problem(library) or (None if library().is_supported() else NO_BFLOAT16)


def library():
    """cpu_kernels.cpp as a library."""
    torch_folder = pathlib.Path(torch.__file__).parent
    return cpp.library(SOURCE, f'-I{torch_folder}/include', f'-L{torch_folder}/lib', '-ltorch_cpu', '-lc10')


# Gradients are not registered with the operations: torch.library.register_autograd would run Python in each
# call, in compiled code too, which for a small model takes as long as the operation.

# --- attention ----------------------------------------------------------------------------------------------

torch.library.define('kilogpt::attention',
                     '(Tensor q, Tensor k, Tensor v, Tensor? first) -> (Tensor, Tensor)')
torch.library.define('kilogpt::attention_backward', '(Tensor grad_y, Tensor q, Tensor k, Tensor v, Tensor y, '
                     'Tensor log_sums, Tensor? first) -> (Tensor, Tensor, Tensor)')


@torch.library.register_fake('kilogpt::attention')
def _(q, k, v, first):
    B, T, H, _ = q.shape
    return torch.empty_like(q), q.new_empty((B, H, T), dtype=torch.float32)


@torch.library.register_fake('kilogpt::attention_backward')
def _(grad_y, q, k, v, y, log_sums, first):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def takes(q, k):
    """Whether `attention` computes q (B, H, T, D) and k (B, G, S, D): bfloat16, and both T = S and D even."""
    T, D = q.shape[2:]
    return q.dtype == torch.bfloat16 and T == k.size(2) and T % 2 == 0 and D % 2 == 0


def attention(q, k, v, first=None):
    """Causal attention: q (B, H, T, D), k and v (B, G, T, D) -> (B, H, T, D), all bfloat16.

    first (B, T): query i of a row sees the keys first[i] to i alone, as in cpu_attention.attention.
    Sums are in float32; the softmax's weights and the gradients of the scores are rounded to bfloat16.
    """
    first = None if first is None else first.contiguous()
    return Attention.apply(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), first).transpose(1, 2)


class Attention(torch.autograd.Function):
    """`attention` of contiguous q (B, T, H, D), k and v (B, T, G, D)."""

    @staticmethod
    def forward(ctx, q, k, v, first):
        y, log_sums = torch.ops.kilogpt.attention(q, k, v, first)  # (B, T, H, D) and (B, H, T), in float32
        ctx.save_for_backward(q, k, v, y, log_sums, first)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        return *torch.ops.kilogpt.attention_backward(grad_y.contiguous(), *ctx.saved_tensors), None


# --- activations --------------------------------------------------------------------------------------------

torch.library.define('kilogpt::activation', '(Tensor x, Tensor? factor, Tensor values) -> Tensor')
torch.library.define('kilogpt::activation_backward', '(Tensor grad_y, Tensor x, Tensor? factor, '
                     'Tensor values, Tensor slopes) -> (Tensor, Tensor)')


@torch.library.register_fake('kilogpt::activation')
def _(x, factor, values):
    return torch.empty_like(x)


@torch.library.register_fake('kilogpt::activation_backward')
def _(grad_y, x, factor, values, slopes):
    return torch.empty_like(x), x.new_empty(0) if factor is None else torch.empty_like(x)


BLOCK = 64  # as in cpu_kernels.cpp
GELU_TANH = functools.partial(F.gelu, approximate='tanh')
ACTIVATIONS = dict(gelu=F.gelu, gelu_tanh=GELU_TANH, relu2=lambda x: F.relu(x).square(), swiglu=F.silu,
                   geglu=GELU_TANH)
GATED = ('swiglu', 'geglu')  # those that multiply the activation by a factor


@functools.cache
def tables(form):
    """Tables of an activation and of its derivative, indexed by the bits of a bfloat16: (65536,), float32."""
    with torch.inference_mode(False), torch.enable_grad():
        numbers = torch.arange(2 ** 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        numbers = numbers.double().requires_grad_()
        values = ACTIVATIONS[form](numbers)
        slopes, = torch.autograd.grad(values.sum(), numbers)
    return values.detach().float(), slopes.float()


def activation(x, factor, values, slopes):
    """f(x), or f(x) * factor, in bfloat16, for a multiple of BLOCK numbers. values, slopes: tables of f.

    A number in bfloat16 has one of 65,536 values. A table has the exact result and is faster than arithmetic.
    """
    factor = None if factor is None else factor.contiguous()
    return Activation.apply(x.contiguous(), factor, values, slopes)


class Activation(torch.autograd.Function):
    """`activation` of contiguous x and factor."""

    @staticmethod
    def forward(ctx, x, factor, values, slopes):
        ctx.save_for_backward(x, factor, values, slopes)
        return torch.ops.kilogpt.activation(x, factor, values)

    @staticmethod
    def backward(ctx, grad_y):
        x, factor, values, slopes = ctx.saved_tensors
        grad_x, grad_factor = torch.ops.kilogpt.activation_backward(
            grad_y.contiguous(), x, factor, values, slopes)
        return grad_x, None if factor is None else grad_factor, None, None
