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

_started = time.perf_counter()
# Less fragmentation of GPU memory; must be set before torch is imported.
os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')

from data.datasets import check_exists
from kilogpt.configurator import configure, exit_on_error
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
init_from = 'scratch'  # 'scratch', 'resume', weights (a path, org/name on the hub), or 'auto': resume if possible
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

from data.splits import TrainingData
from kilogpt.optim import build_optimizer
from kilogpt.parallel.apply import Parallel, take_means
from kilogpt.parallel.bits_per_byte import BitsPerByte
from kilogpt.run.metrics import Meter
from kilogpt.training.cluster import Cluster
from kilogpt.training.run import Run
from kilogpt.training.start import find_start
from model import GPT, GPTConfig

# --- set-up -------------------------------------------------------------------------------------------------
with exit_on_error():
    cluster = Cluster(config)  # the processes, how the model is laid out on them, and the folder of the run
    processes = cluster.processes
    data = TrainingData(config, processes)
    start = find_start(config, data.meta, cluster)  # a checkpoint, other weights, or a new model
    with torch.device('meta'):  # shapes alone: each process makes the values of its own part
        model = GPT(GPTConfig(**start.model_args), seed=None)
    config = settle_settings(config, model.config, data.shards, start, processes.say)
    data.open_splits(model.config.vocab_size, config)
    meter = Meter(model, data.train.document_lengths(), cluster, _started)
    parallel = Parallel(processes, cluster.layout)
    parallel.parallelize(model, config, cluster.dtype)
    optimizer = build_optimizer(config, parallel.optimizer_parameters(), model.split_plan, cluster.dtype,
                                parallel.apply_to_whole_matrices)
    parallel.attach_optimizer(optimizer)
    cluster.islands.attach_model(parallel, model)
    start.load(parallel, model, optimizer, cluster, seed)
    bits = BitsPerByte(parallel, data.sources)
    run = Run(config, cluster, data, start, model, parallel, optimizer, meter)


# --- what the loop calls ------------------------------------------------------------------------------------
def lr_at(iteration):
    """The learning rate of the update that follows `iteration` finished ones."""
    return lr_of(config, iteration)


@torch.no_grad()
def evaluate():
    """{'train_loss', 'val_loss', ...: mean over a split's fixed sequences}; None at a signal to stop."""
    means, text = {}, {}
    parallel.train(False)
    for key, loader, count in data.evaluations(eval_iters * batch_size):
        starts = loader.eval_starts(count)
        batches = parallel.batches(loader, loader.batch, lambda _: starts, end=1)
        loss_sum = torch.zeros((), device=processes.device)
        for batch, _ in batches.of(0):
            if run.stops():
                break
            loss_sum += bits.evaluate(batch)
        nats, n_targets = parallel.sum_losses(loss_sum), batches.count_targets(0)
        means[key] = run.guard.check(nats, key) / (n_targets or float('nan'))
        text[key] = bits.take(nats, n_targets)
        means |= take_means(parallel, key, n_targets)
    parallel.train(True)
    return None if run.signals.stop else data.add_figures(means, text, run.tokens // run.block_size)


def save(in_background=False):
    """Save a checkpoint of the current iteration."""
    run.write(dict(model=vars(model.config), tokenizer=start.meta, config=config, shards=data.shards,
                   base=start.base), in_background)


# What acts between iterations, in this order. Append a class of your own, a kilogpt.run.Hook.
hooks = run.hooks
with exit_on_error():
    run.begin(save)
gc.enable()

# --- the loop -----------------------------------------------------------------------------------------------
while True:
    # Usually nothing is due between two updates, and the host does not wait for the device.
    if run.is_due():
        run.settle()
        if run.has_moved:
            continue  # from the iteration to which a hook has moved the run
        with run.clock.paused():
            if run.evaluates:
                with hooks.weights_for_evaluation():
                    losses = evaluate()
                run.note(losses)
            run.end_if_due()
            if run.saves:
                save(in_background=not run.ending)
        if run.ending:
            break

    with processes.waits_counted():
        processes.seed(seed, run.iteration, cluster.islands.rank)  # for dropout
        lr, loss_sum = lr_at(run.iteration), 0.0
        n_targets = run.batches.count_targets(run.iteration)
        for batch, is_last in run.batches.of(run.iteration):
            if run.stops():
                break
            loss_sum += parallel.forward_backward(batch, n_targets, is_last, run.guard.scale)
        if not run.may_update(loss_sum):
            continue  # the run ends before this update, or makes this iteration again
        grad_norm = run.guard.step(lr, loss_sum, grad_clip)
    run.advance(lr, loss_sum, grad_norm, n_targets)

run.leave()
