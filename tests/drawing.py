"""Draw forms that people bring until the time is over, and shrink one that is read in another way than its makers do.

A form is a dict of what JSON has: dicts, lists, texts, numbers.
"""
import copy
import random
import time


def check_draws(draw, difference, seed, seconds, at_least=20):
    """Fail with the smallest form that differs. Returns the number of draws.

    draw(generator): a form. difference(form): what is read differently, or ''.
    seed: of the first draw; the next ones have the numbers after it.
    """
    began, number = time.perf_counter(), 0
    while number < at_least or time.perf_counter() - began < seconds:
        form = draw(random.Random(seed + number))
        if difference(form):
            form = shrink(form, difference)
            raise AssertionError(f'seed {seed + number}: {difference(form)}\n{form}')
        number += 1
    print(f'{number} draws from seed {seed}')
    return number


class Skipped(Exception):
    """Ends the comparison of a form that the library or our reader does not read."""


def counted(compare):
    """Yield the `difference` of check_draws for a fixture; at the end, print how many forms had each outcome.

    compare(form, theirs, ours): what is read differently, or ''. In it, theirs(read) returns read(), a call
    of the library that made the form, and ours(read) one of our reader. A form is invalid if the library
    fails or returns None, and refused if our reader raises a ValueError; then nothing is compared.
    """
    counts = dict(same=0, refused=0, invalid=0)

    def theirs(read):
        try:
            found = read()
        except Exception:
            found = None
        if found is None:
            counts['invalid'] += 1
            raise Skipped
        return found

    def ours(read):
        try:
            found = read()
        except ValueError:
            counts['refused'] += 1
            raise Skipped from None
        counts['same'] += 1
        return found

    def difference(form):
        try:
            return compare(form, theirs, ours)
        except Skipped:
            return ''

    yield difference
    print(counts)


def shrink(form, difference):
    """A form that differs, and no longer does without any of its entries."""
    for smaller in without_an_entry(form):
        if difference(smaller):
            return shrink(smaller, difference)
    return form


def without_an_entry(form):
    """Yield copies of a form, each without one entry of a dict or list in it."""
    keys = form if isinstance(form, dict) else range(len(form)) if isinstance(form, list) else ()
    for key in list(keys):
        smaller = copy.copy(form)
        del smaller[key]
        yield smaller
        for inner in without_an_entry(form[key]):
            smaller = copy.copy(form)
            smaller[key] = inner
            yield smaller
