"""kilogpt.prove --random: every key is in the draw, every pair of values is met, and what fails shrinks."""
import itertools
import re

import pytest

from helpers import ROOT, run_forked, run_script
from kilogpt.configurator import config_of
from kilogpt.prove import limits, trial
from kilogpt.prove.draws import Drawer, keys_not_plain, pairs_of, rank_of, shrink, without
from kilogpt.prove.random_draws import command_of, parse_draw
from kilogpt.prove.space import CROSSED, DRAWN, MOST_PROCESSES, NOT_DRAWN, OF_DRAW, count_processes, plain

BASE = config_of(f'{ROOT}/train.py', [])
FIRST_SEED, FIRST_DRAWS = 23, 15  # that meet every pair of degrees of up to 4 processes


def test_every_key_is_drawn_or_has_a_reason():
    """A new key of train.py or model.py belongs into kilogpt/prove/space.py."""
    placed = DRAWN.keys() | NOT_DRAWN.keys()
    assert sorted(BASE.keys() - placed) == [], 'give these keys values in DRAWN, or a reason in NOT_DRAWN'
    assert sorted(placed - BASE.keys() - OF_DRAW.keys()) == [], 'these keys do not exist'
    assert DRAWN.keys() & NOT_DRAWN.keys() == set()


def test_every_key_has_its_default_or_a_smaller_value_among_its_values():
    """Otherwise a draw would never show what users have."""
    for key in DRAWN.keys() - OF_DRAW.keys():
        kinds = {type(value) for value in DRAWN[key].values}
        assert kinds == {type(BASE[key])}, key
        assert len(set(DRAWN[key].values)) > 1, key


def test_every_pair_of_values_is_met_within_320_draws():
    drawer, met = Drawer(seed=0, refusal=lambda draw: ''), set()
    for _ in range(320):
        draw, _ = drawer.draw()
        assert count_processes(draw) <= MOST_PROCESSES
        met |= pairs_of(draw)
    assert [pair for pair in drawer.pairs if pair not in met] == []


def test_every_pair_of_degrees_is_met_first():
    drawer, met = Drawer(FIRST_SEED, lambda draw: trial.refusal_of(draw, BASE), most_processes=4), set()
    for _ in range(FIRST_DRAWS):
        met |= pairs_of(drawer.draw()[0])
    possible = [pair for pair in drawer.pairs if rank_of(pair) == 0]  # others need more processes
    kinds = {frozenset(key for key, _ in pair) for pair in possible}
    assert kinds == {frozenset(pair) for pair in itertools.combinations(CROSSED, 2)}
    assert [pair for pair in possible if pair not in met] == []


def test_draws_are_a_function_of_the_seed():
    first, second, other = ([Drawer(seed, lambda draw: '').draw() for _ in range(3)] for seed in (3, 3, 4))
    assert first == second != other


def test_pair_that_no_draw_can_have_is_refused_by_its_sentence():
    def refusal(draw):
        return 'tp=2 and ZeRO-3 cannot be' if draw['tp'] == 2 and draw['zero_stage'] == 3 else ''

    drawer = Drawer(0, refusal, most_processes=2)
    provoked = [sentence for _, sentence in (drawer.draw() for _ in range(80)) if sentence]
    assert drawer.refused == {(('tp', 2), ('zero_stage', 3)): 'tp=2 and ZeRO-3 cannot be'}
    assert provoked == ['tp=2 and ZeRO-3 cannot be']


@pytest.mark.parametrize('cause', [
    dict(tp=2), dict(mlp='moe', ep=2, dp=2), dict(pp=2, pp_schedule='zbv', zero_stage=3)])
def test_failing_draw_shrinks_to_the_keys_that_it_needs(cause):
    drawer = Drawer(5, lambda draw: '')
    draw = next(draw for draw, _ in iter(drawer.draw, None) if draw.items() >= cause.items())
    attempts = []

    def which_fail(draws):
        attempts.extend(draws)
        return [each.items() >= cause.items() for each in draws]

    assert set(keys_not_plain(draw)) > set(cause)
    smallest = shrink(draw, which_fail)
    assert {key: smallest[key] for key in keys_not_plain(smallest)} == cause
    assert len(attempts) < 120


def test_draw_can_be_repeated_from_its_command():
    draw, _ = Drawer(7, lambda draw: '').draw()
    text = re.search(r'--draw="(.*)"', command_of(draw))[1]
    assert parse_draw(text) == without(draw, ())
    assert parse_draw('') == plain()


def test_only_sentences_of_the_documentation_may_refuse_a_draw():
    assert limits.is_documented('n_head=6 cannot be split over tp=4 cp=1: on these processes this model can have ...')
    assert not limits.is_documented('n_head=6 is not what we like')
    assert len(limits.documented_sentences()) > 10


@pytest.mark.parametrize('text, outcome', [
    pytest.param('data=pairs; lora_rank=4; cp=2; then=dp2', 'same', marks=pytest.mark.slow),
    pytest.param('data=packed taught; tp=2; cp=2; distill_divergence=js; mlp=moe', 'same', marks=pytest.mark.slow),
    # A group of parameters leads through FSDP2's hooks in the second half of a backward pass.
    pytest.param('mlp=moe; norm_place=after; pp=2; zero_stage=3; expert_bias=True; pp_schedule=zbv', 'same',
                 marks=pytest.mark.slow),
    pytest.param('dp=2; tp=2; mlp=swiglu', 'same', marks=pytest.mark.slow),
    # The planner measured latent attention with narrow weights, but without the adapters that allow these.
    pytest.param('pos=rope; kv_latent=24; lora_rank=4; lora_base_dtype=bfloat16', 'same',
                 marks=pytest.mark.slow),
    pytest.param('islands=2; dp=2; outer_interval=1; data=mixture', 'same', marks=pytest.mark.slow),
    pytest.param('dp=2; precision=bfloat16; zero_stage=3', 'same', marks=pytest.mark.slow),
    ('tp=2; n_kv_head=1', 'refused: n_kv_head=1 cannot be split'),
    pytest.param('n_kv_head=1; then=tp2 dp2 zero2', 'refused: n_kv_head=1 cannot be split', marks=pytest.mark.slow),
])
def test_one_draw(text, outcome):
    done = run_forked('kilogpt.prove', f'--draw={text}')
    assert done.stdout.startswith(outcome), done.stdout + done.stderr


def run_draws(*arguments):
    """Run random draws of the product; the test fails with their report."""
    done = run_script('kilogpt.prove', *arguments, check=False, timeout=1200)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_draws_of_few_processes_equal_one_process():
    """These draws meet every pair of degrees of up to 4 processes."""
    report = run_draws(f'--random={FIRST_DRAWS}', '--nproc=4', f'--seed={FIRST_SEED}')
    assert f'{FIRST_DRAWS} draws of seed {FIRST_SEED}' in report


@pytest.mark.slow
def test_draws_of_a_known_seed_equal_one_process():
    run_draws('--minutes=4', '--seed=1')


@pytest.mark.slow
def test_draws_of_a_new_seed_equal_one_process():
    """Another seed in each run, which the report names."""
    run_draws('--minutes=4')
