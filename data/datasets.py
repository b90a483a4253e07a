"""The folders of datasets, and what their meta.json says about the tokens."""
import json
import os
import subprocess
import sys

from data.tokenizer import get_tokenizer

DATA = os.path.dirname(os.path.abspath(__file__))
SMALL_DATASETS = ('shakespeare_char', 'shakespeare')  # a run prepares these itself if they are missing


def open_dataset(dataset, processes):
    """Prepare a small dataset if it is missing; returns (folder, meta.json). All processes call this.

    Raises ValueError if the dataset does not exist or cannot be used.
    """
    # The first process of the run prepares the dataset while the others wait. Then the first process of each
    # node does the same, since the nodes may not share a file system.
    for is_preparer in (processes.is_first, processes.local_rank == 0):
        if is_preparer:
            prepare_small_dataset(dataset)
        processes.barrier()
    folder = find_dataset(dataset)
    return folder, read_meta(folder)


def prepare_small_dataset(dataset):
    """Run the prepare.py of a small dataset if the dataset is missing; ValueError if prepare.py fails."""
    folder = os.path.join(DATA, dataset)
    if dataset in SMALL_DATASETS and not os.path.exists(os.path.join(folder, 'val.bin')):
        print(f'{dataset} is not prepared yet: running data/{dataset}/prepare.py', flush=True)
        if subprocess.run([sys.executable, os.path.join(folder, 'prepare.py')]).returncode:
            raise ValueError(f'dataset {dataset!r} could not be prepared')


def find_dataset(dataset):
    """The folder of a dataset, a name in data/ or any other path; ValueError if it has no token files."""
    folder = os.path.join(DATA, dataset)
    if os.path.isdir(folder) and any(name.endswith('.bin') for name in os.listdir(folder)):
        return folder
    advice = f'make it from text with python data/text/prepare.py --input=FILES --out={dataset}'
    if os.path.exists(os.path.join(folder, 'prepare.py')):
        advice = f'run python data/{dataset}/prepare.py'
    raise ValueError(f'dataset {dataset!r} has no data in {folder}: {advice}')


def read_meta(folder):
    """The content of a dataset's meta.json; ValueError if it cannot be used.

    A dataset without a meta.json has GPT-2's vocabulary, as in nanoGPT.
    """
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        if os.path.exists(os.path.join(folder, 'meta.pkl')):
            raise ValueError(f'{folder} has a meta.pkl but no meta.json; a pickle can run code, '
                             'so it is never read: prepare the dataset again')
        return dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2')
    with open(path, encoding='utf-8') as file:
        try:
            meta = json.load(file)
        except ValueError as error:
            raise ValueError(f'{path} is not JSON ({error}): prepare the dataset again') from None
    if not isinstance(meta, dict):
        raise ValueError(f'{path} is not a JSON object: prepare the dataset again')
    if meta.get('dtype') not in ('uint16', 'uint32') or not isinstance(meta.get('vocab_size'), int):
        raise ValueError(f'{path} needs an integer vocab_size and a dtype of uint16 or uint32; it holds '
                         f'vocab_size={meta.get("vocab_size")!r}, dtype={meta.get("dtype")!r}')
    return meta


def find_meta(name):
    """The meta of a tokenizer: `name` is a dataset that has it, or the tokenizer itself.

    Raises the errors of read_meta and get_tokenizer.
    """
    folder = os.path.join(DATA, name)
    return read_meta(folder) if os.path.isdir(folder) else get_tokenizer(dict(tokenizer=name)).meta()
