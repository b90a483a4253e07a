"""A scaling law fitted to runs: L = E + A / N^alpha + B / D^beta, or with one term if the runs allow no more.

N is the number of parameters, D of training tokens, and C of FLOPs, which is k N D. k is about 6.
"""
import math
import statistics
from typing import NamedTuple

import numpy as np

from kilogpt.scaling.fit import fit, predict

NAMES = dict(N=('A', 'alpha'), D=('B', 'beta'), C=('K', 'gamma'))  # {variable: coefficients of its term}
SAME_RATIO = 1.2  # if tokens per parameter differ by less than this factor, N and D have no separate effects
FEWEST_VALUES = 3  # of each variable: a constant and a power have three coefficients


class Point(NamedTuple):
    """What a run has at its last evaluation: N, D and C, and a loss, which is measured or predicted."""
    name: str
    n: float
    d: float
    c: float
    loss: float = math.nan


class Law:
    """The law fitted to Points, whose `variables` are ('N', 'D'), ('N',), ('D',) or ('C',).

    samples: the number of bootstrap samples. ValueError if the points do not determine the coefficients.
    """

    def __init__(self, points, samples=0):
        self.points = points
        self.variables = choose_variables(points)
        self.names = ['E', *(name for variable in self.variables for name in NAMES[variable])]
        logs = self.logs(points)
        check_number_of_runs(self.variables, self.names, logs)
        log_losses = np.log([point.loss for point in points])
        self.coefficients = fit(logs, log_losses, np.ones((1, len(points))))
        self.samples = self.coefficients[:0]
        if samples:
            self.samples = fit(logs, log_losses, resample(logs, len(self.names), samples))

    def logs(self, points):
        """The logarithms (T, R) of the law's variables."""
        return np.log([[getattr(point, variable.lower()) for point in points] for variable in self.variables])

    def __str__(self):
        terms = [f'{scale} / {variable}^{exponent}' for variable, (scale, exponent) in NAMES.items()
                 if variable in self.variables]
        return f'L({", ".join(self.variables)}) = ' + ' + '.join(['E', *terms])

    def loss_at(self, points):
        """(predicted losses (R,), those of each bootstrap sample (F, R))."""
        logs = self.logs(points)
        return np.exp(predict(self.coefficients, logs)[0]), np.exp(predict(self.samples, logs))

    def described(self):
        """[(name, value, the samples' values)] of the coefficients, and of the exponents of optimal sizes."""
        rows = []
        for i, name in enumerate(self.names):
            is_log = name in ('E', 'A', 'B', 'K')
            value, sampled = self.coefficients[0, i], self.samples[:, i]
            rows.append((name, np.exp(value), np.exp(sampled)) if is_log else (name, value, sampled))
        if self.variables == ('N', 'D'):
            alpha, beta = self.coefficients[0, 2], self.coefficients[0, 4]
            sampled = self.samples[:, 4] / (self.samples[:, 2] + self.samples[:, 4])
            rows.append(('a', beta / (alpha + beta), sampled))
            rows.append(('b', alpha / (alpha + beta), 1 - sampled))
        return rows

    def has_optimum(self):
        """Whether there is a best size for each number of FLOPs: both terms exist and fall."""
        return self.variables == ('N', 'D') and min(self.coefficients[0, 2::2]) > 0

    def optimum(self, c):
        """The Point with the lowest predicted loss for C FLOPs (Hoffmann et al. 2022, equation 4)."""
        _, log_a, alpha, log_b, beta = self.coefficients[0]
        nd = c / flops_factor(largest(self.points))
        log_g = (log_a - log_b + math.log(alpha / beta)) / (alpha + beta)
        n = math.exp(log_g + beta / (alpha + beta) * math.log(nd))
        return Point('', n, nd / n, c)


def choose_variables(points):
    """The variables of the terms that the points can tell apart."""
    ratios = [point.d / point.n for point in points]
    has_one_size = len({point.n for point in points}) == 1
    has_one_length = len({point.d for point in points}) == 1
    if has_one_size and has_one_length:
        raise ValueError('all runs have the same size and the same number of tokens: vary at least one')
    if has_one_size:
        return ('D',)
    if has_one_length:
        return ('N',)
    return ('C',) if max(ratios) < SAME_RATIO * min(ratios) else ('N', 'D')


def check_number_of_runs(variables, names, logs):
    """Raise ValueError if there are too few runs, or too few different ones, for the coefficients."""
    count, needed = logs.shape[1], len(names) + 1
    if count < needed:
        raise ValueError(f'{count} run(s) are too few for the {len(names)} coefficients {", ".join(names)}: '
                         f'give {needed} or more')
    for variable, row in zip(variables, logs):
        if len(set(row)) < FEWEST_VALUES:
            what = dict(N='sizes of models', D='numbers of tokens', C='numbers of FLOPs')[variable]
            raise ValueError(f'the runs have {len(set(row))} different {what}: give {FEWEST_VALUES} or more, '
                             'for the constant and the power')


def resample(logs, n_coefficients, count):
    """How often each bootstrap sample (F, R) draws each run.

    A sample that does not determine the coefficients is drawn again.
    """
    rng = np.random.default_rng(0)
    n_runs = logs.shape[1]
    samples = []
    while len(samples) < count:
        weights = rng.multinomial(n_runs, np.full(n_runs, 1 / n_runs))
        drawn = logs[:, weights > 0]
        if drawn.shape[1] >= n_coefficients and all(len(set(row)) >= FEWEST_VALUES for row in drawn):
            samples.append(weights)
    return np.array(samples, dtype=float)


def largest(points):
    return max(points, key=lambda point: point.c)


def flops_factor(point):
    """k of C = k N D, which depends on the size because of attention and embeddings."""
    return point.c / (point.n * point.d)


def larger_runs(law):
    """Points to predict: the next size or length, and ten times the FLOPs in the best or the same way."""
    last = largest(law.points)
    k = flops_factor(last)
    if law.variables == ('D',):
        sizes = [(last.n, 2 * last.d), (last.n, 10 * last.d)]
    elif law.variables == ('N',):
        sizes = [(2 * last.n, last.d), (10 * last.n, last.d)]
    elif law.variables == ('C',):
        sizes = [(math.sqrt(factor) * last.n, math.sqrt(factor) * last.d) for factor in (2, 10)]
    else:
        widest = max(law.points, key=lambda point: (point.n, point.d))
        sizes = [(2 * widest.n, 2 * widest.d)]
    points = [Point('larger', n, d, k * n * d) for n, d in sizes]
    if law.has_optimum():
        points.append(law.optimum(10 * last.c)._replace(name='compute-optimal'))
    return points


def asked_run(law, n, d):
    """The Point of N parameters and D tokens. ValueError if the law does not have the effect of N or D."""
    last = largest(law.points)
    if len(law.variables) == 1:
        what, theirs, asked = dict(
            D=('parameters', last.n, n), N=('tokens', last.d, d),
            C=('tokens per parameter', last.d / last.n, d / n))[law.variables[0]]
        if not 1 / SAME_RATIO < asked / theirs < SAME_RATIO:
            raise ValueError(f'all runs have {theirs:.4g} {what} and do not tell the loss at {asked:.4g}: '
                             f'ask for about {theirs:.4g}, or give runs with others')
    return Point('asked for', n, d, flops_factor(last) * n * d)


def held_out(points):
    """(the Point with the most FLOPs, its loss predicted from the others); None if these are too few."""
    last = largest(points)
    try:
        law = Law([point for point in points if point is not last])
    except ValueError:
        return None
    return last, law.loss_at([last])[0][0]


def typical_residual(law):
    """The root mean square of measured minus predicted losses."""
    predicted, _ = law.loss_at(law.points)
    return math.sqrt(statistics.mean((point.loss - loss) ** 2 for point, loss in zip(law.points, predicted)))
