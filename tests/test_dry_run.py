"""The dry run foretells what real processes allocate and send, and refuses what they refuse."""
import json

import pytest

from helpers import FAULTS, TINY, run_forked, run_script

# Large enough that activations and logits weigh as much as parameters.
SHAPE = ('--n_layer=4 --n_embd=64 --block_size=64 --max_iters=3 --eval_iters=0 --keep_checkpoints=0 '
         '--gradient_accumulation_steps=8 --batch_size=2').split()

LAYOUTS = {
    'ddp': (2, ''),
    'ddp in bfloat16': (2, '--dtype=bfloat16'),
    'zero1': (3, '--zero_stage=1'),
    'zero1 muon': (2, '--zero_stage=1 --optimizer=muon'),
    'zero2': (2, '--zero_stage=2'),
    'zero3': (4, '--zero_stage=3'),
    'zero3 in bfloat16, full checkpointing': (2, '--zero_stage=3 --dtype=bfloat16 --activation_checkpoint=full'),
    'zero2 muon': (2, '--zero_stage=2 --optimizer=muon'),
    'selective checkpointing': (2, '--zero_stage=2 --activation_checkpoint=selective'),
    'cpu_offload': (2, '--zero_stage=2 --cpu_offload'),
    'hsdp': (4, '--zero_stage=3 --dp_replicate=2'),
    'bf16 gradients': (2, '--grad_compress=bf16'),
    'tp': (4, '--tp=2 --gradient_accumulation_steps=4'),
    'tp, rope, swiglu, untied': (2, '--tp=2 --pos=rope --norm=rmsnorm --mlp=swiglu --tie_weights=False'),
    'cp': (4, '--cp=2 --gradient_accumulation_steps=4'),
    'cp zero3': (4, '--cp=2 --zero_stage=3 --gradient_accumulation_steps=4'),
    'gpipe': (2, '--pp=2 --pp_schedule=gpipe'),
    '1f1b': (4, '--pp=2'),
    'interleaved1f1b': (2, '--pp=2 --pp_schedule=interleaved1f1b'),
    'zbv': (2, '--pp=2 --pp_schedule=zbv'),
    'zbv untied': (2, '--pp=2 --pp_schedule=zbv --tie_weights=False'),
    'tp 1f1b': (4, '--pp=2 --tp=2'),
    'tp cp hsdp': (8, '--tp=2 --cp=2 --dp_replicate=2 --zero_stage=3'),
}


def dry_run(dataset, rank, world_size, *arguments, **options):
    """The report of a rank by `python -m kilogpt.dry_run`."""
    done = run_forked('kilogpt.dry_run', rank, world_size, *TINY, f'--dataset={dataset}', *arguments, **options)
    return json.loads(done.stdout.splitlines()[-1])


def bytes_by_kind(collectives):
    """{(kind, dtype): bytes}, without the sums of numbers over all processes, which are in float64."""
    sums = {}
    for row in collectives:
        if row['dtype'] != 'float64':
            key = row['kind'], row['dtype']
            sums[key] = sums.get(key, 0) + row['bytes']
    return sums


def check_layout(train, dataset, nproc, arguments):
    run = train(*SHAPE, *arguments, nproc=nproc, faults=[FAULTS / 'record.py'])
    for rank in (0, nproc - 1) if '--pp=2' in arguments else (0,):
        recorded = json.load(open(f'{run.out_dir}.record.{rank}'))
        foretold = dry_run(dataset, rank, nproc, *SHAPE, *arguments)
        assert bytes_by_kind(foretold['collectives']) == bytes_by_kind(recorded['collectives']), rank
        assert foretold['peak_bytes'] == pytest.approx(recorded['peak'], rel=0.03), (rank, foretold)


def test_dry_run_foretells_memory_and_collectives_of_real_processes(train, dataset):
    check_layout(train, dataset, 2, ['--zero_stage=3'])


@pytest.mark.slow
@pytest.mark.parametrize('layout', LAYOUTS)
def test_dry_run_foretells_memory_and_collectives(layout, train, dataset):
    nproc, arguments = LAYOUTS[layout]
    check_layout(train, dataset, nproc, arguments.split())
