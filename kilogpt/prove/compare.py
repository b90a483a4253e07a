"""Compare what two runs computed: loss curves, gradients and weights.

kilogpt.prove and the tests of layouts use these functions.
"""
import math
from typing import NamedTuple

import torch

# float32 sums in another order change a loss of 4 by about 1e-7, and AdamW's normalised updates amplify this
# over the iterations. The bounds are far above that, and far below the effect of a wrong factor or a lost
# token.
LOSS, GRAD_NORM = 1e-4, 1e-3
# Largest errors of losses, and relative ones of gradient norms, of gradients, each in the first and in later
# iterations, and of all updates together. In float64 correct layouts differ by 1e-16 to 1e-12 in the first
# iteration. AdamW divides gradients that are nothing but rounding by no more than 1e-8, its epsilon, so that later
# iterations may differ by more.
IN_FLOAT32 = {'loss': [LOSS], 'gradient norm': [GRAD_NORM], 'starting weight': [1e-6], 'gradient': [1e-3, 1e-2],
              'update': 1e-2}
IN_FLOAT64 = {'loss': [1e-11, 1e-9], 'gradient norm': [1e-11, 1e-9], 'starting weight': [1e-15],
              'gradient': [1e-11, 1e-9], 'update': 1e-9}
# A gradient smaller than this share of the norm of all gradients is zero except for rounding, such as the
# gradient of a key's bias.
NEGLIGIBLE = 1e-4
# Drawn models may diverge, which amplifies rounding: what is wrong in their layouts, float64 shows. There, six layers
# with a norm behind each (`delta_norm_place=both`) turned 1e-15 of the first weights, on one process, into 2e-12, 7e-11
# and 1.4e-8 of the gradient norm in iterations 2, 3 and 4.
OF_DRAWS_IN_FLOAT32 = IN_FLOAT32 | {'loss': [LOSS, 1e-2], 'gradient norm': [GRAD_NORM, 1e-1]}
OF_DRAWS_IN_FLOAT64 = IN_FLOAT64 | {'loss': [1e-11, 1e-9, 1e-6], 'gradient norm': [1e-11, 1e-9, 1e-6],
                                    'gradient': [1e-11, 1e-9, 1e-6], 'update': 1e-7}
# A gradient in bfloat16 may be this many times as far from the exact one as that of one process is.
DRIFT = 2.0


class Difference(NamedTuple):
    """A difference between two runs: of two numbers, or of two tensors whose norms are found and expected."""
    iteration: int
    what: str  # 'loss', 'gradient norm', 'evaluation', ...; or 'gradient', 'starting weight', 'update', ...
    name: str  # name of the parameter, or ''
    found: float | None
    expected: float | None
    cosine: float | None = None  # of the angle between the two tensors
    error: float | None = None  # norm of the difference, relative to `expected`
    largest: float | None = None  # largest difference of two elements
    ranks: tuple = ()  # ranks with this difference; () = all ranks that have the tensor

    @property
    def ratio(self):
        return self.found / self.expected if self.expected else float('inf')


def compare_curves(run, other, loss=(LOSS,), grad_norm=(GRAD_NORM,)):
    """[Difference] of two runs' logs.

    loss: absolute tolerances, of the first iteration, of the second, ...; the last one is that of all later
    iterations. grad_norm: the same, relative.
    run, other: objects with `lines` and `evals`, {iteration: line of metrics.jsonl}.
    """
    differences = []
    for kind, lines, expected_lines in (('training', run.lines, other.lines),
                                        ('evaluation', run.evals, other.evals)):
        for i in sorted(lines.keys() ^ expected_lines.keys()):
            found, expected = float(i in lines), float(i in expected_lines)
            differences.append(Difference(i, f'number of lines of {kind}', '', found, expected))
        for i in sorted(lines.keys() & expected_lines.keys()):
            line, expected = lines[i], expected_lines[i]
            keys = ('loss', 'grad_norm') if kind == 'training' else ('train_loss', 'val_loss')
            for key in keys:
                if expected[key] is None or line[key] is None:  # not finite, such as a mean over no targets
                    is_near = expected[key] == line[key]
                else:
                    bound = bound_at(i, grad_norm) * abs(expected[key]) if key == 'grad_norm' else bound_at(i, loss)
                    is_near = abs(line[key] - expected[key]) <= bound
                if not is_near:
                    differences.append(Difference(i, key, '', line[key], expected[key]))
    return differences


def bound_at(iteration, bounds):
    """The bound of an iteration, of those of the first, of the second, ..., and of all later iterations."""
    return bounds[max(0, min(iteration, len(bounds)) - 1)]


def relative_error(found, expected, floor=1e-30):
    """The norm of found - expected over the norm of `expected`, or over `floor` if that is larger."""
    return ((found - expected).norm() / expected.norm().clamp(min=floor)).item()


def norm_of_all(tensors):
    return torch.stack([tensor.norm() for tensor in tensors]).norm().item()


def compare_tensors(iteration, what, found, expected, tolerance, floor):
    """([Difference], largest relative error) of one process's tensors.

    found: [(name, tensor)]. expected: {name: tensor}. Errors are those of relative_error.
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


def clear_elements(gradients):
    """{name: mask of a parameter's elements whose gradient is more than rounding in every iteration}.

    AdamW makes a full step for the other elements as well, but in an arbitrary direction.
    gradients: [(name, gradient)] of each iteration.
    """
    masks = {}
    for of_iteration in map(dict, gradients):
        floor = NEGLIGIBLE * norm_of_all(of_iteration.values())
        for name, gradient in of_iteration.items():
            size = max(gradient.norm().item(), floor) / gradient.numel() ** 0.5
            masks[name] = masks.get(name, True) & (gradient.abs() > 0.05 * size)
    return masks


def compare_drift(found_by_rank, of_one, exact):
    """(problem or '', largest drift) of gradients in bfloat16, in units of the drift of one process.

    found_by_rank: [{name: gradient}] of each process. of_one, exact: {name: gradient} of one process in bfloat16
    and in float64. The drift of a gradient is the norm of its difference from the exact one.
    """
    drifts = {name: (of_one[name].double() - gradient).norm().item() for name, gradient in exact.items()}
    drift_of_all = math.hypot(*drifts.values())
    n_elements = sum(gradient.numel() for gradient in exact.values())
    worst, problem = 0.0, ''
    for found in found_by_rank:
        for name, gradient in found.items():
            # By chance the drift of a small parameter may be small on one process.
            unit = max(drifts[name], drift_of_all * math.sqrt(exact[name].numel() / n_elements), 1e-30)
            drift = (gradient.double() - exact[name]).norm().item() / unit
            worst = max(worst, drift)
            if not drift <= DRIFT and not problem:
                problem = (f'{name}: the gradient in bfloat16 is {drift:.3g} times as far from the one in '
                           'float64 as that of one process')
    return problem, worst


def merge_ranks(by_rank, names_by_rank):
    """[Difference] of all ranks, with one Difference for each tensor.

    by_rank: [Difference] of each rank. names_by_rank: the set of names of the tensors that each rank has.
    """
    first, ranks_of = {}, {}
    for rank, differences in enumerate(by_rank):
        for difference in differences:
            first.setdefault(difference.name, difference)
            ranks_of.setdefault(difference.name, []).append(rank)
    merged = []
    for name, difference in first.items():
        ranks = set(ranks_of[name])
        owners = {rank for rank, names in enumerate(names_by_rank) if name in names}
        merged.append(difference._replace(ranks=() if ranks == owners else tuple(sorted(ranks))))
    return merged
