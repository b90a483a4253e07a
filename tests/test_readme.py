"""README says what is so: its commands, its table of keys and its files."""
import os
import re

from conftest import ROOT, run

README = open(os.path.join(ROOT, 'README.md'), encoding='utf-8').read()


def test_every_key_is_in_the_table():
    lines = run('train.py', '--help').stdout.splitlines()
    keys = [re.match(r'  --(\w+)=(.+?)\s{2,}(?:int|float|bool|str)\s+(.*)', line) for line in lines]
    expected = [(m[1], m[2], m[3]) for m in keys if m]
    assert len(expected) > 40
    table = re.findall(r'^\| `(\w+)` \| `(.+?)` \| (.*) \|$', README, re.M)
    assert table == expected


def test_files_it_names_are_there():
    commands = re.findall(r'python ([\w/]+\.py)(?: (config/\w+\.py))?|train\.py (config/\w+\.py)', README)
    names = {name for command in commands for name in command if name} | set(re.findall(r'\]\((assets/\S+)\)', README))
    assert len(names) > 8
    assert [name for name in names if not os.path.exists(os.path.join(ROOT, name))] == []


def test_opens_with_the_two_commands():
    first, second = re.findall(r'^```\n(.*?)\n```', README, re.M | re.S)[:2]
    assert first == ('pip install -r requirements.txt && python train.py config/quickstart.py && '
                     'python sample.py --out_dir=out-quickstart')
    assert second == 'pip install -r requirements-dev.txt && python -m pytest'


def test_nanogpts_keys_keep_their_names_and_defaults():
    """Its config files and command lines run unmodified; device, dtype and backend follow the machine instead."""
    theirs = dict(
        out_dir='out', eval_interval=2000, log_interval=1, eval_iters=200, eval_only=False, always_save_checkpoint=True,
        init_from='scratch', wandb_log=False, wandb_project='owt', wandb_run_name='gpt2', dataset='openwebtext',
        gradient_accumulation_steps=40, batch_size=12, block_size=1024, n_layer=12, n_head=12, n_embd=768, dropout=0.0,
        bias=False, learning_rate=6e-4, max_iters=600000, weight_decay=1e-1, beta1=0.9, beta2=0.95, grad_clip=1.0,
        decay_lr=True, warmup_iters=2000, lr_decay_iters=600000, min_lr=6e-5, backend='auto', device='auto', dtype='auto',
        compile=True)
    table = dict(re.findall(r'^\| `(\w+)` \| `(.+?)` \|', README, re.M))  # which is what train.py has, see above
    assert {key: table.get(key) for key in theirs} == {key: repr(value) for key, value in theirs.items()}


def test_nanogpts_command_line_for_a_cpu(dataset, tmp_path):
    done = run('train.py', 'config/train_shakespeare_char.py', *(
        '--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 '
        '--n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0').split(),
        f'--dataset={dataset}', f'--out_dir={tmp_path}', '--max_iters=2')
    assert 'step 2: train loss' in done.stdout and os.path.exists(tmp_path / 'ckpt' / 'iter_00000002')
