"""Continue drawn requests by models in a layout, in float64, and print the texts of each model as a line of JSON.

    torchrun --nproc_per_node=2 tests/generate/texts_in_layout.py SEED 'tp=2' MODEL...
"""
import json
import os
import random
import sys
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [ROOT, *(os.path.join(ROOT, 'tests', *folder) for folder in ((), ('generate',)))]
import torch
from test_engine import MODELS, SIZE, build, draw_request

from kilogpt.generate import engine as engine_module
from kilogpt.generate.engine import Engine, ModelReader
from kilogpt.generate.layouts import LayoutReader
from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.dtensor import fill
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.processes import Processes
from kilogpt.parallel.scoring import Scoring
from model import GPT, GPTConfig


def complete(reader, seed, separator):
    """[tokens] of drawn requests, of which each joins at a drawn step."""
    draw, requests = random.Random(seed), []
    for _ in range(9):
        requests.append(draw_request(draw, requests))
    engine, waiting = Engine(reader, separator), list(requests)
    while waiting or engine.is_busy:
        while waiting and (draw.random() < 0.4 or not engine.is_busy):
            engine.submit(waiting.pop(0))
        engine.step()
    return [request.tokens for request in requests]


def main(seed, layout, *names):
    torch.set_default_dtype(torch.float64)
    engine_module.PIECE = 8
    processes = Processes('cpu')
    layout = Layout(processes.world_size, **{key: type(getattr(Layout, key))(value) for key, value in
                                             (pair.split('=') for pair in layout.split())})
    processes.join(layout)
    for number, name in enumerate(names):
        separator = 7 if number % 2 else None
        values = dict(build(MODELS[name], torch.float64).named_parameters())
        config = GPTConfig(**SIZE, **MODELS[name])
        with torch.device('meta'):
            model = GPT(config, seed=None)
        parallel = Parallel(processes, layout)
        shape = dict(batch_size=1, gradient_accumulation_steps=layout.dp * layout.n_stages, block_size=32)
        parallel.parallelize(model, shape)
        fill(parallel.named_parameters(), lambda name, shape, rows: values[name][rows])
        scorer = SimpleNamespace(config=config, dtype='float32', most_tokens=64)
        with Scoring(parallel, config, 'float32', wants_logits=True) as scoring:
            reader = LayoutReader(scoring, scorer, 3, 32, is_alone=False)
            found = complete(reader, int(seed) + number, separator)
        if processes.is_main:
            alone = complete(ModelReader(build(MODELS[name], torch.float64), 1), int(seed) + number, separator)
            print(json.dumps(dict(model=name, found=found, expected=alone)), flush=True)
    processes.leave(0)


if __name__ == '__main__':
    main(*sys.argv[1:])
