"""Predict before the first iteration whether a run fits into the memory of its device (memory_model.py)."""
import dataclasses

from kilogpt.parallel.layout import CHECKED_KEYS, check_layout
from kilogpt.plan import memory_model
from kilogpt.plan.shape import Shape


def describe_memory(model, layout, config, available, device):
    """[line] to print: how much memory a run will need, and a warning if that is more than is available.

    available: bytes on the device of this process. The other arguments are those of `predict_memory`.
    Nothing for a model with Gated DeltaNet, whose activations memory_model.py does not count.
    """
    if model.config.n_layer_of('D'):
        return []
    global_batch = config['batch_size'] * config['gradient_accumulation_steps'] // config['islands']
    of_an_island = config | dict(gradient_accumulation_steps=-(-global_batch // config['batch_size']))
    predicted, warning = predict_memory(model, layout, of_an_island, device.type, available)
    lines = [f'memory      {predicted / 1e9:,.3f} GB predicted of {available / 1e9:,.1f} GB']
    return lines + [f'warning     {warning}'] if warning else lines


def predict_memory(model, layout, config, device_type, available):
    """(bytes predicted on the fullest process, a warning or None) for a run that is about to start.

    config: the values of train.py's keys, dtype resolved. device_type: 'cuda' or 'cpu'. available: bytes of
    memory on a device. The warning names a change of keys with which the run would fit.
    """
    shape = Shape(model)
    predicted = _bytes_of(shape, layout, config, device_type)
    if predicted <= available:
        return predicted, None
    advice = 'no change of keys makes it fit: use more GPUs'
    for change in _changes(layout, config, device_type):
        changed = config | change
        try:
            other = dataclasses.replace(layout, zero_stage=changed['zero_stage'])
            check_layout(model, other, **{key: changed[key] for key in (*CHECKED_KEYS, 'dtype')})
        except ValueError:
            continue
        if _bytes_of(shape, other, changed, device_type) <= available:
            keys = ' '.join(f'--{key}={value}' for key, value in change.items() if config[key] != value)
            advice = f'it would fit with {keys}'
            break
    return predicted, (f'the run will probably not fit: a process is predicted to need '
                       f'{predicted / 1e9:,.1f} GB, but only {available / 1e9:,.1f} GB are free; {advice}')


def _bytes_of(shape, layout, config, device_type):
    work = memory_model.Work.of(config, layout, device_type)
    parts = memory_model.memory(shape, layout, work)
    return sum(parts.values()) + memory_model.reserve(parts, work, shape, layout)


def _changes(layout, config, device_type):
    """Yield changes of keys that save memory, in order of the time they cost."""
    copies = memory_model.Work.of(config, layout, device_type).saves_in_background
    saves = dict(async_checkpoint=False) if copies else {}
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
                yield saves | batch | dict(activation_checkpoint=mode, zero_stage=zero_stage)
    yield saves | batches[-1] | dict(activation_checkpoint='full', zero_stage=3, cpu_offload=True)
