"""What `kilogpt.prove --random` draws from: the values of each key of train.py, or why a key is not drawn.

A new key of train.py or of the model belongs into DRAWN, or into NOT_DRAWN with a reason. A test compares
these tables with the keys that exist.
"""
from graphlib import TopologicalSorter
from typing import NamedTuple

from kilogpt.parallel.layout import SCHEDULES

MOST_PROCESSES = 8  # of a draw, over all islands


class Key(NamedTuple):
    """The values that draws give a key. The first value is the plain one, to which a failing draw shrinks.

    when: {other key: the values with which this key has an effect}; otherwise it keeps its plain value.
    """
    values: tuple
    when: dict = {}


ROPE, EXPERTS, ADAPTERS = dict(pos=('rope',)), dict(mlp=('moe',)), dict(lora_rank=(4,))
LATENT, NOT_LATENT = dict(kv_latent=(24,)), dict(kv_latent=(0,))
DELTA = dict(mixer_pattern=('DA', 'D', 'DDA'))
PIPELINE, EXCHANGE = dict(pp=(2, 4)), dict(outer_interval=(1, 2))
TAUGHT = dict(data=('taught', 'packed taught'))
MIXTURE = dict(data=('mixture', 'packed mixture', 'masked mixture'))
FORMS = ('swiglu', 'gelu', 'gelu_tanh', 'relu2', 'geglu', 'swiglu_clamped')
YES_OR_NO, NO_OR_YES = (True, False), (False, True)

# Keys of a draw that are not keys of train.py
OF_DRAW = dict(
    # The data-parallel degree. With the other degrees and islands, it gives the number of processes.
    dp=Key((1, 2, 3, 4)),
    data=Key(('stream', 'mask', 'pack', 'answers', 'packed answers', 'pairs', 'taught', 'packed taught',
              'mixture', 'packed mixture', 'masked mixture')),
    # In float32 or bfloat16, rounding may send a token to another expert.
    precision=Key(('float64', 'float32', 'bfloat16'), dict(mlp=(*FORMS, 'gelu'))),
    compile=Key(NO_OR_YES),  # in few draws, since one takes a minute
    # The layout that continues from the checkpoint, in the words of `prove --layouts`; '' = none does
    then=Key(('', 'dp1', 'dp2', 'dp3 zero1', 'dp2 zero3', 'tp2', 'cp2', 'pp2 zbv', 'tp2 dp2 zero2'),
             dict(islands=(1,), precision=('float64', 'float32'))),
)
LAYOUT = dict(
    tp=Key((1, 2, 4)),
    cp=Key((1, 2, 4)),
    pp=Key((1, 2, 4)),
    pp_schedule=Key(('1f1b', *(name for name in SCHEDULES if name != '1f1b')), PIPELINE),
    ep=Key((1, 2, 4), EXPERTS),
    zero_stage=Key((0, 1, 2, 3)),
    dp_replicate=Key((1, 2)),
    activation_checkpoint=Key(('none', 'selective', 'full')),
    cpu_offload=Key(NO_OR_YES),
    grad_compress=Key(('none', 'powersgd')),  # PowerSGD averages whole gradients in the first ten iterations
    islands=Key((1, 2)),
)
MODEL = dict(
    n_layer=Key((2, 3, 6)),
    n_head=Key((4, 2, 6)),
    n_kv_head=Key((0, 1, 2)),
    n_embd=Key((48, 96)),
    head_width=Key((0, 8)),
    bias=Key(NO_OR_YES),
    bias_of=Key(('', 'qkv', 'mlp+proj')),
    pos=Key(('learned', 'rope')),
    norm=Key(('layernorm', 'rmsnorm')),
    norm_eps=Key((1e-5, 1e-2)),
    norm_place=Key(('before', 'after', 'both')),
    mlp=Key(('gelu', 'gelu_tanh', 'relu2', 'swiglu', 'geglu', 'swiglu_clamped', 'moe')),
    n_hidden=Key((0, 40)),
    parallel_block=Key(NO_OR_YES),
    qk_norm=Key(NO_OR_YES, NOT_LATENT),
    qk_norm_over=Key(('head', 'all'), dict(qk_norm=(True,))),
    tie_weights=Key(YES_OR_NO),
    softcap=Key((0.0, 3.0)),
    zero_init=Key(NO_OR_YES),
    rope_theta=Key((10000.0, 50.0), ROPE),
    rope_share=Key((1.0, 0.5), ROPE | NOT_LATENT),
    rope_scaling=Key((
        '', 'linear factor=2', 'dynamic factor=2 original_max_position_embeddings=8',
        'yarn factor=4 original_max_position_embeddings=8',
        'llama3 factor=4 low_freq_factor=1 high_freq_factor=4 original_max_position_embeddings=16'), ROPE),
    rope_pattern=Key(('R', 'RN'), ROPE),
    window=Key((0, 5)),
    window_pattern=Key(('S', 'SL'), dict(window=(5,))),
    rope_theta_window=Key((0.0, 30.0), ROPE | dict(window=(5,))),
    attention_scale=Key((0.0, 0.5)),
    attention_softcap=Key((0.0, 2.0)),
    attention_sinks=Key(NO_OR_YES),
    kv_latent=Key((0, 24), ROPE | dict(n_kv_head=(0,))),
    q_latent=Key((0, 20), LATENT),
    rope_width=Key((0, 2), LATENT),
    value_width=Key((0, 6), LATENT),
    attention_gate=Key(NO_OR_YES, NOT_LATENT),
    attention_gate_over=Key(('head', 'feature'), dict(attention_gate=(True,))),
    attention_conv=Key((0, 3), NOT_LATENT),
    mlp_conv=Key((0, 2)),
    value_pattern=Key(('N', 'V', 'VN'), NOT_LATENT),
    mixer_pattern=Key(('A', 'DA', 'D', 'DDA')),
    delta_heads=Key((0, 8, 2), DELTA),  # 0: as many as attention has
    delta_key_heads=Key((0, 4, 2), DELTA | dict(delta_heads=(0, 8))),
    delta_key_width=Key((0, 6), DELTA),
    delta_value_width=Key((0, 10), DELTA),
    delta_conv=Key((4, 2), DELTA),
    delta_negative=Key(NO_OR_YES, DELTA),
    delta_norm_eps=Key((0.0, 1e-2), DELTA),
    delta_norm_place=Key(('', 'before', 'both'), DELTA),
    embedding_scale=Key((1.0, 5.0)),
    residual_scale=Key((1.0, 0.5)),
    logit_scale=Key((1.0, 3.0)),
    n_experts=Key((4, 6), EXPERTS),
    n_active_experts=Key((2, 1, 4), EXPERTS),
    n_shared_experts=Key((0, 1, 2), EXPERTS),
    shared_gate=Key(NO_OR_YES, EXPERTS | dict(n_shared_experts=(1, 2))),
    expert_hidden=Key((16, 24), EXPERTS),
    expert_mlp=Key(FORMS, EXPERTS),
    expert_bias=Key(NO_OR_YES, EXPERTS),
    moe_first_layer=Key((0, 1), EXPERTS),
    moe_every=Key((1, 2), EXPERTS),
    router=Key(('softmax', 'sigmoid'), EXPERTS),
    router_groups=Key((1, 2), EXPERTS | dict(n_active_experts=(2, 1))),
    router_active_groups=Key((1, 2), EXPERTS | dict(router_groups=(2,))),
    router_balance=Key(('bias', 'loss', 'none'), EXPERTS),
    router_balance_rate=Key((1e-3, 0.1), EXPERTS | dict(router_balance=('bias', 'loss'))),
    router_z_loss=Key((0.0, 0.01), EXPERTS),
    router_norm=Key(YES_OR_NO, EXPERTS),
    router_scale=Key((1.0, 2.0), EXPERTS),
    lora_rank=Key((0, 4)),
    lora_alpha=Key((16.0, 4.0), ADAPTERS),
    lora_targets=Key(('all', 'attention', 'c_q,c_proj'), ADAPTERS),
    lora_rank_stabilised=Key(NO_OR_YES, ADAPTERS),
    lora_base_dtype=Key(('float32', 'bfloat16', 'int8'), ADAPTERS),
)
TRAINING = dict(
    batch_size=Key((2, 1, 3)),
    gradient_accumulation_steps=Key((4, 1, 3, 6)),
    block_size=Key((16, 32)),
    dpo_beta=Key((0.1, 1.0), dict(data=('pairs',))),
    distill_divergence=Key(('forward', 'reverse', 'js'), TAUGHT),
    distill_top_k=Key((6, 1), TAUGHT),
    distill_share=Key((0.5, 1.0), TAUGHT),
    mixture_phases=Key(('', '300: text:0.2, more:0.8'), MIXTURE),
    max_epochs=Key((0, 1), MIXTURE),
    optimizer=Key(('adamw', 'muon')),
    learning_rate=Key((1e-2, 1e-3)),
    lr_factors=Key(('', 'vector:30', 'embedding:3, head:0.5, matrix:2')),
    weight_decay=Key((0.1, 0.0)),
    beta1=Key((0.9, 0.5)),
    beta2=Key((0.95, 0.5)),
    muon_momentum=Key((0.95, 0.5), dict(optimizer=('muon',))),
    grad_clip=Key((1.0, 0.0, 0.1)),
    decay_lr=Key(YES_OR_NO),
    lr_schedule=Key(('cosine', 'linear', 'wsd'), dict(decay_lr=(True,))),
    lr_decay_ratio=Key((0.2, 0.8), dict(decay_lr=(True,), lr_schedule=('wsd',))),
    warmup_iters=Key((1, 0), dict(decay_lr=(True,))),
    seed=Key((1337, 7)),
    async_checkpoint=Key(NO_OR_YES),
    outer_interval=Key((0, 1, 2)),
    outer_lr=Key((0.7, 1.0), EXCHANGE),
    outer_momentum=Key((0.9, 0.0), EXCHANGE),
    outer_fragments=Key((1, 2), EXCHANGE),
    outer_delay=Key((0, 1), EXCHANGE),
    outer_mix=Key((0.0, 0.3), EXCHANGE),
    outer_offload=Key(NO_OR_YES, EXCHANGE),
)
DRAWN = OF_DRAW | MODEL | LAYOUT | TRAINING
# Each after those that its `when` names: the order in which a draw is made.
DRAWN = {key: DRAWN[key] for key in TopologicalSorter({key: DRAWN[key].when for key in DRAWN}).static_order()}
UNPAIRED = ('compile',)  # keys whose pairs are not counted
DEGREES = ('islands', 'dp', 'tp', 'cp', 'pp')  # their product is the number of processes
CROSSED = (*DEGREES, 'ep')  # degrees whose pairs are drawn first

NOT_DRAWN = dict(
    # What a draw sets itself
    **dict.fromkeys(('documents', 'loss', 'dataset'), 'follows from `data`'),
    dtype='follows from `precision`',
    **dict.fromkeys(('init_from', 'out_dir', 'max_iters', 'lr_decay_iters', 'min_lr', 'eval_interval',
                     'eval_iters', 'log_interval', 'save_interval', 'keep_checkpoints', 'comm_timeout'),
                    'a draw needs these itself, to stop, save, continue and be compared'),
    # What makes layouts differ by design
    **dict.fromkeys(('dropout', 'lora_dropout'), 'each process draws its own masks'),
    outer_compress='rounds, so that a last bit decides; tests/islands compares it',
    **dict.fromkeys(('teacher', 'teacher_dtype', 'distill_temperature'),
                    'decides the numbers beside the data, which draws write at random; tests/test_distillation.py'),
    **dict.fromkeys(('rl_prompts', 'rl_val_prompts', 'rl_reward', 'rl_reward_seconds', 'rl_reward_errors', 'rl_samples',
                     'rl_tokens', 'rl_scale', 'rl_kl', 'rl_updates', 'rl_clip', 'rl_pass', 'rl_eval_prompts',
                     'rl_eval_samples'), 'rounding may decide a draw of text; tests/parallel/test_data_layouts.py'),
    # What does not take part in an update
    **dict.fromkeys(('eval_only', 'eval_tasks', 'eval_tasks_interval', 'eval_tasks_limit', 'sample_interval',
                     'sample_prompts', 'sample_tokens'), 'scores or writes text; tests/evaluate'),
    **dict.fromkeys(('wandb_log', 'wandb_project', 'wandb_run_name', 'tensorboard', 'trackio', 'events', 'profile'),
                    'only logs'),
    **dict.fromkeys(('always_save_checkpoint', 'save_minutes', 'data_cache_gb', 'accept_new_data'),
                    'when to save, and where data lie'),
    **dict.fromkeys(('on_nonfinite', 'on_spike', 'spike_factor'),
                    'acts on updates that no draw has; tests/test_guard.py'),
    **dict.fromkeys(('outer_store', 'island', 'outer_timeout'), 'separate jobs; tests/islands/test_jobs.py'),
    **dict.fromkeys(('fault_tolerance', 'replica_timeout'), 'needs torchft and a lighthouse; tests/replicas'),
    # What this machine does not have
    **dict.fromkeys(('device', 'backend', 'async_tp', 'fp8', 'cuda_graph', 'deterministic'),
                    'needs a GPU; tests/gpu_layouts.sh'),
)


def plain():
    """The draw of plain values: GPT-2 on one process."""
    return {key: entry.values[0] for key, entry in DRAWN.items()}


def is_active(key, draw):
    """Whether a key has an effect in a draw."""
    for other, values in DRAWN[key].when.items():
        if draw[other] not in values:
            return False
    return True


def count_processes(draw):
    """The number of processes of a draw, over all islands."""
    product = 1
    for key in DEGREES:
        product *= draw[key]
    return product
