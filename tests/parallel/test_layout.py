"""A layout's arithmetic: degrees that fit, batches that divide, and who holds what."""
import re

import pytest
from helpers import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st

from kilogpt.parallel.layout import SCHEDULES, Layout

pytestmark = pytest.mark.quick


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.integers(1, 4),
       st.sampled_from(sorted(SCHEDULES)))
def test_batch_is_split_so_that_the_pipeline_can_run_it(global_batch, dp, batch_size, pp, schedule):
    """Every sequence once, micro-batches of batch_size at most, as many as the schedule wants."""
    layout, seen = Layout(dp * pp, pp=pp, pp_schedule=schedule), []
    before = repr(layout), list(layout.notes)
    micro_batch, micro_steps = layout.split_batch(global_batch, batch_size)
    # Only the first pipeline rank is asked; the others take the same rows. A pipeline takes the rows of all
    # micro-steps at once.
    for rank in range(dp):
        seen += layout.rows(rank, global_batch, micro_batch * micro_steps, 0).tolist()
    assert sorted(row for row in seen if row >= 0) == list(range(global_batch))
    assert 1 <= micro_batch <= batch_size and micro_steps >= layout.n_stages
    if schedule.startswith('interleaved') and pp > 1:
        assert micro_steps % pp == 0
    if pp == 1:  # less than a sequence of padding in a micro-step
        assert micro_batch * micro_steps < -(-global_batch // dp) + micro_steps
    # Notes report any difference from micro-batches of batch_size. The call does not change the layout.
    notes = layout.split_notes(global_batch, batch_size)
    is_as_asked = micro_batch == batch_size and -1 not in seen
    assert is_as_asked == (notes == []) and (repr(layout), layout.notes) == before
    steps, rest = divmod(global_batch, dp * batch_size)
    fits = rest == 0 and steps >= layout.n_stages
    if fits and (pp == 1 or steps % pp == 0):
        assert is_as_asked
    for note in notes:  # the advice must lead to a batch without notes
        if 'would fit' in note:
            advised = int(re.search(r'gradient_accumulation_steps=(\d+) would fit', note)[1])
            assert layout.split_notes(advised * batch_size, batch_size) == []


@pytest.mark.parametrize('global_batch, dp, batch_size, split, notes', [
    (480, 8, 12, (12, 5), ''),
    (480, 16, 12, (10, 3),
     'micro-batch 10 rather than 12, since 16 data-parallel rank(s) divide 480 sequences: '
     'gradient_accumulation_steps=48 would fit'),
    (492, 12, 12, (11, 4),
     'micro-batch 11 rather than 12, since 12 data-parallel rank(s) divide 492 sequences: '
     'gradient_accumulation_steps=48 would fit\n'
     '36 of the 528 sequences that an iteration computes are padding, which counts for nothing: '
     'gradient_accumulation_steps=48 would fit'),
    (480, 1024, 12, (1, 1),
     'micro-batch 1 rather than 12, since 1024 data-parallel rank(s) divide 480 sequences: '
     'gradient_accumulation_steps=1024 would fit\n'
     '544 of 1024 data-parallel ranks are without any of 480 sequences: start fewer processes, or set '
     'gradient_accumulation_steps to 86 or more'),
], ids=str)
def test_padding_is_cheaper_than_tiny_micro_batches(global_batch, dp, batch_size, split, notes):
    layout = Layout(dp)
    assert layout.split_batch(global_batch, batch_size) == split
    assert '\n'.join(layout.split_notes(global_batch, batch_size)) == notes


def test_padded_split_trains_as_one_process_does(train):
    """22 sequences on 2 processes: 6 micro-batches of 2 each, of which the last one is padding."""
    arguments = '--batch_size=2', '--gradient_accumulation_steps=11', '--max_iters=4'
    padded = train(*arguments, nproc=2)
    assert 'micro-batch 2, 6 micro-step(s)' in padded.stdout
    assert '  note        2 of the 24 sequences that an iteration computes are padding' in padded.stdout
    assert_near(padded, train(*arguments))


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_every_stage_is_on_one_rank(schedule):
    layout = Layout(4, pp=4, pp_schedule=schedule)
    stages = [stage for pp_rank in range(4) for stage in layout.stages_of(pp_rank)]
    assert sorted(stages) == list(range(layout.n_stages))
    if layout.is_v_shaped:
        assert layout.stages_of(0) == [0, 7] and layout.stages_of(3) == [3, 4]


def test_ranks_count_with_tp_innermost():
    layout = Layout(16, pp=2, tp=2, cp=2, zero_stage=3)
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 4, 8, 15)] == [
        (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1)]
    assert layout.positions(2, 32) == slice(16, 32) and layout.positions(1, 32) == slice(0, 16)


@pytest.mark.parametrize('keys, message', [
    (dict(world_size=8, tp=3),
     'tp=3 × cp=1 × pp=1 is 3, which does not divide the 8 process.*1, 2, 4, 8, or start a multiple of 3'),
    (dict(world_size=8, zero_stage=2, dp_replicate=3),
     'dp_replicate=3 does not divide the data-parallel degree, 8'),
    (dict(world_size=8, dp_replicate=2), 'zero_stage is 0: set zero_stage to 2 or 3'),
    (dict(zero_stage=4), 'zero_stage is 4'),
    (dict(pp=0), 'pp is 0'),
    (dict(pp_schedule='zb'), "pp_schedule is 'zb'"),
], ids=str)
def test_degrees_that_do_not_fit_are_refused_in_one_sentence(keys, message):
    with pytest.raises(ValueError, match=f'^[^\n]*{message}[^\n]*$'):
        Layout(**keys)


def test_tensor_and_pipeline_parallelism_run_fsdp():
    assert Layout(2, tp=2).zero_stage == 2 and 'zero_stage=0 runs as 2' in Layout(2, tp=2).notes[0]
    assert Layout(2, cp=2).zero_stage == 0 and not Layout(2, cp=2).notes
