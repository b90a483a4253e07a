"""The commands of kilogpt.convert."""
import re
import sys

import pytest
import torch
from helpers import run_forked, run_script
from safetensors.torch import load_file
from test_weights import TINY, make_run, randomize, save_run

from kilogpt.convert.__main__ import inspect, main
from kilogpt.weights.exporting import export_weights
from model import GPT, GPTConfig


def test_commands(tmp_path, monkeypatch, capsys):
    out_dir, model, _ = make_run(tmp_path / 'run', moments=True)
    done = run_script('kilogpt.convert', 'inspect', out_dir)
    facts = 'iteration 3, tokens 2304, val_loss 2.5, best_val_loss 2.5, checksums correct'
    parameters = f'{model.num_params():,} parameters in {4 * model.num_params():,} bytes'
    for words in (f'iter_00000003: {facts}', 'n_layer 2', 'n_hidden 128', 'learning_rate 0.001',
                  'tokenizer: char', parameters):
        assert words in done.stdout
    assert re.search(r'transformer\.h\.0\.\.1\.attn\.c_q\.weight +\(32, 32\) +float32 +2,048\n', done.stdout)

    main(['export', out_dir, f'{tmp_path}/hf', '--dtype=bfloat16'])
    assert {p.dtype for p in load_file(tmp_path / 'hf' / 'model.safetensors').values()} == {torch.bfloat16}
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)  # a terminal says what is being done
    main(['import', f'{tmp_path}/hf', f'{tmp_path}/again'])
    shown = capsys.readouterr().err
    assert f'reading {tmp_path}/hf ...' in shown and f'writing {tmp_path}/again ...' in shown
    arguments = '--device=cpu --num_samples=1 --max_new_tokens=30 --start=AB'.split()
    imported = run_forked('sample.py', f'--out_dir={tmp_path}/again', *arguments)
    direct = run_forked('sample.py', f'--init_from={tmp_path}/hf', *arguments)
    assert imported.stdout == direct.stdout and len(direct.stdout) > 32


def test_bad_commands(tmp_path, capsys):
    out_dir, *_ = make_run(tmp_path / 'run')
    done = run_script('kilogpt.convert', 'export', out_dir, tmp_path / 'run', check=False)
    assert done.returncode == 1
    assert done.stderr == f'error: {tmp_path}/run already exists: choose another target\n'
    with pytest.raises(ValueError, match='no checkpoint to export'):
        export_weights(str(tmp_path), str(tmp_path / 'hf'))
    export_weights(out_dir, str(tmp_path / 'hf'))
    for option in ('--tokenizer', '--dataset'):  # the second is its former name
        with pytest.raises(SystemExit, match='bytes has 256 tokens, but the model of .*hf has 97: set --tok'):
            main(['import', f'{tmp_path}/hf', f'{tmp_path}/again', f'{option}=bytes'])
    inspect(str(tmp_path / 'hf'))
    assert re.search(r'^model: .*\bblock_size 64, ', capsys.readouterr().out, re.M)
    path = tmp_path / 'run' / 'ckpt' / 'iter_00000003' / 'state.json'
    path.write_text(path.read_text() + ' ')
    for command in (inspect, lambda source: export_weights(source, str(tmp_path / 'x'))):
        with pytest.raises(ValueError, match='state.json is not as it was written'):
            command(out_dir)


def test_inspect_lists_parameters_in_the_models_order(tmp_path, capsys):
    """DCP lists the tensors by process, and alphabetical order would put h.10 before h.2."""
    model = randomize(GPT(GPTConfig(**TINY | dict(n_layer=12, tie_weights=False))))
    names = [name for name, _ in model.named_parameters()]
    save_run(tmp_path, model, sorted(model.named_parameters()))
    inspect(str(tmp_path))
    listed = re.findall(r'^(?:transformer|lm_head)\S+', capsys.readouterr().out, re.M)
    first_block = [name.replace('.h.0.', '.h.0..11.') for name in names if not re.search(r'\.h\.[1-9]', name)]
    assert listed == first_block
