"""Compile a C++ file of this folder at its first use, into the user's cache."""
import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile

import torch

from kilogpt.configurator import announced
from kilogpt.devices.compiler import in_one_line

# The rest of -ffast-math would round denormal numbers to zero in the whole process. Machines that share a
# home share the libraries, which therefore have no instructions beyond AVX512-BF16 and AVX512-VNNI.
FLAGS = ('-std=c++20 -O3 -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mtune=native -mprefer-vector-width=512 '
         '-fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC').split()
NO_BFLOAT16 = 'the processor does not multiply in bfloat16'


@functools.cache
def library(source, *flags):
    """The C++ file as a ctypes.CDLL. Its first use compiles it, in seconds; later processes load it.

    source: a pathlib.Path. flags: more flags of the compiler, the libraries to link last.
    """
    compiler = os.environ.get('CXX', 'g++')
    content = f'{torch.__version__} {FLAGS} {flags} {source.read_text()}'
    key = hashlib.blake2b(content.encode(), digest_size=8)
    path = pathlib.Path.home() / '.cache' / 'kilogpt' / f'{source.stem}-{key.hexdigest()}.so'
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may compile the file at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, announced(f'compiling {source.name}'):
            built = os.path.join(folder, path.name)
            subprocess.run([compiler, *FLAGS, str(source), '-o', built, *flags],
                           check=True, capture_output=True, text=True)
            os.replace(built, path)
    return ctypes.CDLL(str(path))


def problem(load):
    """Why load(), which calls `library`, does not work in this process, in one line; None if it does."""
    if not torch.cpu.get_capabilities().get('avx512_bf16'):
        return NO_BFLOAT16
    try:
        load()
        return None
    except subprocess.CalledProcessError as error:
        return in_one_line(error.cmd[0], error.stderr)
    except (OSError, RuntimeError) as error:  # a compiler, a place for the library or a home is missing
        return in_one_line(type(error).__name__, error)
