"""The library of kiloGPT: train.py uses it to run on any number of processes and to survive their failures.

The files of this folder are what many subjects share (configurator.py, settings.py, optim.py, ...). Each
subfolder has one subject; its __init__.py describes it and says which file to read first. docs/files.md lists
all files.
"""


def load(source, which='best', tokenizer='', device='auto'):
    """Load a trained model: a LoadedRun, with model, tokenizer, config, metrics, generate and loss.

    source: a run's folder, one of its checkpoints (out_dir/ckpt/iter_*), a Hugging Face folder, a GGUF file,
        a ckpt.pt of nanoGPT, or a name on the Hugging Face hub, 'org/name' or 'org/name@revision'.
    which: the 'best' or 'latest' checkpoint of a run.
    tokenizer: a tokenizer ('gpt2', for example), or what has the same, as --tokenizer of sample.py, for a source
        without one.
    device: as the key of sample.py.
    ValueError, OSError or ImportError, each with one sentence, if the input is wrong or missing.
    """
    from kilogpt.loading import LoadedRun  # takes seconds, because it imports torch
    return LoadedRun(source, which, tokenizer, device)
