r"""Train a GPT: on a CPU, on one GPU, or on many with torchrun.

    python train.py config/quickstart.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

On two nodes, the first of which is 10.0.0.1, the same command on each:

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234 \
        train.py config/train_gpt2.py
"""
import dataclasses
import json
import os
import signal
import sys
import time
from functools import partial

_started = time.perf_counter()
# Less fragmentation of GPU memory; must be set before torch is imported.
os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')
import numpy as np
import torch
from torch.profiler import record_function

from data.loader import Batches, TokenLoader, find_dataset, prepare_small_dataset, read_meta
from kilogpt import checkpoint, metrics, profiler
from kilogpt.convert import weights
from kilogpt.devices import cpu
from kilogpt.configurator import configure, exit_on_error
from kilogpt.plan.fits import forecast
from kilogpt.signals import Agreement, Ending, StopRequest
from kilogpt.watchdog import Watchdog
from kilogpt.islands.jobs import IslandJob
from kilogpt.islands.islands import Islands, needed_checkpoint
from kilogpt.parallel.layout import Layout
from kilogpt.optim import build_optimizer, scheduled_lr
from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.dtensor import bytes_held, fill
from kilogpt.parallel.network import spans_nodes
from kilogpt.parallel.processes import Processes, make_deterministic, resolve_dtype
from kilogpt.replay import Replay
from kilogpt.settings import check_settings, compare_settings
from kilogpt.guard import NonfiniteUpdates, Spikes, Update
from model import GPT, GPTConfig

# --- configuration ------------------------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText, as nanoGPT's do.
# I/O
out_dir = 'out'  # checkpoints, metrics.jsonl and config.json go here
eval_interval = 2000  # iterations from one evaluation (and checkpoint) to the next
log_interval = 1  # iterations from one log line to the next
eval_iters = 200  # an evaluation takes eval_iters * batch_size fixed sequences of each split; 0 = none
eval_only = False  # evaluate once and exit
replay = ''  # an iteration of the run in out_dir, or 'all': compute it again and compare with the log
always_save_checkpoint = True  # save after each evaluation; False = after improvements, and at the end
save_interval = 0  # also save at multiples of this many iterations; 0 = only with evaluations
save_minutes = 0.0  # also save when the last checkpoint is this many minutes old; 0 = only with evaluations
keep_checkpoints = 2  # newest checkpoints to keep besides the best; 0 with eval_iters=0 saves none
async_checkpoint = True  # write checkpoints while training continues, from a copy in host memory
init_from = 'scratch'  # 'scratch', 'resume', 'auto' (resume if possible), 'gpt2*', or a path to weights
# wandb logging
wandb_log = False  # log to Weights & Biases too (WANDB_MODE=offline works)
wandb_project = 'owt'  # project in Weights & Biases
wandb_run_name = 'gpt2'  # run name in Weights & Biases
tensorboard = False  # write out_dir/tensorboard too (pip install tensorboard)
# data
dataset = 'openwebtext'  # a folder in data/, or any other path
gradient_accumulation_steps = 5 * 8  # micro-batches of batch_size in an iteration, over all processes
batch_size = 12  # sequences in a micro-batch
block_size = 1024  # tokens in a sequence
# model
n_layer = 12  # blocks
n_head = 12  # attention heads
n_kv_head = 0  # key/value heads (grouped-query attention); 0 = n_head
n_embd = 768  # width of the residual stream
head_width = 0  # width of a head; 0 = n_embd / n_head
dropout = 0.0  # for pretraining 0 is good, for finetuning try 0.1
bias = False  # biases in linears and LayerNorms
pos = 'learned'  # positions: 'learned' or 'rope'
norm = 'layernorm'  # 'layernorm' or 'rmsnorm'
mlp = 'gelu'  # 'gelu', 'gelu_tanh' (GPT-2's own), 'relu2', 'swiglu' or 'moe' (a mixture of experts)
qk_norm = False  # normalise queries and keys per head
tie_weights = True  # the output head shares the token embedding
softcap = 0.0  # tanh cap on the logits; 0 = none
zero_init = False  # start each block as the identity: projections into the residual stream are zero
# mixture of experts, with mlp='moe'
n_experts = 8  # experts in a block
n_active_experts = 2  # experts that a token goes to
n_shared_experts = 0  # experts that every token goes to as well
expert_hidden = 0  # width of an expert; 0 = that of a dense MLP
expert_mlp = 'swiglu'  # form of each expert, and of the MLP in blocks without: as mlp
moe_first_layer = 0  # first block with experts
moe_every = 1  # from there on, each of this many blocks has experts
router = 'softmax'  # affinity of a token and an expert: 'softmax' (Mixtral) or 'sigmoid' (DeepSeek-V3)
router_balance = 'bias'  # keeps experts equally busy: 'bias' (in the choice), 'loss' (Switch's) or 'none'
router_balance_rate = 1e-3  # step of the bias in an iteration, or weight of the loss
router_z_loss = 0.0  # weight of the z-loss, which keeps the router's logits small (about 1e-3)
# optimizer
optimizer = 'adamw'  # 'adamw', or 'muon': Muon for the blocks' matrices, AdamW for the rest
learning_rate = 6e-4  # highest learning rate of the schedule
max_iters = 600000  # iterations (updates) in all
weight_decay = 1e-1  # weight decay of matrices and embeddings; biases and norms have none
beta1 = 0.9  # decay of AdamW's mean of gradients
beta2 = 0.95  # decay of AdamW's mean of squared gradients
muon_momentum = 0.95  # decay of Muon's mean of gradients; less for runs of a few hundred iterations
grad_clip = 1.0  # clip the gradient to this norm; 0 = no clipping
on_nonfinite = 'abort'  # on a NaN or infinite gradient: 'abort', or 'skip' the update up to 9 times in a row
on_spike = 'none'  # on a far too large gradient: 'skip' the update, or also 'rollback' after 4 in a row
spike_factor = 5.0  # with on_spike: gradient norms above this many times their running median are too large
# learning rate schedule
decay_lr = True  # False = constant learning rate, without warm-up
lr_schedule = 'cosine'  # 'cosine', 'linear' or 'wsd' (warm-up, stable, decay over the last fifth)
warmup_iters = 2000  # iterations of linear warm-up
lr_decay_iters = 600000  # iteration at which min_lr is reached; about max_iters
min_lr = 6e-5  # learning rate at the end of the schedule; about learning_rate / 10
# layout: data parallelism (DDP or FSDP2) takes the processes that tp, cp and pp leave
zero_stage = 0  # 0 = DDP; 1 = DDP, optimizer sharded; 2 = FSDP2; 3 = FSDP2, parameters freed after forward
dp_replicate = 1  # with zero_stage 2 or 3: groups of processes that each hold one replica (HSDP)
tp = 1  # tensor (and sequence) parallel degree
async_tp = False  # with tp, compile and NVLink: its collectives run beside matrix products
cp = 1  # context parallel degree: processes that share each sequence
ep = 1  # expert parallel degree: processes that divide the experts, of those that dp_replicate leaves
pp = 1  # pipeline parallel degree
pp_schedule = '1f1b'  # 'gpipe', '1f1b', 'interleaved1f1b', 'interleavedzb', 'zbv' or 'dualpipev'
activation_checkpoint = 'none'  # recompute in backward: 'selective' (all but matmuls and attention), 'full'
cpu_offload = False  # keep parameters, gradients and optimizer state in host memory (zero_stage 2 or 3)
grad_compress = 'none'  # DDP's all-reduce: 'none', 'bf16' or 'powersgd' (matrices of low rank)
comm_timeout = 600  # seconds without progress until the run ends and names what hung; 3 times that at start
# islands: groups of processes that train apart and now and then exchange parameters (DiLoCo)
islands = 1  # groups; each has the layout above, and a share of each iteration's sequences
outer_interval = 0  # iterations from one exchange to the next; 0 = 100 with islands, without them none
outer_lr = 0.7  # learning rate of the outer optimizer, which takes the mean of the islands' changes
outer_momentum = 0.9  # its Nesterov momentum
outer_fragments = 1  # parts of the parameters, exchanged at different times within an interval
outer_compress = 'none'  # what islands send: 'none' (parameters), or changes in 'bf16', 'int8' or 'int4'
outer_delay = 0  # iterations for which islands train on while an exchange is under way
outer_mix = 0.0  # share of an island's own parameters in those with which it goes on after an exchange
outer_offload = False  # keep the state of the outer optimizer in host memory
outer_store = ''  # for islands that are jobs of their own: HOST:PORT of python -m kilogpt.meet
island = 0  # with outer_store: the number of this job's island
outer_timeout = 60.0  # with outer_store: seconds for which the first island waits for others at an exchange
# system
backend = 'auto'  # 'nccl' or 'gloo'; 'auto' follows the device
device = 'auto'  # 'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' = CUDA if available, then MPS, then CPU
dtype = 'auto'  # 'float32', 'bfloat16' or 'float16' (with a gradient scaler); 'auto' follows the device
fp8 = False  # the blocks' matrix products in float8, by torchao (pip install torchao); for H100 and newer
deterministic = False  # operations that repeat to the bit on GPUs too, where the faster ones do not
compile = True  # torch.compile; falls back to eager where there is no compiler
seed = 1337  # determines weights, data order and dropout
profile = False  # trace a few iterations into out_dir/trace.json and print where their time went
# ------------------------------------------------------------------------------------------------------------
config = configure(globals())

STORAGE_LIMIT = 1800  # seconds that storage may take for a checkpoint before a process counts as hung

# --- set-up: processes --------------------------------------------------------------------------------------
stop_request = StopRequest()
cpu.keep_freed_memory()
torch.set_float32_matmul_precision('high')  # TF32 on GPUs that have it

with exit_on_error():
    check_settings(config)
    if deterministic:
        make_deterministic()
    processes = Processes(device, 1 if outer_store else islands)
    layout = Layout(processes.world_size, zero_stage, dp_replicate, tp, cp, pp, pp_schedule, ep)
    processes.join(layout, backend, comm_timeout)
    outer = (IslandJob if outer_store else Islands)(processes, layout, config)
    out_dir = outer.out_dir
    watchdog = Watchdog(processes, os.path.join(out_dir, 'hang'), comm_timeout)
    parallel = Parallel(processes, layout)
    dtype = resolve_dtype(dtype, processes.device)
say = processes.say

# --- set-up: data -------------------------------------------------------------------------------------------
# The first process of all prepares while the others wait. Then the first process of each node does, since
# nodes may not share their files.
for is_preparer in (processes.is_first, processes.local_rank == 0):
    with exit_on_error():
        if is_preparer:
            prepare_small_dataset(dataset)
    processes.barrier()
with exit_on_error():
    data_dir = find_dataset(dataset)
    meta = read_meta(data_dir)
watchdog.beat()

# --- set-up: where the weights come from --------------------------------------------------------------------
is_training = not (eval_only or replay)
with exit_on_error():
    lock = None  # held until the process ends
    if processes.is_main and is_training and os.path.isdir(out_dir):
        lock = checkpoint.lock_folder(out_dir)
processes.barrier()

source, tensors, saved = None, None, {}  # a checkpoint to load, or tensors; the state of a run to resume
with exit_on_error():
    if replay:
        replay, log_interval = Replay(replay, out_dir, processes, config, dtype), 1
        source, saved = replay.start()
    elif init_from in ('resume', 'auto'):
        source, saved = outer.find_checkpoint()
    if init_from == 'resume' and not source:
        raise ValueError(f'there is no checkpoint to resume in {out_dir}/ckpt: '
                         'set --out_dir, or --init_from=scratch')
    if saved:
        compare_settings(config, saved, source, say)
        model_args = saved['model']
    elif init_from in ('scratch', 'auto'):
        model_args = {field.name: config[field.name] for field in dataclasses.fields(GPTConfig)
                      if field.name in config}
        model_args['vocab_size'] = meta['vocab_size']
    else:
        source, tensors, model_args = weights.find_initial(init_from, processes)
    model_args['dropout'] = dropout
    if block_size > model_args['block_size']:
        raise ValueError(
            f'block_size is {block_size}, but the model of {source or init_from} was made for '
            f'{model_args["block_size"]} positions: set --block_size={model_args["block_size"]} or less')
watchdog.beat()

# --- set-up: model and optimizer ----------------------------------------------------------------------------
global_batch = batch_size * gradient_accumulation_steps // islands  # sequences in an iteration of an island
tokens_per_iter = global_batch * block_size
micro_batch, micro_steps = layout.split_batch(global_batch, batch_size)

with exit_on_error():
    train_loader = TokenLoader(data_dir, 'train', block_size, model_args['vocab_size'], meta, seed)
    val_loader = TokenLoader(data_dir, 'val', block_size, model_args['vocab_size'], meta, seed)
    sizes = train_loader.n_tokens, val_loader.n_tokens
    if processes.any(sizes != processes.share(sizes)):
        raise ValueError(f'{data_dir} does not hold the same data on every node ({sizes[0]:,} training '
                         'tokens here): copy one folder to all of them')
    with torch.device('meta'):  # shapes alone: each process makes the values of its own part
        model = GPT(GPTConfig(**model_args), seed=None)
    n_parameters, n_active = model.num_params(), model.num_active_params()
    flops_per_token = model.flops_per_token(block_size)
    parallel.lay_out(model, global_tokens=tokens_per_iter, micro_batch=micro_batch, micro_steps=micro_steps,
                     block_size=block_size, dtype=dtype, compile=compile, cpu_offload=cpu_offload, fp8=fp8,
                     activation_checkpoint=activation_checkpoint, grad_compress=grad_compress,
                     async_tp=async_tp)
    optimizer = build_optimizer(
        optimizer, parallel.optimizer_parameters(), learning_rate, weight_decay, (beta1, beta2),
        muon_momentum, model.split_plan['blocks'], dtype, parallel.apply_to_whole_matrices)
    parallel.attach(optimizer)
    outer.attach(parallel, model)
    if source:
        checkpoint.load(source, outer.parameters(), optimizer if saved else None, outer.tensors(saved))
    elif tensors:
        fill(parallel.named_parameters(),
             lambda name, shape, rows: weights.pad_rows(tensors[name], shape, rows))
    else:
        fill(parallel.named_parameters(),
             lambda name, shape, rows: model.initial_value(name, shape, seed, rows))
scaler = torch.amp.GradScaler(processes.device.type, enabled=dtype == 'float16')
if saved:
    scaler.load_state_dict(saved['scaler'])
iteration, best_val_loss = saved.get('iteration', 0), saved.get('best_val_loss')
first_iteration = iteration
with exit_on_error():
    outer.begin(global_batch, iteration, saved, has_loaded=bool(source),
                training_tokens=train_loader.n_tokens)
saver = checkpoint.Saver(out_dir, keep_checkpoints, partial(needed_checkpoint, out_dir, processes.between))
saves_checkpoints = (keep_checkpoints > 0 or eval_iters > 0) and is_training
saves_in_background = async_checkpoint and not cpu_offload
watchdog.beat()

# --- set-up: batches ----------------------------------------------------------------------------------------
# A pipeline takes all micro-batches of an iteration in one step.
rows_per_step, steps = (micro_batch * micro_steps, 1) if pp > 1 else (micro_batch, micro_steps)


def batches_of(loader, starts, steps):
    return Batches(loader, starts, steps,
                   rows=lambda total, step: layout.rows(processes.rank, total, rows_per_step, step),
                   positions=layout.positions(processes.rank, block_size), device=processes.device)


def starts_of_iteration(iteration):
    """Where the sequences of an iteration begin in the stream of tokens."""
    return train_loader.train_starts(outer.sequences(iteration))


train_batches = batches_of(train_loader, starts_of_iteration, steps)

if parallel.compiles:
    say('compiling the model (up to a minute or so) ...')
if parallel.compiles or processes.world_size > 1:
    with exit_on_error():
        x, y = train_batches(iteration, 0)
    parallel.warm_up(x, y)

# --- set-up: what the run will be ---------------------------------------------------------------------------
bytes_here = bytes_held(parallel.named_parameters(), optimizer)
parameter_bytes, moment_bytes = (processes.max(count) for count in bytes_here)
of_a_token = f' ({n_active:,} active in a token)' if n_active < n_parameters else ''
say(f'{processes.world_size} process(es) on {processes.device}, {dtype}, '
    f'{n_parameters:,} parameters{of_a_token}, '
    f'{train_loader.n_tokens:,} training tokens in {os.path.relpath(data_dir)}')
say(f'  layout      {layout.describe()}')
say(f'  on a rank   parameters {parameter_bytes / 1e6:,.1f} MB, optimizer {moment_bytes / 1e6:,.1f} MB')
available = metrics.available_memory(processes.device)
if outer.is_on:
    available -= outer.optimizer.bytes_on(processes.device)
work = config | dict(dtype=dtype, gradient_accumulation_steps=-(-global_batch // batch_size))
foretold, warning = forecast(model, layout, work, processes.device.type, available)
say(f'  memory      {foretold / 1e9:,.3f} GB foretold of {available / 1e9:,.1f} GB')
if warning:
    say(f'  warning     {warning}')
say(f'  batch       tokens per iteration: {tokens_per_iter:,} = {global_batch} sequences of {block_size}; '
    f'micro-batch {micro_batch}, {micro_steps} micro-step(s) a process')
if outer.is_on:
    say(f'  islands     {outer.describe()}')
for note in layout.notes + layout.split_notes(global_batch, batch_size, islands) + parallel.notes:
    say(f'  note        {note}')
if spans_nodes():
    say(f'  nodes       all share {os.path.abspath(out_dir)}; each has the whole dataset in {data_dir}')
if saved:
    say(f'resuming {source} at iteration {iteration}')

profile_dir, profiled = out_dir, {}
with exit_on_error():
    if processes.is_main:
        os.makedirs(out_dir, exist_ok=True)
    if saves_checkpoints:
        checkpoint.check_shared(out_dir, processes)
    if replay and not replay.is_whole:
        profile_dir = replay.write_batch(train_loader, starts_of_iteration(replay.last - 1), meta)
        profiled = dict(settle=replay.last - 1 - iteration, traced=1)
        say(f'the batch of iteration {replay.last} is in {profile_dir}')
    if processes.is_main and is_training:
        lock = lock or checkpoint.lock_folder(out_dir)
        resumes_here = saved and source.startswith(os.path.join(out_dir, 'ckpt'))
        earlier = None if resumes_here else checkpoint.set_aside(out_dir)
        if earlier:
            say(f'{out_dir} held an earlier run: moved to {earlier}')
        with open(os.path.join(out_dir, 'config.json'), 'w', encoding='utf-8') as file:
            json.dump(config | dict(profile=False), file, indent=1)  # what repeats the run is not traced too
    wandb = None
    if wandb_log and outer.island == 0:
        wandb = dict(project=wandb_project, name=wandb_run_name, config=config, id=saved.get('wandb_id'))
    log = metrics.Metrics(out_dir, processes.is_main and not replay, wandb, tensorboard and is_training,
                          iteration, prints=processes.is_first)
peak_flops = metrics.peak_flops(processes.device, dtype)
profiler = profiler.Profiler(profile_dir, **profiled) if profile and processes.is_main else None


def report_update(kind, update, what):
    """Write down the batch of an update that was not made, and return the path of the file."""
    return log.dump(f'{kind}_{update.iteration + 1:08d}.json', dict(
        iteration=update.iteration + 1, what=what, lr=update.lr,
        losses=processes.gather(update.loss_sum.item()), block_size=block_size,
        sequences=train_loader.where(starts_of_iteration(update.iteration))))


nonfinite = NonfiniteUpdates(on_nonfinite, parallel, partial(report_update, 'nonfinite'),
                             scaler.is_enabled(), *saved.get('skipped', [0, 0]))
if replay and on_spike == 'rollback':
    on_spike = 'skip'  # a replay goes from checkpoint to checkpoint by itself
spikes = Spikes(on_spike, spike_factor, partial(report_update, 'spike'), say, saved.get('spikes', {}))


# --- the phases of the loop ---------------------------------------------------------------------------------
agreement = Agreement(processes, stop_request)


def exchange(line=None):
    """Tell the other processes what this one knows, and log the line whose sums have arrived."""
    wants_save = save_minutes > 0 and time.monotonic() - saved_time >= 60 * save_minutes
    log_training(agreement.exchange(wants_save, line))


def poll(step):
    """Report progress in a long iteration or evaluation, and learn of signals that have reached others."""
    watchdog.beat()
    if agreement.is_due() and step > 0:
        exchange()


def check_update(update):
    """Wait for the device to make or skip an update; returns an Ending if the run cannot continue from it."""
    if nonfinite.check(update) == 'fatal':
        return Ending('failed', nonfinite.problem, 1)
    if spikes.check(update):
        return Ending('spikes', '', 0)


@torch.no_grad()
def evaluate():
    """{split: mean loss over the split's fixed sequences} on all processes; None at a stop signal."""
    means = {}
    parallel.train(False)
    for split, loader in (('train', train_loader), ('val', val_loader)):
        starts = loader.eval_starts(eval_iters * batch_size)
        eval_steps = -(-len(starts) // (rows_per_step * layout.dp))
        batches = batches_of(loader, lambda batch: starts, eval_steps)
        loss_sum = torch.zeros((), device=processes.device)
        for step in range(eval_steps):
            poll(step)
            if agreement.stop_signal:
                parallel.train(True)
                return None
            with exit_on_error():
                x, y = batches(0, step)
            loss_sum += parallel.evaluate(x, y)
        means[split] = parallel.sum_losses(loss_sum) / (len(starts) * block_size)
    parallel.train(True)
    return means


def save(val_loss, in_background):
    """Save a checkpoint of the present iteration. The log has its line once it is written."""
    state = dict(iteration=iteration, tokens=outer.shares.tokens_before(iteration), val_loss=val_loss,
                 best_val_loss=best_val_loss, skipped=[nonfinite.skipped, nonfinite.skipped_in_a_row],
                 spikes=spikes.state(), wandb_id=log.wandb_id, scaler=scaler.state_dict(),
                 model=dataclasses.asdict(model.config), tokenizer=meta, config=config,
                 machine=processes.machine(), **outer.state())
    began = time.perf_counter()
    path = saver.save(iteration, outer.parameters(), optimizer, state, in_background, outer.tensors())
    log.save_started(path, iteration, time.perf_counter() - began, clock)
    if not in_background:
        log.save_written(iteration, clock)


def take_over(state, tokens):
    """Continue from a checkpoint whose tensors are loaded, where `tokens` of the data have been used."""
    global iteration, first_iteration, best_val_loss, train_batches, saved_iteration
    iteration = first_iteration = saved_iteration = state['iteration']
    best_val_loss = state['best_val_loss']
    scaler.load_state_dict(state['scaler'])
    outer.share_out(global_batch, iteration, tokens)
    train_batches = batches_of(train_loader, starts_of_iteration, steps)


def go_back():
    """Go back to the checkpoint before a row of spikes, and leave out the batches since.

    Returns an Ending if the run cannot continue from there.
    """
    watchdog.beat(pause=STORAGE_LIMIT)
    saver.wait()
    path, state = checkpoint.find_undamaged(out_dir, processes, newest=spikes.row_began)
    if not path:
        say(f'there is no checkpoint of iteration {spikes.row_began} or before to go back to; '
            '--save_interval makes more of them')
        return None
    say(f'{spikes.in_a_row} spikes in a row: going back to {path}, and on with the batches behind them')
    checkpoint.load(path, parallel.named_parameters(), optimizer)
    parallel.zero_grad()
    parallel.balance.forget()
    take_over(state, outer.shares.tokens_before(iteration))
    problem = spikes.go_back(state)
    if problem:
        return Ending('failed', problem, 1)
    # A run that is resumed from now on must not find what came after this checkpoint, nor its old position.
    save(state['val_loss'], in_background=False)
    checkpoint.delete_after(out_dir, iteration, processes)


def step_optimizer():
    """Clip the gradients, and make the update unless their norm is above a limit; returns norm and limit."""
    scaler.unscale_(optimizer)
    limit = spikes.limit()
    grad_norm = parallel.clip_gradients(grad_clip, limit)
    is_made = (grad_norm <= limit).float()  # 0 for NaN and infinity too
    # The device itself leaves an update out: the host need not wait for the norm. A GradScaler's own decision
    # covers overflows alone, and is replaced just before the step.
    hook = optimizer.register_step_pre_hook(
        lambda optimizer, *_: setattr(optimizer, 'found_inf', 1 - is_made))
    scaler.step(optimizer)
    hook.remove()
    scaler.update()
    parallel.balance.update(is_made)
    parallel.zero_grad()
    return grad_norm, limit


def line_of(update, iterations, seconds):
    """The last update's line of the log; `seconds` is the mean of the `iterations` since the line before."""
    flops = flops_per_token * tokens_per_iter / seconds
    return dict(
        iter=iteration, loss_sum=update.loss_sum.item(), grad_norm=update.grad_norm.item(), lr=update.lr,
        dt_ms=1000 * seconds, tokens_per_sec=tokens_per_iter / seconds,
        mfu=flops / (peak_flops * processes.world_size) if peak_flops else None,
        mem_gb=metrics.peak_memory_gb(processes.device), tokens=outer.shares.tokens_before(iteration),
        seconds=time.perf_counter() - _started, iterations=iterations, **parallel.balance.load_max(),
        **(dict(spikes=spikes.skipped) if on_spike != 'none' else {}))


def log_training(line):
    """Log the line of an update, once the sums over all processes have arrived. line: may be None."""
    if line:
        # Tensor-parallel ranks have the same loss, which counts once.
        loss = line.pop('loss_sum') / layout.tp / tokens_per_iter
        if 'lag_ms' in line:
            line['lag_ms'] /= line['iterations']
        del line['iterations']
        if replay:
            replay.compare(dict(loss=loss) | line)
        log.train(dict(iter=line['iter'], loss=loss) | line,
                  eta_seconds=(max_iters - line['iter']) * line['dt_ms'] / 1000)


# --- the loop -----------------------------------------------------------------------------------------------
saved_iteration, saved_time = iteration, time.monotonic()
pending_update = None  # the last Update, until the host has seen whether the device made it
ending = None
paused = 0.0  # seconds of evaluations and saves, for which the clock of the iterations stands still
timed_from, timed_at = iteration, time.perf_counter()  # iteration and clock of the last log line
while True:
    # evaluate
    evaluation_due = eval_only or iteration % eval_interval == 0 or iteration == max_iters
    exchange_due = outer.is_due(iteration)
    save_due = agreement.save_requested or (save_interval and iteration % save_interval == 0)
    if replay:
        evaluation_due, save_due = False, iteration in replay.paths or iteration == replay.last
    if ending or agreement.stop_signal or evaluation_due or save_due or exchange_due:
        log_training(agreement.finish())
        metrics.synchronize(processes.device)  # work still under way counts as training time
        ending, pending_update = ending or check_update(pending_update), None
    if exchange_due and not (ending or agreement.stop_signal):
        line = outer.exchange(iteration, agreement, watchdog.beat)
        if line:
            log.exchange(line)
            if outer.has_new_shares:
                train_batches = batches_of(train_loader, starts_of_iteration, steps)
        if outer.moved_to is not None:
            iteration, outer.moved_to = outer.moved_to, None
            saved_iteration = min(saved_iteration, iteration)
            watchdog.beat(pause=STORAGE_LIMIT)
            saver.wait()
            checkpoint.delete_after(out_dir, iteration, processes)
            train_batches = batches_of(train_loader, starts_of_iteration, steps)
            timed_from, timed_at = iteration, time.perf_counter() - paused
            continue
    pause_began = time.perf_counter()
    clock = pause_began - paused
    if ending and ending.reason == 'spikes':
        former, ending = iteration, go_back()
        if iteration < former:
            timed_from, timed_at = iteration, clock
            paused += time.perf_counter() - pause_began
            continue
    evaluation_due = evaluation_due and not (ending or agreement.stop_signal or outer.problem)
    if replay and first_iteration < iteration and iteration in replay.paths:
        watchdog.beat(pause=STORAGE_LIMIT)
        state = replay.pass_checkpoint(iteration, parallel.named_parameters(), optimizer)
        take_over(state, state['tokens'])
        spikes.load(state.get('spikes', {}))
    if profiler:
        profiler.step()
    losses = None
    if evaluation_due and eval_iters:
        with outer.outer_parameters():
            losses = evaluate()
    val_loss, improved = None, False
    if losses:
        val_loss = losses['val']
        # A NaN does not improve.
        improved = val_loss < (float('inf') if best_val_loss is None else best_val_loss)
        log.eval(dict(iter=iteration, train_loss=losses['train'], val_loss=val_loss,
                      **parallel.balance.loads()))
    if improved:
        best_val_loss = val_loss

    # end, and save
    if ending:
        iteration -= 1  # that update was not made: a run that resumes from here comes to it again
    elif agreement.stop_signal:
        resumes = '; --init_from=resume continues from here' if iteration else ''
        name = signal.Signals(agreement.stop_signal).name
        ending = Ending('stopped', f'stopped by {name} at iteration {iteration}{resumes}', 143)
    elif outer.problem:
        ending = Ending('failed', outer.problem, 1)
    elif replay and (replay.problem or iteration == replay.last):
        ending = Ending('failed', replay.problem, 1) if replay.problem else Ending('finished', '', 0)
    elif eval_only or iteration >= max_iters:
        ending = Ending('finished', '', 0)
    watchdog.beat(pause=STORAGE_LIMIT)
    if ending:
        outer.end()
        saver.wait()
    if not saver.under_way:
        log.save_written(iteration, clock)
    wants_save = ending or save_due or (evaluation_due and (always_save_checkpoint or improved))
    # At the end, a save that failed is tried once more.
    is_unsaved = iteration > saved_iteration or (ending and saver.problem)
    if wants_save and is_unsaved:
        if saves_checkpoints:
            log.save_written(iteration, clock)  # the one before, for which this one waits
            save(val_loss, in_background=saves_in_background and not ending)
        saved_iteration, saved_time = iteration, time.monotonic()
        agreement.forget_save_request()
    watchdog.beat()
    if ending:
        break
    paused += time.perf_counter() - pause_began

    # update
    with processes.waits_counted():
        generator_seed = np.random.SeedSequence([seed, iteration, outer.rank]).generate_state(1)
        processes.seed(int(generator_seed[0]))  # for dropout
        lr = learning_rate
        if decay_lr:
            lr = scheduled_lr(iteration, lr_schedule, learning_rate, min_lr, warmup_iters, lr_decay_iters)
        for group in optimizer.param_groups:
            group['lr'] = lr
        loss_sum = torch.zeros((), device=processes.device)
        for step in range(steps):
            poll(step)
            if agreement.stop_signal:
                break
            with record_function('data'), exit_on_error():
                x, y = train_batches(iteration, step)
            loss_sum += parallel.forward_backward(x, y, last=step == steps - 1, scale=scaler.scale)
        if agreement.stop_signal:
            continue  # to the save above; this iteration is left to the run that resumes
        # The device made the update of the iteration before long ago, so that this check does not wait.
        ending, pending_update = check_update(pending_update), None
        if ending:
            continue
        with record_function('optimizer'):
            grad_norm, limit = step_optimizer()
    update = pending_update = Update(iteration, lr, loss_sum, grad_norm, limit)
    iteration += 1
    watchdog.first_iteration_done()
    if saves_checkpoints and saves_in_background and not saver.host_copies:
        saver.allocate(outer.parameters(), optimizer, outer.tensors())

    # log
    line = None
    if iteration % log_interval == 0:
        metrics.synchronize(processes.device)
        ending, pending_update = check_update(pending_update), None
        if ending:
            continue
        clock = time.perf_counter() - paused
        line = line_of(update, iteration - timed_from, (clock - timed_at) / (iteration - timed_from))
        timed_from, timed_at = iteration, clock
    exchange(line)

# --- the end ------------------------------------------------------------------------------------------------
if profiler:
    profiler.close()
outer.leave()
log.close()
if saver.problem and ending.reason != 'failed':
    ending = Ending('failed', f'the run ended at iteration {iteration}, but its last checkpoint could not be '
                    f'saved ({saver.problem})', 1)
if ending.reason == 'stopped':
    say(ending.message)
if ending.reason == 'finished' and replay:
    say(replay.summary())
if ending.reason == 'failed' and processes.is_main:
    print(f'error: {ending.message}', file=sys.stderr, flush=True)
processes.leave(ending.exit_code)
