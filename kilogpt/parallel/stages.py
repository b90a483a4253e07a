"""Lays out one pipeline stage, or the whole model: each part of a layout in its order, in place."""
import functools

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kilogpt.devices.parts import find_experts, find_parts, replace_parts
from kilogpt.parallel.dtensor import check_integers, split_tensors


def lay_out_stage(stage, parallel, *, dtype, compile, use_kernels, documents, fp8, activation_checkpoint, cpu_offload):
    """Lay out the model, or a stage of it, in place: the parts of the device, then ep, tp, cp, each block, and FSDP2.

    parallel: the Parallel that has the stage. use_kernels: as in `cpu.use_faster_parts`.
    """
    layout, processes, plan, device = parallel.layout, parallel.processes, stage.split_plan, parallel.device
    blocks = list(stage.get_submodule(plan['blocks']).values())
    for owner, name in find_parts(stage, 'attention'):
        getattr(owner, name).first_head = layout.first_head(processes.rank, stage.config.n_head)
    use_parts_of_device(stage, device, dtype, use_kernels, documents, parallel.notes)
    if fp8:
        from kilogpt.devices.float8 import use_float8
        use_float8(stage.get_submodule(plan['blocks']), device, parallel.notes)
    if layout.tp * layout.ep > 1 and find_experts(stage):
        from kilogpt.parallel.expert import split_experts
        split_experts(stage, processes.expert_mesh, layout.ep, layout.tp)
    if layout.tp > 1:
        from kilogpt.parallel.loss import split_loss
        split_tensors(stage, parallel.mesh['tp'])
        split_loss(stage, parallel.mesh['tp'], parallel.notes)
    if layout.cp > 1:
        from kilogpt.parallel.context import exchange_heads
        stage.first_position = layout.positions(processes.rank, parallel.block_size).start
        stage.n_sequence_parts = layout.cp
        exchange_heads(stage, processes.cp_mesh)
    fuse_loss = torch.compile
    if device.type == 'cuda':  # after cp, which may repeat key/value heads itself
        from kilogpt.devices import cuda
        cuda.use_fused_attention(stage, device, dtype)
        cuda.use_grouped_products(stage, device)
        if stage.loss.distillation is None:
            fuse_loss = functools.partial(cuda.fuse_loss, config=stage.config)
    for block in blocks:
        apply_to_block(block, plan, activation_checkpoint, compile)
    if compile and layout.tp == 1:
        replace_parts(stage, 'loss_of_hidden', fuse_loss)
    if layout.uses_fsdp:
        shard_parameters(stage, blocks, layout, processes, dtype, cpu_offload)
    stage.to_empty(device='cpu' if cpu_offload else device)
    stage.tie()


# The outputs that selective activation checkpointing keeps: those of matrix products and of attention.
SAVED_OUTPUTS = ('mm', 'addmm', '_scaled_mm', '_scaled_dot_product_flash_attention_for_cpu',
                 '_scaled_dot_product_flash_attention', '_scaled_dot_product_efficient_attention',
                 '_scaled_dot_product_cudnn_attention', '_grouped_mm')


def use_parts_of_device(stage, device, dtype, use_kernels, documents, notes):
    """Put the forms that a device has in the place of the model's parts, before any hook is on them.

    use_kernels, documents: as in `cpu.use_faster_parts` and `Parallel.parallelize`. notes: gets what the device lacks.
    """
    if device.type == 'cpu':
        from kilogpt.devices import cpu
        cpu.use_faster_parts(stage, use_kernels)
    if device.type != 'cuda':
        return
    config, found = stage.config, []
    if documents != 'stream' or config.window or config.attention_softcap or config.attention_sinks:
        from kilogpt.devices import flex
        found.append(flex.use_flex_attention(stage, device))
    if find_parts(stage, 'recurrence'):
        from kilogpt.devices.delta_kernels import use_delta_kernels
        found.append(use_delta_kernels(stage, device, dtype))
    notes += [note for note in found if note and note not in notes]


def apply_to_block(block, plan, activation_checkpoint, compile):
    """Checkpoint a block's activations and compile it.

    'selective' is within what is compiled, so that the compiler sees it. 'full' is around what is compiled,
    since the compiler fails on tensor-parallel blocks with 'full' inside.
    """
    modules = dict(block.named_modules())
    routed, parts = modules.get(plan['experts']), [block]
    if routed:  # selective checkpointing does not go around modules that FSDP2 shards on their own
        parts = [modules[name] for name in plan['checkpointed'] if name in modules]
        routed.forward = torch.compiler.disable(routed.forward)  # the numbers of rows depend on the tokens
    if activation_checkpoint == 'selective':  # recompute all in the backward pass but SAVED_OUTPUTS
        saved = [getattr(torch.ops.aten, name).default for name in SAVED_OUTPUTS]
        saved += [getattr(torch.ops.kilogpt, name).default for name in ('attention', 'visible_attention')
                  if hasattr(torch.ops.kilogpt, name)]  # kilogpt/devices, where the device has them
        saved.append(torch.ops.higher_order.flex_attention)
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)
        for part in parts:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False,
                                             context_fn=contexts)
    if compile:
        from kilogpt.devices.frozen_products import keep_no_copies
        keep_no_copies(block)
        block.forward = torch.compile(block.forward)
    if activation_checkpoint == 'full':  # recompute the whole block (Chen et al. 2016)
        options = {}
        if routed:
            from kilogpt.parallel.expert import remember_choice
            options = dict(context_fn=remember_choice(routed.router))
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def shard_parameters(stage, blocks, layout, processes, dtype, cpu_offload):
    """Apply FSDP2. It reduces gradients in each micro-batch, with a pipeline once an iteration."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    check_integers(stage)
    mesh = processes.mesh
    mesh_dims = ('dp_replicate', 'dp_shard_cp') if layout.dp_replicate > 1 else 'dp_shard_cp'
    options = dict(mesh=mesh[mesh_dims])
    if dtype == 'bfloat16':  # parameters alone are cast: the rotary tables are inputs that stay in float32
        options['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if cpu_offload:
        options['offload_policy'] = CPUOffloadPolicy(pin_memory=mesh.device_type == 'cuda')
    reshard = layout.zero_stage == 3
    for routed in find_experts(stage).values():
        from kilogpt.parallel.expert import shard_experts
        shard_experts(routed, layout, processes.expert_mesh, reshard, options)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    # The embeddings and the head form one group, since they may be tied.
    fully_shard(stage, reshard_after_forward=False, **options)


def multiply_finite(loss, factor):
    """loss * factor, of which all gradients are NaN unless the loss is finite: the guard looks at gradients."""
    return loss * (factor + 0 * loss.detach())
