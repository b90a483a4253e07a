"""The recipes that dev/peers.py compares: models and how they are trained, by the code in a checkout of each peer.

Each recipe gets the folder of the checkout, the shape, and a factor for the documented learning rate. Settings
that the peer's code does not hold are here, with the file where it documents them. Lengths of warm-up are the
exception for the three that use AdamW with a schedule: they document 1 to 2% of much longer runs, and have 4%
here, as ours.
"""
import argparse
import ast
import ctypes
import hashlib
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.nn import functional as F


class Recipe(NamedTuple):
    """A PyTorch model and how it is trained.

    dev/peers.py reads n_params, learning_rate and dtype, and calls train and evaluate. LlmC has the same five.
    """
    model: object
    loss: Callable  # (inputs, targets) -> mean loss
    update: Callable  # called with the number of finished updates: sets the rates and makes one update
    learning_rate: float  # that of the matrices in blocks
    dtype: str
    gradient_scale: float = 1.0  # of the mean loss, for peers that sum over tokens

    @property
    def n_params(self):
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train(self, iteration, x, y):
        """Make one update with a batch, arrays (B, T); returns the mean loss before it."""
        loss = self.loss(torch.from_numpy(x), torch.from_numpy(y))
        (loss * self.gradient_scale).backward()
        self.update(iteration)
        return loss.item()

    @torch.no_grad()
    def evaluate(self, x, y):
        """The mean loss of a batch, without dropout."""
        self.model.eval()
        loss = self.loss(torch.from_numpy(x), torch.from_numpy(y)).item()
        self.model.train()
        return loss


def nanogpt(folder, shape, factor):
    """Settings of train.py and config/train_shakespeare_char.py. On a CPU, train.py computes in float32."""
    module = run_statements(os.path.join(folder, 'model.py'), list)
    model = module['GPT'](module['GPTConfig'](
        block_size=shape.block_size, vocab_size=shape.vocab_size, n_layer=shape.layers, n_head=shape.heads,
        n_embd=shape.width, dropout=0.0, bias=False))
    rate = 1e-3 * factor
    optimizer = model.configure_optimizers(0.1, rate, (0.9, 0.99), 'cpu')
    schedule = run_statements(
        os.path.join(folder, 'train.py'), named('get_lr'), math=math, learning_rate=rate,
        warmup_iters=shape.warmup, lr_decay_iters=shape.iters, min_lr=rate / 10)
    compiled = torch.compile(model)
    return Recipe(model, lambda x, y: compiled(x, y)[1], clipped_update(model, optimizer, schedule['get_lr']),
                  rate, 'float32')


def nanochat(folder, shape, factor):
    """Defaults of scripts/base_train.py, head width and windows of runs/runcpu.sh.

    Its rule for batches divides the rates by 11 at 4,096 tokens. The factor is relative to those without it.
    """
    os.environ.setdefault('NANOCHAT_DTYPE', 'bfloat16')
    sys.path.insert(1, folder)
    from nanochat.gpt import GPT, GPTConfig

    def build(layers, width):
        heads = width // (shape.width // shape.heads)
        return GPT(GPTConfig(sequence_len=shape.block_size, vocab_size=shape.vocab_size, n_layer=layers,
                             n_head=heads, n_kv_head=heads, n_embd=width, window_pattern='L'))

    def n_scaling_params(model):
        counts = model.num_scaling_params()
        return counts['transformer_matrices'] + counts['lm_head']

    def is_setting_or_schedule(node):
        return (getattr(node, 'name', '') in ('get_lr_multiplier', 'get_muon_momentum', 'get_weight_decay')
                or ast.unparse(node).startswith(('parser =', 'parser.add_argument(')))

    script = run_statements(
        os.path.join(folder, 'scripts', 'base_train.py'), lambda nodes: list(filter(is_setting_or_schedule, nodes)),
        argparse=argparse, math=math, num_iterations=shape.iters)
    settings = script['args'] = script['parser'].parse_args([])
    model = build(shape.layers, shape.width)
    model.init_weights()
    with torch.device('meta'):  # 12 layers are what its rates were tuned for
        reference = build(12, 12 * settings.aspect_ratio)
    script['weight_decay_scaled'] = settings.weight_decay * math.sqrt(shape.tokens / 2 ** 19) * (
        n_scaling_params(reference) / n_scaling_params(model))
    optimizer = model.setup_optimizer(**{
        f'{name}_lr': factor * getattr(settings, f'{name}_lr')
        for name in ('unembedding', 'embedding', 'scalar', 'matrix')}, weight_decay=script['weight_decay_scaled'])

    def update(iteration):
        for group in optimizer.param_groups:
            group['lr'] = group['initial_lr'] * script['get_lr_multiplier'](iteration)
            if group['kind'] == 'muon':
                group['momentum'] = script['get_muon_momentum'](iteration)
                group['weight_decay'] = script['get_weight_decay'](iteration)
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return Recipe(model, torch.compile(model, dynamic=False), update, factor * settings.matrix_lr,
                  os.environ['NANOCHAT_DTYPE'])


def modded(folder, shape, factor):
    """The definitions, and those statements of its loop over trials that initialise and set up optimizers."""
    script = os.path.join(folder, 'records', 'track_3_optimization', 'train_gpt_simple.py')
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    names = run_statements(script, definitions)
    names['CausalSelfAttention'].__init__.__defaults__ = (shape.width // shape.heads,)  # instead of 128
    model = names['GPT'](shape.vocab_size, shape.layers, shape.width)
    model.compile(dynamic=False)

    def trial_setup(nodes):
        loop = next(node for node in nodes if isinstance(node, ast.For))
        end = 1 + loop.body.index(*named('set_hparams')(loop.body))
        return [node for node in loop.body[:end] if not ast.unparse(node).startswith('train_steps =')]

    run_statements(script, trial_setup, model=model, train_steps=shape.iters)
    for optimizer in names['optimizers']:
        for group in optimizer.param_groups:
            group['initial_lr'] *= factor

    def update(iteration):
        names['set_hparams'](iteration)
        for optimizer in names['optimizers']:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    rate = names['optimizer2'].param_groups[0]['initial_lr']
    return Recipe(model, lambda x, y: model(x, y) / y.numel(), update, rate, 'bfloat16', shape.tokens)


def litgpt(folder, shape, factor):
    """The model and settings of config_hub/pretrain/tinystories.yaml, the functions of litgpt/pretrain.py."""
    sys.path.append(folder)
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.pretrain import chunked_cross_entropy, get_lr, initialize_weights
    model = GPT(Config(
        name='stories', block_size=shape.block_size, padded_vocab_size=shape.vocab_size, n_layer=shape.layers,
        n_head=shape.heads, n_embd=shape.width, intermediate_size=shape.width * 8 // 3, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name='RMSNorm', mlp_class_name='LLaMAMLP'))
    initialize_weights(SimpleNamespace(strategy=None), model, shape.layers, shape.width)
    model.transformer.wte.weight = model.lm_head.weight
    rate = 5e-4 * factor
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    compiled = torch.compile(model)

    def loss(x, y):
        with torch.autocast('cpu', torch.bfloat16):
            logits = compiled(x)
        return chunked_cross_entropy(logits.float(), y)

    update = clipped_update(model, optimizer, lambda i: get_lr(rate, i, shape.warmup, shape.iters, 0.0))
    return Recipe(model, loss, update, rate, 'bfloat16')


def transformers(folder, shape, factor):
    """GPT-2 with Trainer's optimizer and schedule, and the settings of codeparrot-small, which is such a model."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.block_size, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0))
    rate = 5e-4 * factor
    with tempfile.TemporaryDirectory() as out_dir:
        trainer = Trainer(model, TrainingArguments(
            out_dir, learning_rate=rate, weight_decay=0.1, lr_scheduler_type='cosine', warmup_steps=shape.warmup,
            max_steps=shape.iters, use_cpu=True, report_to='none'))
    trainer.create_optimizer_and_scheduler(shape.iters)
    compiled = torch.compile(model)

    def loss(x, y):
        with torch.autocast('cpu', torch.bfloat16):
            logits = compiled(input_ids=x).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def update(iteration):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad(set_to_none=True)

    return Recipe(model, loss, update, rate, 'bfloat16')


# The functions that Python calls. They call those of train_gpt2.c as its main() does, which TESTING leaves out.
LLMC_CALLS = r"""
#define TESTING
#include "train_gpt2.c"

static GPT2 model;

int build(const char* checkpoint) {
    gpt2_build_from_checkpoint(&model, checkpoint);
    return model.num_parameters;
}

float loss(int* inputs, int* targets, int B, int T) {
    gpt2_forward(&model, inputs, targets, B, T);
    return model.mean_loss;
}

void update(float learning_rate, int t) {
    gpt2_zero_grad(&model);
    gpt2_backward(&model);
    gpt2_update(&model, learning_rate, 0.9f, 0.999f, 1e-8f, 0.0f, t);
}
"""
# llm.c's Makefile has all but the last two.
LLMC_FLAGS = '-Ofast -march=native -fopenmp -DOMP -Wno-unused-result -Wno-ignored-pragmas -shared -fPIC'.split()


class LlmC:
    """llm.c's program for CPUs, train_gpt2.c, with the settings that its main() passes to gpt2_update.

    main() finetunes GPT-2, at a constant rate, without weight decay and clipping. The settings of
    scripts/run_gpt2_124M.sh, which trains from scratch, are for the CUDA program, whose schedule and clipping
    train_gpt2.c does not have.
    """
    dtype = 'float32'

    def __init__(self, folder, shape, factor):
        self.learning_rate = 1e-4 * factor
        self.program = ctypes.CDLL(compiled_llmc(folder))
        self.program.loss.restype = ctypes.c_float
        self.program.update.argtypes = ctypes.c_float, ctypes.c_int
        with tempfile.TemporaryDirectory() as checkpoint_dir:
            path = os.path.join(checkpoint_dir, 'model.bin')
            write_llmc_checkpoint(folder, shape, path)
            self.n_params = self.program.build(path.encode())

    def train(self, iteration, x, y):
        loss = self.evaluate(x, y)
        self.program.update(self.learning_rate, iteration + 1)
        return loss

    def evaluate(self, x, y):
        x, y = x.astype(np.int32), y.astype(np.int32)
        return self.program.loss(x.ctypes, y.ctypes, *x.shape)


def compiled_llmc(folder):
    """The path of llm.c's CPU program as a library, which is compiled unless torch.compile's cache has it."""
    compiler = os.environ.get('CC', 'cc')
    with open(os.path.join(folder, 'train_gpt2.c'), 'rb') as file:
        key = hashlib.sha256(file.read() + f'{compiler} {LLMC_FLAGS} {LLMC_CALLS}'.encode()).hexdigest()
    path = os.path.join(cache_dir(), f'llmc-{key}.so')
    if not os.path.exists(path):
        # Other processes may compile the program at the same time.
        with tempfile.TemporaryDirectory(dir=cache_dir()) as build_dir:
            built = os.path.join(build_dir, 'llmc.so')
            subprocess.run([compiler, *LLMC_FLAGS, f'-I{folder}', '-x', 'c', '-', '-o', built, '-lm', '-lgomp'],
                           input=LLMC_CALLS, text=True, check=True)
            os.replace(built, path)
    return path


def write_llmc_checkpoint(folder, shape, path):
    """Write the weights that llm.c's train_gpt2.py begins with, for the C program; returns the PyTorch model."""
    names = run_statements(os.path.join(folder, 'train_gpt2.py'), definitions)
    # The function of train_gpt2.py refuses other vocabularies than GPT-2's.
    names['pad_vocab'] = lambda weight: F.pad(weight, (0, 0, 0, -len(weight) % 128))
    model = names['GPT'](names['GPTConfig'](block_size=shape.block_size, vocab_size=shape.vocab_size,
                                            n_layer=shape.layers, n_head=shape.heads, n_embd=shape.width))
    model.init_rng.manual_seed(shape.seed)  # instead of 42
    model.apply(model._init_weights)
    names['write_model'](model, path, 'float32')
    return model


class Peer(NamedTuple):
    build: Callable
    file: str = ''  # that its checkout has
    source: str = ''


PEERS = dict(
    nanogpt=Peer(nanogpt, 'train.py', 'a checkout of https://github.com/karpathy/nanoGPT'),
    transformers=Peer(transformers),
    llmc=Peer(LlmC, 'train_gpt2.c', 'a checkout of https://github.com/karpathy/llm.c'),
    litgpt=Peer(litgpt, 'litgpt/pretrain.py', 'a folder written by pip install --target=FOLDER litgpt'),
    modded=Peer(modded, 'records/track_3_optimization/train_gpt_simple.py',
                'a checkout of https://github.com/KellerJordan/modded-nanogpt'),
    nanochat=Peer(nanochat, 'scripts/base_train.py', 'a checkout of https://github.com/karpathy/nanochat'),
)


def run_statements(path, select, **names):
    """Execute those of a script's statements that select(statements) returns, in a module that has `names`.

    Returns the names in the module, which is the same one for each call with the path.
    """
    module = sys.modules.setdefault(f'peer {path}', ModuleType(f'peer {path}'))
    vars(module).update(names)
    with open(path, encoding='utf-8') as file:
        tree = ast.parse(file.read())
    tree.body = select(tree.body)
    exec(compile(tree, path, 'exec'), vars(module))
    return vars(module)


def definitions(statements):
    """A selection for `run_statements`: imports, classes and functions."""
    kinds = ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef
    return [node for node in statements if isinstance(node, kinds)]


def named(*names):
    """A selection for `run_statements`: the functions with these names."""
    return lambda statements: [node for node in statements if getattr(node, 'name', '') in names]


def clipped_update(model, optimizer, schedule):
    """An update as nanoGPT and litgpt make it, with gradients clipped to a norm of 1."""

    def update(iteration):
        for group in optimizer.param_groups:
            group['lr'] = schedule(iteration)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return update
