"""Find the likely cause if a layout trains a model differently from one process, and advise what to change.

`inspect` looks only at the model, `advise` at the results of a run. For kilogpt.prove.
"""
import collections
import itertools
import math
import os
import re
import subprocess
import traceback
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from kilogpt.launch_train import ROOT

KINDS = ('colwise', 'rowwise', 'sequence', 'across', 'features', 'shared', 'whole', 'positions', 'local',
         'embedding', 'tables', 'head')  # of split_plan
MAX_NAMES = 4  # parameters named in a sentence
MODULES = os.path.join('torch', 'nn', 'modules')
AFTER_A_SAVE = ('without a save the run goes on right: what does a hook in train.py, or the optimizer, remember that '
                'no checkpoint keeps? See state() and tensors() of a hook')


def changes_since_commit(folder):
    """'train.py line 196, model.py line 20': where code differs from git's last commit; '' if git knows of nothing."""
    command = ['git', 'diff', '--unified=0', 'HEAD', '--', '*.py', ':!tests']
    try:
        text = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ''
    places = []
    for section in re.split(r'^diff --git ', text, flags=re.M)[1:]:
        lines = re.findall(r'^@@ -\S+ \+(\d+)', section, flags=re.M)
        name = re.search(r'^\+\+\+ (?:b/)?(.*)', section, flags=re.M)
        if lines and name:
            places.append(f'{name[1]} line {some(lines)}')
    return some(places)


class Facts(NamedTuple):
    """Lists of names in a model that layouts may not handle. A * stands for the number of a block."""
    buffers: list
    unplanned: list  # parameters that split_plan does not name (matters for tp)
    direct: list  # unplanned parameters of a block or of the model itself, not of one of its linears or norms
    outside: list  # parameters neither in a block nor in before_blocks or after_blocks (matters for pp)
    shared: list  # 'NAME = NAME': one parameter with two names that are not in `tied` (matters for pp)
    order: list  # full names of trained parameters from the first block on, in the order of a forward pass
    attention: tuple  # paths of the modules in which a process has whole sequences, but a part of the heads
    embedding: tuple  # names of the modules that read token ids
    positions: tuple  # names of the modules that read positions


def inspect(model):
    """The Facts of a model."""
    plan = model.split_plan
    parts = {'': model} | {f'{plan["blocks"]}.{number}.': block
                           for number, block in model.get_submodule(plan['blocks']).items()}
    planned_modules = [*itertools.chain.from_iterable(plan[kind] for kind in KINDS), plan['experts']]
    planned, direct = set(), set()
    for prefix, part in parts.items():
        modules = dict(part.named_modules())
        for name in planned_modules:
            if name in modules:
                planned |= {f'{prefix}{name}.{each}' for each, _ in modules[name].named_parameters()}
        direct |= {prefix + name for name, _ in part.named_parameters(recurse=False)}
    first_names, shared = {}, []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if name != first and name not in model.tied:
            shared.append(f'{first} = {name}')
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    places = (f'{plan["blocks"]}.', *plan['before_blocks'], *plan['after_blocks'])
    unplanned = [name for name in trained if name not in planned]
    return Facts(buffers=starred(name for name, _ in model.named_buffers()), unplanned=starred(unplanned),
                 direct=starred(name for name in unplanned if name in direct),
                 outside=starred(name for name in trained if not name.startswith(places)), shared=shared,
                 order=[name for name in trained if not name.startswith(plan['before_blocks'])],
                 attention=model.replaceable['attention'], embedding=plan['embedding'],
                 positions=plan['positions'])


def split_block(name):
    """'transformer.h.2.attn.c_k.weight' -> ('transformer.h.*.attn.c_k.weight', '2')."""
    match = re.fullmatch(r'(.*?\.)(\d+)(\..*|)', name)
    return (f'{match[1]}*{match[3]}', match[2]) if match else (name, '')


def starred(names):
    """Names with * for the number of a block, without duplicates, in order."""
    return list(dict.fromkeys(split_block(name)[0] for name in names))


def problems(model, facts):
    """[sentence] for mistakes that affect every layout, even one process, or would with larger parameters."""
    found = []
    unstable = [name for name, parameter in model.named_parameters()
                if not is_function_of_name(model, name, parameter.shape)]
    if unstable:
        found.append(
            f'{some(starred(unstable))}: GPT.initial_value returns other values in a second call, or for '
            'other rows, so every process would start from different values. Draw from a generator seeded by '
            'seed, name and rows, not from the global generator')
    if facts.buffers:
        found.append(
            f'{some(facts.buffers)}: a buffer has no values, since the model is built on the meta device, '
            'and checkpoints do not contain it: compute it in forward, as GPT.rope does, or make it a '
            'parameter with requires_grad=False, which GPT.initial_value fills')
    return found


def is_function_of_name(model, name, shape):
    """Whether a parameter's initial values depend only on the seed, on its name and on the rows."""
    n_rows = max(shape[0], 2 ** 17 // math.prod(shape[1:]))  # more than GPT.initial_value draws at a time
    part, values = slice(n_rows // 2, n_rows // 2 + n_rows // 4), []
    for seed, rows in ((0, slice(None)), (1, part)):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            values.append(model.initial_value(name, (n_rows, *shape[1:]), 1337, rows))
    return torch.equal(values[0][part], values[1])


class WatchForWrites(TorchFunctionMode):
    """A context that notes which lines of this repository give a tensor values in place, as nn.init does.

    What a model's __init__ writes is lost, since GPT.initial_value gives every parameter its values.
    """

    def __init__(self):
        super().__init__()
        self.lines = {}  # {'model.py:123': name of the function}

    def __torch_function__(self, function, types, arguments=(), options=None):
        name = getattr(function, '__name__', '')
        if name.endswith('_') and not name.endswith('__') and name != 'requires_grad_':
            # A module of torch.nn that fills its own weights does not count.
            caller = next((frame for frame in reversed(traceback.extract_stack())
                           if os.path.dirname(frame.filename) == ROOT or MODULES in frame.filename), None)
            if caller and MODULES not in caller.filename:
                self.lines.setdefault(f'{os.path.basename(caller.filename)}:{caller.lineno}', name)
        return function(*arguments, **(options or {}))

    def advice(self):
        """[sentence] for each line."""
        return [f'{line}: {name} in __init__ has no effect, since GPT.initial_value gives every parameter its first '
                'values: write it there' for line, name in self.lines.items()]


def advise_on_unused(names):
    """A sentence for parameters that require a gradient but have none."""
    return (f'{some(starred(names))} has no gradient: the loss does not depend on it, which makes DDP fail: '
            'use it, or set requires_grad=False')


def some(names):
    """The first names of a list, as text."""
    shown = ', '.join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f'{shown} and {len(names) - MAX_NAMES} more'


# --- differences in words -----------------------------------------------------------------------------------

def describe(differences, n_blocks):
    """[line] of differences, one for the same difference in several blocks; the most telling first."""
    groups = collections.defaultdict(list)
    for difference in differences:
        groups[difference.what, split_block(difference.name)[0]].append(difference)
    lines = []
    for (what, pattern), members in groups.items():
        blocks = [split_block(member.name)[1] for member in members]
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
    # A wrong factor says more than a wrong direction, and a parameter says more than a sum over all of them.
    return [text for *_, text in sorted(lines, key=lambda line: line[:2])]


def is_factor(difference):
    """Whether a tensor is a multiple of the correct tensor."""
    return (difference.cosine or 0) > 0.999 and abs(difference.ratio - 1) > 0.01


def words(members):
    """A group of similar differences in words."""
    first = members[0]
    if first.found is None:
        return 'is missing'
    if first.expected is None:
        return 'exists, but one process has no such parameter'
    if first.cosine is None:
        return f'{first.found:.10g}, on one process {first.expected:.10g}'
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


# --- advice -------------------------------------------------------------------------------------------------

def advise(keys, facts, differences, first_wrong='', random=()):
    """[sentence] with the likely cause of a layout's differences.

    keys: {key of train.py: text} of the layout, and `documents`. first_wrong: the first input or output of a
    module, or argument of a block, that is wrong in a forward pass, or ''. random: names of modules that draw
    random numbers.
    """
    pp, found = int(keys.get('pp', 1)), []
    if random:
        found.append(
            f'{some(starred(random))} draws random numbers although dropout is 0 here, and every process '
            'draws different ones: make the noise in model.py depend on dropout or on another key that is 0 here, '
            'since layouts with noise cannot be compared')
    if pp > 1 and facts.shared:
        found.append(f'{some(facts.shared)}: one parameter has two names, and pipeline stages train separate '
                     'copies of it: give each block its own parameter')
    if pp > 1 and facts.outside:
        found.append(f'{some(facts.outside)} is in no block, so every pipeline stage has a copy: name it '
                     "in split_plan's before_blocks or after_blocks, or move it into the blocks")
    kinds = {each.what for each in differences}
    if 'starting weight' in kinds and not found:
        found.append('a process starts from other weights than one process does: see GPT.initial_value in model.py '
                     'and start.load in train.py, and check whether a parameter belongs to two pipeline stages')
    if found:
        return found
    if 'gradient' in kinds:
        gradients = [each for each in differences if each.what == 'gradient']
        return advise_on_gradients(keys, gradients, first_wrong, 'loss' not in kinds, facts)
    if first_wrong:
        return [where_to_look(first_wrong, keys, facts)]
    if 'update' in kinds:
        return ['the gradients are right, but the updates are not: does lr_at, a hook or the clipping in train.py '
                'depend on the rank, the number of processes or the time? Then see the optimizer, '
                'kilogpt/optim.py, and the exchange of parameters for zero_stage=1, kilogpt/parallel/ddp.py']
    if kinds == {'grad_norm'}:
        return ['the gradients are right, but their norm is not: see the update in train.py, and clip_gradients in '
                'kilogpt/parallel/apply.py']
    if kinds == {'loss'}:
        return ['training is right, but the logged loss is not: the log adds up what forward_backward in '
                'kilogpt/parallel/apply.py returns on every process, and each process must count only the '
                'targets of its own sequences and positions']
    if kinds <= {'train_loss', 'val_loss'}:
        return ['training is right, but evaluation is not: see evaluate in train.py. What does the model do '
                'differently if self.training is False, or without gradients? Does it get the starts of documents '
                'there?']
    return []


def advise_on_gradients(keys, gradients, first_wrong, is_loss_right, facts):
    """[sentence] for gradients that differ. The arguments are as in `advise`."""
    tp, ep = (int(keys.get(key, 1)) for key in ('tp', 'ep'))
    factors = [each for each in gradients if is_factor(each)]
    ratios = [each.ratio for each in factors]
    lost = [each.name for each in gradients if each.found in (None, 0.0)]
    if lost:
        return [f'{some(starred(lost))}: the gradient is lost: is there a detach, a .data, or a '
                'torch.no_grad in forward?']
    if all(each.ranks for each in gradients):
        ranks = sorted(set().union(*(each.ranks for each in gradients)))
        return [f'gradients are wrong only on rank {", ".join(map(str, ranks))}: does the model, or the update or a '
                'hook in train.py, depend on the rank or on something that only this process has?']
    if factors and ep > 1 and all('.experts.' in each.name for each in factors):
        return [f'{some(starred(each.name for each in factors))}: experts are averaged over fewer ranks than '
                f'other parameters, since they already see the tokens of ep={ep} ranks: see local_matrix in '
                'expert.py']
    if len(factors) == len(gradients) > 4 and max(ratios) < 1.01 * min(ratios):
        text = f'every gradient is off by the same factor, {ratios[0]:.3g}'
        if 'batch_size' in keys:
            return [f'{text}: model(x, y) must return the sum of the losses over the targets, not a mean, '
                    'which depends on the size of a micro-batch (kilogpt/parallel/apply.py divides the sum '
                    'by the tokens of the whole batch): see the loss in model.py']
        return [f'{text}: something is averaged twice, or not at all, or a micro-batch is left out: see the update in '
                'train.py. DDP and FSDP2 average over all dp × cp ranks, which loss_scale in '
                'kilogpt/parallel/apply.py compensates; replicas (rep) count too, and a pipeline adds up its '
                'micro-batches']
    if not is_loss_right and not first_wrong and 'batch_size' in keys:
        return ['the loss differs too, but the logits are right: model(x, y) must return the sum of the '
                'losses over the targets, not a mean over targets or documents, of which each micro-batch has '
                'another number: see the loss in model.py']
    if not is_loss_right and not first_wrong:
        return ['the loss differs too: a target counts twice or not at all, or the processes have not '
                'divided the batch (if it does not divide evenly, some targets are padding, -1): see the update in '
                'train.py']
    if keys.get('activation_checkpoint', 'none') != 'none' and not first_wrong:
        return ['the outputs are right, but when activation_checkpoint recomputes them in the backward pass, '
                'they differ: does a block change its input in place (x += ..., x.mul_), or keep something '
                'between calls? Write x = x + ... in model.py']
    if first_wrong:
        return [where_to_look(first_wrong, keys, facts)]
    if factors and tp > 1:
        return [f'{some(starred(each.name for each in factors))}: does split_plan list it as whole on each '
                'rank (sequence, local, positions) although its input is split, or the reverse? Then each of '
                f'the tp={tp} ranks adds a whole gradient, or a term of a sum is not added']
    if tp > 1:
        return ['the outputs are right, but the gradients are not: a tensor is whole on each tp rank, but '
                f'its gradient is only one term of a sum. Look at {last_wrong(gradients, facts.order)} and '
                'what reads its output, since all gradients after that are right; see split_plan, and to_local in '
                'expert.py']
    return ['the outputs are right, but the gradients, which the processes add up, are not: look for a '
            'custom backward, or a hook on a parameter']


def last_wrong(gradients, order):
    """The last parameter with a wrong gradient: the backward pass is right until it gets there."""
    wrong = {each.name for each in gradients}
    return next((name for name in reversed(order) if name in wrong), gradients[-1].name)


def where_to_look(value, keys, facts):
    """A sentence on what to look for if this value is the first wrong one: `first_wrong` in `advise`."""
    text = f'{value} is the first value that is wrong'
    tp, cp, pp = (int(keys.get(key, 1)) for key in ('tp', 'cp', 'pp'))
    is_output = value.startswith('the output of')
    if value.startswith('the mask of'):
        return (f'{text}: the positions that each query sees, those of its document and window. '
                f'{where_documents_go_wrong(cp, pp)}')
    if value.startswith('the rope of') or is_output and value.endswith(facts.positions):
        return (f'{text}: positions, which count from the start of each document. '
                f'{where_documents_go_wrong(cp, pp)}')
    if is_output and value.endswith(facts.embedding) and tp == 1:
        return (f'{text}: a process reads other tokens than those that are its share of the batch. Which '
                'tokens a sequence has, and their order, must not depend on the rank: see hooks and batches in '
                'train.py, Layout.rows in kilogpt/parallel/layout.py, and data/')
    others = '' if keys.get('documents', 'stream') == 'stream' else f'. {SWAPPED_STARTS}'
    if tp * cp > 1 and is_output and value.endswith(facts.attention):
        return (f'{text}: with tp={tp} and cp={cp} a process has 1/{tp * cp} of the heads there, and whole '
                'sequences. A bias or a scale for each head must count heads from first_head on (see '
                f'DotProductAttention in model.py), and nothing may mix heads{others}')
    if cp > 1 and tp == 1:
        return (f'{text}: with cp a process has a part of each sequence, T / {cp} positions from '
                'GPT.first_position on. A part that mixes positions must be a module that GPT.replaceable '
                'names as attention, and a part that counts positions must start at first_position (model.py)')
    if tp > 1:
        return (f'{text}: with tp a process has 1/{tp} of the features after a colwise linear (1/{tp} of '
                f'the heads), and T / {tp} positions between blocks. A norm, softmax or mean over them sees '
                'only a part: compute it over a head, or before the linear (model.py)')
    return (f'{text}: does model.py mix the sequences of a batch (a mean over dimension 0), or keep something from '
            f'one micro-batch to the next? Other processes have other sequences{others}')


SWAPPED_STARTS = ('Starts of documents must come from the same sequences as inputs and targets, on each '
                  'process and in each micro-batch')


def where_documents_go_wrong(cp, pp):
    """What to look for if positions, or what queries see, are wrong in a layout. An end of a sentence."""
    found = []
    if cp > 1:
        found.append('With cp a process has a part of each sequence, which begins at first_position, but '
                     'attention sees whole sequences: starts of documents are whole on each rank, and '
                     'windows count positions of the whole sequence')
    if pp > 1:
        found.append('With pp each stage needs the starts of the same micro-batch as the first stage, in the '
                     'keywords of schedule.step, and the numbers of its blocks are those in their names')
    return '. '.join(found) or SWAPPED_STARTS


ERRORS = {  # {pattern in a run's error: advice} for one process too
    'meta tensor|device meta|meta device|on meta':
        'a tensor created in __init__ has no values, since the model is built on the meta device: create it '
        'in forward, or make it a parameter that GPT.initial_value fills',
    'inplace operation|in-place':
        'a tensor that the backward pass needs is changed in place: write x = x + ..., not x += ...',
}
LAYOUT_ERRORS = {
    'Expected to have finished reduction':
        'the loss does not depend on some parameter: remove it, or use it',
    'CheckpointError|different number of tensors':
        'with activation_checkpoint, the backward pass recomputes a block, which must give the same result: '
        'do not change its input in place, and keep no state between calls',
    'loss_parallel|log_softmax|nll_loss':
        'with tp a rank has a part of the vocabulary, except where Loss calls cross_entropy, at the end of model.py: '
        'write the loss there (docs/edit.md, "A loss of one\'s own")',
    'mixed torch.Tensor and DTensor':
        'an operation has a plain tensor and a tensor split by tp: name the layer in split_plan',
    'broadcast a dimension':
        'with tp a process has a part of the positions between blocks, but here a tensor has all of them: a '
        'norm whose output is added to x is local in split_plan, not sequence',
    'same reduction dim|size mismatch|must match the size|match the broadcast shape|cannot be multiplied|'
    'input of size|cannot reshape':
        'a process has a part of the features after a colwise linear (tp), of the positions between blocks '
        '(tp, cp), and of the heads in attention (tp, cp), which there begin at first_head: is a layer '
        'missing in split_plan, or under the wrong kind? Sizes in forward must be -1 or read from x',
}


def advise_on_error(error, facts, unused=(), keys=None, block_size=0, is_reference=False):
    """[sentence] for a run that ended with an error.

    unused: names of trained parameters without a gradient. keys: as in `advise`. is_reference: whether it is the
    one process alone.
    """
    cp = int((keys or {}).get('cp', 1))
    if 'is in no part of split_plan' in error:
        in_modules = [name for name in facts.unplanned if name not in facts.direct]
        modules = list(dict.fromkeys(name.rpartition('.')[0] for name in in_modules))
        found = []
        if modules:
            found.append(
                f"name {some(modules)} in GPT.split_plan: a linear that reads a norm's output as colwise, if a rowwise "
                'one reads its features, and as rowwise if it reads those of a colwise one; a norm before a linear as '
                'sequence; a norm over a head, or after attention or an MLP, as local; a linear whose whole output '
                'meets x or what attention or an MLP returns, such as a gate of each channel, as local')
        if facts.direct:
            found.append(
                f'{some(facts.direct)} belongs to a block or the model itself, but split_plan names modules: '
                'put it into a module of its own, whose forward takes x, and name that module (as sequence, '
                'if it works position by position)')
        return found
    sizes = set(map(int, re.findall(r'size of tensor \w \((\d+)\)', error)))
    if cp > 1 and sizes == {block_size, block_size // cp}:
        return [f'a part of a sequence, {block_size // cp} positions, meets a whole one, {block_size}: with '
                f'cp={cp} a process has a part of the inputs and targets, and whole sequences in attention, '
                'where starts of documents and masks are whole; positions are cut from first_position on']
    if unused and 'Expected to have finished reduction' in error:
        return [advise_on_unused(unused)]
    for pattern, text in (ERRORS if is_reference else LAYOUT_ERRORS | ERRORS).items():
        if re.search(pattern, error):
            return [text]
    return []
