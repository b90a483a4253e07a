"""What is often the reason that a layout trains a model otherwise than one process, and what to change.

`inspect` looks at the model alone, `advise` at what a run has shown. For kilogpt.prove.
"""
import collections
import math
import re
from typing import NamedTuple

import torch

KINDS = ('colwise', 'rowwise', 'sequence', 'positions', 'local', 'embedding', 'head')
SHOWN = 4  # parameters that a sentence names


class Facts(NamedTuple):
    """What about a model the layouts cannot carry out: lists of names, with * for the blocks' numbers."""
    buffers: list
    unplanned: list  # parameters that split_plan does not name (tp)
    raw: list  # those among them that are no linear's or norm's, but a block's or the model's own
    homeless: list  # parameters that belong to no block, and neither come before nor after the blocks (pp)
    shared: list  # 'NAME = NAME', a parameter under two names that `tied` does not know (pp)
    order: list  # all that are trained from the first block on, whole names in the order of a forward pass


def inspect(model):
    """The Facts of a model."""
    plan = model.split_plan
    parts = {'': model} | {f'{plan["blocks"]}.{number}.': block
                           for number, block in model.get_submodule(plan['blocks']).items()}
    planned, own = set(), set()
    for prefix, part in parts.items():
        modules = dict(part.named_modules())
        for name in [name for kind in KINDS for name in plan[kind]] + [plan['experts']]:
            if name in modules:
                planned |= {f'{prefix}{name}.{each}' for each, _ in modules[name].named_parameters()}
        own |= {prefix + name for name, _ in part.named_parameters(recurse=False)}
    names = collections.defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    shared = [f'{first} = {other}' for first, *others in names.values() for other in others
              if other not in model.tied]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    places = (f'{plan["blocks"]}.', *plan['before_blocks'], *plan['after_blocks'])
    unplanned = [name for name in trained if name not in planned]
    return Facts(buffers=starred(name for name, _ in model.named_buffers()), unplanned=starred(unplanned),
                 raw=starred(name for name in unplanned if name in own),
                 homeless=starred(name for name in trained if not name.startswith(places)), shared=shared,
                 order=[name for name in trained if not name.startswith(plan['before_blocks'])])


def over_blocks(name):
    """'transformer.h.2.attn.c_k.weight' -> ('transformer.h.*.attn.c_k.weight', '2')."""
    match = re.fullmatch(r'(.*?\.)(\d+)(\..*|)', name)
    return (f'{match[1]}*{match[3]}', match[2]) if match else (name, '')


def starred(names):
    """Names over all blocks, each once, in order."""
    return list(dict.fromkeys(over_blocks(name)[0] for name in names))


def problems(model, facts):
    """What is wrong in every layout, even on one process, or would be with larger parameters."""
    found = []
    dependent = [name for name, parameter in model.named_parameters()
                 if not is_function_of_name(model, name, parameter.shape)]
    if dependent:
        found.append(
            f'{some(starred(dependent))}: GPT.initial_value gives other values when it is asked again, or '
            'for other rows: each process would start from its own. Draw from a generator that is seeded by '
            'seed, name and rows, not from the global one')
    if facts.buffers:
        found.append(
            f'{some(facts.buffers)}: a buffer has no values, since the model is built on the meta device, '
            'and no checkpoint keeps it: compute it in forward, as GPT.rope does, or make it a parameter '
            'with requires_grad=False, which GPT.initial_value fills')
    return found


def is_function_of_name(model, name, shape):
    """Whether the starting values of a parameter depend on nothing but the seed, its name and the rows."""
    n_rows = max(shape[0], 2 ** 17 // math.prod(shape[1:]))  # more than GPT.initial_value draws at a time
    part, values = slice(n_rows // 2, n_rows // 2 + n_rows // 4), []
    for seed, rows in ((0, slice(None)), (1, part)):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            values.append(model.initial_value(name, (n_rows, *shape[1:]), 1337, rows))
    return torch.equal(values[0][part], values[1])


def on_unused(names):
    """A sentence for parameters that should be trained, but get no gradient."""
    return (f'{some(starred(names))} has no gradient: it takes no part in the loss, on which DDP fails: use '
            'it, or set requires_grad=False')


def some(names):
    """The first of some names, in words."""
    shown = ', '.join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f'{shown} and {len(names) - SHOWN} more'


# --- what differs, in words ---------------------------------------------------------------------------------

def describe(differences, n_blocks):
    """A line for each thing that differs, one for all blocks that differ alike; the most telling first."""
    groups = collections.defaultdict(list)
    for difference in differences:
        groups[difference.what, over_blocks(difference.name)[0]].append(difference)
    lines = []
    for (what, pattern), members in groups.items():
        blocks = [over_blocks(member.name)[1] for member in members]
        where = ''
        if '*' in pattern:
            where = ' in all blocks' if len(blocks) == n_blocks else f' in block {", ".join(blocks)}'
        ranks = members[0].ranks
        if ranks:
            where += f' on rank {", ".join(map(str, ranks))}'
        text = f'{what} {words(members)}{where}'
        if pattern:
            text = f'{pattern}: {text}'
        lines.append((pattern == '', not is_factor(members[0]), text))
    # A factor tells more than a gradient of another direction, and a parameter more than a sum over all.
    return [text for *_, text in sorted(lines, key=lambda line: line[:2])]


def is_factor(difference):
    """Whether a tensor is a multiple of the right one."""
    return (difference.cosine or 0) > 0.999 and abs(difference.ratio - 1) > 0.01


def words(members):
    """How differences of the same kind differ."""
    first = members[0]
    if first.found is None:
        return 'is missing'
    if first.expected is None:
        return 'is there, but one process has no such parameter'
    if first.cosine is None:
        return f'{first.found:.6g}, on one process {first.expected:.6g}'
    if first.expected == 0:
        return f'has norm {first.found:.2g}, on one process 0'
    if first.found == 0:
        return 'is zero'
    if is_factor(first):
        ratios = [member.ratio for member in members]
        ratio = sum(ratios) / len(ratios)
        return f'{ratio:.2f} times too large' if ratio > 1 else f'{1 / ratio:.2f} times too small'
    worst = max(members, key=lambda member: member.error)
    return (f'differs by {worst.error:.2g} of its norm (cosine {worst.cosine:.4f}, norm {worst.ratio:.3f} '
            f'times that of one process, largest difference of an element {worst.largest:.2g})')


# --- what to change -----------------------------------------------------------------------------------------

def advise(keys, facts, differences, first_wrong='', random=()):
    """Sentences: what is often the reason that a layout differs.

    keys: {key of train.py: text} of the layout. first_wrong: the input or output of a module that is the
    first to differ in a forward pass. random: modules that draw random numbers.
    """
    tp, cp, pp = (int(keys.get(key, 1)) for key in ('tp', 'cp', 'pp'))
    found = []
    if random:
        found.append(
            f'{some(starred(random))} draws random numbers, though dropout is 0 here, and each process draws '
            'others: let it depend on dropout or a key of its own that is 0 here, since a layout with noise '
            'cannot equal another')
    if pp > 1 and facts.shared:
        found.append(f'{some(facts.shared)}: one parameter under two names, of which each pipeline stage has '
                     'a copy that is trained alone: give each block its own')
    if pp > 1 and facts.homeless:
        found.append(f'{some(facts.homeless)} is in no block, and every pipeline stage has a copy: name it '
                     "in split_plan's before_blocks or after_blocks, or move it into the blocks")
    kinds = {each.what for each in differences}
    if 'starting weight' in kinds and not found:
        found.append('a process does not start from the weights of one process: see GPT.initial_value, and '
                     'whether a parameter belongs to two pipeline stages')
    if found:
        return found
    if 'gradient' in kinds:
        gradients = [each for each in differences if each.what == 'gradient']
        return advise_on_gradients(keys, gradients, first_wrong, 'loss' not in kinds, facts.order)
    if first_wrong:
        return [where_to_look(first_wrong, tp, cp)]
    if 'update' in kinds:
        return ['the gradients are right, but not what the optimizer makes of them, or of which a process '
                'learns: see optim.py, and in ddp.py for zero_stage=1']
    if kinds == {'loss'}:
        return ['training is right, but not the loss that is shown: the log adds up what forward_backward in '
                'kilogpt/parallel/apply.py returns on all processes, each of which counts the targets of its own sequences '
                'and positions']
    if kinds <= {'train_loss', 'val_loss'}:
        return ['training is right, but not evaluation: what does the model do otherwise where self.training '
                'is False, or without gradients?']
    return []


def advise_on_gradients(keys, gradients, first_wrong, is_loss_right, order):
    """Sentences for gradients that differ. order: Facts.order. The other arguments are as in `advise`."""
    tp, cp, ep = (int(keys.get(key, 1)) for key in ('tp', 'cp', 'ep'))
    factors = [each for each in gradients if is_factor(each)]
    ratios = [each.ratio for each in factors]
    lost = [each.name for each in gradients if each.found in (None, 0.0)]
    if lost:
        return [f'{some(starred(lost))}: the gradient is lost on its way: is there a detach, a .data, or a '
                'torch.no_grad in forward?']
    ranks = sorted({rank for each in gradients for rank in each.ranks})
    if all(each.ranks for each in gradients):
        return [f'gradients are wrong on rank {", ".join(map(str, ranks))} alone: does the model, or a hook, '
                'go by the rank or by what only that process has?']
    if factors and ep > 1 and all('.experts.' in each.name for each in factors):
        return [f'{some(starred(each.name for each in factors))}: these are averaged over other ranks than '
                f'the rest, since the tokens of ep={ep} ranks have met there already: see local_matrix in '
                'expert.py']
    if len(factors) == len(gradients) > 4 and max(ratios) < 1.01 * min(ratios):
        text = f'every gradient is off by the same factor, {ratios[0]:.3g}'
        if 'batch_size' in keys:
            return [f'{text}: model(x, y) must return the sum of the losses over the targets, not a mean, '
                    'which depends on the size of a micro-batch (and kilogpt/parallel/apply.py divides it by the tokens '
                    'of the whole batch)']
        return [f'{text}: something is averaged once too often, or not at all. DDP and FSDP2 average over '
                'all dp × cp ranks, for which loss_scale in kilogpt/parallel/apply.py makes up; replicas (rep) count too, '
                'and a pipeline adds up its micro-batches']
    if not is_loss_right and not first_wrong:
        return ['the loss differs too: a target counts twice or not at all, or the processes have not '
                'divided the batch, of which some is padding (-1) where it does not divide evenly']
    if keys.get('activation_checkpoint', 'none') != 'none' and not first_wrong:
        return ['the outputs are right, but the backward pass with activation_checkpoint computes them again '
                'and gets others: does a block change its input in place (x += ..., x.mul_), or keep '
                'something between calls? Write x = x + ...']
    if first_wrong:
        return [where_to_look(first_wrong, tp, cp)]
    if factors and tp > 1:
        return [f'{some(starred(each.name for each in factors))}: is it in split_plan among those that each '
                'rank has whole (sequence, local, positions), but reads what is split, or the reverse? Each '
                f'of the tp={tp} ranks then adds a whole gradient, or a part of one is not added']
    if tp > 1:
        return ['the outputs are right, but not the gradients: a tensor is whole on each tp rank while its '
                f'gradient is a part of a sum. Look at {last_wrong(gradients, order)} and what reads its '
                'output, since all gradients behind that are right; see split_plan, and to_local in '
                'expert.py']
    return ['the outputs are right, but not the gradients, which the processes add up: see a custom '
            'backward, or a hook on a parameter']


def last_wrong(gradients, order):
    """The last parameter of the model whose gradient is wrong: the backward pass is right up to there."""
    wrong = {each.name for each in gradients}
    return next((name for name in reversed(order) if name in wrong), gradients[-1].name)


def where_to_look(value, tp, cp):
    """What to look for before the input or output of a module that is the first that is wrong."""
    text = f'{value} is the first value that is wrong'
    if cp > 1 and tp == 1:
        return (f'{text}: with cp a process has a part of each sequence, T / {cp} positions from '
                'GPT.first_position on. A part that mixes positions has to be a module that GPT.replaceable '
                'names as attention, and a part that counts positions starts at first_position')
    if tp > 1:
        return (f'{text}: with tp a process has 1/{tp} of the features behind a colwise linear (of the '
                f'heads), and T / {tp} positions between blocks. A norm, softmax or mean over them sees a '
                'part alone: take it over a head, or before the linear')
    return (f'{text}: does it mix the sequences of a batch (a mean over dimension 0), or keep something from '
            'one micro-batch to the next? Other processes have other sequences')


ERRORS = {  # {pattern of a run's error: what to change}
    'meta tensor|device meta|meta device|on meta':
        'a tensor that __init__ makes has no values, since the model is built on the meta device: make it in '
        'forward, or a parameter that GPT.initial_value fills',
    'Expected to have finished reduction':
        'a parameter takes no part in the loss: remove it, or use it',
    'CheckpointError|different number of tensors':
        'the backward pass computes a block again for activation_checkpoint, and it must compute the same: '
        'no in-place change of its input, no state between calls',
    'inplace operation|in-place':
        'a tensor that the backward pass needs is changed in place: x = x + ... in the place of x += ...',
    'mixed torch.Tensor and DTensor':
        'a plain tensor meets one that tp has split: name the layer in split_plan',
    'broadcast a dimension':
        'under tp a process has a part of the positions between blocks, which meets all of them here: a norm '
        'whose output is added to x is local in split_plan, not sequence',
    'same reduction dim|size mismatch|must match the size|cannot be multiplied|input of size|cannot reshape':
        'under tp a process has a part of the features behind a colwise linear, and of the positions between '
        'blocks: is a layer missing in split_plan, or under the wrong kind? Sizes in forward have to be -1 '
        'or read from x',
}


def advise_on_error(error, facts, unused=()):
    """Sentences for a run that ended with an error."""
    if 'is in no part of split_plan' in error:
        in_modules = [name for name in facts.unplanned if name not in facts.raw]
        modules = list(dict.fromkeys(name.rpartition('.')[0] for name in in_modules))
        found = []
        if modules:
            found.append(
                f"name {some(modules)} in GPT.split_plan: a linear that reads a norm's output as colwise and "
                'one that reads the features of a colwise one as rowwise; a norm before a linear as '
                'sequence, one over a head, or behind attention or an MLP, as local')
        if facts.raw:
            found.append(
                f'{some(facts.raw)} belongs to a block or the model itself, but split_plan names modules: '
                'put it into a module of its own, whose forward takes x, and name that (as sequence, where '
                'it works position by position)')
        return found
    if unused and 'Expected to have finished reduction' in error:
        return [on_unused(unused)]
    for pattern, text in ERRORS.items():
        if re.search(pattern, error):
            return [text]
    return []
