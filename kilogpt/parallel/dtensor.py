"""DTensors, of which each process has a part: tensor parallelism, and parameters under any layout."""
import contextlib

import torch

from kilogpt.devices.parts import replace_parts
from kilogpt.optim import local_part


def check_integers(model):
    """Raise ValueError if parameters are integers (lora_base_dtype=int8) and this torch shards only others."""
    if model.config.lora_base_dtype == 'int8' and torch.__version__ < '2.13':
        raise ValueError(f'lora_base_dtype is int8, but torch {torch.__version__} does not shard integers: set it to '
                         'bfloat16, or zero_stage to 0 or 1 and tp and pp to 1')


def split_tensors(model, mesh):
    """Apply tensor and sequence parallelism: split_plan makes every parameter a DTensor on `mesh`, in place.

    Between blocks each rank has its part of the sequence. A norm's output is gathered once for all linears
    that read it. A row-wise linear's output is summed and scattered in one step (Korthikanti et al. 2022,
    4.2.2). The logits stay split by vocabulary rows. Passes run within `tensor_context`.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, PrepareModuleOutput,
                                                   RowwiseParallel, SequenceParallel, parallelize_module)
    check_integers(model)
    styles = dict(
        colwise=[ColwiseParallel()],
        tables=[ColwiseParallel()],
        rowwise=[RowwiseParallel(output_layouts=Shard(1))],
        sequence=[SequenceParallel(), PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)],
        positions=[PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
                   SequenceParallel(sequence_dim=1, use_local_output=True)],
        local=[SequenceParallel(sequence_dim=1, use_local_output=True)],
        across=[PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Shard(-1)),
                PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(-1))],
        features=[],
        shared=[PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(),
                                    use_local_output=False)],
        whole=[PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(),
                                  use_local_output=True),
               PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(),
                                   use_local_output=False)],
        embedding=[RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))],
        head=[ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)],
    )
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for part in (model, *model.get_submodule(model.split_plan['blocks']).values()):
        modules = dict(part.named_modules())
        for kind, steps in styles.items():
            for name in model.split_plan[kind]:
                if name not in modules or kind != 'sequence' and not list(modules[name].parameters()):
                    continue
                # The few rows of an adapter's A would give ranks empty parts, so each rank has all of them.
                whole = modules[name]._parameters.pop('lora_A', None) if kind == 'colwise' else None
                for style in steps:
                    parallelize_module(modules[name], mesh, style)
                if whole is not None:
                    whole = distribute_tensor(whole.detach(), mesh, [Replicate()], src_data_rank=None)
                    modules[name].lora_A = torch.nn.Parameter(whole)
                if kind in ('across', 'features', 'shared', 'whole'):
                    placement = Replicate() if kind in ('shared', 'whole') else Shard(0)
                    for key, vector in list(modules[name].named_parameters()):
                        vector = distribute_tensor(vector.detach(), mesh, [placement], src_data_rank=None)
                        setattr(modules[name], key, torch.nn.Parameter(vector))
                if kind == 'embedding':  # a compiled block loses gradients of a pending input
                    modules[name].register_forward_hook(lambda module, inputs, output: output.clone())
    model.tie()  # the split gave the embedding and the head a parameter each
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
        if parameter.requires_grad and not hasattr(parameter, 'placements'):
            raise ValueError(f'{name} is in no part of split_plan (model.py): say there how tp={mesh.size()} '
                             'splits it, or set tp to 1')
    model.register_forward_hook(
        lambda module, inputs, output: output.to_local().clone() if hasattr(output, 'to_local') else output)
    if model.preferences is not None:
        model.preferences.register_forward_pre_hook(lambda module, inputs: (local_part(inputs[0]), *inputs[1:]))
    replace_parts(model, 'to_heads', lambda pass_on: take_by_heads)
    replace_parts(model, 'factors', lambda factors: lambda: [vector.to_local() for vector in factors()])


def take_by_heads(x):
    """x as a plain tensor, of which each rank's heads have a part of the gradient. All ranks then have the whole one."""
    from torch.distributed.tensor import Partial
    return x.redistribute(placements=x.placements).to_local(grad_placements=[Partial()])


@contextlib.contextmanager
def tensor_context():
    """The context that forward and backward passes need under tensor parallelism.

    Cross-entropy takes logits that are split by vocabulary rows, and plain tensors may meet DTensors.
    """
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel
    with loss_parallel(), implicit_replication():
        yield


def take_whole_logits(loss):
    """Let a model's loss compute all logits at once rather than in parts. It stays the same module, in its mode."""
    loss.forward = lambda x, head, targets: loss.of_logits(head(x).flatten(0, 1), targets.flatten())
    return loss


def name_parameters(stage, tied, processes):
    """[(name in the whole model, parameter)] of a pipeline stage. tied: {name of a copy: its original}.

    FSDP2 and tensor parallelism leave some of the parameters that are not trained as plain tensors, which all
    ranks have. Here these parameters are DTensors too.
    """
    named = []
    for name, parameter in stage.named_parameters():
        is_dtensor = parameter.requires_grad or hasattr(parameter, 'placements')
        is_plain = processes.mesh is not None and not is_dtensor
        named.append((tied.get(name, name), processes.as_replicas(parameter) if is_plain else parameter))
    return named


@torch.no_grad()
def fill(named_parameters, value):
    """Set each parameter, sharded or not, from value(name, shape, rows).

    value: returns the slice `rows` of the whole parameter of that shape. A process asks for the rows that it
    has and no others, and cuts the columns itself.
    """
    for name, parameter in named_parameters:
        local, cuts = parameter, []
        if hasattr(parameter, 'placements'):
            local, mesh = parameter.to_local(), parameter.device_mesh
            cuts = list(zip(mesh.shape, parameter.placements, mesh.get_coordinate()))
        slices = [slice(0, size) for size in parameter.shape]  # this process's part in each dimension
        for ranks, placement, coordinate in reversed(cuts):  # FSDP cuts what tensor parallelism has cut
            if not placement.is_replicate():
                whole = slices[placement.dim]
                size = -(-(whole.stop - whole.start) // ranks)
                start = min(whole.start + coordinate * size, whole.stop)
                slices[placement.dim] = slice(start, min(start + size, whole.stop))
        rows, *columns = slices
        local.copy_(value(name, parameter.shape, rows)[(slice(None), *columns)])


def total_norm(gradients, device):
    """The norm of all gradients, which may be DTensors on different meshes of the same processes.

    A pipeline stage without adapters does not have gradients: 0, on the device.
    """
    if not gradients:
        return torch.zeros((), device=device)
    by_mesh = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, 'device_mesh', None), []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    norms = [norm.full_tensor() if hasattr(norm, 'full_tensor') else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def bytes_held(named_parameters, optimizer):
    """Bytes on this process: (parameters, optimizer state in float32).

    AdamW has two moments, Muon and SGD with momentum one.
    """
    parameters = sum(local_part(parameter).nbytes for _, parameter in named_parameters)
    state = 0
    for group in optimizer.param_groups:
        moments = 2 if 'betas' in group else 0
        if 'momentum' in group:
            moments = 1 if group['momentum'] else 0
        state += moments * 4 * sum(local_part(parameter).numel() for parameter in group['params'])
    return parameters, state
