"""Attention and activations by cpu_kernels.cpp, for CPUs that multiply in bfloat16 (AVX512-BF16, AMX)."""
import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile

import torch
from torch.nn import functional as F

from kilogpt.compiler import in_one_line

SOURCE = pathlib.Path(__file__).with_suffix('.cpp')
# Without the rest of -ffast-math, which would round denormal numbers to zero in the whole process. Machines
# that share a home share the library: no instructions but those of AVX512-BF16.
FLAGS = ('-std=c++20 -O3 -march=x86-64-v4 -mavx512bf16 -mtune=native -mprefer-vector-width=512 '
         '-fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC').split()
NO_BFLOAT16 = 'the processor does not multiply in bfloat16'


def is_usable(processes, notes):
    """Whether the processes are on CPUs and cpu_kernels.cpp runs on all, which may wait for a compiler.

    notes: gets the reason if it should run, but does not.
    """
    if processes.device.type != 'cpu':
        return False
    failure = processes.first_problem(problem())
    if failure and failure[1] != NO_BFLOAT16:
        notes.append('the model could be faster: kilogpt/cpu_kernels.cpp cannot be compiled '
                     f'(rank {failure[0]}: {failure[1]})')
    return not failure


def problem():
    """Why cpu_kernels.cpp does not run in this process, in one line; None if it does."""
    if not torch.cpu.get_capabilities().get('avx512_bf16'):
        return NO_BFLOAT16
    try:
        return None if library().is_supported() else NO_BFLOAT16
    except subprocess.CalledProcessError as error:
        return in_one_line(error.cmd[0], error.stderr)
    except (OSError, RuntimeError) as error:  # there is no compiler, no place for the library, or no home
        return in_one_line(type(error).__name__, error)


@functools.cache
def library():
    """cpu_kernels.cpp as a library. Its first use compiles it into the user's cache, in 2 seconds."""
    compiler = os.environ.get('CXX', 'g++')
    torch_folder = pathlib.Path(torch.__file__).parent
    key = hashlib.blake2b(f'{torch.__version__} {FLAGS} {SOURCE.read_text()}'.encode(), digest_size=8)
    path = pathlib.Path.home() / '.cache' / 'kilogpt' / f'cpu_kernels-{key.hexdigest()}.so'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # other processes may compile it too
            built = os.path.join(folder, path.name)
            subprocess.run([compiler, *FLAGS, f'-I{torch_folder}/include', str(SOURCE), '-o', built,
                            f'-L{torch_folder}/lib', '-ltorch_cpu', '-lc10'],
                           check=True, capture_output=True, text=True)
            os.replace(built, path)
    return ctypes.CDLL(str(path))


def pointers(*tensors):
    return [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]


# --- attention ----------------------------------------------------------------------------------------------

def takes(q, k):
    """Whether `attention` computes q (B, H, T, D) and k (B, G, S, D): bfloat16, and both T = S and D even."""
    T, D = q.shape[2:]
    return q.dtype == torch.bfloat16 and T == k.size(2) and T % 2 == 0 and D % 2 == 0


def attention(q, k, v):
    """Causal attention without a mask: q (B, H, T, D), k and v (B, G, T, D) -> (B, H, T, D), all bfloat16.

    Sums are in float32; the softmax's weights and the gradients of the scores are rounded to bfloat16.
    """
    y, _ = attention_forward(*(x.transpose(1, 2) for x in (q, k, v)))
    return y.transpose(1, 2)


@torch.library.custom_op('kilogpt::attention', mutates_args=())
def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, T, H, D), k and v (B, T, G, D) -> y (B, T, H, D) and log_sums (B, H, T), float32."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    B, T, H, D = q.shape
    y, log_sums = torch.empty_like(q), torch.empty(B, H, T)
    library().attention(*pointers(q, k, v, y, log_sums), (ctypes.c_int64 * 5)(B, T, H, k.size(2), D))
    return y, log_sums


@torch.library.custom_op('kilogpt::attention_backward', mutates_args=())
def attention_backward(grad_y: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       y: torch.Tensor, log_sums: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of q, k and v."""
    q, k, v, grad_y = (x.contiguous() for x in (q, k, v, grad_y))
    B, T, H, D = q.shape
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    library().attention_backward(*pointers(q, k, v, y, log_sums, grad_y, *gradients),
                                 (ctypes.c_int64 * 5)(B, T, H, k.size(2), D))
    return gradients


@attention_forward.register_fake
def _(q, k, v):
    B, T, H, D = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)


@attention_backward.register_fake
def _(grad_y, q, k, v, y, log_sums):
    return [x.new_empty(x.shape) for x in (q, k, v)]


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _attention_backward(ctx, grad_y, _):
    return tuple(attention_backward(grad_y, *ctx.saved_tensors))


attention_forward.register_autograd(_attention_backward, setup_context=_keep_inputs)


# --- activations --------------------------------------------------------------------------------------------

ACTIVATIONS = dict(gelu=F.gelu, gelu_tanh=functools.partial(F.gelu, approximate='tanh'),
                   relu2=lambda x: F.relu(x).square(), swiglu=F.silu)


@functools.cache
def tables(form):
    """An activation and its derivative at all numbers in bfloat16, by their bits: two of (65536,), float32."""
    with torch.inference_mode(False), torch.enable_grad():
        numbers = torch.arange(2 ** 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        numbers = numbers.double().requires_grad_()
        values = ACTIVATIONS[form](numbers)
        slopes, = torch.autograd.grad(values.sum(), numbers)
    return values.detach().float(), slopes.float()


@torch.library.custom_op('kilogpt::activation', mutates_args=())
def activation(form: str, x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """f(x), or f(x) * factor, where f is the activation of that form. All are in bfloat16.

    A number in bfloat16 is one of 65,536: a table has the exact value, and is faster than a computation.
    """
    values, _ = tables(form)
    x, factor = contiguous(x, factor)
    y = torch.empty_like(x)
    library().activation(*pointers(x, factor, values, y), ctypes.byref(ctypes.c_int64(x.numel())))
    return y


@torch.library.custom_op('kilogpt::activation_backward', mutates_args=())
def activation_backward(form: str, grad_y: torch.Tensor, x: torch.Tensor,
                        factor: torch.Tensor | None) -> list[torch.Tensor]:
    """The gradient of x, and that of factor if there is one."""
    grad_y, x, factor = contiguous(grad_y, x, factor)
    gradients = [torch.empty_like(x), None if factor is None else torch.empty_like(x)]
    library().activation_backward(*pointers(grad_y, x, factor, *tables(form), *gradients),
                                  ctypes.byref(ctypes.c_int64(x.numel())))
    return [gradient for gradient in gradients if gradient is not None]


def contiguous(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


@activation.register_fake
def _(form, x, factor):
    return x.new_empty(x.shape)


@activation_backward.register_fake
def _(form, grad_y, x, factor):
    return [x.new_empty(x.shape) for x in (x, factor) if x is not None]


def _keep_arguments(ctx, inputs, output):
    ctx.form, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _activation_backward(ctx, grad_y):
    grad_x, *grad_factor = activation_backward(ctx.form, grad_y, *ctx.saved_tensors)
    return None, grad_x, *(grad_factor or [None])


activation.register_autograd(_activation_backward, setup_context=_keep_arguments)
