"""Trains iterations of a run again, in a folder apart, and compares them with the run: kilogpt.replay."""
import os
import shutil
import subprocess
import sys
import tempfile

from kilogpt.configurator import config_of
from kilogpt.keys import initial_weights
from kilogpt.launch_train import ROOT, as_arguments
from kilogpt.learning_rate import decay_iters
from kilogpt.prove.recorded import Comparison, RecordedRun, write_batch
from kilogpt.run import checkpoint

# The keys of a replay that differ from the run: it only trains, and saves its last iteration.
REPLAY_KEYS = dict(log_interval=1, eval_iters=0, eval_interval=2 ** 31, eval_only=False, save_interval=0,
                   save_minutes=0, keep_checkpoints=1, async_checkpoint=False, wandb_log=False,
                   trackio=False, tensorboard=False, events=False, accept_new_data=True)  # the comparison tells what has changed


def replay(out_dir, which, nproc, arguments):
    """Replay a run and print the result. Exits with code 1 at the first difference.

    which: an iteration, as text, or 'all'. nproc: the number of processes, or 0 for that of the run.
    arguments: config files and keys of train.py.
    """
    run = RecordedRun(out_dir)
    last = run.last_of(which)
    arguments = [os.path.join(out_dir, 'config.json'), *arguments]
    config = config_of(os.path.join(ROOT, 'train.py'), arguments)
    if config['islands'] > 1 or config['outer_interval'] or config['outer_store']:
        raise ValueError('a run with islands or outer_interval cannot be replayed, since other islands '
                         'cannot go back')
    nproc = int(os.environ.get('WORLD_SIZE', nproc)) or run.processes_at(last)
    run.check_dropout(last, nproc, config)
    is_main = os.environ.get('RANK', '0') == '0'
    comparison = Comparison(run, config)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix='replay_') as folder:
        for begin, end in run.segments(which, config['init_from'], config['profile']):
            keys = REPLAY_KEYS | dict(out_dir=os.path.join(folder, str(end)), max_iters=end,
                                      lr_decay_iters=decay_iters(config),
                                      profile=config['profile'] and end - begin == 1)
            if config['on_spike'] == 'rollback':  # each segment starts from a checkpoint anyway
                keys['on_spike'] = 'skip'
            keys['init_from'] = 'resume' if begin else initial_weights(config['init_from']) or 'scratch'
            if is_main and begin:
                link_checkpoint(run.paths.get(begin) or find_replayed(folder, begin), keys['out_dir'])
            run_train([*arguments, *as_arguments(**keys)], nproc)
            if is_main:
                comparison.compare(keys['out_dir'], begin, end)
            if comparison.problem:
                break
        if is_main and which != 'all':
            keep_folder(run, last, keys['out_dir'], config)
    if comparison.problem:
        sys.exit(f'error: {comparison.problem}')
    if is_main:
        print(comparison.summary())


def link_checkpoint(path, out_dir):
    """Put a checkpoint into a replay's folder, as hard links if the storage has them, else as copies."""
    target = os.path.join(out_dir, 'ckpt', os.path.basename(path))
    try:
        shutil.copytree(path, target, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(path, target)


def find_replayed(folder, iteration):
    """The checkpoint at the end of an earlier segment of this replay."""
    return checkpoint.find(os.path.join(folder, str(iteration)))[0]


def run_train(arguments, nproc):
    """Run train.py on nproc processes; exits with its exit code if it fails.

    If this process was itself started beside others, by torchrun or mpirun, it runs train.py as the same rank.
    """
    command = [sys.executable]
    if nproc > 1 and 'RANK' not in os.environ:
        command += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
    done = subprocess.run([*command, os.path.join(ROOT, 'train.py'), *arguments])
    if done.returncode:
        sys.exit(done.returncode)


def keep_folder(run, last, replayed, config):
    """Keep the text of the last iteration's batch and, if it was profiled, the trace."""
    folder = os.path.join(run.out_dir, f'replay_{last:08d}')
    os.makedirs(folder, exist_ok=True)
    write_batch(folder, run, last, config)
    for name in ('trace.json', 'profile.json'):
        if os.path.exists(os.path.join(replayed, name)):
            shutil.move(os.path.join(replayed, name), os.path.join(folder, name))
    print(f'the batch of iteration {last} is in {folder}')
