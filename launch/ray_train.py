"""Train on a Ray cluster: Ray Train starts train.py in its workers, and restarts it after a failure.

    python launch/ray_train.py --num_workers=4 -- config/train_gpt2.py --key=value
    python launch/ray_train.py --num_workers=8:32 -- config/train_gpt2.py --key=value

The second command uses 8 to 32 workers, as many as the cluster has room for, and adapts when nodes join or
are lost. A worker runs one process of train.py, with one GPU if the cluster has GPUs, otherwise with one CPU.

All arguments after -- are passed to train.py. If out_dir has a checkpoint, the run continues from the newest
one, at the first start, too. This repository, out_dir and the dataset must have the same paths on all nodes.
The values in metrics.jsonl are also sent to Ray Train's reports and, as kilogpt_loss etc., to Ray's metrics.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

try:
    import ray
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.metrics import Gauge
except ImportError as error:
    sys.exit(f'error: launch/ray_train.py needs Ray Train ({error}): pip install "ray[train]"')

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from data.storage import is_url, local_folder
from kilogpt.configurator import config_of


def run_worker(run):
    """Run train.py in a Ray Train worker, and report what it logs until it ends.

    run: a dict with `root` (this repository), `out_dir` and the `arguments` of train.py.
    """
    rank = ray.train.get_context().get_world_rank()
    sys.path.insert(0, run['root'])  # for `data` and `kilogpt`
    from data.storage import local_folder
    log = LogReader(pathlib.Path(run['root'], local_folder(run['out_dir']), 'metrics.jsonl'))
    train = start_training(run, rank)
    gauges = {}
    is_over = False
    while not is_over:
        values = None
        if rank == 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                train.wait(timeout=1)
            is_over = train.returncode is not None
            values = log.read_values()
            for key, value in values.items():
                if key not in gauges:
                    gauges[key] = Gauge(f'kilogpt_{key}', f'{key} in metrics.jsonl')
                gauges[key].set(value)
        has_values, is_over = broadcast_from_rank_zero((bool(values), is_over))
        if has_values:
            ray.train.report(values or {})  # Ray Train waits for all ranks, and keeps the report of rank 0
        if is_over:
            train.wait()
        if train.poll():
            raise RuntimeError(f'train.py of rank {rank} on {socket.gethostname()} ended with exit code '
                               f'{train.returncode}')


def start_training(run, rank):
    """Start train.py as torchrun does; returns its Popen."""
    start = None
    if rank == 0:
        from kilogpt.run import checkpoint
        with socket.create_server(('', 0)) as server:
            start = dict(port=server.getsockname()[1], resumes=bool(checkpoint.find(run['out_dir'])))
    start = broadcast_from_rank_zero(start)
    command = [sys.executable, 'train.py', *run['arguments']]
    if start['resumes']:
        command.append('--init_from=auto')
    if shutil.which('setpriv'):
        # On Linux, train.py then ends when this worker ends, for any reason. The next worker starts train.py
        # with the same out_dir and on the same GPU.
        command = ['setpriv', '--pdeathsig=KILL', *command]
    # Ray Train has set RANK, WORLD_SIZE, MASTER_ADDR and so on, but listens on MASTER_PORT itself.
    return subprocess.Popen(command, cwd=run['root'], env=os.environ | dict(MASTER_PORT=str(start['port'])))


class LogReader:
    """Reads the lines that are appended to metrics.jsonl from now on."""

    def __init__(self, path):
        self.path = path
        self.position = 0
        self.read_values()

    def read_values(self):
        """{key: latest number} in the lines since the last call.

        Ray Train accepts a report about every two seconds; a small model logs more often.
        """
        try:
            if os.path.getsize(self.path) < self.position:  # a new run has moved the old file away
                self.position = 0
            with open(self.path, 'rb') as file:
                file.seek(self.position)
                content = file.read()
        except FileNotFoundError:
            return {}
        content = content[:content.rfind(b'\n') + 1]  # without a line that is still being written
        self.position += len(content)
        values = {}
        for line in content.splitlines():
            for key, value in json.loads(line).items():
                if isinstance(value, (int, float)):
                    values[key] = value
        return values


def parse_workers(text):
    """'4' -> 4, '1:4' -> (1, 4)."""
    lowest, is_range, highest = text.partition(':')
    return (int(lowest), int(highest)) if is_range else int(lowest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, usage='%(prog)s [options] -- [train.py arguments]',
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--num_workers', type=parse_workers, default=1, help='N, or FROM:TO')
    parser.add_argument('--max_failures', type=int, default=3, help='number of restarts; -1 = no limit')
    parser.add_argument('arguments', nargs='*', help=argparse.SUPPRESS)
    options = parser.parse_args()
    out_dir = config_of(str(ROOT / 'train.py'), options.arguments)['out_dir']
    out_dir = out_dir if is_url(out_dir) else os.path.abspath(out_dir)

    ray.init()
    trainer = TorchTrainer(
        run_worker,
        train_loop_config=dict(root=str(ROOT), out_dir=out_dir, arguments=options.arguments),
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.num_workers, use_gpu='GPU' in ray.cluster_resources()),
        # Ray's own process group, which needs no GPUs. train.py creates another one.
        torch_config=TorchConfig(backend='gloo'),
        run_config=ray.train.RunConfig(
            name='ray', storage_path=os.path.abspath(local_folder(out_dir)),
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures)))
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    main()
