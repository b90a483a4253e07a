"""Write to ATTENTION.RANK for how many pairs of a query and a key this process has computed attention."""
import atexit
import os
import pathlib

import torch

from kilogpt.devices import cpu_attention

attention, pairs, end = cpu_attention.attention, 0, os._exit


def counted_attention(q, k, v, first, *others):
    global pairs
    queries = torch.arange(q.size(2))
    pairs += q.size(1) * int((queries - first + 1).sum())
    return attention(q, k, v, first, *others)


def write_down():
    pathlib.Path(f'{os.environ["ATTENTION"]}.{os.environ.get("RANK", "0")}').write_text(str(pairs))


def write_down_and_end(code):
    write_down()
    end(code)


cpu_attention.attention, os._exit = counted_attention, write_down_and_end
atexit.register(write_down)
