"""A teacher in memory: weights that stay as they are, beside the model that trains."""
import numpy as np
import torch

from data.datasets import join_tokenizers
from kilogpt.evaluate.teaching import MAX_LOGITS, OTHER_TOKENIZER
from kilogpt.layers.distillation import teacher_numbers
from kilogpt.layers.precision import at_least_float32
from kilogpt.loading import load_model
from kilogpt.run.metrics import describe_size


def open_teacher(run):
    """The Teacher of a Run, in the memory of each process. ValueError if it cannot teach the run's model."""
    config = run.config
    model, tokenizer, path, _ = load_model(config['teacher'])
    join_tokenizers(tokenizer.meta() if tokenizer.name else None, path, run.start.meta, config['dataset'], OTHER_TOKENIZER)
    if model.config.block_size < config['block_size'] or model.config.vocab_size != run.model_config.vocab_size:
        raise ValueError(f'the teacher {path} has block_size={model.config.block_size} and vocab_size='
                         f'{model.config.vocab_size}, but the run has {config["block_size"]} and '
                         f'{run.model_config.vocab_size}: set block_size to that of the teacher or less, and choose a '
                         'teacher with the vocabulary of the data')
    run.processes.say(f'the teacher is {path}, {describe_size(model)}, in {config["teacher_dtype"]}')
    return Teacher(model.to(run.processes.device, getattr(torch, config['teacher_dtype'])))


class Teacher:
    """A frozen GPT. x, y, starts: arrays (B, T), as a loader returns them."""

    def __init__(self, model):
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def _of_rows(self, function, *arrays):
        """function(logits (b, T, V), b rows of further arrays) of some rows x, starts, ... at a time, as one array."""
        size, found = max(1, MAX_LOGITS // (arrays[0].shape[1] * self.model.config.vocab_size)), []
        for first in range(0, len(arrays[0]), size):
            x, starts, *others = (array if array is None else torch.from_numpy(array[first:first + size]).to(self.device)
                                  for array in arrays)
            found.append(function(self.model(x, starts=starts), *others).cpu().numpy())
        return np.concatenate(found)

    def numbers(self, x, starts, top_k, temperature):
        """teacher_numbers (B, T, 2 k + 1)."""
        return self._of_rows(lambda logits: teacher_numbers(logits, top_k, temperature), x, starts)

    def log_p(self, x, y):
        """The log-probabilities (B, T) of targets y; those of -1 have no meaning."""
        return self._of_rows(lambda logits, y: at_least_float32(logits).log_softmax(dim=-1).gather(
            -1, y.clamp(min=0)[..., None])[..., 0], x, None, y)
