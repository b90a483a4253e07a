"""kilogpt.prove judges edits: correct ones pass, and mistakes are found, with advice that names their file.

Numbers in the edits are drawn anew in each run; a failure prints them.
"""
import random
import re

import pytest

import test_prove
from helpers import copy_repository, run_forked
from test_edits import EDITS, KEYS, LOSS, MLP, apply_diff
from test_prove import ONE_MICRO_STEP, SMALL

pytestmark = pytest.mark.slow

SCHEDULE = 'train.py', '    return lr_of(config, iteration)\n'
HOOKS = 'train.py', 'hooks = run.hooks\n'
STEP = 'train.py', '        grad_norm = run.guard.step(lr, loss_sum, grad_clip)\n'
BLOCK, PRODUCT = ('model.py', test_prove.BLOCK), ('model.py', test_prove.PRODUCT)
OPTIMIZER = 'SGD, or any other optimizer'


def replaced(place, new):
    """An edit that replaces a text of a file. new: may have {old}."""
    return lambda folder: replace(folder, *place, new.replace('{old}', place[1]))


def replace(folder, name, old, new):
    text = (folder / name).read_text()
    assert text.count(old) == 1, old
    (folder / name).write_text(text.replace(old, new))


def of_page(title, **numbers):
    """An edit of docs/edit.md with other numbers: {text: replacement}."""
    def edit(folder):
        diff = EDITS[title]
        for old, new in numbers.items():
            assert old in diff, old
            diff = diff.replace(old, str(new))
        apply_diff(diff, folder)
    return edit


def hook(body):
    """An edit that adds a hook: `from kilogpt.run import Hook` is part of it."""
    lines = ''.join(f'    {line}\n' for line in body.splitlines())
    return replaced(HOOKS, f'from kilogpt.run import Hook\n\n\nclass Mine(Hook):\n{lines}\n\n{{old}}hooks.append(Mine())\n')


def optimizer(text):
    def edit(folder):
        diff = EDITS[OPTIMIZER]
        old = re.search(r'torch\.optim\.SGD\(.*\)', diff)[0]
        apply_diff(diff.replace(old, f'torch.optim.{text}'), folder)
    return edit


def correct_edits(draw):
    """{name: edit} of correct edits. draw: a random.Random for their numbers."""
    share, part, few = draw.uniform(0.1, 0.9), draw.choice((2, 3, 4)), draw.uniform(1e-4, 1e-2)
    return {
        'a linear decay': replaced(SCHEDULE, f'    return learning_rate * (1 - {share} * iteration / max_iters)\n'),
        'a step of the rate': replaced(
            SCHEDULE, f'    return learning_rate * ({share} if iteration >= max_iters // {part} else 1)\n'),
        'a cosine without warm-up': replaced(
            SCHEDULE, '    import math\n    return learning_rate * math.cos(math.pi / 2 * iteration / max_iters)\n'),
        'a rate in cycles of evaluations': replaced(
            SCHEDULE, f'    return learning_rate * (1 - {share} * (iteration % eval_interval) / eval_interval)\n'),
        'a batch that grows': of_page('A batch that grows', **{'iteration < 6': f'iteration < max_iters // {part}'}),
        'an average of the weights': of_page('An average of the weights, used for evaluation', **{'0.01': share}),
        'another norm of each layer': of_page("The norm of each layer's gradient, logged", total_norm='total_norm'),
        'a penalty': of_page('A second loss, logged and added', **{'1e-3': few}),
        'a frozen block': of_page('Some layers frozen', **{"h['0']": "h['1']"}),
        'frozen embeddings': of_page('Some layers frozen', **{"h['0']": 'wpe'}),
        'SGD': optimizer(f'SGD(parallel.optimizer_parameters(), learning_rate, momentum={share}, nesterov=True)'),
        'RMSprop': optimizer(f'RMSprop(parallel.optimizer_parameters(), learning_rate, alpha={share})'),
        'NAdam': optimizer(f'NAdam(parallel.optimizer_parameters(), learning_rate, eps={few})'),
        'clipping by a schedule': replaced(
            STEP, f'        grad_norm = run.guard.step(lr, loss_sum, grad_clip * {share} ** run.iteration)\n'),
        'weights that decay by a hook': hook(
            'def after_update(self):\n    for _, weight in parallel.optimizer_parameters():\n'
            f'        weight.data.mul_(1 - {few})'),
        'a part of the branch': replaced(BLOCK, f'        before = x\n{{old}}        x = before + {share} * (x - before)\n'),
        'a cap between blocks': replaced(BLOCK, f'{{old}}        x = {1 + share} * torch.tanh(x / {1 + share})\n'),
        'slopes of one value': replaced(
            PRODUCT, f'        distance = torch.arange(q.size(2))[:, None] - torch.arange(q.size(2))\n'
                     f'        mask = torch.where(distance < 0, -torch.inf, -{share} * distance).to(q.dtype)\n{{old}}'),
        'a window of its own': replaced(
            PRODUCT, '        mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril()'
                     f'.triu(-{draw.choice((3, 5, 9))})\n{{old}}'),
        'a weight of the loss': replaced(
            ('model.py', '            return self.loss(x, self.lm_head, targets)\n'),
            f'            return {share} * self.loss(x, self.lm_head, targets)\n'),
    }


def mistakes(draw):
    """{name: (file, edit)} of mistakes. draw: a random.Random for their numbers."""
    share, few = draw.uniform(0.1, 0.9), draw.uniform(1e-3, 1e-2)
    place = {
        'a rate for each process': replaced(SCHEDULE, '    return lr_of(config, iteration) * processes.world_size\n'),
        'a rate of each rank': replaced(SCHEDULE, f'    return lr_of(config, iteration) * (1 + {share} * processes.rank)\n'),
        'one micro-batch': replaced(
            ('train.py', 'in run.batches.of(run.iteration):'), 'in list(run.batches.of(run.iteration))[:1]:'),
        'targets of one process': replaced(
            ('train.py', 'n_targets, is_last, run.guard.scale)'),
            'n_targets // processes.world_size, is_last, run.guard.scale)'),
        'a batch by the number of processes': hook(
            'def is_due(self, run):\n    return run.batch != parallel.global_batch * processes.world_size\n'
            'def act(self, run):\n    run.change_batch(parallel.global_batch * processes.world_size)'),
        'noise of each rank': hook(
            'def after_update(self):\n    for _, weight in parallel.optimizer_parameters():\n'
            f'        weight.data.add_({few} * processes.rank)'),
        'gradients of one rank': replaced(
            STEP, '        for _, p in parallel.optimizer_parameters():\n'
                  f'            p.grad.mul_(1 + {share} * (processes.rank == 1))\n{{old}}'),
        'a clip of each process': replaced(
            STEP, '        grad_norm = run.guard.step(lr, loss_sum, grad_clip / processes.world_size)\n'),
        'a norm of its own': replaced(STEP, '{old}        grad_norm = grad_norm * processes.world_size\n'),
        'an evaluation of one process': replaced(
            ('train.py', 'nats, n_targets = parallel.sum_losses(loss_sum)'), 'nats, n_targets = loss_sum.item()'),
        'weights of each rank': replaced(
            ('train.py', 'optimizer, cluster, seed)'), 'optimizer, cluster, seed + processes.rank)'),
        'a step by the clock': replaced(
            SCHEDULE, f'    return learning_rate * (1 - {share} * (time.time() % 1))\n'),
        'a hook without state': hook(
            'updates = 0\ndef after_update(self):\n    self.updates += 1\n    for _, weight in parallel.optimizer_parameters():\n'
            f'        weight.data.mul_(1 - {few} * self.updates)'),
        'a mean for a sum': replaced(('model.py', 'ignore_index=-1, reduction=reduction)'), 'ignore_index=-1)'),
        'random numbers': replaced(BLOCK, f'{{old}}        x = x + {few} * torch.randn_like(x)\n'),
        'a mean over the batch': replaced(BLOCK, f'{{old}}        x = x - {share} * x.mean(dim=0, keepdim=True)\n'),
        'a mean over positions': replaced(BLOCK, f'{{old}}        x = x - {share} * x.mean(dim=1, keepdim=True)\n'),
        'a bias of heads from 0': replaced(
            PRODUCT, '        heads = torch.arange(q.size(1))[:, None, None] * torch.arange(q.size(2))\n'
                     f'        mask = torch.ones(q.size(2), q.size(2)).tril().log() + {share} * heads\n{{old}}'),
        'a memory of micro-batches': replaced(
            BLOCK, f"        x, self.last = x + {share} * getattr(self, 'last', 0), x.detach()\n{{old}}"),
        'a change of data': replaced(BLOCK, f'        x.data.mul_({share})\n{{old}}'),
    }
    is_of_model = [*place].index('a mean for a sum')
    return {name: ('model.py' if number >= is_of_model else 'train.py', edit)
            for number, (name, edit) in enumerate(place.items())}


SEED = random.randrange(10 ** 6)
CORRECT, MISTAKES = correct_edits(random.Random(SEED)), mistakes(random.Random(SEED))
# Mistakes that show in some layouts only
LAYOUTS = {'a mean for a sum': ONE_MICRO_STEP, 'a mean over the batch': ONE_MICRO_STEP, 'a mean over positions': 'tp2',
           'a bias of heads from 0': 'tp2', 'a change of data': 'dp2 full'}


def judge(folder, edit, layouts, *keys):
    copy_repository(folder)
    edit(folder)
    done = run_forked('kilogpt.prove', *SMALL, *keys, f'--layouts={layouts}', cwd=folder, check=False, timeout=1800)
    print(f'seed {SEED}', done.stdout, done.stderr, sep='\n')
    return done


@pytest.mark.drawn(5)
@pytest.mark.parametrize('name', CORRECT)
def test_correct_edit_passes(tmp_path, name):
    done = judge(tmp_path, CORRECT[name], 'dp2 zero3; cp2; pp2')
    assert done.returncode == 0 and done.stdout.count('same: ') == 3


@pytest.mark.drawn(1)
@pytest.mark.parametrize('title', [MLP, LOSS])
def test_edit_of_the_model_is_right_in_every_layout(tmp_path, title):
    """Compiled too, where a CPU would take a faster form of the part."""
    layouts = 'tp2 zero3; tp2 cp2; pp2 zbv; cp2; tp2 pp2 full; dp1 compile=True; tp2 compile=True'
    done = judge(tmp_path, of_page(title), layouts, *KEYS.get(title, []))
    assert done.returncode == 0 and done.stdout.count('same: ') == 7


@pytest.mark.drawn(5)
@pytest.mark.parametrize('name', MISTAKES)
def test_mistake_is_found(tmp_path, name):
    file, edit = MISTAKES[name]
    done = judge(tmp_path, edit, LAYOUTS.get(name, 'dp2'))
    advice = [line for line in done.stdout.splitlines() if line.startswith('    ->')]
    assert done.returncode == 1 and ('WRONG' in done.stdout or 'FAILED' in done.stdout)
    assert any(file in line for line in advice)
