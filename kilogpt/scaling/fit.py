"""Find the coefficients of L = E + A / N^alpha + B / D^beta, or of a law with one of the two terms.

The fit is that of Hoffmann et al. 2022 ("Training Compute-Optimal Large Language Models", section 3.3): it
minimises the Huber loss of log L, which is the log-sum-exp of e, a - alpha log N and b - beta log D, with
E = exp(e), A = exp(a) and B = exp(b), from a grid of starts. The paper uses L-BFGS. Here it is the method of
Levenberg and Marquardt, which NumPy computes for all starts and all bootstrap samples side by side.

Shapes: F fits, R runs, T terms. coefficients (F, 1 + 2T): e, a, alpha, b, beta. logs (T, R): log N, log D.
"""
import itertools

import numpy as np

DELTA = 1e-3  # residuals of log L above this count linearly
STARTS = 8  # the starts of the grid with the lowest loss, from which a fit is made
STEPS = 100


def predict(coefficients, logs):
    """log L (F, R)."""
    return np.logaddexp.reduce(log_terms(coefficients, logs), axis=-1)


def log_terms(coefficients, logs):
    """The logarithms of E and of each term (F, R, 1 + T)."""
    terms = coefficients[:, None, 1::2] - coefficients[:, None, 2::2] * logs.T
    floors = np.broadcast_to(coefficients[:, None, :1], (*terms.shape[:2], 1))
    return np.concatenate([floors, terms], axis=-1)


def huber(residuals):
    """Huber's loss, which is quadratic up to DELTA and linear above."""
    size = np.abs(residuals)
    return np.where(size <= DELTA, size ** 2 / 2, DELTA * (size - DELTA / 2))


def fit(logs, log_losses, weights):
    """The coefficients with the lowest loss for each row of weights (F, R): how often a run counts."""
    centres = logs.mean(axis=1)
    # Around the middle of the runs, the size of a term hardly depends on its exponent.
    centred = logs - centres[:, None]
    starts = grid_of_starts(log_losses, len(logs))
    costs = huber(predict(starts, centred) - log_losses) @ weights.T  # (starts, F)
    chosen = np.argsort(costs, axis=0)[:STARTS].T  # (F, STARTS)
    repeated = np.repeat(weights, STARTS, axis=0)
    coefficients, costs = descend(starts[chosen.ravel()], centred, log_losses, repeated)
    best = costs.reshape(chosen.shape).argmin(axis=1)
    coefficients = coefficients.reshape(*chosen.shape, -1)[np.arange(len(chosen)), best]
    coefficients[:, 1::2] += coefficients[:, 2::2] * centres
    return coefficients


def grid_of_starts(log_losses, n_terms):
    """Starts (starts, 1 + 2T) for logs of mean 0: E is a share of the lowest loss, a term one of the mean."""
    floors = log_losses.min() + np.log([0.2, 0.5, 0.8, 0.95])
    sizes = log_losses.mean() + np.log([0.02, 0.06, 0.2, 0.6])
    terms = list(itertools.product(sizes, [0.1, 0.25, 0.4, 0.6, 1.0]))
    starts = itertools.product(floors, *[terms] * n_terms)
    return np.array([(floor, *itertools.chain(*chosen)) for floor, *chosen in starts])


def descend(coefficients, logs, log_losses, weights):
    """(coefficients, losses) after STEPS steps of Levenberg and Marquardt from each start.

    The Huber loss is a sum of squares whose weights follow from the residuals (iteratively reweighted).
    """
    def cost_of(coefficients):
        return (huber(predict(coefficients, logs) - log_losses) * weights).sum(axis=1)

    costs = cost_of(coefficients)
    damping = np.full(len(coefficients), 1e-2)
    identity = np.eye(coefficients.shape[1])
    for _ in range(STEPS):
        log_predicted = predict(coefficients, logs)
        shares = np.exp(log_terms(coefficients, logs) - log_predicted[..., None])
        jacobian = np.empty((*log_predicted.shape, coefficients.shape[1]))
        jacobian[..., 0] = shares[..., 0]
        jacobian[..., 1::2] = shares[..., 1:]
        jacobian[..., 2::2] = -shares[..., 1:] * logs.T
        residuals = log_predicted - log_losses
        factors = weights * DELTA / np.maximum(np.abs(residuals), DELTA)
        weighted = jacobian.transpose(0, 2, 1) * factors[:, None]
        square = weighted @ jacobian
        diagonal = np.einsum('fpp->fp', square) + 1e-30  # a coefficient without influence stays where it is
        square += (damping[:, None] * diagonal)[..., None] * identity + 1e-30 * identity
        step = np.linalg.solve(square, weighted @ residuals[..., None])[..., 0]
        tried = coefficients - np.clip(step, -2, 2)
        tried_costs = cost_of(tried)
        is_better = tried_costs < costs
        coefficients = np.where(is_better[:, None], tried, coefficients)
        costs = np.where(is_better, tried_costs, costs)
        damping = np.clip(np.where(is_better, damping / 3, damping * 4), 1e-9, 1e9)
    return coefficients, costs
