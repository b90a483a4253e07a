"""The compiler fails only on rank 1, after the probe of whether it works."""
import os

import torch._inductor.compile_fx as inductor

compile_fx = inductor.compile_fx
calls = 0


def failing_compile_fx(*args, **options):
    global calls
    calls += 1
    if calls > 1 and os.environ['RANK'] == '1':
        raise RuntimeError('a planted fault')
    return compile_fx(*args, **options)


inductor.compile_fx = failing_compile_fx
