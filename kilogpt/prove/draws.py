"""Choose the draws of `kilogpt.prove --random` such that every pair of values is met soon, and shrink them.

A pair is two keys with a value each, which both have an effect. A draw of 80 keys meets about 2,000 pairs, so
that three hundred draws meet the 43,000 pairs that exist (pairwise testing, Cohen et al. 1997).
"""
import functools
import itertools
import math
import random

from kilogpt.launch_train import keys_of_layout
from kilogpt.prove.space import CROSSED, DEGREES, DRAWN, LAYOUT, MOST_PROCESSES, UNPAIRED, count_processes, is_active, plain

CANDIDATES = 100  # random draws, of which the one with the most new pairs for its time is taken
COMPILED_EVERY = 50  # draws, of which one is compiled, on few processes: it takes a minute
MOST_COMPILED = 2
USUAL_PROCESSES = (2, 2, 2, 3, 4, 4, 4, 8)  # the most processes of a draw whose pair does not need more
# Values that are chosen so many times as often as others. Two layers, and one micro-batch, take less time.
OFTEN = {('precision', 'float64'): 4, ('n_layer', 2): 3, ('gradient_accumulation_steps', 1): 3,
         ('activation_checkpoint', 'none'): 2}
DEGREES_OF_RUN = 'dp', 'tp', 'cp', 'pp', 'zero_stage'
REPEATS = 2  # how often a sentence that refuses a pair is provoked in a run


def pairs_of(draw):
    """The set of pairs ((key, value), (key, value)) of a draw, in the order of DRAWN."""
    values = [(key, draw[key]) for key in DRAWN if key not in UNPAIRED and is_active(key, draw)]
    return set(itertools.combinations(values, 2))


class PairBits:
    """A set of pairs as bits, in which those of a draw are counted a hundred times as fast as in a set of tuples.

    Each (key, value) has a number. Bit j of row i stands for the pair of the numbers i < j.
    """
    NUMBERS = {(key, value): number for number, (key, value) in enumerate(
        (key, value) for key, entry in DRAWN.items() for value in entry.values if key not in UNPAIRED)}

    def __init__(self, pairs):
        self.rows = [0] * len(self.NUMBERS)
        for first, second in pairs:
            self.rows[self.NUMBERS[first]] |= 1 << self.NUMBERS[second]

    @classmethod
    def numbers_in(cls, draw):
        """(the numbers of a draw's values, the same as bits)."""
        numbers = [cls.NUMBERS[key, draw[key]] for key in DRAWN if key not in UNPAIRED and is_active(key, draw)]
        return numbers, sum(1 << number for number in numbers)

    def remove(self, pair):
        first, second = (self.NUMBERS[each] for each in pair)
        self.rows[first] &= ~(1 << second)


def rank_of(pair):
    """When the pair is met: 0, of two degrees above 1; 1, of two keys of a layout, neither plain; 2, others."""
    if all(key in CROSSED and value > 1 for key, value in pair):
        return 0
    return 1 if all(key in ('dp', *LAYOUT) and value != DRAWN[key].values[0] for key, value in pair) else 2


def needs_of(wanted, most_processes):
    """{key: its possible values} in draws that have the wanted (key, value)s; None if there are no such draws."""
    needs = {}
    queue = [(key, (value,)) for key, value in wanted]
    while queue:
        key, values = queue.pop()
        if key not in needs:
            queue += DRAWN[key].when.items()
        needs[key] = [value for value in needs.get(key, DRAWN[key].values) if value in values]
        if not needs[key]:
            return None
    return needs if least_processes(needs) <= most_processes else None


def least_processes(needs):
    """The number of processes of the smallest draw that meets needs."""
    islands, tp, pp, ep, replicas = (min(needs.get(key, [1])) for key in ('islands', 'tp', 'pp', 'ep', 'dp_replicate'))
    shares = [dp * cp for dp in needs.get('dp', DRAWN['dp'].values) for cp in needs.get('cp', DRAWN['cp'].values)
              if dp % replicas == 0 and dp // replicas * cp % ep == 0]  # experts are divided over dp and cp
    return islands * tp * pp * min(shares, default=math.inf)


@functools.cache
def every_pair(most_processes):
    """The pairs that some draw of at most that many processes can have."""
    values = [(key, value) for key, entry in DRAWN.items() for value in entry.values if key not in UNPAIRED]
    return tuple(pair for pair in itertools.combinations(values, 2)
                 if pair[0][0] != pair[1][0] and needs_of(pair, most_processes))


def complete(needs, choose, most_processes):
    """A draw that meets needs. choose(key, values): one of the values that a key may have."""
    draw = plain()
    for key in needs:
        if key in DEGREES:
            draw[key] = min(needs[key])
    for key, entry in DRAWN.items():
        if key in UNPAIRED or not is_active(key, draw):
            continue
        values = needs.get(key, entry.values)
        if key in DEGREES:
            others = count_processes(draw) // draw[key]
            values = [value for value in values if value * others <= most_processes] or [min(values)]
        draw[key] = choose(key, values)
    return draw


def cost_of(draw):
    """The time that a draw takes, in about seconds of a core."""
    iterations = max(2, draw['outer_interval'] + 1)
    cost = cost_of_run(draw, count_processes(draw), iterations, **{key: draw[key] for key in DEGREES_OF_RUN})
    if draw['then']:
        processes, layout = keys_of_layout(draw['then'])
        degrees = {key: int(layout.get(key, 1)) for key in ('tp', 'cp', 'pp')}
        dp = processes // math.prod(degrees.values())
        cost += cost_of_run(draw, processes, 2, dp=dp, zero_stage=int(layout.get('zero_stage', 0)), **degrees)
    return cost


def cost_of_run(draw, processes, iterations, dp, tp, cp, pp, zero_stage):
    """About the seconds of a run: half of one for each process, and milliseconds for each pass of a block.

    The figures are fitted to 52 draws (docs/log): most of a pass is Python, in DTensor and in FSDP2.
    """
    micro_batches = max(math.ceil(draw['gradient_accumulation_steps'] / dp), 2 * pp * (pp > 1))
    passes = micro_batches * (iterations + (pp > 1)) + 3  # a warm-up (pp: an iteration) and evaluations
    delta = draw['mixer_pattern'].count('D') / len(draw['mixer_pattern'])
    of_block = 0.003 + 0.01 * delta + 0.01 * (zero_stage >= 2 or tp * pp > 1)
    of_exchanges = 0.03 * (tp > 1) + (0.02 + 0.02 * delta) * (cp > 1)
    of_block += of_exchanges * (1 if draw['activation_checkpoint'] == 'none' else 1.7)
    return 0.5 * processes + processes * draw['n_layer'] / pp * passes * of_block


class Drawer:
    """An endless sequence of draws, a function of the seed alone.

    refusal(draw): the sentence with which train.py will refuse a draw, or ''.
    most_processes: of a draw, over all islands.

    Pairs of two degrees above 1 come first, and then the other pairs of layouts, since faults lie where two of
    these meet.
    """

    def __init__(self, seed, refusal, most_processes=MOST_PROCESSES):
        self.random, self.refusal, self.most_processes = random.Random(seed), refusal, most_processes
        self.pairs = list(every_pair(most_processes))
        self.refused = {}  # {pair: sentence}
        self._since_compiled = 0  # draws since the last compiled one
        self._provoked = {}  # {sentence without its values: how often it was provoked}
        self._begin_round()

    def _begin_round(self):
        order = [pair for pair in self.pairs if pair not in self.refused]
        self.random.shuffle(order)
        order.sort(key=rank_of)
        self._early = [PairBits(pair for pair in order if rank_of(pair) == rank) for rank in (0, 1)]
        self.unmet, self._unmet_bits = dict.fromkeys(order), PairBits(order)

    def _meet(self, pair):
        if pair in self.unmet:
            del self.unmet[pair]
            self._unmet_bits.remove(pair)

    def draw(self):
        """The next draw, and the sentence with which it is expected to be refused, or ''."""
        while True:
            if not self.unmet:
                self._begin_round()
            pair = next(iter(self.unmet))
            draw = self._allowed(pair, self._usual_processes(pair)) or self._allowed(pair, self.most_processes)
            if draw:
                for met in pairs_of(draw):
                    self._meet(met)
                self._since_compiled += 1
                is_small = count_processes(draw) <= MOST_COMPILED and draw['precision'] == 'float32'
                if self._since_compiled >= COMPILED_EVERY and is_small:
                    self._since_compiled, draw['compile'] = 0, True
                return draw, ''
            self._meet(pair)
            if self._allowed(pair, 8 * self.most_processes):
                self.pairs.remove(pair)
                continue
            smallest = complete(needs_of(pair, self.most_processes), lambda key, values: values[0], 1)
            sentence = self.refused[pair] = self.refusal(smallest)
            words = ''.join(filter(str.isalpha, sentence))
            self._provoked[words] = self._provoked.get(words, 0) + 1
            if self._provoked[words] <= REPEATS:
                return smallest, sentence

    def _usual_processes(self, pair):
        least = least_processes(needs_of(pair, self.most_processes))
        return min(self.most_processes, max(least, self.random.choice(USUAL_PROCESSES)))

    def _allowed(self, pair, most_processes):
        """Of some random draws with this pair that are not refused, the one that meets the most new pairs for its time."""
        needs = needs_of(pair, self.most_processes)
        # The fewer keys have other values than the plain ones, the fewer draws are refused.
        for share_of_plain in (0.0, 0.6, 0.9):
            candidates = []
            for _ in range(CANDIDATES):
                choose = functools.partial(self._choose, share_of_plain)
                candidates.append(complete(needs, choose, most_processes))
            candidates.sort(key=self._count_new, reverse=True)
            for candidate in candidates:
                if not self.refusal(candidate):
                    return candidate
        return None

    def _choose(self, share_of_plain, key, values):
        if self.random.random() < share_of_plain:
            return values[0]
        return self.random.choice(repeated(key, tuple(values)))

    def _count_new(self, draw):
        numbers, bits = PairBits.numbers_in(draw)
        found = [(number, self._unmet_bits.rows[number] & bits) for number in numbers]
        of_degrees, of_layouts = (sum((row & early.rows[number]).bit_count() for number, row in found)
                                  for early in self._early)
        cost = cost_of(draw)
        return of_degrees / cost, of_layouts / cost, sum(row.bit_count() for _, row in found) / cost


@functools.cache
def repeated(key, values):
    """The values of a key, each as many times as OFTEN says."""
    return [value for value in values for _ in range(OFTEN.get((key, value), 1))]


def draw_layouts(generator, count, needs, most_processes, is_possible):
    """Up to `count` different random layouts, as [words of launch_train.parse_layouts].

    generator: a random.Random. needs: as in `complete`. is_possible(words): whether a layout can be.
    """
    layouts = {}
    for _ in range(20 * count):
        draw = complete(needs, lambda key, values: generator.choice(values), most_processes)
        words = words_of(draw)
        if words not in layouts and len(layouts) < count and is_possible(words):
            layouts[words] = None
    return list(layouts)


def words_of(draw):
    """The layout of a draw in words, such as 'tp2 dp2 zero3'."""
    words = [f'{key}{draw[key]}' for key in ('dp', 'tp', 'cp', 'pp', 'ep') if draw[key] > 1 or key == 'dp']
    words += [f'zero{draw["zero_stage"]}'] * (draw['zero_stage'] > 0) + ['rep2'] * (draw['dp_replicate'] > 1)
    for key in ('pp_schedule', 'activation_checkpoint', 'grad_compress'):
        if draw[key] != DRAWN[key].values[0]:
            words.append(draw[key])
    return ' '.join(words + ['offload'] * draw['cpu_offload'])


# --- shrinking ----------------------------------------------------------------------------------------------

def shrink(draw, which_fail):
    """A draw that fails, and in which each key that is not plain is needed for that (ddmin, Zeller 2002).

    which_fail(draws): whether each of several draws fails, in order.
    """
    size = max(1, len(keys_not_plain(draw)) // 2)
    while True:
        keys = keys_not_plain(draw)
        chunks = [keys[start:start + size] for start in range(0, len(keys), size)]
        fails = which_fail([without(draw, chunk) for chunk in chunks])
        removable = [chunk for chunk, is_failing in zip(chunks, fails) if is_failing]
        together = without(draw, sum(removable, []))
        if len(removable) > 1 and which_fail([together])[0]:
            draw = together
        elif removable:
            draw = without(draw, removable[0])
        elif size == 1:
            break
        size = max(1, min(size, len(keys_not_plain(draw))) // 2)
    for key in DEGREES:  # fewer processes of the kinds that it needs
        for value in DRAWN[key].values:
            if 1 < value < draw[key] and which_fail([draw | {key: value}])[0]:
                draw = draw | {key: value}
    return draw


def keys_not_plain(draw):
    """The keys of a draw that have an effect and another value than the plain one."""
    return [key for key, value in plain().items() if is_active(key, draw) and draw[key] != value]


def without(draw, keys):
    """The draw with plain values for some keys, and for those that have no effect without these."""
    smaller, values = dict(draw), plain()
    for key in DRAWN:
        if key in keys or not is_active(key, smaller):
            smaller[key] = values[key]
    return smaller
