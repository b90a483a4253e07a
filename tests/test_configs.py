"""The configs for many GPUs, laid out for the world size of their own commands: in one process, as shapes."""
import os
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import ROOT
from kilogpt.configurator import config_of
from kilogpt.parallel.layout import Layout
from kilogpt.optim import local_part
from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.dtensor import bytes_held, fill
from kilogpt.parallel.processes import Processes
from model import GPT, GPTConfig

TOKENS = {'openwebtext': 9e9, 'fineweb': 10e9, 'fineweb-edu': 1.3e12}  # as the configs' comments prepare them


def commands_of(name):
    """[(world size, arguments of train.py)] of the torchrun commands in a config file's comments."""
    with open(os.path.join(ROOT, 'config', f'{name}.py')) as file:
        comments = file.read().replace('\\\n#', '')  # a command continues on the next line
    command = r'^# torchrun (?:--standalone|--nnodes=(\d+)) --nproc_per_node=(\d+) .*train.py (.+)$'
    found = re.findall(command, comments, re.M)
    assert found, f'{name}.py names no command'
    return [(int(nodes or 1) * int(gpus), arguments) for nodes, gpus, arguments in found]


def settings(arguments):
    """Every key of train.py, as these arguments leave it."""
    return config_of(os.path.join(ROOT, 'train.py'), arguments.replace('config/', f'{ROOT}/config/').split())


def lay_out(monkeypatch, world_size, rank, arguments):
    """What train.py does up to the weights, on the meta device.

    Returns (Parallel, number of parameters, micro_batch, micro_steps, config).
    """
    config = SimpleNamespace(**settings(arguments))
    for key, value in dict(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=rank % 8).items():
        monkeypatch.setenv(key, str(value))
    layout = Layout.of(world_size, vars(config))
    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=world_size)
    try:
        processes = Processes('cpu')
        processes.build_meshes(layout)
        processes.device = torch.device('meta')
        parallel = Parallel(processes, layout)
        shape = {key: value for key, value in vars(config).items() if key in GPTConfig.__dataclass_fields__}
        with processes.device:
            model = GPT(GPTConfig(vocab_size=50257, **shape), seed=None)
        n_parameters = model.num_params()
        global_batch = config.batch_size * config.gradient_accumulation_steps
        micro_batch, micro_steps = layout.split_batch(global_batch, config.batch_size)
        keys = 'batch_size', 'gradient_accumulation_steps', 'block_size', 'activation_checkpoint'
        parallel.parallelize(model, {key: getattr(config, key) for key in keys}, 'bfloat16')
    finally:
        dist.destroy_process_group()
    return parallel, n_parameters, micro_batch, micro_steps, config


@pytest.mark.parametrize('world_size, arguments', [
    *commands_of('gpt2_xl_fsdp'), *commands_of('llama_7b_tp_fsdp'),
    *(pytest.param(*command, marks=pytest.mark.slow)
      for name in ('gpt_70b_3d', 'train_gpt2_moe', 'qwen3_30b_a3b') for command in commands_of(name))])
def test_config_lays_out_as_its_command_says(monkeypatch, world_size, arguments):
    def value(name, shape, rows):
        assert rows.stop - rows.start == rows_held[name], f'{name}: no rank draws what others hold'
        return torch.empty(rows.stop - rows.start, *shape[1:], device='meta')

    no_optimizer = SimpleNamespace(param_groups=[])
    total, pp = 0, settings(arguments)['pp']
    for rank in range(0, world_size, world_size // pp):  # one of each pipeline rank
        found = lay_out(monkeypatch, world_size, rank, arguments)
        parallel, n_parameters, micro_batch, micro_steps, config = found
        layout = parallel.layout
        share = layout.tp * layout.dp_shard * layout.cp  # ranks that divide this pipeline rank's parameters
        held = bytes_held(parallel.named_parameters(), no_optimizer)[0]
        assert held == pytest.approx(4 * n_parameters / pp / share, rel=0.06)  # the head makes stages uneven
        total += held * share
        rows_held = {name: local_part(parameter).size(0) for name, parameter in parallel.named_parameters()}
        fill(parallel.named_parameters(), value)
        # Nothing but what the file says.
        global_batch = config.batch_size * config.gradient_accumulation_steps
        assert layout.notes + layout.split_notes(global_batch, config.batch_size) + parallel.notes == []
        assert micro_batch == config.batch_size
        assert micro_steps * layout.dp == config.gradient_accumulation_steps
        assert pp == 1 or micro_steps >= layout.n_stages and micro_steps % pp == 0
    assert total == pytest.approx(4 * n_parameters, rel=0.01)  # each parameter somewhere, none twice


@pytest.mark.quick
@pytest.mark.parametrize('name, most_epochs', [
    ('gpt_70b_3d', 1), ('llama_7b_tp_fsdp', 1), ('gpt2_xl_fsdp', 4), ('train_gpt2_modern', 4),
    ('train_gpt2', 40), ('train_gpt2_moe', 4), ('qwen3_30b_a3b', 1)])
def test_dataset_of_a_config_has_the_tokens_that_it_wants(name, most_epochs):
    """Repeating data up to 4 times costs little (Muennighoff et al. 2023); train_gpt2 is nanoGPT's run."""
    config = SimpleNamespace(**settings(f'config/{name}.py'))
    tokens = config.max_iters * config.gradient_accumulation_steps * config.batch_size * config.block_size
    assert tokens < most_epochs * TOKENS[config.dataset]


@pytest.mark.quick
@pytest.mark.parametrize('world_size, arguments, message', [
    (8, 'config/gpt2_xl_fsdp.py --tp=3', 'tp=3 .* does not divide the 8 process'),
    (8, 'config/gpt2_xl_fsdp.py --tp=2', 'n_head=25 cannot be split over tp=2'),
    (64, 'config/llama_7b_tp_fsdp.py --dp_replicate=3', 'dp_replicate=3 does not divide .* 32'),
    (1024, 'config/gpt_70b_3d.py --tp=16', 'n_kv_head=8 cannot be split over tp=16'),
    (1024, 'config/gpt_70b_3d.py --pp=64', 'makes 128 stages, but n_layer=80'),
])
def test_config_with_an_impossible_layout_is_refused(monkeypatch, world_size, arguments, message):
    with pytest.raises(ValueError, match=message):
        lay_out(monkeypatch, world_size, 0, arguments)
