"""Layouts on pretended GPUs: each trains, over an NCCL that refuses different calls of ranks of one group."""
import pytest

# {layout: processes}
LAYOUTS = {
    '--zero_stage=0': 2, '--zero_stage=1': 2, '--zero_stage=2': 2, '--zero_stage=3': 2,
    '--zero_stage=3 --dp_replicate=2': 4,
    '--zero_stage=3 --optimizer=muon': 2, '--zero_stage=1 --optimizer=muon': 2, '--zero_stage=3 --cpu_offload=True': 2,
    '--tp=2': 2, '--tp=2 --zero_stage=3': 4, '--cp=2': 2, '--cp=2 --documents=mask': 2,
    '': 8, '--cp=2 --zero_stage=3': 4, '--tp=2 --pp=2': 4,
    '--mlp=moe --ep=2': 2, '--mlp=moe --ep=2 --zero_stage=3': 4, '--grad_compress=bf16': 2,
    '--grad_compress=powersgd': 2,
    **{f'--pp=2 --pp_schedule={schedule}': 2 for schedule in (
        'gpipe', '1f1b', 'interleaved1f1b', 'interleavedzb', 'zbv', 'dualpipev')}}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_layout_trains_with_the_same_collectives_on_all_ranks(dry_run, folders, layout):
    run = dry_run('--max_iters=3', '--eval_interval=3', '--eval_iters=1', '--n_layer=4', '--dtype=bfloat16',
                  '--gradient_accumulation_steps=4', '--on_nonfinite=skip', f'--dataset={folders}',
                  *layout.split(), nproc=LAYOUTS[layout])
    assert list(run.lines) == [1, 2, 3] and list(run.evals) == [0, 3]
    assert 'process(es) on cuda:0' in run.stdout
    assert any(call.startswith('nccl') for call, _ in run.calls[2])
