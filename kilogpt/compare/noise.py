"""Whether a difference is larger than the noise: t-tests over seeds, and a z-test from standard errors."""
import math
import statistics
from typing import NamedTuple

TERMS = 200  # of the continued fraction, which is exact to 1e-12 up to 10,000 degrees of freedom


class Difference(NamedTuple):
    """Mean of b minus mean of a, its 95% interval, and the p-value of there being no difference."""
    mean: float
    low: float
    high: float
    p: float


def welch(a, b):
    """The Difference of two samples by Welch's t-test (Welch 1947), which allows for unequal variances."""
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    variance = sum(parts)
    freedom = len(a) + len(b) - 2
    if variance:
        freedom = variance ** 2 / sum(part ** 2 / (len(values) - 1) for part, values in zip(parts, (a, b)))
    return t_test(statistics.mean(b) - statistics.mean(a), math.sqrt(variance), freedom)


def paired(a, b):
    """The Difference of two samples whose values belong together, by the paired t-test."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return t_test(statistics.mean(differences), error, len(differences) - 1)


def t_test(mean, error, freedom):
    """The Difference of a mean with a standard error and its degrees of freedom."""
    if not error:  # all runs of each candidate are the same
        return Difference(mean, mean, mean, float(mean == 0))
    margin = error * t_of_p(0.05, freedom)
    return Difference(mean, mean - margin, mean + margin, p_of_t(mean / error, freedom))


def z_test(a, a_error, b, b_error):
    """The Difference of two scores with standard errors, if both are normally distributed and independent."""
    error = math.hypot(a_error, b_error)
    if not error:
        return Difference(b - a, b - a, b - a, float(a == b))
    margin = error * statistics.NormalDist().inv_cdf(0.975)
    return Difference(b - a, b - a - margin, b - a + margin, math.erfc(abs(b - a) / error / math.sqrt(2)))


def p_of_t(t, freedom):
    """The probability that a t-distributed value is further from 0 than t (Abramowitz and Stegun 26.7.1)."""
    return incomplete_beta(freedom / (freedom + t ** 2), freedom / 2, 0.5)


def t_of_p(p, freedom):
    """The t > 0 for which p_of_t is p, by bisection."""
    low, high = 0.0, 1.0
    while p_of_t(high, freedom) > p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if p_of_t(middle, freedom) > p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(x, a, b):
    """The regularised incomplete beta function I_x(a, b), by the continued fraction of DLMF 8.17.22."""
    if x in (0, 1):
        return float(x)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this
        return 1 - incomplete_beta(1 - x, b, a)
    fraction = 1.0
    for i in range(TERMS, 0, -1):
        m = i // 2
        numerator = -(a + m) * (a + b + m) if i % 2 else m * (b - m)
        fraction = 1 + numerator * x / ((a + i - 1) * (a + i)) / fraction
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a / fraction
