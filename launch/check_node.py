"""Check that a node can take part in a run. launch/slurm.sh and launch/ssh.sh call this before a run starts.

    python launch/check_node.py --node=0 --nodes=2 --endpoint=10.0.0.1:29500 --processes=8 \
        train.py config/train_gpt2.py

Run this on all nodes at the same time; the first node is --node=0. The nodes exchange what they have over
the port that torchrun will use. If a node lacks something, all nodes exit with code 1, and the first node
prints a sentence that names the node.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import socket
import sys
import time
import uuid

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT
os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'FATAL')  # hides stack traces of failed connections
import torch
import torch.distributed as dist

from data.storage import is_url, local_folder
from kilogpt.configurator import config_of, exit_on_error
from kilogpt.keys import parse_init_from

PATIENCE = 300  # seconds until all nodes must have started and answered
SHARED_WITHIN = 20  # seconds until a new file must be visible on all nodes


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--node', type=int, required=True, help='index of this node, from 0')
    parser.add_argument('--nodes', type=int, required=True, help='number of nodes')
    parser.add_argument('--endpoint', required=True, help='HOST:PORT on the first node, as for torchrun')
    parser.add_argument('--processes', type=int, required=True,
                        help='number of processes that torchrun starts here')
    parser.add_argument('--name', default=socket.gethostname(), help='name of this node in messages')
    parser.add_argument('program', nargs=argparse.REMAINDER, help='the program that torchrun will run')
    return parser.parse_args()


def check_init_from(config):
    """Raise ValueError for an init_from from which each restart of the job would begin again."""
    resumes, weights = parse_init_from(config['init_from'])
    if weights and not resumes:
        raise ValueError(f'init_from is {weights!r}, and every restart of the job would begin from there: set '
                         f'--init_from=auto:{weights}, which continues from the checkpoint in out_dir if there is one')


def check_gpus(name, processes, device):
    """Raise ValueError if this node has fewer GPUs than processes that need one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device in ('auto', 'cuda') and count < processes:
        raise ValueError(f'{name} has {count} GPUs that PyTorch {torch.__version__} can use, but must start '
                         f'{processes} processes: check nvidia-smi and the driver there, or set --device=cpu')


def open_store(arguments):
    """The store on the first node through which the nodes communicate. ValueError if it cannot be opened."""
    host, _, port = arguments.endpoint.rpartition(':')
    is_first = arguments.node == 0
    try:
        return dist.TCPStore(host, int(port), is_master=is_first, wait_for_workers=False,
                             timeout=datetime.timedelta(seconds=PATIENCE))
    except RuntimeError as error:  # torch's network errors are among them
        reason = str(error).splitlines()[0]
        if is_first and 'EADDRINUSE' in reason:
            raise ValueError(f'port {port} of {arguments.name} is in use: set another port') from None
        raise ValueError(f'{arguments.name} cannot reach the first node at {arguments.endpoint}: check its '
                         f'name, and whether a firewall blocks the port ({reason})') from None


def read(store, key, sender):
    """The value that a node has put into the store. ValueError if it does not arrive in time."""
    try:
        return json.loads(store.get(key))
    except RuntimeError:
        raise ValueError(f'{sender} (counted from 0) has not answered within {PATIENCE} seconds: check its '
                         'log, and whether Python starts there') from None


@contextlib.contextmanager
def token_in(out_dir):
    """A context with the name of a temporary file in out_dir, which the other nodes must see."""
    path = pathlib.Path(local_folder(out_dir), f'.shared-{uuid.uuid4().hex}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        yield path.name
    finally:
        path.unlink()


def is_visible(path):
    """Whether a file that another node has just written becomes visible here."""
    deadline = time.monotonic() + SHARED_WITHIN
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def problem_of(arguments, config, first):
    """The problem that keeps this node from the run, as a sentence; None if there is none.

    first: a dict with `name`, `torch` and `token` of the first node.
    """
    try:
        if torch.__version__ != first['torch']:
            raise ValueError(f'{arguments.name} has PyTorch {torch.__version__}, but {first["name"]} has '
                             f'{first["torch"]}: install the same version on all nodes')
        if config:
            check_gpus(arguments.name, arguments.processes, config['device'])
            out_dir = os.path.abspath(local_folder(config['out_dir']))
            if not is_url(config['out_dir']) and not is_visible(os.path.join(out_dir, first['token'])):
                raise ValueError(f'{arguments.name} does not see in {out_dir} what {first["name"]} writes '
                                 'there: set --out_dir to a folder on storage that all nodes share')
    except ValueError as error:
        return str(error)


def problems_of_all(arguments, config, store, token=None):
    """[problem or None] of all nodes, which exchange them. token: only on the first node."""
    if arguments.node == 0:
        store.set('first', json.dumps(dict(name=arguments.name, torch=torch.__version__, token=token)))
    first = read(store, 'first', 'the first node')
    store.set(f'problem {arguments.node}', json.dumps(problem_of(arguments, config, first)))
    return [read(store, f'problem {node}', f'node {node}') for node in range(arguments.nodes)]


def main():
    arguments = parse_arguments()
    config = None
    if os.path.basename(arguments.program[0]) == 'train.py':
        config = config_of(os.path.join(ROOT, 'train.py'), arguments.program[1:])
        check_init_from(config)
    store = open_store(arguments)
    with contextlib.ExitStack() as stack:
        token = None
        if config and arguments.node == 0:
            token = stack.enter_context(token_in(config['out_dir']))
        problems = problems_of_all(arguments, config, store, token)
    if arguments.node == 0:
        for problem in filter(None, problems):
            print(f'error: {problem}', file=sys.stderr, flush=True)
        store.set('said', 'null')
    # If a node exits with an error, Slurm kills the others. All wait until the first has printed problems.
    read(store, 'said', 'the first node')
    # The store is in the first node's process, which therefore waits until the others have read from it.
    done = store.add('done', 1)
    deadline = time.monotonic() + PATIENCE
    while arguments.node == 0 and done < arguments.nodes and time.monotonic() < deadline:
        time.sleep(0.05)
        done = store.add('done', 0)
    sys.exit(any(problems))


if __name__ == '__main__':
    with exit_on_error():
        main()
