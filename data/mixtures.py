"""Mixtures of datasets: which source each training sequence comes from, computed from its number alone.

    dataset = 'fineweb:0.7, code:0.2, wiki:0.1'
    mixture_phases = '5e9: fineweb:0.4, code:0.3, wiki:0.3; 9e9: wiki:1'

Of the first n sequences of a phase, each source has given its share of n to within a sequence or so, for
every n: they are counted out and not drawn. Nothing is remembered from one step to the next.
"""
import fractions
import math

import numpy as np

MAX_TOTAL = 10 ** 9  # of the integers that are proportional to the weights


def parse_mixture(text):
    """'web:0.7, code:0.3' -> {'web': Fraction(7, 10), 'code': Fraction(3, 10)}; a name alone -> {name: 1}.

    ValueError if a weight is not a number of at least 0, if all are 0, or if a name comes twice.
    """
    parts = [part.strip() for part in text.split(',')]
    if len(parts) == 1 and _weight_of(parts[0].rpartition(':')[2]) is None:
        return {text: fractions.Fraction(1)}
    mixture = {}
    for part in parts:
        name, _, number = (piece.strip() for piece in part.rpartition(':'))
        weight = _weight_of(number)
        if not name or weight is None:
            raise ValueError(f'{part!r} in the mixture {text!r} is not NAME:WEIGHT, such as code:0.2')
        if name in mixture:
            raise ValueError(f'the mixture {text!r} names {name} twice')
        mixture[name] = weight
    if not any(mixture.values()):
        raise ValueError(f'the weights of the mixture {text!r} sum to 0: give a source a positive weight')
    return mixture


def _weight_of(number):
    """A number of at least 0 as a Fraction; None if the text is none."""
    try:
        weight = fractions.Fraction(number)
    except (ValueError, ZeroDivisionError):
        return None
    return weight if weight >= 0 else None


def parse_phases(text, names):
    """'5e9: web:0.4, code:0.6; 9e9: code:1' -> [(5000000000, {'web': ..., 'code': ...}), ...].

    names: the sources of the run. ValueError if a phase does not begin after the one before it, or names
    another source.
    """
    phases = []
    for part in filter(None, (part.strip() for part in text.split(';'))):
        begin, _, mixture = part.partition(':')
        tokens = _weight_of(begin.strip())
        if not tokens or not mixture.strip():
            raise ValueError(f'mixture_phases has {part!r}, which is not TOKENS: NAME:WEIGHT, ...: '
                             'such as 5e9: web:0.4, code:0.6')
        mixture = parse_mixture(mixture.strip())
        for name in mixture:
            if name not in names:
                raise ValueError(
                    f'mixture_phases names {name}, which is not in dataset ({", ".join(names)}): add it '
                    f'there, with a weight of 0 if no earlier phase has it ({name}:0)')
        if phases and tokens <= phases[-1][0]:
            raise ValueError(
                f'a phase of mixture_phases begins at {float(tokens):g} tokens, but the one before it at '
                f'{float(phases[-1][0]):g}: give phases in order')
        phases.append((int(tokens), mixture))
    return phases


def as_integers(weights):
    """Integers in the proportions of Fractions; ValueError if they would be too large to count with."""
    denominator = math.lcm(*(fractions.Fraction(weight).denominator for weight in weights))
    integers = [int(weight * denominator) for weight in weights]
    divisor = math.gcd(*integers)
    integers = [integer // divisor for integer in integers]
    if sum(integers) > MAX_TOTAL:
        raise ValueError(f'the weights of a mixture have too many digits ({", ".join(map(str, weights))}): '
                         'round them')
    return integers


def count_out(n, weights):
    """How many of n sequences each source gives, for an integer array n: an array (sources, *n.shape).

    The sources are divided into two sets of about the same weight. The first gets round(n * its share), and so
    on within each set. So of n + 1 sequences one source gives one more than of n, and the others as many. Sets
    of about the same weight keep the roundings from adding up: a search for the worst weights found a source
    1.37 sequences from its exact share, where halves of the list gave 1.97. weights: integers.
    """
    counts = np.zeros((len(weights), *n.shape), dtype=np.int64)
    pending = [(n, list(range(len(weights))))]
    while pending:
        n, sources = pending.pop()
        if len(sources) == 1:
            counts[sources[0]] = n
            continue
        first, second = _divide(sources, weights)
        part, total = (sum(weights[source] for source in some) for some in (first, sources))
        # n * part may exceed 64 bits; n has a multiple of total, and a rest.
        wholes, rest = np.divmod(n, total or 1)
        n_first = wholes * part + (2 * rest * part + total) // (2 * total or 1)
        pending += [(n_first, first), (n - n_first, second)]
    return counts


def _divide(sources, weights):
    """Two sets of sources of about the same weight: each source, the heaviest first, goes to the lighter set."""
    sets, sums = ([], []), [0, 0]
    for source in sorted(sources, key=lambda source: -weights[source]):
        lighter = int(sums[1] < sums[0] or sums[1] == sums[0] and len(sets[1]) < len(sets[0]))
        sets[lighter].append(source)
        sums[lighter] += weights[source]
    return sets


class Schedule:
    """Which source each sequence comes from, and which of the source's own sequences it is.

    phases: [(number of the phase's first sequence, Fraction for each source)], the first at 0.
    limits: the most sequences of each source, or None. A source that has given them has no weight any more,
    and the others share its part. `end` is the number of sequences after which none has any (or infinity).
    """

    def __init__(self, phases, limits=None):
        self.phases, self.end = [], math.inf  # [(first sequence, weights, sequences given before it)]
        given = np.zeros(len(phases[0][1]), dtype=np.int64)
        limits = np.array(limits or [math.inf] * len(given))
        ends = [begin for begin, _ in phases[1:]] + [math.inf]
        for (begin, weights), end in zip(phases, ends):
            while begin < end:
                left = limits - given
                active = [weight if n > 0 else 0 for weight, n in zip(weights, left)]
                if not any(active):
                    self.end = begin
                    return
                active = as_integers(active)
                self.phases.append((begin, active, given))
                length = min(end - begin, _length_within(active, left))
                if length == math.inf:
                    return
                given = given + count_out(np.array(length), active)
                begin += length

    def counts(self, n):
        """How many of the first n sequences each source gives, an array."""
        begin, weights, given = [phase for phase in self.phases if phase[0] <= n][-1]
        return given + count_out(np.array(n - begin), weights)

    def locate(self, numbers):
        """(source, number within the source) of sequences with these numbers, two arrays."""
        begins = np.array([begin for begin, _, _ in self.phases])
        phase_of = np.searchsorted(begins, numbers, side='right') - 1
        sources, within = np.zeros_like(numbers), np.zeros_like(numbers)
        for phase in np.unique(phase_of):
            begin, weights, given = self.phases[phase]
            rows = np.flatnonzero(phase_of == phase)
            before, after = (count_out(numbers[rows] - begin + more, weights) for more in (0, 1))
            sources[rows] = (after - before).argmax(axis=0)
            within[rows] = before[sources[rows], np.arange(len(rows))] + given[sources[rows]]
        return sources, within


def _length_within(weights, most):
    """The largest n of which no source gives more than its part of `most`; infinity if there is none."""
    if not np.isfinite(most[np.array(weights) > 0]).any():
        return math.inf
    low, high = 0, 1
    while (count_out(np.array(high), weights) <= most).all():
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        is_within = (count_out(np.array(middle), weights) <= most).all()
        low, high = (middle, high) if is_within else (low, middle)
    return low
