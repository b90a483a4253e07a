"""kilogpt.settings: schedules that do not fit their run, and what a resumed run does not take from its keys."""
import dataclasses
import pathlib
from types import SimpleNamespace

import pytest

from helpers import ROOT, TINY
from kilogpt.configurator import config_of
from kilogpt.settings import check_sampling, check_settings, lr_of, settle_settings
from model import GPTConfig

pytestmark = pytest.mark.quick

SHARDS = {'train.bin': [40_000, 'a'], 'val.bin': [6_000, 'b']}


def config_with(*files, **keys):
    return config_of(f'{ROOT}/train.py', [*files] or TINY) | keys


def model_of(config):
    names = {field.name for field in dataclasses.fields(GPTConfig)}
    return GPTConfig(vocab_size=65, **{key: value for key, value in config.items() if key in names})


def settle(config, model=None, shards=SHARDS, saved=None, source='out/ckpt/iter_00000012'):
    """(config of the run, the lines that it prints)."""
    said = []
    start = SimpleNamespace(saved=saved or {}, source=source)
    config = settle_settings(config, model or model_of(config), shards, start, said.append)
    return config, said


def state_of(config, iteration, shards=SHARDS):
    return dict(config=config, iteration=iteration, model=dataclasses.asdict(model_of(config)), shards=shards)


# --- schedules that do not fit ------------------------------------------------------------------------------

@pytest.mark.parametrize('keys, words', [
    (dict(max_iters=20), ['min_lr=0.001', 'lr_decay_iters=12', 'max_iters=20', 'lr_decay_iters=0 follows']),
    (dict(max_iters=10), ['max_iters=10', 'before lr_decay_iters=12', 'min_lr=0.001']),
    (dict(warmup_iters=12), ['warmup_iters=12', 'max_iters=12', 'learning_rate=0.01']),
    (dict(warmup_iters=2000, lr_decay_iters=0), ['warmup_iters=2000', 'max_iters=12', 'never reaches']),
    (dict(warmup_iters=8, lr_decay_iters=6), ['warmup_iters=8', 'lr_decay_iters=6', 'min_lr=0.001']),
    (dict(min_lr=0.02), ['min_lr=0.02', 'learning_rate=0.01', 'rises']),
])
def test_schedule_that_does_not_fit_is_a_warning_with_its_keys(keys, words):
    config = config_with(**keys)
    check_settings(config)
    _, (warning,) = settle(config)
    assert warning.startswith('warning: ') and [word for word in words if word not in warning] == []
    for silent in (dict(decay_lr=False), dict(eval_only=True)):
        assert settle(config | silent)[1] == []


def test_folder_without_a_name_is_refused():
    with pytest.raises(ValueError, match="^out_dir is '': name the folder of the run"):
        check_settings(config_with(out_dir=''))


def test_schedule_whose_rate_is_0_for_most_of_the_run_is_an_error():
    config = config_with(f'{ROOT}/config/quickstart.py', lr_decay_iters=140, min_lr=0.0, max_iters=2000)
    with pytest.raises(ValueError) as error:
        check_settings(config)
    for word in ('lr_decay_iters is 140', 'min_lr=0', 'iteration 140', 'max_iters=2000', 'to 0, which follows'):
        assert word in str(error.value)
    for keys in (dict(max_iters=280), dict(min_lr=1e-9), dict(decay_lr=False), dict(eval_only=True)):
        check_settings(config | keys)


@pytest.mark.parametrize('path', sorted(pathlib.Path(ROOT, 'config').glob('*.py')), ids=lambda path: path.stem)
def test_configs_have_schedules_that_fit(path):
    """Among them nanoGPT's own, with its keys."""
    config = config_with(str(path))
    check_settings(config)
    assert settle(config)[1] == []


def test_lr_decay_iters_0_follows_max_iters():
    config = config_with(f'{ROOT}/config/quickstart.py', min_lr=0.0, max_iters=2000)
    check_settings(config)
    assert settle(config)[1] == []
    rates = [lr_of(config, iteration) for iteration in range(2001)]
    assert min(rates[:-1]) > 0 == rates[-1] and rates == [
        lr_of(config | dict(lr_decay_iters=2000), iteration) for iteration in range(2001)]


# --- resuming -----------------------------------------------------------------------------------------------

def jump(former, iteration, **keys):
    """The lines about a jump when a checkpoint at an iteration is resumed with other keys."""
    _, said = settle(former | keys, saved=state_of(former, iteration))
    return [line for line in said if 'jumps' in line]


def test_jump_of_the_learning_rate_is_said_with_both_rates_and_the_iteration():
    """A wsd run ends at min_lr + 1/3 of the distance; the longer one is before its decay."""
    wsd = config_with(lr_schedule='wsd', learning_rate=1e-3, min_lr=0.0, max_iters=15, lr_decay_iters=15)
    line, = jump(wsd, 15, max_iters=30, lr_decay_iters=30)
    assert 'at iteration 15' in line and 'had 0.000333' in line and 'has 0.001' in line
    assert line.endswith('because of lr_decay_iters')
    line, = jump(wsd | dict(lr_decay_iters=0), 15, max_iters=30)
    assert line.endswith('because of max_iters')
    line, = jump(config_with(), 6, learning_rate=0.02)
    assert line.endswith('because of learning_rate') and 'at iteration 6' in line


def test_learning_rate_that_continues_is_not_a_jump():
    cosine = config_with()
    assert jump(cosine, 1) == []  # within the warm-up the next rate is twice as high
    assert jump(cosine, 6) == [] and jump(cosine, 12, max_iters=20) == []
    assert jump(cosine | dict(lr_schedule='wsd'), 4, lr_decay_iters=40) == []  # both are at the peak
    assert jump(cosine, 6, learning_rate=0.0101) == []


def test_finished_run_says_what_to_raise():
    config = config_with()
    _, said = settle(config, saved=state_of(config, 12))
    assert said == ['nothing is left to do: the checkpoint has 12 iterations, and max_iters is 12. '
                    'Set max_iters higher to continue']
    assert settle(config | dict(eval_only=True), saved=state_of(config, 12))[1] == [
        'resuming with another eval_only: False -> True']
    assert settle(config, saved=state_of(config, 11))[1] == []


@pytest.mark.parametrize('shards, change', [
    (SHARDS | {'train.bin': [20_000, 'c']}, '(train.bin was 40,000 bytes and is 20,000 bytes)'),
    (SHARDS | {'train.bin': [40_000, 'c']}, '(train.bin has other content)'),
    (SHARDS | {'val.bin': [6_000, 'c']}, '(val.bin has other content)'),
    (SHARDS | {'train_1.bin': [8, 'c']}, '(train_1.bin was absent and is 8 bytes)'),
    ({'train.bin': SHARDS['train.bin']}, '(val.bin was 6,000 bytes and is absent)'),
    ({name: [1, 'c'] for name in SHARDS}, '(train.bin was 40,000 bytes and is 1 bytes, 1 more differ)'),
], ids=['other size', 'other content', 'validation', 'grown', 'less', 'two'])
def test_dataset_that_has_changed_is_refused_until_it_is_accepted(shards, change):
    config = config_with()
    saved = state_of(config, 6)
    with pytest.raises(ValueError) as error:
        settle(config, shards=shards, saved=saved)
    assert change in str(error.value) and str(error.value).endswith('--accept_new_data=True')
    assert "dataset 'openwebtext' has changed since out/ckpt/iter_00000012" in str(error.value)
    _, (line,) = settle(config | dict(accept_new_data=True), shards=shards, saved=saved)
    assert change in line and 'continues with other batches' in line
    # Another dataset is asked for; a checkpoint of an older version does not know its data.
    assert settle(config | dict(dataset='other'), shards=shards, saved=saved)[1] == [
        "resuming with another dataset: 'openwebtext' -> 'other'"]
    del saved['shards']
    assert settle(config, shards=shards, saved=saved)[1] == []


def test_keys_that_the_model_does_not_have_are_named_and_not_recorded():
    given = config_with(n_layer=4, n_kv_head=0, head_width=0, block_size=16, dropout=0.5)
    has = model_of(given | dict(n_layer=2, n_head=2, block_size=64, dropout=0.0, bias=True))
    config, said = settle(given, has, source='gpt2')
    assert said == ['the model is that of gpt2: n_layer=2 (not 4), n_head=2 (not 4), bias=True (not False)']
    assert config == given | dict(n_layer=2, n_head=2, bias=True)
    grouped = model_of(given | dict(n_layer=4, n_kv_head=2))
    config, said = settle(given, grouped)
    assert 'n_kv_head=2 (not 0)' in said[0] and config == given | dict(n_kv_head=2)
    assert settle(given, model_of(given)) == (given, [])


@pytest.mark.parametrize('argument, sentence', [
    ('num_samples=-1', 'num_samples is -1: it must be at least 1'),
    ('max_new_tokens=0', 'max_new_tokens is 0: it must be at least 1'),
    *[(f'temperature={value}', f'temperature is {value}: it must be 0, which takes the likeliest token, or ')
      for value in ('-1.0', 'inf', 'nan', '1e-40')],
    ('top_k=-1', 'top_k is -1: it must be at least 0; 0 or None draws from all'),
    *[(f'top_p={value}', f'top_p is {value}: it must be above 0 and at most 1; 1 or None draws from all')
      for value in ('-1.0', '0.0', '2.0', 'nan')],
    ('seed=-1', 'seed is -1: it must be from 0 to 2**64 - 1')])
def test_sampling_with_a_value_that_cannot_be_is_refused(argument, sentence):
    with pytest.raises(ValueError) as error:
        check_sampling(config_of(f'{ROOT}/sample.py', [f'--{argument}']))
    assert str(error.value).startswith(sentence)


def test_sampling_from_all_tokens_or_one_is_accepted():
    for argument in ('top_k=0', 'top_k=None', 'top_p=None', 'temperature=0', 'temperature=1e-10'):
        check_sampling(config_of(f'{ROOT}/sample.py', [f'--{argument}']))
