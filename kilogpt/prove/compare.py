"""Whether two runs computed the same: loss curves, gradients and weights, and how they differ, in words.

The tests of layouts and kilogpt.prove compare by the same functions.
"""
from typing import NamedTuple

import torch

# float32 sums in another order differ by about 1e-7 in a loss of 4; AdamW's normalised updates raise that
# over the iterations. These bounds are far above, and far below what a wrong factor or a lost token would do.
LOSS, GRAD_NORM = 1e-4, 1e-3
# Largest relative errors: of gradients in the first iteration and in later ones, and of all updates together.
IN_FLOAT32 = {'starting weight': [1e-6], 'gradient': [1e-3, 1e-2], 'update': 1e-2}
IN_FLOAT64 = {'starting weight': [1e-6], 'gradient': [1e-5, 1e-4], 'update': 1e-4}
NEGLIGIBLE = 1e-4  # of the norm of all gradients: one that is zero but for rounding, as that of a key's bias


class Difference(NamedTuple):
    """Something that two runs do not have in common."""
    iteration: int
    what: str  # 'loss', 'gradient norm', 'evaluation', ...; or 'gradient', 'starting weight', 'weight'
    name: str  # the parameter's, or ''
    found: float | None
    expected: float | None
    cosine: float | None = None  # of the angle between two tensors, of which found and expected are the norms
    error: float | None = None  # the norm of the difference of two tensors, relative to that of `expected`
    largest: float | None = None  # the largest difference of two elements
    ranks: tuple = ()  # those that found it, where not all did

    @property
    def ratio(self):
        return self.found / self.expected if self.expected else float('inf')


def compare_curves(run, other, loss=LOSS, grad_norm=GRAD_NORM):
    """[Difference] of two runs' logs: losses differ by more than `loss`, norms by `grad_norm` of their size.

    run, other: have `lines` and `evals`, {iteration: line of metrics.jsonl}.
    """
    differences = []
    for kind, lines, expected_lines in (('training', run.lines, other.lines),
                                        ('evaluation', run.evals, other.evals)):
        for i in sorted(lines.keys() ^ expected_lines.keys()):
            found, expected = float(i in lines), float(i in expected_lines)
            differences.append(Difference(i, f'number of lines of {kind}', '', found, expected))
        bounds = dict(loss=loss, train_loss=loss, val_loss=loss)
        for i in sorted(lines.keys() & expected_lines.keys()):
            line, expected = lines[i], expected_lines[i]
            keys = ('loss', 'grad_norm') if kind == 'training' else ('train_loss', 'val_loss')
            for key in keys:
                bound = bounds.get(key, grad_norm * abs(expected[key]))
                if not abs(line[key] - expected[key]) <= bound:  # a NaN differs too
                    differences.append(Difference(i, key, '', line[key], expected[key]))
    return differences


def relative_error(found, expected, floor=1e-30):
    """The norm of the difference of two tensors, relative to that of `expected`, or to `floor` if larger."""
    return ((found - expected).norm() / expected.norm().clamp(min=floor)).item()


def norm_of_all(tensors):
    return torch.stack([tensor.norm() for tensor in tensors]).norm().item()


def compare_tensors(iteration, what, found, expected, tolerance, floor):
    """([Difference], the largest relative error) of one process's tensors.

    found: [(name, tensor)], expected: {name: tensor}. Errors are relative to a tensor's norm, or to `floor`.
    """
    differences, worst = [], 0.0
    for name, tensor in found:
        if name not in expected or tensor.shape != expected[name].shape:
            differences.append(Difference(iteration, what, name, tensor.norm().item(), None))
            continue
        reference = expected[name]
        error = relative_error(tensor, reference, floor)
        worst = max(worst, error)
        if not error <= tolerance:
            norms = tensor.norm().item(), reference.norm().item()
            cosine = (tensor * reference).sum().item() / max(norms[0] * norms[1], 1e-300)
            largest = (tensor - reference).abs().max().item()
            differences.append(Difference(iteration, what, name, *norms, cosine, error, largest))
    return differences, worst


def unite_ranks(by_rank, held):
    """The differences that each rank found, those of several ranks in one tensor as one [Difference].

    by_rank: a list of Differences for each rank. held: the names of the tensors that each rank has.
    """
    first, ranks_of = {}, {}
    for rank, differences in enumerate(by_rank):
        for difference in differences:
            first.setdefault(difference.name, difference)
            ranks_of.setdefault(difference.name, []).append(rank)
    united = []
    for name, difference in first.items():
        is_everywhere = set(ranks_of[name]) == {rank for rank, names in enumerate(held) if name in names}
        united.append(difference._replace(ranks=() if is_everywhere else tuple(sorted(set(ranks_of[name])))))
    return united
