r"""Train a GPT: on a CPU, on one GPU, or on many with torchrun.

    python train.py config/quickstart.py
    python train.py config/train_shakespeare_char.py --batch_size=32 --compile=False
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

On two nodes, the first of which is 10.0.0.1, the same command on each:

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:1234 \
        train.py config/train_gpt2.py
"""
import os
import time
from functools import partial

_started = time.perf_counter()
# Less fragmentation of GPU memory; must be set before torch is imported.
os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')
import torch
from torch.profiler import record_function

from data.datasets import fingerprint, open_dataset
from data.shares import Shares
from data.splits import add_figures, evaluations, open_splits
from kilogpt import checkpoint, metrics
from kilogpt.configurator import configure, exit_on_error
from kilogpt.convert.start import find_start, initial_values
from kilogpt.devices import host
from kilogpt.evaluate.bits import BitsPerByte
from kilogpt.evaluate.hooks import evaluation_hooks
from kilogpt.guard import Guard, Rollback
from kilogpt.islands.islands import Islands, IslandSettings, needed_checkpoint
from kilogpt.islands.jobs import IslandJob
from kilogpt.layers.options import ModelOptions
from kilogpt.optim import build_optimizer, set_lr
from kilogpt.parallel.apply import Parallel, describe_layout, take_means
from kilogpt.parallel.dtensor import fill
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.network import describe_nodes
from kilogpt.parallel.processes import Processes, make_deterministic, resolve_dtype
from kilogpt.plan.fits import describe_memory
from kilogpt.profiler import Profiler
from kilogpt.run import Run, RunFolder, hook_states, hook_tensors, restore_hooks, weights_for_evaluation
from kilogpt.settings import check_settings, lr_of, settle_settings
from kilogpt.signals import Signals, StopRequest
from kilogpt.watchdog import Watchdog
from model import GPT, GPTConfig

# --- configuration ------------------------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText, as nanoGPT's do.
# I/O
out_dir = 'out'  # checkpoints, metrics.jsonl and config.json go here
eval_interval = 2000  # iterations from one evaluation (and checkpoint) to the next
log_interval = 1  # iterations from one log line to the next
eval_iters = 200  # an evaluation takes eval_iters * batch_size fixed sequences of each split; 0 = none
eval_only = False  # evaluate once and exit
eval_tasks = ''  # tasks to score as well (docs/evaluate.md): 'capitals, my/task.jsonl, core:eval_bundle'
eval_tasks_interval = 0  # iterations from one scoring of tasks to the next; 0 = eval_interval
eval_tasks_limit = 0  # score the first so many questions of each task; 0 = all
sample_interval = 0  # iterations from one sample of text to the next; 0 = none
sample_prompts = '\n'  # texts that the samples continue, separated by ||
sample_tokens = 100  # tokens in each sample
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
mixture_phases = ''  # other weights from a number of tokens on: '5e9: web:0.4, code:0.6; 9e9: code:1'
max_epochs = 0  # epochs of each source, after which the others share its part of a mixture; 0 = any number
data_cache_gb = 100.0  # of a dataset in object storage, keep up to so much on this machine; 0 = read from there
accept_new_data = False  # resume although the files of the dataset have changed since the checkpoint
gradient_accumulation_steps = 5 * 8  # micro-batches of batch_size in an iteration, over all processes
batch_size = 12  # sequences in a micro-batch
block_size = 1024  # tokens in a sequence
documents = 'stream'  # 'stream' = one text; 'mask' = attention within documents; 'pack' = whole ones in rows
loss = 'cross_entropy'  # 'cross_entropy' of tokens, or 'dpo' of pairs of answers (docs/dpo.md)
dpo_beta = 0.1  # with loss='dpo': how much a margin counts; smaller values lead further from the reference
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
mlp = 'gelu'  # 'gelu', 'gelu_tanh' (GPT-2's own), 'relu2', 'swiglu', 'geglu', 'moe' (of experts)
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
router_balance = 'bias'  # what keeps experts equally busy: 'bias' (in the choice), 'loss' (Switch) or 'none'
router_balance_rate = 1e-3  # step of the bias in an iteration, or weight of the loss
router_z_loss = 0.0  # weight of the z-loss, which keeps the router's logits small (about 1e-3)
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
on_nonfinite = 'abort'  # on a NaN or infinite gradient: 'abort', or 'skip' the update up to 9 times in a row
on_spike = 'none'  # on a gradient spike: 'skip' the update, or 'rollback' too after 4 in a row
spike_factor = 5.0  # with on_spike: gradient norms above this many times their running median are too large
# learning rate schedule
decay_lr = True  # False = constant learning rate, without warm-up
lr_schedule = 'cosine'  # 'cosine', 'linear' or 'wsd' (warm-up, stable, decay)
lr_decay_ratio = 0.2  # with wsd: the last part of the schedule, in which the learning rate falls
warmup_iters = 2000  # iterations of linear warm-up
lr_decay_iters = 600000  # iteration at which min_lr is reached; 0 = max_iters
min_lr = 6e-5  # learning rate at the end of the schedule; about learning_rate / 10
# layout: data parallelism (DDP or FSDP2) takes the processes that tp, cp and pp leave
zero_stage = 0  # 0 = DDP; 1 = DDP, optimizer sharded; 2 = FSDP2; 3 = FSDP2, parameters freed after forward
dp_replicate = 1  # with zero_stage 2 or 3: groups of processes that each hold one replica (HSDP)
tp = 1  # tensor (and sequence) parallel degree
async_tp = False  # overlap tp's collectives with matrix products; needs compile and NVLink
cp = 1  # context parallel degree: processes that share each sequence
ep = 1  # expert parallel degree: processes among which the experts are divided, within a replica
pp = 1  # pipeline parallel degree
pp_schedule = '1f1b'  # 'gpipe', '1f1b', 'interleaved1f1b', 'interleavedzb', 'zbv' or 'dualpipev'
activation_checkpoint = 'none'  # recompute in backward: 'selective' (all but matmuls and attention), 'full'
cpu_offload = False  # keep parameters, gradients and optimizer state in host memory (zero_stage 2 or 3)
grad_compress = 'none'  # DDP's all-reduce: 'none', 'bf16' or 'powersgd' (matrices of low rank)
comm_timeout = 600  # seconds without progress until the run ends and names what hung; 3 times that at start
# islands: groups of processes that train separately and exchange parameters at intervals (DiLoCo)
islands = 1  # number of groups; each has the layout above and a share of each iteration's sequences
outer_interval = 0  # iterations from one exchange to the next; 0 = 100 with islands, else no exchange
outer_lr = 0.7  # learning rate of the outer optimizer, which takes the mean of the islands' changes
outer_momentum = 0.9  # its Nesterov momentum
outer_fragments = 1  # parts of the parameters that are exchanged at different times within an interval
outer_compress = 'none'  # what islands send: 'none' (parameters), or changes in 'bf16', 'int8' or 'int4'
outer_delay = 0  # iterations that islands make while an exchange is in progress
outer_mix = 0.0  # share of its own parameters that an island keeps after an exchange; 0 = none
outer_offload = False  # keep the state of the outer optimizer in host memory
outer_store = ''  # for islands that are jobs of their own: HOST:PORT of python -m kilogpt.islands
island = 0  # with outer_store: the number of this job's island
outer_timeout = 60.0  # with outer_store: seconds for which the first island waits for others at an exchange
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
config = configure(globals(), ModelOptions)  # its fields are keys too: parts that fewer models have

# --- set-up: processes, data, and what the run starts from --------------------------------------------------
stop_request = StopRequest()
torch.set_float32_matmul_precision('high')  # TF32 on GPUs that have it

with exit_on_error():
    check_settings(config)
    if deterministic:
        make_deterministic()
    processes = Processes(device, 1 if outer_store else islands)
    layout = Layout(processes.world_size, zero_stage, dp_replicate, tp, cp, pp, pp_schedule, ep)
    processes.join(layout, backend, comm_timeout)
    host.prepare(processes.say)
    parallel = Parallel(processes, layout)
    dtype = resolve_dtype(dtype, processes.device)
    all_islands = (IslandJob if outer_store else Islands)(processes, layout, IslandSettings.of(config))
    out_dir = all_islands.out_dir
    folder = RunFolder(out_dir, processes, is_written=not eval_only)
    watchdog = Watchdog(processes, os.path.join(folder.path, 'hang'), comm_timeout)
    sources = open_dataset(dataset, processes)
    shards = processes.share(fingerprint(sources) if processes.is_main else None)
    watchdog.beat()
    # source: a checkpoint; tensors: weights from elsewhere, or the base of adapters; saved: a state to resume
    source, tensors, saved, model_args, meta, base = find_start(
        init_from, config, next(iter(sources.values())).meta, all_islands.find_checkpoint, processes, out_dir)
    watchdog.beat()

# --- set-up: model and optimizer ----------------------------------------------------------------------------
global_batch = batch_size * gradient_accumulation_steps // islands  # sequences in an iteration of an island

with exit_on_error():
    with torch.device('meta'):  # shapes alone: each process makes the values of its own part
        model = GPT(GPTConfig(**model_args | dict(dropout=dropout)), seed=None)
    config = settle_settings(config, model.config, shards, saved, source or init_from, processes.say)
    train_loader, val_loader = open_splits(sources, model_args['vocab_size'], config, processes)
    size, n_params = model.describe_size(), model.num_params()
    flops_per_token = model.flops_per_token(train_loader.document_lengths())
    parallel.lay_out(model, global_batch=global_batch, batch_size=batch_size, block_size=block_size,
                     dtype=dtype, compile=compile, cpu_offload=cpu_offload, fp8=fp8, async_tp=async_tp,
                     activation_checkpoint=activation_checkpoint, grad_compress=grad_compress,
                     documents=documents, cuda_graph=cuda_graph, loss=loss, dpo_beta=dpo_beta)
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
    run = Run(partial(Shares, global_batch, block_size, islands), all_islands.island, saved,
              max_iters=max_iters, eval_interval=eval_interval, eval_only=eval_only,
              always_saves=always_save_checkpoint, save_interval=save_interval, save_minutes=save_minutes)
    batches = parallel.batches(train_loader.train_batch, run.sequences, train_loader.read_ahead)
    parallel.warm_up(lambda: batches(run.iteration, 0))

# --- set-up: what the run will be, its folder and its log ---------------------------------------------------
available = metrics.available_memory(processes.device) - all_islands.bytes_on(processes.device)
processes.say(f'{processes.world_size} process(es) on {processes.device}, {dtype}, {size}, '
              f'{train_loader.n_tokens:,} training tokens in {train_loader.place}')
for line in (*describe_layout(parallel, optimizer, batch_size, islands), *all_islands.describe(),
             *train_loader.describe(), *describe_nodes(out_dir, train_loader.place),
             *describe_memory(model, layout, config | dict(dtype=dtype), available, processes.device)):
    processes.say(f'  {line}')
if saved:
    processes.say(f'resuming {source} at iteration {run.iteration}')

saves_checkpoints = (keep_checkpoints > 0 or eval_iters > 0) and not eval_only
saves_in_background = saves_checkpoints and async_checkpoint and not cpu_offload
with exit_on_error():
    folder.begin(config, meta, resumed=source if saved else None, saves_checkpoints=saves_checkpoints)
    wandb = dict(project=wandb_project, name=wandb_run_name, config=config, id=saved.get('wandb_id'))
    log = metrics.Metrics(folder.path, processes.is_main,
                          wandb if wandb_log and all_islands.island == 0 else None,
                          tensorboard and not eval_only, run.iteration, prints=processes.is_first)
    saver = checkpoint.Saver(out_dir, keep_checkpoints, partial(needed_checkpoint, out_dir, processes.between))
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
        means[key], text[key] = nats / (n_targets or float('nan')), bits.take(nats, n_targets)
        means |= take_means(parallel, key, n_targets)
    parallel.train(True)
    return None if signals.stop else add_figures(means, text, train_loader, val_loader, run.tokens // block_size)


def save(in_background=False):
    """Save a checkpoint of the present iteration. The log has its line once it is written."""
    state = run.state() | guard.state() | hook_states(hooks) | dict(
        wandb_id=log.wandb_id, model=vars(model.config), tokenizer=meta, config=config,
        shards=shards, base=base, machine=processes.machine())
    with watchdog.waits_for_storage():
        saver.wait()
        log.save_written(run.iteration, run.clock.now())
        began = time.perf_counter()
        path = saver.save(run.iteration, all_islands.parameters(), optimizer, state, in_background,
                          hook_tensors(hooks))
        log.save_started(saver, path, run.iteration, time.perf_counter() - began, run.clock.now())


signals = Signals(processes, stop_request, watchdog, run.wants_save, meter.write)
guard = Guard(run, parallel, optimizer, dtype, log, train_loader, on_nonfinite, on_spike, spike_factor)
# What acts between iterations, in this order. Add a class of your own, a kilogpt.run.Hook.
hooks = [all_islands] if all_islands.is_on else []
hooks += [Rollback(guard, out_dir, saver, hooks, save)] if on_spike == 'rollback' else []
hooks += [Profiler(folder.path, max_iters - run.iteration)] if profile and processes.is_main else []
with exit_on_error():
    hooks += evaluation_hooks(parallel, model.config, dtype, meta, config, hooks, log, meter.stamp, signals.poll)
    if saved:
        guard.load_state(saved)
        restore_hooks(hooks, source, saved, processes)
    all_islands.begin(run, signals, saver, log, saved, bool(source), train_loader.n_tokens)

run.clock.start_lap(run.iteration)

# --- the loop -----------------------------------------------------------------------------------------------
while True:
    # Usually nothing is due between two updates, and the host does not wait for the device.
    if run.is_due(signals, hooks):
        signals.flush()
        metrics.synchronize(processes.device)  # work still under way counts as training time
        guard.settle()  # now the last update is made or skipped, or the run ends before it
        run.end_if_stopped(signals)
        if not run.ending and any([hook.act(run) for hook in hooks if hook.is_due(run)]):
            continue  # from the iteration to which a hook has moved the run
        with run.clock.paused():
            if run.evaluates and eval_iters and not run.ending:
                with weights_for_evaluation(hooks):
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
        sums = parallel.take_sums()
    for hook in hooks:
        hook.after_update()
    run.advance()
    watchdog.first_iteration_done()
    if saves_in_background and not saver.host_copies:
        saver.allocate(all_islands.parameters(), optimizer, hook_tensors(hooks))

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
for hook in hooks:
    hook.close()
log.close()
processes.leave(run.report_ending(processes, saver.problem))
