"""Text of a model that trains on a CPU: by a fast copy of its weights, while the model is what model.py builds."""
import pytest
import torch

from kilogpt.devices import cpu_step
from kilogpt.evaluate.scorer import Scorer
from kilogpt.generate import layouts
from kilogpt.generate.engine import Request
from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.dtensor import fill
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.processes import Processes
from model import GPT, GPTConfig

SIZE = dict(block_size=48, vocab_size=61, n_layer=2, n_head=4, n_embd=32)
FORMS = dict(gpt2={}, modern=dict(n_kv_head=2, pos='rope', norm='rmsnorm', mlp='swiglu', bias=False, tie_weights=False))
needs_step = pytest.mark.skipif(cpu_step.problem() is not None, reason=str(cpu_step.problem()))


def scorer_of(dtype='float32', separator=None, **options):
    """(a Scorer of a model that is laid out for training on this process, the model), with drawn weights."""
    config = GPTConfig(**SIZE | options)
    layout, processes = Layout(1), Processes('cpu')
    processes.join(layout)
    with torch.device('meta'):
        model = GPT(config, seed=None)
    parallel = Parallel(processes, layout)
    parallel.parallelize(model, dict(batch_size=2, gradient_accumulation_steps=1, block_size=48), dtype)
    generator = torch.Generator().manual_seed(0)
    fill(parallel.named_parameters(), lambda name, shape, rows: 0.3 * torch.randn(shape, generator=generator)[rows])
    return Scorer(parallel, config, dtype, separator), model


def texts_of(scorer):
    requests = [Request([(5 * number + i) % 61 for i in range(1 + 3 * number)], 12, temperature, seed=(3, number))
                for number, temperature in enumerate((0.0, 1.0, 1.0, 0.7))]
    return layouts.generate_in_layout(scorer, requests)


@pytest.fixture
def readers(monkeypatch):
    """The results of fast_reader, one after the other."""
    found, original = [], layouts.fast_reader
    monkeypatch.setattr(layouts, 'fast_reader', lambda *arguments: found.append(original(*arguments)) or found[-1])
    return found


@needs_step
@pytest.mark.parametrize('separator', [None, 7])
@pytest.mark.parametrize('form', FORMS)
def test_fast_copy_writes_what_the_model_writes(readers, monkeypatch, form, separator):
    scorer, _ = scorer_of(separator=separator, **FORMS[form])
    found = texts_of(scorer)
    assert type(readers[0].model.forward) is cpu_step.FusedStep
    with torch.no_grad():  # as an update does
        for _, parameter in scorer.parallel.named_parameters():
            parameter.mul_(1.5)
    later = texts_of(scorer)
    monkeypatch.setattr(layouts, 'fast_reader', lambda *_: None)
    assert later == texts_of(scorer) != found


@needs_step
def test_model_that_was_changed_after_it_was_built_writes_by_itself(readers):
    scorer, model = scorer_of()
    model.transformer.h['1'].mlp.register_forward_hook(lambda module, inputs, y: 1.01 * y)
    texts_of(scorer)
    assert readers == [None]


@pytest.mark.parametrize('options', [dict(mlp='moe'), dict(attention_conv=3), dict(lora_rank=2)])
def test_model_that_one_call_does_not_compute_writes_by_itself(readers, options):
    texts_of(scorer_of(**options)[0])
    assert readers == [None]
