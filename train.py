"""Train a GPT: on a CPU, on one GPU, or on many with torchrun.

    python train.py config/quickstart.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

On two nodes, the first of them at 10.0.0.1:

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234 train.py config/train_gpt2.py
"""
import ctypes
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np

os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')  # less memory is lost between blocks; read by torch
if sys.platform == 'linux':  # glibc gives large blocks back at once, and each new one is zeroed page by page: half of a CPU's time
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(option, 2 ** 31 - 1)
import torch
from torch.profiler import record_function

from kilogpt import checkpoint
from kilogpt import metrics
from kilogpt.weights import pad_rows, read_weights
from kilogpt.configurator import configure, exit_on_error
from data.loader import Prefetcher, TokenLoader, read_meta
from model import GPT, GPTConfig
from kilogpt.optim import Muon, build_adamw, scheduled_lr
from kilogpt.parallel import Parallel, compile_failure, fill, resolve_dtype
from kilogpt.health import Watchdog

# ---------------------------------------------------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText, as nanoGPT's do.
# I/O
out_dir = 'out'  # checkpoints, metrics.jsonl and config.json go here
eval_interval = 2000  # evaluate (and save) every so many iterations
log_interval = 1  # log every so many iterations
eval_iters = 200  # an evaluation takes eval_iters * batch_size sequences of either split, the same each time; 0 = none
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # save after each evaluation; False = only where the validation loss improved, and at the end
save_interval = 0  # also save every so many iterations; 0 = only with evaluation
save_minutes = 0.0  # also save every so many minutes; 0 = only with evaluation
keep_checkpoints = 2  # complete checkpoints kept besides the best; 0 with eval_iters=0 saves none
async_checkpoint = True  # write checkpoints while training goes on, from a copy in host memory
init_from = 'scratch'  # 'scratch', 'resume', 'auto' (resume if there is a checkpoint), 'gpt2*', or weights: a folder, a ckpt.pt
# wandb logging
wandb_log = False  # log to Weights & Biases too (WANDB_MODE=offline works)
wandb_project = 'owt'  # its project
wandb_run_name = 'gpt2'  # its run name
# data
dataset = 'openwebtext'  # a folder in data/, or any path
gradient_accumulation_steps = 5 * 8  # batch_size * gradient_accumulation_steps sequences make an iteration, over all processes
batch_size = 12  # sequences in a micro-batch
block_size = 1024  # tokens in a sequence
# model
n_layer = 12  # blocks
n_head = 12  # attention heads
n_kv_head = 0  # key/value heads (grouped-query attention); 0 = n_head
n_embd = 768  # width
dropout = 0.0  # for pretraining 0 is good, for finetuning try 0.1
bias = False  # biases in linears and LayerNorms
pos = 'learned'  # positions: 'learned' or 'rope'
norm = 'layernorm'  # 'layernorm' or 'rmsnorm'
mlp = 'gelu'  # 'gelu', 'gelu_tanh' (GPT-2's own), 'relu2' or 'swiglu'
qk_norm = False  # normalise queries and keys per head
tie_weights = True  # the output head shares the token embedding
softcap = 0.0  # tanh cap on the logits; 0 = none
zero_init = False  # projections into the residual stream start at zero: each block as the identity
# optimizer
optimizer = 'adamw'  # or 'muon': the blocks' matrices by Muon, the rest by AdamW, of the same learning rate
learning_rate = 6e-4  # the peak
max_iters = 600000  # updates in all
weight_decay = 1e-1  # on matrices
beta1 = 0.9  # AdamW's
beta2 = 0.95  # AdamW's
grad_clip = 1.0  # clip the gradient to this norm; 0 = do not
on_nonfinite = 'abort'  # what a NaN or infinite gradient does, before the update: 'abort' or 'skip' (up to 10 in a row)
# learning rate schedule
decay_lr = True  # False = constant
lr_schedule = 'cosine'  # 'cosine', 'linear' or 'wsd' (warm-up, stable, decay over the last fifth)
warmup_iters = 2000  # iterations of linear warm-up
lr_decay_iters = 600000  # the iteration at which min_lr is reached; about max_iters
min_lr = 6e-5  # about learning_rate / 10
# layout: pp × dp_replicate × dp_shard × cp × tp processes; data parallel (DDP or FSDP2) takes what tp, cp and pp leave
zero_stage = 0  # 0 = DDP; 1 = DDP, sharded optimizer; 2 = FSDP2, parameters kept after forward; 3 = FSDP2, parameters freed
dp_replicate = 1  # with zero_stage 2 or 3: groups of processes that hold a replica each (HSDP)
tp = 1  # tensor (and sequence) parallel degree
cp = 1  # context parallel degree: processes that share each sequence
pp = 1  # pipeline parallel degree
pp_schedule = '1f1b'  # 'gpipe', '1f1b', 'interleaved1f1b', 'interleavedzb', 'zbv' or 'dualpipev'
activation_checkpoint = 'none'  # recompute in the backward pass: 'selective' (all but matmuls and attention) or 'full'
cpu_offload = False  # parameters, gradients and optimizer state live in host memory (zero_stage 2 or 3)
grad_compress = 'none'  # DDP's all-reduce in 'bf16', or of low rank by 'powersgd'
comm_timeout = 600  # seconds without progress after which the run ends and the process that hung is named
# system
backend = 'auto'  # 'nccl' or 'gloo'; 'auto' follows the device
device = 'auto'  # 'cpu', 'cuda', 'cuda:1', 'mps'; 'auto' takes what is there
dtype = 'auto'  # 'float32', 'bfloat16' or 'float16' (with a gradient scaler); 'auto' follows the device, bfloat16 where it is fast
fp8 = False  # the blocks' matrix products in float8, by torchao (pip install torchao); for H100 and newer
compile = True  # torch.compile; falls back to eager where there is no compiler
seed = 1337  # of weights, data order and dropout
profile = False  # trace a few settled iterations into out_dir/trace.json and print where their time went
# ---------------------------------------------------------------------------------------------------------------------
config = configure(globals())

WRITING = 1800  # seconds that storage may take for a checkpoint until a process counts as hung
SMALL_DATASETS = ('shakespeare_char', 'shakespeare')  # prepared on the spot when missing
here = os.path.dirname(os.path.abspath(__file__))
data_dir = os.path.join(here, 'data', dataset)

# A signal asks for a checkpoint and a clean exit at the next micro-step; one more, 5 seconds later or after, exits at once.
# Before that it is the same request come twice: Slurm signals every process, and torchrun passes its signal on to ours.
stop_signal, stop_time = None, 0.0
def request_stop(number, frame):
    global stop_signal, stop_time
    if stop_signal is None:
        stop_signal, stop_time = number, time.monotonic()
    elif time.monotonic() - stop_time > 5:
        os._exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # the last is what Slurm's --signal=USR1@120 sends before the end
    signal.signal(number, request_stop)

with exit_on_error():
    for key in ('eval_interval', 'log_interval', 'batch_size', 'gradient_accumulation_steps', 'block_size', 'max_iters'):
        if config[key] < 1:
            raise ValueError(f'{key} is {config[key]}: it must be at least 1')
    for key in ('eval_iters', 'save_interval', 'save_minutes', 'keep_checkpoints', 'warmup_iters', 'seed'):
        if config[key] < 0:
            raise ValueError(f'{key} is {config[key]}: it cannot be negative')
    if lr_schedule not in ('cosine', 'linear', 'wsd'):
        raise ValueError(f'lr_schedule is {lr_schedule!r}: choose one of cosine, linear, wsd')
    if optimizer not in ('adamw', 'muon'):
        raise ValueError(f'optimizer is {optimizer!r}: choose adamw or muon')
    if on_nonfinite not in ('abort', 'skip'):
        raise ValueError(f'on_nonfinite is {on_nonfinite!r}: choose abort or skip')
    par = Parallel(device, backend, comm_timeout, zero_stage, dp_replicate, tp, cp, pp, pp_schedule)
    dtype = resolve_dtype(dtype, par.device)

def say(text):
    if par.is_main:
        print(text, flush=True)

# data: prepared by one process (of each node, should nodes share no files) while the others wait
for preparer in (par.is_main, par.local_rank == 0):
    if preparer and dataset in SMALL_DATASETS and not os.path.exists(os.path.join(data_dir, 'val.bin')):
        print(f'{dataset} is not there yet: running data/{dataset}/prepare.py', flush=True)
        if subprocess.run([sys.executable, os.path.join(data_dir, 'prepare.py')]).returncode:
            sys.exit(f'error: dataset {dataset!r} could not be prepared')
    par.barrier()
with exit_on_error():
    if not os.path.isdir(data_dir) or not any(name.endswith('.bin') for name in os.listdir(data_dir)):
        script = os.path.join('data', dataset, 'prepare.py')
        raise ValueError(f'dataset {dataset!r} has no data in {data_dir}: ' + (
            f'run python {script}' if os.path.exists(os.path.join(here, script)) else
            f'make it from text with python data/text/prepare.py --input=FILES --out={dataset}'))
    meta = read_meta(data_dir)

# model: from scratch, from this run's own checkpoint, or from weights that were trained elsewhere
torch.set_float32_matmul_precision('high')  # TF32 on GPUs that have it
with exit_on_error():
    lock = checkpoint.lock_folder(out_dir) if par.is_main and not eval_only and os.path.isdir(out_dir) else None
par.barrier()
source, weights, saved = None, None, {}  # a checkpoint to load, tensors to copy, the state of the run to resume
if init_from in ('resume', 'auto'):
    for path in checkpoint.find(out_dir):
        problem = checkpoint.damage(path, par.rank, par.world_size)
        if problem:
            print(f'{path} is damaged ({problem}): going back to the one before it', flush=True)
        if not par.any(problem):
            source, saved = path, checkpoint.read_state(path)
            break
    if source is None and init_from == 'resume':
        sys.exit(f'error: there is no checkpoint to resume in {out_dir}/ckpt: set --out_dir, or --init_from=scratch')
with exit_on_error():
    model_args = {field.name: config[field.name] for field in dataclasses.fields(GPTConfig) if field.name in config}
    model_args['vocab_size'] = meta['vocab_size']
    if saved:
        model_args = saved['model'] | dict(dropout=dropout)
        if saved['config'].get('optimizer', optimizer) != optimizer:
            raise ValueError(f'optimizer is {optimizer!r}, but {source} holds the state of {saved["config"]["optimizer"]!r}: set that, or '
                             f'begin anew from its weights with --init_from={out_dir} and another out_dir')
        for key, value in saved['config'].items():
            if config.get(key, value) != value and key != 'init_from':
                kept = ' (the checkpoint decides)' if model_args.get(key, config[key]) != config[key] else ''
                say(f'resuming with another {key}: {value!r} -> {config[key]!r}{kept}')
    elif init_from not in ('scratch', 'auto'):
        source = checkpoint.find_best(init_from)  # a run's folder
        if source:
            problem = checkpoint.damage(source, par.rank, par.world_size)
            if problem:
                raise ValueError(f'{source} is damaged ({problem}): delete it, and the next best is taken')
            model_args = checkpoint.read_state(source)['model'] | dict(dropout=dropout)
        else:
            model_args, weights, _ = read_weights(init_from)
            model_args['dropout'] = dropout
    if block_size > model_args['block_size']:
        raise ValueError(f'block_size is {block_size}, but the model of {source or init_from} was made for '
                         f'{model_args["block_size"]} positions: set --block_size={model_args["block_size"]} or less')
    train_loader, val_loader = (TokenLoader(data_dir, split, block_size, model_args['vocab_size'], meta, seed)
                                for split in ('train', 'val'))
    # built as shapes alone; each process then makes its own part
    with torch.device('meta'):
        model = GPT(GPTConfig(**model_args), seed=None)
    n_parameters, flops_per_token = model.num_params(), model.flops_per_token(block_size)
    global_batch = batch_size * gradient_accumulation_steps
    tokens_per_iter = global_batch * block_size
    micro_batch, micro_steps = par.split_batch(global_batch, batch_size)
    if compile:
        failure = compile_failure(par.device)
        if par.any(failure):
            say(f'torch.compile does not work here ({failure}): going on without it; --compile=False says so from the start')
            compile = False
    par.lay_out(model, global_tokens=tokens_per_iter, micro_batch=micro_batch, micro_steps=micro_steps, block_size=block_size,
                dtype=dtype, compile=compile, activation_checkpoint=activation_checkpoint, cpu_offload=cpu_offload,
                grad_compress=grad_compress, fp8=fp8)
    settings = par.optimizer_parameters(), learning_rate, weight_decay, (beta1, beta2)
    optimizer = build_adamw(*settings) if optimizer == 'adamw' else Muon(
        *settings, blocks=model.split_plan['blocks'], on_whole=par.on_whole, dtype=getattr(torch, 'float32' if dtype == 'float16' else dtype))
    par.attach(optimizer)
    if source:
        checkpoint.load(source, par.named_parameters(), optimizer if saved else None)
    else:
        fill(par.named_parameters(),
             (lambda name, shape: pad_rows(weights[name], shape)) if weights else lambda name, shape: model.initial_value(name, shape, seed))
scaler = torch.amp.GradScaler(par.device.type, enabled=dtype == 'float16')
if saved:
    scaler.load_state_dict(saved['scaler'])
iteration, best_val_loss = saved.get('iteration', 0), saved.get('best_val_loss')
skipped, skipped_in_a_row = saved.get('skipped', [0, 0])  # updates, for a gradient that was not finite
saver = checkpoint.Saver(out_dir, keep_checkpoints)

# batches: each process takes its rows of the global batch, and its positions of them; the next are prepared while the device
# works. A pipeline takes all micro-batches of an iteration at once.
rows_per_step, steps = (micro_batch * micro_steps, 1) if pp > 1 else (micro_batch, micro_steps)
positions = par.my_positions(block_size)

def fetch(batches, step):
    with exit_on_error():  # a token beyond the vocabulary, found as it is read
        x, y = batches(step)
    return x.to(par.device, non_blocking=True), y.to(par.device, non_blocking=True)

def prepare(loader, starts):
    x, y = (tokens[:, positions] for tokens in loader.batch(starts))
    if par.device.type == 'cuda':
        torch.cuda.set_device(par.device)  # of this thread: else pinning opens a context on GPU 0
        x, y = x.pin_memory(), y.pin_memory()
    return x, y

def prepare_train(step):
    step_iteration, micro_step = divmod(step, steps)
    rows = par.my_rows(global_batch, rows_per_step, micro_step)
    return prepare(train_loader, train_loader.train_starts(np.where(rows < 0, -1, step_iteration * global_batch + rows)))

train_batches = Prefetcher(prepare_train)
watchdog = Watchdog(par.rank, par.world_size, os.path.join(out_dir, 'hang'))

if compile:
    say('compiling the model (up to a minute or so) ...')
if compile or par.world_size > 1:  # thrown away: here it compiles, and DDP orders its buckets, so that a resumed run sums alike
    par.forward_backward(*fetch(train_batches, iteration * steps))
    par.zero_grad()

def stop_asked():
    """The number of a signal that has reached any of the processes, the same on all of them; 0 for none."""
    watchdog.beat()
    return int(par.max(stop_signal or 0))

@torch.no_grad()
def evaluate():
    """Mean loss over the fixed evaluation sequences of each split, shared by the processes; None if a stop is asked for."""
    means = {}
    par.train(False)
    for split, loader in (('train', train_loader), ('val', val_loader)):
        starts = loader.eval_starts(eval_iters * batch_size)
        def prepare_eval(step):
            rows = par.my_rows(len(starts), rows_per_step, step)
            return prepare(loader, np.where(rows < 0, -1, starts[rows]))
        batches = Prefetcher(prepare_eval)
        loss_sum = torch.zeros((), device=par.device)
        for step in range(-(-len(starts) // (rows_per_step * par.dp))):
            if stop_asked():
                par.train(True)
                return None
            loss_sum += par.evaluate(*fetch(batches, step))
        means[split] = par.sum_losses(loss_sum) / (len(starts) * block_size)
    par.train(True)
    return means

# what the run will be
held, moments = par.bytes_held(optimizer)
say(f'''{par.world_size} process(es) on {par.device}, {dtype}, {n_parameters:,} parameters, \
{train_loader.n_tokens:,} training tokens in {os.path.relpath(data_dir)}
  layout      {par.describe()}
  on a rank   parameters {par.max(held) / 1e6:,.1f} MB, optimizer {par.max(moments) / 1e6:,.1f} MB
  batch       tokens per iteration: {tokens_per_iter:,} = {global_batch} sequences of {block_size}; micro-batch {micro_batch}, \
{micro_steps} micro-step(s) a process''')
for note in par.notes:
    say(f'  note        {note}')
if saved:
    say(f'resuming {source} at iteration {iteration}')
with exit_on_error():
    if par.is_main:
        os.makedirs(out_dir, exist_ok=True)
    if par.is_main and not eval_only:
        lock = lock or checkpoint.lock_folder(out_dir)
        earlier = None if saved else checkpoint.set_aside(out_dir)
        if earlier:
            say(f'{out_dir} held an earlier run: moved to {earlier}')
        with open(os.path.join(out_dir, 'config.json'), 'w', encoding='utf-8') as file:
            json.dump(config, file, indent=1)
    wandb = dict(project=wandb_project, name=wandb_run_name, config=config, id=saved.get('wandb_id')) if wandb_log else None
    log = metrics.Metrics(out_dir, par.is_main, wandb)
peak = metrics.peak_flops(par.device, dtype)
flops_per_iter = flops_per_token * tokens_per_iter

profiler = metrics.Profiler(out_dir) if profile and par.is_main else None
unchecked = None  # of the last update, until it is known to have been made

def check_update():
    """See whether the last update was made, and what to do if not. All processes decide alike: the norm is of all gradients everywhere."""
    global unchecked, iteration, skipped, skipped_in_a_row, failure
    if unchecked is None:
        return
    (its_iteration, its_lr, its_losses, its_norm), unchecked = unchecked, None
    # float16's gradients may overflow, which its scaler mends
    decisive = par.sum_losses(its_losses) if scaler.is_enabled() else its_norm.item()
    if math.isfinite(decisive):
        skipped_in_a_row = 0
        return
    what = f'{"loss" if scaler.is_enabled() else "gradient norm"} of iteration {its_iteration + 1} is {decisive}'
    where = log.dump(f'nonfinite_{its_iteration + 1:08d}.json', dict(
        iteration=its_iteration + 1, what=what, lr=its_lr, losses=par.gather(its_losses.item()), block_size=block_size,
        sequences=train_loader.where(train_loader.train_starts(its_iteration * global_batch + np.arange(global_batch)))))
    if on_nonfinite == 'skip' and skipped_in_a_row < 9:
        skipped, skipped_in_a_row = skipped + 1, skipped_in_a_row + 1
        say(f'the {what}: update skipped ({skipped} so far), its batch is in {where}')
        return
    iteration = its_iteration  # it is met again by a run that goes on from here
    failure = (f'the {what}{f", after {skipped_in_a_row} that were skipped" * (skipped_in_a_row > 0)}: the update was not made, '
               f'its batch is in {where}; try a lower learning_rate, or --on_nonfinite=skip if it is the data')

saved_iteration, saved_time, stop, failure = iteration, time.monotonic(), 0, None
timed_from, clock = iteration, time.perf_counter()
par.waits.clear()  # for what compiled
while True:
    # evaluate, and save
    eval_due = (eval_only or iteration % eval_interval == 0 or iteration == max_iters) and not (stop or failure)
    save_due = save_interval and iteration % save_interval == 0 or \
        save_minutes and par.any(par.is_main and time.monotonic() - saved_time >= 60 * save_minutes)
    if eval_due or save_due:
        metrics.synchronize(par.device)  # what is still under way is training time
        check_update()
        eval_due = eval_due and not failure
    pause, waits = time.perf_counter(), len(par.waits)
    if profiler:
        profiler.step()
    losses, val_loss, improved = evaluate() if eval_due and eval_iters else None, None, False
    if losses:
        val_loss = losses['val']
        improved = val_loss < (float('inf') if best_val_loss is None else best_val_loss)  # NaN is no improvement
        best_val_loss = val_loss if improved else best_val_loss
        log.eval(dict(iter=iteration, train_loss=losses['train'], val_loss=val_loss))
    stop = stop or stop_asked()
    if stop:
        check_update()
    if eval_only:
        break
    ending = stop or failure or iteration >= max_iters
    watchdog.beat(pause=WRITING)
    if ending:
        saver.wait()
        saved_iteration = -1 if saver.problem else saved_iteration  # once more
    if iteration > saved_iteration and (ending or save_due or (eval_due and (always_save_checkpoint or improved))):
        if keep_checkpoints or eval_iters:
            state = dict(iteration=iteration, tokens=iteration * tokens_per_iter, val_loss=val_loss,
                         best_val_loss=best_val_loss, skipped=[skipped, skipped_in_a_row], wandb_id=log.wandb_id,
                         scaler=scaler.state_dict(), model=dataclasses.asdict(model.config), tokenizer=meta, config=config)
            stall = time.perf_counter()
            path = saver.save(iteration, par.named_parameters(), optimizer, state, background=async_checkpoint and not ending)
            log.checkpoint(dict(iter=iteration, ckpt_stall_ms=1000 * (time.perf_counter() - stall)), path)
        saved_iteration, saved_time = iteration, time.monotonic()
    watchdog.beat()
    if ending:
        break
    clock += time.perf_counter() - pause
    del par.waits[waits:]

    # one update
    torch.manual_seed(int(np.random.SeedSequence([seed, iteration, par.rank]).generate_state(1)[0]))  # dropout
    lr = scheduled_lr(iteration, lr_schedule, learning_rate, min_lr, warmup_iters, lr_decay_iters) if decay_lr else learning_rate
    for group in optimizer.param_groups:
        group['lr'] = lr
    loss_sum = torch.zeros((), device=par.device)
    for step in range(steps):
        stop = stop_asked() if step else 0
        if stop:
            break
        with record_function('data'):
            x, y = fetch(train_batches, iteration * steps + step)
        loss_sum += par.forward_backward(x, y, last=step == steps - 1, scale=scaler.scale)
    if stop:
        continue  # to the save above; this iteration is for the run that goes on
    check_update()  # of the iteration before: the device has long been past it
    if failure:
        continue  # to the save above
    with record_function('optimizer'):
        scaler.unscale_(optimizer)
        grad_norm = par.clip_gradients(grad_clip)
        if not scaler.is_enabled():  # as a scaler does: the device itself leaves the update out, and the host need not wait for it
            optimizer.found_inf = (~grad_norm.isfinite()).float()
        scaler.step(optimizer)
        scaler.update()
        par.zero_grad()
    unchecked = iteration, lr, loss_sum, grad_norm
    iteration += 1
    watchdog.limit = comm_timeout  # what compiles has done so
    if async_checkpoint and (keep_checkpoints or eval_iters):
        saver.allocate(par.named_parameters(), optimizer)

    if iteration % log_interval == 0:
        metrics.synchronize(par.device)
        check_update()
        if failure:
            continue
        iterations = iteration - timed_from
        seconds = (time.perf_counter() - clock) / iterations
        timed_from, clock = iteration, time.perf_counter()
        loss_mean = par.sum_losses(loss_sum) / tokens_per_iter
        lag = {}
        if par.world_size > 1:
            slowest, waited = par.slowest()
            lag = dict(slowest_rank=slowest, lag_ms=1000 * waited / iterations)
        log.train(dict(iter=iteration, loss=loss_mean, grad_norm=grad_norm.item(), lr=lr, dt_ms=1000 * seconds,
                       tokens_per_sec=tokens_per_iter / seconds,
                       mfu=flops_per_iter / seconds / (peak * par.world_size) if peak else None,
                       mem_gb=metrics.peak_memory_gb(par.device), tokens=iteration * tokens_per_iter, **lag),
                  (max_iters - iteration) * seconds)

if profiler:
    profiler.close()
log.close()
if saver.problem and not failure:
    failure = f'the run ended at iteration {iteration}, but its last checkpoint could not be saved ({saver.problem})'
if stop and not failure:
    say(f'stopped by {signal.Signals(stop).name} at iteration {iteration}'
        f'{"; --init_from=resume goes on from here" if iteration else ""}')
if failure and par.is_main:
    print(f'error: {failure}', file=sys.stderr, flush=True)
par.leave(1 if failure else 143 if stop else 0)
