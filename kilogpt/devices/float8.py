"""Products of linears in float8, by torchao."""
import torch


def use_float8(blocks, device, notes):
    """Let the blocks' linears multiply in float8, a scale per tensor (Micikevicius et al. 2022), in place.

    Routers and the matrices of experts are not linears and stay as they are. notes: gets a line if the device
    only emulates float8. Raises ValueError without torchao.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ValueError('fp8=True needs torchao: pip install torchao, or set fp8 to False') from None
    emulate = device.type != 'cuda' or torch.cuda.get_device_capability(device) < (8, 9)
    note = ('fp8 is emulated, at a loss of speed: '
            'float8 products need a GPU of compute capability 8.9 or above')
    if emulate and note not in notes:
        notes.append(note)

    def is_convertible(module, name):
        return isinstance(module, torch.nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(blocks, config=config, module_filter_fn=is_convertible)
