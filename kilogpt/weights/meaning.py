"""Whether two configs of our model mean the same, though their keys may differ."""
import dataclasses
import math

from kilogpt.layers.options import DeltaOptions, ExpertOptions
from kilogpt.layers.rope import read_scaling
from model import GPTConfig


def keys_not_kept(config, read):
    """The keys of a GPTConfig that have another meaning in the arguments that read() returns.

    All keys, if read() or GPTConfig raises ValueError.
    """
    try:
        found = GPTConfig(**read())
    except ValueError:
        return [field.name for field in dataclasses.fields(config)]
    if found.pos == 'learned':  # GPT-2 always has biases, which are written as zeros
        config = dataclasses.replace(config, bias=True, bias_of='')
    return keys_that_differ(config, found)


def keys_that_differ(config, other):
    """The keys of a GPTConfig that have another meaning in another one."""
    wanted, found = meaning(config), meaning(other)
    keys = []
    for key in wanted.keys() & found.keys():
        is_close = isinstance(wanted[key], float) and math.isclose(wanted[key], found[key])
        if wanted[key] != found[key] and not is_close:
            keys.append(key)
    if any(key.startswith('bias_of_') for key in keys):
        keys.append('bias_of' if config.bias_of else 'bias')
    return [field.name for field in dataclasses.fields(config) if field.name in keys]


def meaning(config):
    """{key: value} of a GPTConfig without what makes no difference to the model's output."""
    layers = range(config.n_layer)
    values = dataclasses.asdict(config)
    for key in ('dropout', 'zero_init', 'router_z_loss', 'router_balance_rate', 'window_pattern', 'bias_of'):
        del values[key]
    values |= {f'bias_of_{linear}': config.has_bias(linear) for linear in ('qkv', 'proj', 'mlp')}
    values |= dict(
        attention_scale=config.attention_scale or config.head_width ** -0.5,
        window=[min(config.window_of(layer) or config.block_size, config.block_size) for layer in layers],
        rope_pattern=[config.rope_of(layer) for layer in layers],
        value_pattern=[config.has_value_embedding(layer) for layer in layers],
        rope_scaling=read_scaling(config.rope_scaling) if config.rope_scaling.strip() else None)
    has_attention = [config.mixer_of(layer) == 'A' for layer in layers]
    for key in ('window', 'rope_pattern', 'value_pattern'):  # which only attention reads
        values[key] = [value for value, has in zip(values[key], has_attention) if has]
    values |= dict(mixer_pattern=has_attention, norm_place=[config.norm_place_of(layer) for layer in layers],
                   delta_norm_eps=config.delta_norm_eps or config.norm_eps)
    del values['delta_norm_place']
    if all(has_attention):
        for field in dataclasses.fields(DeltaOptions):
            values.pop(field.name, None)
    if not config.attention_gate:
        del values['attention_gate_over']
    if config.rope_scaling.startswith('dynamic'):  # such a model has no longest context
        del values['block_size']
    if config.norm != 'layernorm':
        del values['bias']
    if config.pos != 'rope':
        for key in [key for key in values if key.startswith('rope_')]:
            del values[key]
    if 'window' not in values.get('rope_pattern', ''):
        values.pop('rope_theta_window', None)
    if not config.qk_norm:
        del values['qk_norm_over']
    if config.mlp != 'moe':
        for field in dataclasses.fields(ExpertOptions):
            values.pop(field.name, None)
        return values
    values |= dict(moe_every=[config.has_experts(layer) for layer in layers],
                   router_balance=config.router == 'softmax' and config.router_balance == 'bias',
                   router_norm=config.router_norm and config.n_active_experts > 1)
    del values['moe_first_layer']
    if config.router_active_groups == config.router_groups:
        values |= dict(router_groups=1, router_active_groups=1)
    if config.router == 'sigmoid':  # GLM has at least one shared expert, which is written as zeros
        values['n_shared_experts'] = max(1, config.n_shared_experts)
    if all(values['moe_every']):
        del values['n_hidden']
        if not config.n_shared_experts:
            del values['bias_of_mlp']
    return values
