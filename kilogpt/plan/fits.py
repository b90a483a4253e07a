"""Whether a run fits into the memory of its GPUs, by the formulas of memory_model.py, before its first iteration."""
import dataclasses

from kilogpt.plan import memory_model
from kilogpt.parallel.layout import check_layout


def describe_memory(model, layout, config, available, device):
    """Lines that say how much memory a run will take, and warn if that is more than there is.

    available: bytes on this process, of which `device` is the device. The other arguments are `forecast`'s.
    """
    global_batch = config['batch_size'] * config['gradient_accumulation_steps'] // config['islands']
    of_an_island = config | dict(gradient_accumulation_steps=-(-global_batch // config['batch_size']))
    predicted, warning = forecast(model, layout, of_an_island, device.type, available)
    lines = [f'memory      {predicted / 1e9:,.3f} GB predicted of {available / 1e9:,.1f} GB']
    return lines + [f'warning     {warning}'] if warning else lines


def forecast(model, layout, config, device_type, available):
    """(bytes foretold on the fullest process, a warning or None) for a run that is about to start.

    config: the values of train.py's keys, dtype resolved. device_type: 'cuda' or 'cpu'. available: bytes of
    memory of a device. The warning says by how much the run does not fit, and names a change of keys with
    which it would.
    """
    shape = memory_model.Shape(model)
    foretold = _bytes_of(shape, layout, config, device_type)
    if foretold <= available:
        return foretold, None
    advice = 'no change of its keys would do: use more GPUs'
    for change in _changes(layout, config):
        changed = config | change
        try:
            other = dataclasses.replace(layout, zero_stage=changed['zero_stage'])
            options = ('block_size', 'dtype', 'activation_checkpoint', 'cpu_offload', 'grad_compress', 'fp8',
                       'async_tp')
            check_layout(model, other, **{key: changed[key] for key in options})
        except ValueError:
            continue
        if _bytes_of(shape, other, changed, device_type) <= available:
            keys = ' '.join(f'--{key}={value}' for key, value in change.items() if config[key] != value)
            advice = f'it would with {keys}'
            break
    return foretold, (f'the run will hardly fit: {foretold / 1e9:,.1f} GB are foretold on a process, and '
                      f'{available / 1e9:,.1f} GB are free; {advice}')


def _bytes_of(shape, layout, config, device_type):
    work = memory_model.Work.of(config, layout, device_type)
    total = sum(memory_model.memory(shape, layout, work).values())
    return total + memory_model.reserve(total, work)


def _changes(layout, config):
    """Changes of keys that save memory, those that cost the least time first."""
    batches = [{}]
    global_batch = config['batch_size'] * config['gradient_accumulation_steps']
    batch_size = config['batch_size']
    while batch_size > 1:
        batch_size //= 2
        if global_batch % batch_size == 0:
            batches.append(dict(batch_size=batch_size,
                                gradient_accumulation_steps=global_batch // batch_size))
    modes = ('none', 'selective', 'full')
    modes = modes[modes.index(config['activation_checkpoint']):]
    for zero_stage in range(layout.zero_stage, 4):
        for mode in modes:
            for batch in batches:
                yield batch | dict(activation_checkpoint=mode, zero_stage=zero_stage)
    yield batches[-1] | dict(activation_checkpoint='full', zero_stage=3, cpu_offload=True)
