"""Random draws find mistakes that are planted: those of other projects (docs/edit.md), and of our own."""
import re

import pytest

from helpers import FAULTS, run_forked
from kilogpt.prove.draws import keys_not_plain
from kilogpt.prove.random_draws import parse_draw

# {mistake of tests/faults/planted.py: the smallest draw that shows it}
SMALLEST = {
    'Megatron-LM 7452 norm': 'tp=2; bias=True',
    'Megatron-LM 7452 router': 'tp=2; mlp=moe; router_z_loss=0.01',
    'Megatron-LM 5916': 'dp=2; tp=2; mlp=moe; ep=2',
    'Megatron-LM 5956': 'dp=2; mlp=moe; ep=2',
    'Megatron-LM 1628': 'tp=2; mlp=moe',
    'Megatron-LM 1464': 'cp=2',
    'Megatron-LM 673': 'cp=2',
    'transformers 48687': 'dp=2; mlp=moe; ep=2',
    'torchtitan 4245': 'tp=2; bias=True',
    'torchtitan 4154': 'dp=2; tp=2; mlp=moe',
    'torchtitan 3280': 'tp=2; cp=2',
    'torchtitan 3984': 'cp=2; data=mask; attention_conv=3',
    'torchtitan 3984 state': 'cp=2; data=mask; mixer_pattern=D',
    'torchtitan 1878': 'tp=2; mlp=moe',
    'Automodel 2995': 'dp=2; mlp=moe; ep=2',
    'ART 648': 'dp=2; data=mask',
    'freed parameters': 'pp=2; zero_stage=3; pp_schedule=zbv',
    'experts divided by tp': 'dp=2; tp=2; mlp=moe; ep=2',
    'tied gradients': 'pp=2',
    'tied norm': 'pp=2',
    'replicas': 'dp=2; zero_stage=2; dp_replicate=2',
    'momentum': 'optimizer=muon; then=dp2',
    'documents of stages': 'pp=2; data=mask',
    'window': 'cp=2; window=5',
    'uneven rows': 'dp=3; zero_stage=1',
    'reference': 'cp=2; data=pairs',
    'fragment': 'dp=2; outer_interval=1',
    'convolution': 'cp=2; mlp_conv=2',
    'padding': 'dp=3',
    'tables': 'tp=2; value_pattern=V',
    'lr_factors': 'dp=2; zero_stage=1; lr_factors=vector:30',
    'adapters': 'tp=2; lora_rank=4',
}
IN_DEFAULT_TESTS = 'freed parameters',
MOST_KEYS = 4


def prove(mistake, *arguments):
    return run_forked('kilogpt.prove', *arguments, check=False, faults=[FAULTS / 'planted.py'],
                      env=dict(PLANTED=mistake), timeout=1500)


@pytest.mark.drawn(8)
@pytest.mark.parametrize('mistake', [
    pytest.param(mistake, marks=() if mistake in IN_DEFAULT_TESTS else pytest.mark.slow) for mistake in SMALLEST])
def test_planted_mistake_shows_in_a_draw_of_few_keys(mistake):
    assert 1 <= len(keys_not_plain(parse_draw(SMALLEST[mistake]))) <= MOST_KEYS
    done = prove(mistake, f'--draw={SMALLEST[mistake]}')
    assert done.returncode == 1 and done.stdout.startswith('wrong: '), done.outputs


@pytest.mark.slow
def test_planted_mistake_is_found_within_50_draws_and_shrinks():
    """This one needs a single key of its draw. docs/log has the number of draws that twelve took."""
    done = prove('Megatron-LM 1464', '--random=50', '--exitfirst', '--shrink=1', '--seed=4', '--nproc=2')
    print(done.stdout)
    smallest = re.search(r'SMALLEST: .*\n    python -m kilogpt.prove --draw="(.*)"', done.stdout)
    assert done.returncode == 1 and smallest, done.outputs
    assert keys_not_plain(parse_draw(smallest[1])) == ['cp']
