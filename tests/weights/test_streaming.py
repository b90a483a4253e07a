"""Models larger than memory: the memory of import, export and train.py, and the files that are written."""
import json
import os
import pathlib
from unittest import mock

import pytest
import torch
from helpers import FAULTS, TINY, read_tensors, run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_weights import FORMS, make_run, model_from, save_run

from kilogpt.run import checkpoint
from kilogpt.weights import exporting, safetensors_files, tensors
from kilogpt.weights.checkpoint_tensors import open_checkpoint
from kilogpt.weights.exporting import export_weights
from kilogpt.weights.importing import read_weights
from kilogpt.weights.safetensors_files import open_safetensors
from model import GPT, GPTConfig

MB = 2 ** 20
# 64 MB in float32, of which the largest tensor has 1.4 MB.
DEEP = dict(block_size=64, vocab_size=97, n_layer=16, n_head=4, n_embd=256, n_hidden=1408, pos='rope',
            norm='rmsnorm', mlp='swiglu', bias=False, tie_weights=False)


def peak_memory(folder, script, *arguments, nproc=1, **options):
    """The bytes by which the memory of each process of a script grew: a list."""
    run_forked(script, *arguments, nproc=nproc, faults=[FAULTS / 'peak_memory.py'],
               env=dict(PEAK_MEMORY=str(folder / 'peak')), **options)
    paths = [folder / f'peak.{rank}' for rank in range(nproc)]
    peaks = [int(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return peaks


def make_deep(folder, n_layer=16):
    """A run's folder with a checkpoint of a deep model; returns the bytes of its weights."""
    model = GPT(GPTConfig(**DEEP | dict(n_layer=n_layer)))
    save_run(folder, model, list(model.named_parameters()), meta=None)
    return 4 * model.num_params()


@pytest.mark.parametrize('n_layer', [16, pytest.param(64, marks=pytest.mark.slow)])
def test_import_export_and_init_from_have_one_tensor_at_a_time(n_layer, dataset, tmp_path):
    """The largest tensor has 1.4 MB. What the scripts import while they run takes up to 62 MB."""
    size = make_deep(tmp_path / 'run', n_layer)
    few = 72 * MB
    assert few < size
    assert peak_memory(tmp_path, 'kilogpt.convert', 'export', tmp_path / 'run', tmp_path / 'hf')[0] < few
    assert peak_memory(tmp_path, 'kilogpt.convert', 'import', tmp_path / 'hf', tmp_path / 'again')[0] < few
    assert peak_memory(tmp_path, 'kilogpt.convert', 'inspect', tmp_path / 'hf')[0] < few
    peaks = peak_memory(tmp_path, 'train.py', *TINY, f'--dataset={dataset}', f'--init_from={tmp_path}/hf',
                        '--zero_stage=3', '--eval_only=True', nproc=2)
    assert max(peaks) < size / 2 + few


def test_large_model_is_exported_in_shards(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    out_dir, model, _ = make_run(tmp_path / 'run', FORMS['llama'])
    export_weights(out_dir, str(tmp_path / 'one'), dtype='bfloat16')
    monkeypatch.setattr(safetensors_files, 'SHARD_BYTES', 20_000)
    export_weights(out_dir, str(tmp_path / 'some'), dtype='bfloat16')
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / 'some')
    theirs.save_pretrained(tmp_path / 'theirs', max_shard_size='20KB')
    ours, index = (json.loads((tmp_path / name / 'model.safetensors.index.json').read_text())
                   for name in ('some', 'theirs'))
    assert ours['metadata'] == index['metadata'] and ours['weight_map'].keys() == index['weight_map'].keys()
    whole = load_file(tmp_path / 'one' / 'model.safetensors')
    files = {path.name: load_file(path) for path in (tmp_path / 'some').glob('*.safetensors')}
    assert sorted(files) == [f'model-{i + 1:05d}-of-{len(files):05d}.safetensors' for i in range(len(files))]
    assert not (tmp_path / 'some' / 'model.safetensors').exists() and len(files) > 3
    for name, file_name in ours['weight_map'].items():
        assert files[file_name].pop(name).equal(whole.pop(name))
    assert not whole and not any(files.values())
    for path in (tmp_path / 'some').glob('*.safetensors'):
        assert path.stat().st_size < 21_000 + 4_000  # with the header
    assert model_from(tmp_path / 'some')(torch.arange(9)[None]).equal(
        model_from(tmp_path / 'one')(torch.arange(9)[None]))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_writer_and_reader_agree_with_the_library(dtype, tmp_path):
    dtype = getattr(torch, dtype)
    named = {name: torch.randn(shape).to(dtype) for name, shape in
             dict(matrix=(7, 5), vector=(3,), stack=(3, 2, 4), nothing=(0, 4), Größe=(1, 1)).items()}
    written = {name: tensors.in_memory(tensor) for name, tensor in named.items()}
    safetensors_files.write_safetensors(str(tmp_path), written, dtype)
    in_file = load_file(tmp_path / 'model.safetensors')
    assert in_file.keys() == named.keys() and all(in_file[name].equal(named[name]) for name in named)
    with safe_open(tmp_path / 'model.safetensors', 'pt') as file:
        assert file.metadata() == dict(format='pt')  # which transformers requires
    save_file(named, tmp_path / 'theirs.safetensors')
    for name, stored in open_safetensors(str(tmp_path / 'theirs.safetensors')).items():
        assert stored.dtype == dtype and stored.whole().equal(named[name])
        assert stored[1:3].equal(named[name][1:3])


END = st.none() | st.integers(-9, 9)
ROWS = st.builds(slice, END, END)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(ROWS)
def test_rows_of_combined_tensors_are_those_of_the_whole(rows):
    first, second = torch.arange(12.0).view(4, 3), -torch.arange(9.0).view(3, 3)
    a, b = tensors.in_memory(first), tensors.in_memory(second)
    pairs = [(tensors.joined([a, b]), torch.cat([first, second])),
             (tensors.stacked([a, a, a]), torch.stack([first] * 3)),
             (tensors.unstacked(tensors.stacked([a, a]))[1], first),
             (tensors.transposed(a), first.t()), (tensors.narrowed(a, 1, 3), first[1:3]),
             (tensors.selected(a, torch.tensor([3, 0, 2])), first[[3, 0, 2]]),
             (tensors.mapped(a, torch.neg), -first), (tensors.zeros((4, 2)), torch.zeros(4, 2))]
    for stored, expected in pairs:
        assert stored.shape == expected.shape and stored[rows].equal(expected[rows])
    padded = torch.zeros(6, 3)
    padded[:4] = first
    with mock.patch.object(tensors, 'BLOCK_BYTES', 24):  # two rows
        assert tensors.pad_rows(a, (6, 3), rows).equal(padded[rows])
        assert tensors.have_same_values(a, a)
        assert not tensors.have_same_values(a, tensors.mapped(a, torch.neg))


def test_parts_that_do_not_fit_are_not_put_together():
    a, b = (tensors.in_memory(torch.ones(shape)) for shape in ((4, 3), (4, 1)))
    for combine in (tensors.joined, tensors.stacked):
        with pytest.raises(ValueError, match=r'tensors of the shapes \[\(4, 1\), \(4, 3\)\] belong together'):
            combine([a, b])
    mixed = [tensors.in_memory(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    assert tensors.joined(mixed).dtype == tensors.stacked(mixed).whole().dtype == torch.float32


@pytest.mark.parametrize('layout', ['--zero_stage=3', pytest.param('--tp=2', marks=pytest.mark.slow)])
def test_checkpoint_of_several_processes_is_read_tensor_by_tensor(layout, train, tmp_path):
    out_dir = train(layout, '--max_iters=1', nproc=2).out_dir
    (path,) = checkpoint.find(str(out_dir))
    expected = read_tensors(path)
    found = open_checkpoint(path)
    assert found.keys() == {name for name, tensor in expected.items() if tensor.dim()}
    for name, stored in found.items():
        assert stored.whole().equal(expected[name]) and stored[3:-5].equal(expected[name][3:-5]), name
    export_weights(str(out_dir), str(tmp_path / 'hf'))
    _, weights, _ = read_weights(str(tmp_path / 'hf'))
    for name, stored in weights.items():
        assert stored.whole().equal(expected[f'model.{name}'][:stored.shape[0]])


def test_rank_that_reads_nan_ends_the_run_with_one_sentence(dataset, tmp_path):
    out_dir, *_ = make_run(tmp_path / 'run', FORMS['llama'], meta=None)
    export_weights(out_dir, str(tmp_path / 'hf'))
    path = tmp_path / 'hf' / 'model.safetensors'
    in_file = load_file(path)
    in_file['model.layers.1.mlp.down_proj.weight'][-1, 0] = torch.nan  # a row of the second rank
    save_file(in_file, path, metadata=dict(format='pt'))
    failed = run_forked('train.py', *TINY, f'--dataset={dataset}', f'--init_from={tmp_path}/hf',
                        '--zero_stage=3', f'--out_dir={tmp_path}/out', nproc=2, check=False)
    count = in_file['model.layers.1.mlp.down_proj.weight'].numel()
    assert failed.outputs[1].splitlines()[0] == (
        f'error: {path} has NaN or infinity in model.layers.1.mlp.down_proj.weight (1 of {count:,} values): '
        'use other weights')
    assert failed.codes == [1, 1]


def test_export_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    out_dir, *_ = make_run(tmp_path / 'run', FORMS['llama'])

    def full_disk(folder, *_):
        pathlib.Path(folder, 'model.safetensors').write_bytes(b'half')
        raise OSError('No space left on device')

    monkeypatch.setattr(exporting, 'write_safetensors', full_disk)
    with pytest.raises(OSError, match='No space'):
        export_weights(out_dir, str(tmp_path / 'hf'))
    assert not os.path.exists(tmp_path / 'hf')
