r"""Train a GPT: on a CPU, on one GPU, or on many with torchrun.

    python train.py config/quickstart.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

On two nodes, the first of which is 10.0.0.1, the same command on each:

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234 \
        train.py config/train_gpt2.py
"""
import gc
import os
import time
from functools import partial

_started = time.perf_counter()
# Less fragmentation of GPU memory; must be set before torch is imported.
os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')

from data.datasets import check_exists, fingerprint, open_dataset
from kilogpt.configurator import configure, exit_on_error
from kilogpt.keys.islands import are_on
from kilogpt.settings import check_settings, lr_of, settle_settings

# --- configuration ------------------------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText, as nanoGPT's do.
# I/O
out_dir = 'out'  # checkpoints, metrics.jsonl and config.json go here
eval_interval = 2000  # iterations from one evaluation (and checkpoint) to the next
log_interval = 1  # iterations from one log line to the next
eval_iters = 200  # an evaluation takes eval_iters * batch_size fixed sequences of each split; 0 = none
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # save after each evaluation; False = after improvements, and at the end
save_interval = 0  # also save every this many iterations; 0 = never for this reason
save_minutes = 0.0  # also save when the last checkpoint is this many minutes old; 0 = never for this reason
keep_checkpoints = 2  # newest checkpoints to keep besides the best; 0 with eval_iters=0 saves none
async_checkpoint = True  # write checkpoints while training continues, from a copy in host memory
init_from = 'scratch'  # 'scratch', 'resume', 'auto' (resume if possible), 'gpt2*', or a path to weights
# wandb logging
wandb_log = False  # log to Weights & Biases too (WANDB_MODE=offline works)
wandb_project = 'owt'  # project in Weights & Biases
wandb_run_name = 'gpt2'  # run name in Weights & Biases
tensorboard = False  # write out_dir/tensorboard too (pip install tensorboard)
# data
dataset = 'openwebtext'  # a name in data/ (or here), a path, or a mixture, 'web:0.7, code:0.3'
gradient_accumulation_steps = 5 * 8  # micro-batches of batch_size in an iteration, over all processes
batch_size = 12  # sequences in a micro-batch
# model; further keys, such as n_layer, are the fields of GPTConfig in model.py
bias = False  # biases in linears and LayerNorms
# optimizer
optimizer = 'adamw'  # 'adamw', or 'muon': Muon for the blocks' matrices, AdamW for the rest
learning_rate = 6e-4  # highest learning rate of the schedule
lr_factors = ''  # of learning_rate for kinds of parameters: 'embedding:5, head:1, matrix:1, vector:1'
max_iters = 600000  # iterations (updates) in all
weight_decay = 1e-1  # weight decay of matrices and embeddings; biases and norms have none
beta1 = 0.9  # decay of AdamW's mean of gradients
beta2 = 0.95  # decay of AdamW's mean of squared gradients
muon_momentum = 0.95  # decay of Muon's mean of gradients; lower for runs of a few hundred iterations
grad_clip = 1.0  # clip the gradient to this norm; 0 = no clipping
# learning rate schedule
decay_lr = True  # False = constant learning rate, without warm-up
lr_schedule = 'cosine'  # 'cosine', 'linear' or 'wsd' (warm-up, stable, decay)
lr_decay_ratio = 0.2  # with wsd: the last part of the schedule, in which the learning rate falls
warmup_iters = 2000  # iterations of linear warm-up
lr_decay_iters = 600000  # iteration at which min_lr is reached; 0 = max_iters
min_lr = 6e-5  # learning rate at the end of the schedule; about learning_rate / 10
# system
backend = 'auto'  # 'nccl' or 'gloo'; 'auto' follows the device
device = 'auto'  # 'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' = CUDA if available, then MPS, then CPU
dtype = 'auto'  # 'float32', 'bfloat16' or 'float16' (with a gradient scaler); 'auto' follows the device
fp8 = False  # the blocks' matrix products in float8, by torchao (pip install torchao); for H100 and newer
deterministic = False  # equal runs give equal bits on GPUs too, at some cost in speed
compile = True  # torch.compile; falls back to eager without a compiler
cuda_graph = True  # with compile, on one GPU: launch all kernels of a micro-batch at once, as a CUDA graph
seed = 1337  # determines weights, data order and dropout
profile = False  # trace a few iterations into out_dir/trace.json and print where their time went
# ------------------------------------------------------------------------------------------------------------
# Further keys are in kilogpt/keys, a page for each subject: data, faults, islands, layouts, logs, scoring.
config = configure(globals(), 'model.py:GPTConfig', 'kilogpt/keys')
with exit_on_error():
    check_settings(config)
    check_exists(dataset)

# PyTorch takes a second or more to import, so a mistyped key is told before.
gc.disable()  # until the loop: imports and set-up leave little garbage
import torch
from torch.profiler import record_function

from data.shares import Shares
from data.splits import add_figures, evaluations, open_splits
from kilogpt import metrics
from kilogpt.devices import host
from kilogpt.optim import build_optimizer, set_lr
from kilogpt.parallel.apply import LAID_OUT_BY, Parallel, describe_layout, take_means
from kilogpt.parallel.bits_per_byte import BitsPerByte
from kilogpt.parallel.dtensor import fill
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.network import describe_nodes
from kilogpt.parallel.processes import Processes, make_deterministic, resolve_dtype
from kilogpt.plan.fits import describe_memory
from kilogpt.run import Hooks, checkpoint
from kilogpt.run.guard import Guard
from kilogpt.run.signals import Signals, StopRequest
from kilogpt.run.state import NoIslands, Run, RunFolder
from kilogpt.run.watchdog import Watchdog
from kilogpt.start import find_start, initial_values
from model import GPT, GPTConfig

# --- set-up: processes, data, and what the run starts from --------------------------------------------------
stop_request = StopRequest()
torch.set_float32_matmul_precision('high')  # TF32 on GPUs that have it

with exit_on_error():
    if deterministic:
        make_deterministic()
    processes = Processes(device, 1 if config['outer_store'] else config['islands'])
    layout = Layout.of(processes.world_size, config)
    processes.join(layout, backend, config['comm_timeout'])
    host.prepare(processes.say)
    parallel = Parallel(processes, layout)
    dtype = resolve_dtype(dtype, processes.device)
    all_islands = NoIslands(processes, config)
    if are_on(config):
        from kilogpt.islands.jobs import open_islands
        all_islands = open_islands(processes, layout, config)
    out_dir = all_islands.out_dir
    folder = RunFolder(out_dir, processes, is_written=not eval_only)
    watchdog = Watchdog(processes, os.path.join(folder.path, 'hang'), config['comm_timeout'])
    sources = open_dataset(dataset, processes)
    shards = processes.share(fingerprint(sources) if processes.is_main else None)
    watchdog.beat()
    # source: a checkpoint; tensors: weights from elsewhere, or the base of adapters; saved: a state to resume
    source, tensors, saved, model_args, meta, base = find_start(
        init_from, config, next(iter(sources.values())).meta, all_islands.find_checkpoint, processes, out_dir)
    watchdog.beat()

# --- set-up: model and optimizer ----------------------------------------------------------------------------
block_size = config['block_size']
global_batch = batch_size * gradient_accumulation_steps // config['islands']  # sequences in an iteration of an island

with exit_on_error():
    with torch.device('meta'):  # shapes alone: each process makes the values of its own part
        model = GPT(GPTConfig(**model_args | dict(dropout=config['dropout'])), seed=None)
    config = settle_settings(config, model.config, shards, saved, source or init_from, processes.say)
    train_loader, val_loader = open_splits(sources, model_args['vocab_size'], config, processes)
    size, n_params = model.describe_size(), model.num_params()
    flops_per_token = model.flops_per_token(train_loader.document_lengths())
    parallel.lay_out(model, global_batch=global_batch, dtype=dtype, **{key: config[key] for key in LAID_OUT_BY})
    optimizer = build_optimizer(
        optimizer, parallel.optimizer_parameters(), learning_rate, weight_decay, (beta1, beta2),
        muon_momentum, model.split_plan, dtype, parallel.apply_to_whole_matrices, lr_factors)
    parallel.attach(optimizer)
    all_islands.attach(parallel, model)
    if tensors or not source:
        fill(parallel.named_parameters(), initial_values(tensors, model, seed))
    if source:  # with adapters, it holds these alone, and the tensors are their base
        checkpoint.load(source, all_islands.parameters(), optimizer if saved else None)
    watchdog.beat()
    bits = BitsPerByte(parallel, sources)
    run = Run(partial(Shares, global_batch, block_size, config['islands']), all_islands.island, saved, config)
    batches = parallel.batches(train_loader.train_batch, run.sequences, train_loader.read_ahead)
    parallel.warm_up(lambda: batches(run.iteration, 0))

# --- set-up: what the run will be, its folder and its log ---------------------------------------------------
available = metrics.available_memory(processes.device) - all_islands.bytes_on(processes.device)
processes.say(f'{processes.world_size} process(es) on {processes.device}, {dtype}, {size}, '
              f'{train_loader.n_tokens:,} training tokens in {train_loader.place}')
for line in (*describe_layout(parallel, optimizer, batch_size, config['islands']), *all_islands.describe(),
             *train_loader.describe(), *describe_nodes(out_dir, train_loader.place),
             *describe_memory(model, layout, config | dict(dtype=dtype), available, processes.device)):
    processes.say(f'  {line}')
if saved:
    processes.say(f'resuming {source} at iteration {run.iteration}')

saves_checkpoints = (keep_checkpoints > 0 or eval_iters > 0) and not eval_only
saves_in_background = saves_checkpoints and async_checkpoint and not config['cpu_offload']
with exit_on_error():
    folder.begin(config, meta, resumed=source if saved else None, saves_checkpoints=saves_checkpoints)
    log = metrics.Metrics(folder.path, processes.is_main, config, saved.get('wandb_id'), run.iteration,
                          all_islands.island, prints=processes.is_first)
    saver = checkpoint.Saver(out_dir, keep_checkpoints, all_islands.needed_checkpoint)
meter = metrics.Meter(log, run, processes, dtype, n_params, flops_per_token, layout.tp, _started)


# --- what the loop calls ------------------------------------------------------------------------------------
def lr_at(iteration):
    """The learning rate of the update that follows `iteration` finished ones."""
    return lr_of(config, iteration)


@torch.no_grad()
def evaluate():
    """{'train_loss', 'val_loss', ...: mean over a split's fixed sequences}; None at a signal to stop."""
    means, text = {}, {}
    parallel.train(False)
    for key, loader, count in evaluations(train_loader, val_loader, eval_iters * batch_size):
        starts = loader.eval_starts(count)
        eval_batches = parallel.batches(loader.batch, lambda _: starts, loader.read_ahead)
        loss_sum = torch.zeros((), device=processes.device)
        for step in range(eval_batches.count(0)):
            if signals.poll():
                break
            with exit_on_error():
                batch = eval_batches(0, step)
            loss_sum += bits.evaluate(batch)
        nats, n_targets = parallel.sum_losses(loss_sum), loader.count_targets(loader.batch, starts)
        means[key], text[key] = guard.check(nats, key) / (n_targets or float('nan')), bits.take(nats, n_targets)
        means |= take_means(parallel, key, n_targets)
    parallel.train(True)
    return None if signals.stop else add_figures(means, text, train_loader, val_loader, run.tokens // block_size)


def save(in_background=False):
    """Save a checkpoint of the present iteration. The log has its line once it is written."""
    state = run.state() | guard.state() | hooks.state() | dict(
        wandb_id=log.wandb_id, model=vars(model.config), tokenizer=meta, config=config,
        shards=shards, base=base, machine=processes.machine())
    with watchdog.waits_for_storage():
        saver.wait()
        log.save_written(run.iteration, run.clock.now())
        began = time.perf_counter()
        path = saver.save(run.iteration, all_islands.parameters(), optimizer, state, in_background,
                          hooks.tensors())
        log.save_started(saver, path, run.iteration, time.perf_counter() - began, run.clock.now())


signals = Signals(processes, stop_request, watchdog, run.wants_save, meter.write)
guard = Guard(run, parallel, optimizer, dtype, log, train_loader, config)
# What acts between iterations, in this order. Add a class of your own, a kilogpt.run.Hook.
hooks = Hooks([all_islands] if are_on(config) else [])
hooks += guard.rollback_hooks(out_dir, saver, hooks, save)
if profile or config['events']:
    from kilogpt.run.events import observing_hooks
    hooks += observing_hooks(folder.path, run, saver, meter, processes, config)
with exit_on_error():
    if config['eval_tasks'] or config['sample_interval']:
        from kilogpt.evaluate.hooks import evaluation_hooks
        hooks += evaluation_hooks(parallel, model.config, dtype, meta, config, hooks, log, meter.stamp, signals.poll)
    if saved:
        guard.load_state(saved)
        hooks.restore(source, saved, processes)
    all_islands.begin(run, signals, saver, log, saved, bool(source), train_loader.n_tokens)

gc.enable()
run.clock.start_lap(run.iteration)

# --- the loop -----------------------------------------------------------------------------------------------
while True:
    # Usually nothing is due between two updates, and the host does not wait for the device.
    if run.is_due(signals, hooks):
        signals.flush()
        metrics.synchronize(processes.device)  # work still under way counts as training time
        guard.settle()  # now the last update is made or skipped, or the run ends before it
        run.end_if_stopped(signals)
        if not run.ending and hooks.act(run):
            continue  # from the iteration to which a hook has moved the run
        with run.clock.paused():
            if run.evaluates and eval_iters and not run.ending:
                with hooks.weights_for_evaluation():
                    losses = evaluate()
                if losses:
                    run.note(losses['val_loss'])
                    log.eval(meter.stamp() | losses | parallel.balance.loads())
            run.end_if_stopped(signals)
            run.end_if_finished()
            if run.needs_save(signals, saver):
                if saves_checkpoints:
                    save(in_background=saves_in_background and not run.ending)
                run.note_save(signals)
        if run.ending:
            break

    # update
    with processes.waits_counted():
        processes.seed(seed, run.iteration, all_islands.rank)  # for dropout
        lr = lr_at(run.iteration)
        set_lr(optimizer, lr)
        loss_sum = torch.zeros((), device=processes.device)
        n_tokens, steps = run.batch * block_size, batches.count(run.iteration)
        n_targets = train_loader.count_targets(train_loader.train_batch, run.sequences(run.iteration))
        for step in range(steps):
            if signals.poll():
                break
            with record_function('data'), exit_on_error():
                batch = batches(run.iteration, step)
            loss_sum += parallel.forward_backward(batch, n_targets, step == steps - 1, guard.scale)
        # The device has made the previous update long ago, so the guard does not wait here.
        if signals.stop or not guard.settle():
            continue  # a run that resumes, or has gone back, makes this iteration again
        with record_function('optimizer'):
            grad_norm = guard.step(lr, loss_sum, grad_clip)
        sums = parallel.pop_sums()
    hooks.after_update()
    run.advance()
    watchdog.first_iteration_done()
    if saves_in_background and not saver.host_copies:
        saver.allocate(all_islands.parameters(), optimizer, hooks.tensors())

    # log
    line = None
    if run.iteration % log_interval == 0:
        metrics.synchronize(processes.device)
        if not guard.settle():
            continue
        line = meter.line(n_tokens, n_targets, lr, loss_sum, grad_norm, sums, guard.figures())
    signals.exchange(line)
    log.save_written(run.iteration, run.clock.now())

# --- the end ------------------------------------------------------------------------------------------------
with watchdog.waits_for_storage():
    saver.wait()
log.save_written(run.iteration, run.clock.now())
hooks.close()
log.close()
processes.leave(run.report_ending(processes, saver.problem, meter, config))
