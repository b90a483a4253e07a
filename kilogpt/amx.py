"""Attention and linears in bfloat16, for processors whose matrix products take tiles (Intel's AMX)."""
import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile

import torch
import torch.nn as nn

from kilogpt.compiler import in_one_line

SOURCE = pathlib.Path(__file__).with_suffix('.cpp')
# Without the rest of -ffast-math, which would round denormal numbers to zero in the whole process.
FLAGS = ('-std=c++20 -O3 -march=sapphirerapids -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math '
         '-fopenmp -shared -fPIC').split()
NO_TILES = 'the processor multiplies no tiles'


def is_usable(processes, notes):
    """Whether `attention` runs on all processes, which may have to wait for a compiler.

    notes: gets the reason if it should run, but does not.
    """
    failure = processes.first_problem(problem())
    if failure and failure[1] != NO_TILES:
        notes.append(f'attention could be faster: kilogpt/amx.cpp cannot be compiled (rank {failure[0]}: '
                     f'{failure[1]})')
    return not failure


def problem():
    """Why `attention` does not run in this process, in one line; None if it does."""
    if not torch.cpu.get_capabilities().get('amx_bf16'):
        return NO_TILES
    try:
        return None if library().is_supported() else NO_TILES
    except subprocess.CalledProcessError as error:
        return in_one_line(error.cmd[0], error.stderr)
    except OSError as error:  # there is no compiler, or no place for the library
        return in_one_line(type(error).__name__, error)


@functools.cache
def library():
    """amx.cpp as a library, which the first use on a machine compiles into the user's cache in 2 seconds."""
    compiler = os.environ.get('CXX', 'g++')
    torch_folder = pathlib.Path(torch.__file__).parent
    key = hashlib.blake2b(f'{torch.__version__} {FLAGS} {SOURCE.read_text()}'.encode(), digest_size=8)
    path = pathlib.Path.home() / '.cache' / 'kilogpt' / f'amx-{key.hexdigest()}.so'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # other processes may compile it too
            built = os.path.join(folder, path.name)
            subprocess.run([compiler, *FLAGS, f'-I{torch_folder}/include', str(SOURCE), '-o', built,
                            f'-L{torch_folder}/lib', '-ltorch_cpu', '-lc10'],
                           check=True, capture_output=True, text=True)
            os.replace(built, path)
    return ctypes.CDLL(str(path))


# --- attention, by amx.cpp ----------------------------------------------------------------------------------

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


def pointers(*tensors):
    return [ctypes.c_void_p(x.data_ptr()) for x in tensors]


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


# --- linears --------------------------------------------------------------------------------------------

def replace_linears(block):
    """Make the linears of a block FastLinears, in place."""
    for module in block.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


def is_worth_a_call(x):
    """Whether a compiled model should call an operation of ours: that takes as long as a small product."""
    return torch.compiler.is_compiling() and x.dtype == torch.bfloat16 and x.numel() >= 2 ** 20


class FastLinear(nn.Linear):
    """A linear whose products in bfloat16, where it is compiled, are faster by a tenth.

    F.linear copies the bias into every row of the result before it adds the product. The product that gives
    the gradient of the weight is slower where that has fewer rows than columns: its transpose is computed
    then. And the compiler sums up the gradient of the bias a few columns at a time.
    """

    def forward(self, x):
        """x (..., inputs) -> (..., outputs)."""
        if hasattr(self.weight, 'placements') or not is_worth_a_call(x):
            return super().forward(x)
        bias = None if self.bias is None else self.bias.type_as(x)
        return linear(x, self.weight.type_as(x), bias)


@torch.library.custom_op('kilogpt::linear', mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear in bfloat16."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


@torch.library.custom_op('kilogpt::linear_backward', mutates_args=())
def linear_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                    has_bias: bool) -> list[torch.Tensor]:
    """The gradients of x (..., inputs), weight (outputs, inputs) and bias from that of the result."""
    grad, rows = grad.flatten(0, -2), x.flatten(0, -2)
    if weight.size(0) < weight.size(1):
        grad_weight = (rows.T @ grad).T.contiguous()
    else:
        grad_weight = grad.T @ rows
    return [(grad @ weight).view_as(x), grad_weight] + [grad.sum(dim=0)] * has_bias


@linear.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.size(0))


@linear_backward.register_fake
def _(grad, x, weight, has_bias):
    gradients = [x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.size(0))]
    return gradients[:2 + has_bias]


def _keep_operands(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx, grad):
    gradients = linear_backward(grad, *ctx.saved_tensors, ctx.has_bias)
    return *gradients, *[None] * (not ctx.has_bias)


linear.register_autograd(_linear_backward, setup_context=_keep_operands)
