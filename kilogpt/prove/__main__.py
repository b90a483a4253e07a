r"""Prove that a model trains the same in every layout. Run this after you edit model.py, on any machine.

    python -m kilogpt.prove config/train_gpt2.py
    python -m kilogpt.prove config/train_gpt2.py --quick
    python -m kilogpt.prove config/train_gpt2_moe.py --layouts="ep2; ep2 tp2 zero3; pp2 zbv" --float64

A small version of the model trains on one process, and then in each layout on CPU processes of this machine,
with the same data. Each layout is compared with the one process: the starting weights; for three iterations,
the loss, the gradient norm, and every parameter's gradient and update on every process; then the evaluation
and the saved weights; and at last two iterations that resume from the previous layout's checkpoint. A failure
names the first iteration and the parameters that differ, the likely cause, the file to look at, and what git says has
changed since the last commit. The exit code is then 1.

Config files and keys are those of train.py. These keys are shrunk: n_layer to 3, n_head and delta_heads to 4
(grouped heads stay grouped), n_embd to 8 for each head, block_size to 32, window to 5, n_experts to 4 of width 16, the
vocabulary to 61 random tokens, and the batch to 4 micro-batches of 2 sequences; to more if a layout needs
more. Patterns of more blocks than the model has lose repeats (SSSL is SSL). With documents=mask or pack,
documents have 9 tokens on average. Dropout is off, no projection starts at zero, and the warm-up takes one
iteration. All other keys of the model and of the optimizer keep their values. Experts are compared in
float64, since rounding may send a token to another one.

A layout is a list of words, as for bench.py: dpN, tpN, cpN, ppN, epN (number of processes of each kind),
zeroN (zero_stage), repN (dp_replicate), a pp_schedule, full or selective (activation_checkpoint), offload,
and key=value for any other key. With compile=True, a compiled layout is compared with one process that is not
compiled. Without --layouts, about fifteen layouts run, among them the config's own with degrees of at most 2.
Half of them are drawn at random, others in each call (--seed).

    python -m kilogpt.prove --random=200
    python -m kilogpt.prove --minutes=8 --seed=1 --pairs

These commands draw everything at random, whatever the config: the model, the data, the optimizer, the
precision, the batch and the layout, of up to 8 processes, so that every pair of values of two keys is met after
a few hundred draws. Many draws continue in another layout. A draw may only be refused by a sentence that
docs/layouts.md has. A draw that fails is printed as a command, shrunk to the keys that it needs.
"""
import argparse
import dataclasses
import itertools
import json
import os
import random
import sys
import tempfile
import time

import torch
from tqdm import tqdm

from kilogpt.configurator import config_of, exit_on_error
from kilogpt.launch_train import ROOT, parse_layout, parse_layouts
from kilogpt.parallel.layout import Layout, check_layout
from kilogpt.prove import diagnosis, draws, forked, random_draws
from kilogpt.prove.data import VOCABULARY, write_text
from kilogpt.prove.runs import MORE, LayoutRuns
from kilogpt.settings import check_settings
from model import GPT, GPTConfig

ITERATIONS = 3  # iterations compared before the save
MICRO_BATCH, MICRO_STEPS = 2, 4  # on one process
MAX_LINES = 4  # differences printed for a layout

# Each of these layouts covers something that the others do not.
ONE_MICRO_STEP = f'dp1 batch_size={MICRO_BATCH * MICRO_STEPS} gradient_accumulation_steps=1 eval_iters=1'
QUICK = [ONE_MICRO_STEP, 'dp2', 'dp2 zero3 full', 'tp2', 'cp2', 'pp2']
FULL = [*QUICK, 'pp2 zbv', 'tp2 cp2 pp2']
EXPERTS = ['ep2']
DRAWN_QUICK, DRAWN_FULL = 2, 8  # random layouts besides, of at most MOST_DRAWN processes
MOST_DRAWN = 4
WINDOW = 5  # less than a document has, less than a rank's part of a sequence, and far less than a sequence
PATTERNS = 'window_pattern', 'rope_pattern', 'mixer_pattern'
LATENT_WIDTHS = dict(kv_latent=24, q_latent=20, rope_width=4, value_width=6)  # for heads that are 8 wide
# {key of train.py that a layout sets: its value on one process}
LAYOUT_KEYS = dict(zero_stage=0, dp_replicate=1, tp=1, cp=1, pp=1, pp_schedule='1f1b', ep=1,
                   activation_checkpoint='none', cpu_offload=False)
SHRUNK = ('n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_width', 'block_size', 'window', *PATTERNS, *LATENT_WIDTHS,
          'delta_heads', 'delta_key_heads', 'delta_key_width', 'delta_value_width',
          'n_experts', 'n_active_experts', 'n_shared_experts', 'expert_hidden', 'moe_first_layer',
          'moe_every', 'batch_size', 'gradient_accumulation_steps')


# --- layouts and the shrunk config --------------------------------------------------------------------------

def layout_of(config):
    """The layout of a config in words, with degrees of at most 2; '' if it is one process."""
    words = [f'{key}2' for key in ('tp', 'cp', 'pp', 'ep') if config[key] > 1]
    # With tp, pp or ep, train.py shards the state at zero_stage 2 or below in any case.
    is_sharded_anyway = config['tp'] * config['pp'] * config['ep'] > 1 and config['zero_stage'] <= 2
    if config['dp_replicate'] > 1:
        words.append('rep2')
    if config['pp'] > 1 and config['pp_schedule'] != '1f1b':
        words.append(config['pp_schedule'])
    if config['zero_stage'] and not is_sharded_anyway:
        words.append(f'zero{config["zero_stage"]}')
    if config['activation_checkpoint'] != 'none':
        words.append(config['activation_checkpoint'])
    return ' '.join(words)


def choose_layouts(config, options):
    """[(layout, number of processes, train.py arguments)] of the layouts to prove."""
    if options.layouts:
        return parse_layouts(options.layouts)
    texts = list(QUICK if options.quick else FULL)
    if config['mlp'] == 'moe':
        texts += EXPERTS
    of_config = layout_of(config)
    if of_config and of_config not in texts:
        texts.append(of_config)
    layouts = []
    for name, processes, arguments in parse_layouts(';'.join(texts)):
        if processes <= options.nproc:
            layouts.append(('one micro-step' if name == ONE_MICRO_STEP else name, processes, arguments))
    return layouts


def draw_layouts(model, config, options):
    """Random layouts of a model, like the result of `choose_layouts`. config: the shrunk one."""
    small = dict.fromkeys(('tp', 'cp', 'pp', 'ep'), (1, 2))
    small |= dict(mlp=[config['mlp']], dp=(1, 2, 3), islands=(1,), grad_compress=('none',))
    layouts = draws.draw_layouts(
        random.Random(options.seed), DRAWN_QUICK if options.quick else DRAWN_FULL, small,
        min(MOST_DRAWN, options.nproc),
        lambda words: not why_impossible(model, config, *parse_layout(words, 0)))
    return parse_layouts('; '.join(layouts))


def keys_of(arguments):
    """{key: text} of train.py arguments."""
    return dict(argument.removeprefix('--').split('=', 1) for argument in arguments)


def shrink(config, layouts, keep):
    """The config of the runs: small, on one process, in float32. keep: keys that keep their values."""
    most = dict(tp=1, split=1, stages=1, ep=1)
    for _, processes, arguments in layouts:
        keys = {key: int(text) for key, text in keys_of(arguments).items() if key in ('tp', 'cp', 'pp', 'ep')}
        tp, cp, pp = (keys.get(key, 1) for key in ('tp', 'cp', 'pp'))
        most['tp'], most['split'] = max(most['tp'], tp), max(most['split'], tp * cp)
        most['stages'], most['ep'] = max(most['stages'], 2 * pp), max(most['ep'], keys.get('ep', 1))
    small = {}
    small['n_layer'] = min(config['n_layer'], max(3, most['stages'] - 2))
    small['n_head'] = config['n_head']
    if config['n_head'] > 4:
        small['n_head'] = max(4, most['split'])
    small['n_kv_head'] = config['n_kv_head']
    if config['n_kv_head'] not in (0, 1, config['n_head']):  # grouped heads
        small['n_kv_head'] = max(2, most['tp'])
        small['n_head'] = max(small['n_head'], 2 * small['n_kv_head'])
    elif config['n_kv_head'] > 1:
        small['n_kv_head'] = small['n_head']
    small['n_embd'] = min(config['n_embd'], 8 * small['n_head'])
    if config['head_width']:
        small['head_width'] = min(config['head_width'], 16)
    for key, width in LATENT_WIDTHS.items():
        small[key] = min(config[key], width)
    small['block_size'] = min(config['block_size'], 32)
    small['window'] = min(config['window'], WINDOW)
    for key in PATTERNS:
        small[key] = shorten(config[key], small['n_layer'])
    small['delta_key_heads'] = 0
    if config['delta_key_heads'] not in (0, config['delta_heads'] or config['n_head']):  # grouped heads
        small['delta_key_heads'] = max(2, most['tp'])
    small['delta_heads'] = config['delta_heads'] and max(4, most['split'], 2 * small['delta_key_heads'])
    for key in ('delta_key_width', 'delta_value_width'):
        small[key] = min(config[key], 16)
    if config['mlp'] == 'moe':
        small['n_experts'] = min(config['n_experts'], max(4, most['ep']))
        small['n_active_experts'] = min(config['n_active_experts'], 2)
        if config['n_active_experts'] == config['n_experts']:
            small['n_active_experts'] = small['n_experts']
        small['n_shared_experts'] = min(config['n_shared_experts'], 2)
        small['expert_hidden'] = 16
        small['moe_first_layer'] = min(config['moe_first_layer'], 1)
        small['moe_every'] = min(config['moe_every'], 2)
    small['batch_size'], small['gradient_accumulation_steps'] = MICRO_BATCH, MICRO_STEPS
    small = {key: value for key, value in small.items() if key not in keep}
    plain = dict(
        device='cpu', backend='auto', dtype='float32', compile=False, fp8=False, deterministic=False,
        profile=False, wandb_log=False, trackio=False, tensorboard=False, events=False, init_from='scratch',
        loss='cross_entropy', eval_only=False,
        async_tp=False, grad_compress='none', dropout=0.0, zero_init=False, on_nonfinite='abort',
        warmup_iters=1, max_iters=ITERATIONS + MORE, lr_decay_iters=max(10, config['lr_decay_iters']),
        eval_iters=MICRO_STEPS, eval_interval=ITERATIONS, log_interval=1, save_interval=0,
        save_minutes=0.0, keep_checkpoints=2, always_save_checkpoint=True, async_checkpoint=False,
        comm_timeout=120, mixture_phases='', max_epochs=0, **LAYOUT_KEYS)  # the tokens are random
    return config | plain | small


def shorten(pattern, n_layer):
    """A pattern of n_layer blocks instead of one of more blocks: SSSL is SSL if n_layer is 3.

    Each run of a letter has one block, and the first run has the blocks that remain, so that the pattern does
    not repeat within the model, and a block whose number is wrong is a block of another kind.
    """
    if len(pattern) <= n_layer:
        return pattern
    runs = ''.join(letter for letter, _ in itertools.groupby(pattern))
    return (runs[0] * (n_layer - len(runs)) + runs)[:n_layer]


def build(config):
    """The model of a config, on the meta device."""
    fields = {field.name: config[field.name] for field in dataclasses.fields(GPTConfig)
              if field.name in config}
    with torch.device('meta'):
        return GPT(GPTConfig(vocab_size=VOCABULARY, **fields), seed=None)


def why_impossible(model, config, processes, arguments):
    """Why a layout cannot divide a model, or ''."""
    keys = keys_of(arguments)
    degrees = {key: type(LAYOUT_KEYS[key])(text) for key, text in keys.items()
               if key in Layout.__dataclass_fields__}
    try:
        check_layout(model, Layout(processes, **degrees), block_size=config['block_size'], dtype='float32',
                     activation_checkpoint=keys.get('activation_checkpoint', 'none'), fp8=False,
                     cpu_offload=keys.get('cpu_offload') == 'True', grad_compress=keys.get('grad_compress', 'none'))
    except ValueError as error:
        return str(error)
    return ''


# --- report -------------------------------------------------------------------------------------------------

class Report:
    """Prints a line for each layout, as text or JSON, and remembers whether one has failed."""

    def __init__(self, as_json, total):
        self.as_json, self.has_failures = as_json, False
        tqdm.monitor_interval = 0  # tqdm's thread would not survive a fork
        self.bar = tqdm(total=total, unit='layout', leave=False, disable=True if as_json else None)

    def say(self, text):
        if not self.as_json:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def row(self, layout, processes, seconds, verdict, lines=(), advice=(), **figures):
        """Print a layout's line, the lines of its differences, and advice.

        verdict: 'same', 'wrong', 'failed', 'left out' or 'reference'. figures: the largest relative errors.
        """
        if verdict in ('wrong', 'failed') and not self.has_failures:
            self.has_failures, changed = True, diagnosis.changes_since_commit(ROOT)
            advice = [*advice, f'changed since the last commit: {changed}'] if changed else advice
        self.bar.update()
        if self.as_json:
            row = dict(layout=layout, processes=processes, seconds=round(seconds, 1), verdict=verdict,
                       differences=list(lines), advice=list(advice), **figures)
            print(json.dumps(row), flush=True)
            return
        text = dict(wrong='WRONG', failed='FAILED', reference='reference for the others').get(verdict)
        if verdict == 'same':
            text = f'same: gradients within {figures["gradient"]:.0e}, updates within {figures["update"]:.0e}'
        unit = 'process  ' if processes == 1 else 'processes'
        self.say(f'{layout:<26} {processes:>2} {unit} {seconds:>6.1f}s  {text or verdict}')
        for line in lines[:MAX_LINES]:
            self.say(f'    {line}')
        if len(lines) > MAX_LINES:
            self.say(f'    ... and {len(lines) - MAX_LINES} more')
        for sentence in advice:
            self.say(f'    -> {sentence}')


class Prover:
    """Trains on one process and in each layout, compares, and reports."""

    def __init__(self, config, layouts, options, folder):
        self.options = options
        small = shrink(config, layouts, options.keep)
        with exit_on_error():
            check_settings(small)
            self.model = build(small)
            self.layouts = layouts if options.layouts else layouts + draw_layouts(self.model, small, options)
        self.small, self.facts = small, diagnosis.inspect(self.model)
        self.n_blocks = len(self.model.get_submodule(self.model.split_plan['blocks']))
        in_float64 = options.float64 or config['mlp'] == 'moe'
        data = write_text(os.path.join(folder, 'data'), has_documents=small['documents'] != 'stream')
        self.runs = LayoutRuns(folder, small | dict(dataset=data), ITERATIONS, in_float64)
        self.report = Report(options.json, total=1 + len(self.layouts))
        shrunk = [f'{key} {config[key]} -> {small[key]}' for key in SHRUNK if config[key] != small[key]]
        self.report.say(f'{self.model.num_params():,} parameters, {"float64" if in_float64 else "float32"}; '
                        f'shrunk: {", ".join(shrunk) or "nothing"}')

    def run_reference(self):
        """Train on one process; returns whether layouts can be compared with this run."""
        began = time.perf_counter()
        reference = self.source = self.runs.train_reference()
        problems, lines, verdict = diagnosis.problems(self.model, self.facts), [], 'reference'
        self.unused = []
        if reference.error:
            lines, verdict = [reference.error], 'failed'
            problems += diagnosis.advise_on_error(reference.error, self.facts, is_reference=True)
        else:
            self.unused = self.runs.observations[0][0].unused
            if self.unused:
                problems.append(diagnosis.advise_on_unused(self.unused))
            if problems:
                verdict = 'wrong'
        self.report.row('one process', 1, time.perf_counter() - began, verdict, lines, problems)
        return not reference.error

    def run_layout(self, layout, processes, arguments):
        began = time.perf_counter()
        reason = ''
        if not self.options.layouts:  # the run of a layout given by the user reports why it cannot start
            reason = why_impossible(self.model, self.small, processes, arguments)
        result = dict(verdict='left out', lines=[reason])
        if not reason:
            result = self.compare(processes, arguments)
        self.report.row(layout, processes, time.perf_counter() - began, **result)

    def compare(self, processes, arguments):
        """Train in a layout and compare; returns {argument of Report.row: value}."""
        keys, runs = dict(documents=self.small['documents']) | keys_of(arguments), self.runs
        run = runs.train(processes, arguments)
        if run.error:
            return dict(verdict='failed', lines=[run.error],
                        advice=diagnosis.advise_on_error(run.error, self.facts, self.unused, keys,
                                                         self.small['block_size']))
        if run.uncompiled:
            return dict(verdict='left out', lines=[run.uncompiled])
        differences, figures = runs.compare(run)
        if differences:
            lines = diagnosis.describe(differences, self.n_blocks)
            lines[0] = f'iteration {differences[0].iteration}: {lines[0]}'
            advice = diagnosis.advise(keys, self.facts, differences, run.first_wrong,
                                   random=runs.observations[0][0].random)
            return dict(verdict='wrong', lines=lines, advice=advice, **figures)
        if not self.options.quick:
            lines = runs.continue_from(self.source, processes, arguments)
            self.source = run
            if lines:
                advice = [] if runs.continued.error else [diagnosis.AFTER_A_SAVE]
                return dict(verdict='wrong', lines=lines, advice=advice, **figures)
        return dict(verdict='same', **figures)


def parse_arguments():
    """(options of this command, arguments for train.py)."""
    parser = argparse.ArgumentParser(prog='python -m kilogpt.prove', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--layouts', default='', metavar='"LAYOUT; ..."', help='prove these layouts, not the usual ones')
    add('--nproc', type=int, default=8, help='leave out layouts and draws with more processes than this (8)')
    add('--quick', action='store_true', help='only the main layouts, and no run resumes from another')
    add('--float64', action='store_true', help='compute in float64, with a hundredth of the tolerances')
    add('--keep', default='', metavar='KEY,KEY...', help='keys that are not shrunk, such as n_head,n_embd')
    add('--random', type=int, default=0, metavar='N', help='run N random draws (docs/layouts.md)')
    add('--minutes', type=float, default=0.0, metavar='M', help='run random draws for M minutes')
    add('--seed', type=int, default=random.randrange(10 ** 6), help='of what is drawn (another one in each call)')
    add('--pairs', action='store_true', help='print which pairs of values the draws have proved')
    add('--draw', metavar='"KEY=VALUE; ..."', help='run this draw, as a failure prints it')
    add('-x', '--exitfirst', action='store_true', help='stop at the first draw that fails')
    add('--shrink', type=int, default=3, metavar='N', help='shrink the first N draws that fail (3)')
    add('--json', action='store_true', help='print one JSON object for each layout')
    options, arguments = parser.parse_known_args()
    if options.nproc < 1:
        sys.exit(f'error: --nproc is {options.nproc}: it must be at least 1')
    options.keep = list(filter(None, options.keep.split(',')))
    for key in options.keep:
        if key not in SHRUNK:
            sys.exit(f'error: --keep has {key!r}: choose from the shrunk keys, {", ".join(SHRUNK)}')
    return options, arguments


def main():
    options, arguments = parse_arguments()
    if not hasattr(os, 'fork'):
        sys.exit('error: kilogpt.prove needs os.fork, which this system does not have: use Linux or WSL')
    if options.random or options.minutes or options.draw is not None:
        random_draws.main(options)
    config = config_of(os.path.join(ROOT, 'train.py'), arguments)
    layouts = choose_layouts(config, options)
    forked.prepare()
    with tempfile.TemporaryDirectory() as folder:
        prover = Prover(config, layouts, options, folder)
        if prover.run_reference():
            for layout in prover.layouts:
                prover.run_layout(*layout)
        prover.report.bar.close()
    sys.exit(1 if prover.report.has_failures else 0)


if __name__ == '__main__':
    main()
