"""The entries of a config.json of `transformers`: checked values, and what many families name alike."""
import math

from kilogpt.layers.rope import read_scaling


class Entries:
    """The entries of a config.json. Each method raises ValueError for a value that cannot be."""

    def __init__(self, hf_config, source):
        self.hf_config, self.source = hf_config, source
        self.family = hf_config['model_type']

    def refuse(self, key, value, reason):
        raise ValueError(f'{self.source} is of the family {self.family} with {key}={value!r} in its '
                         f'config.json, {reason}')

    def value(self, key, default, kinds, description):
        value = self.hf_config.get(key)
        if value is None:
            if default is None:
                self.refuse(key, value, f'but {key} must be {description}')
            return default
        if type(value) not in kinds:
            self.refuse(key, value, f'but {key} must be {description}')
        return value

    def integer(self, key, default=None):
        value = self.value(key, default, (int,), 'a whole number')
        if value < 0 or value > 2 ** 40:
            self.refuse(key, value, f'but {key} must be a whole number in a sensible range')
        return value

    def number(self, key, default=None):
        if key in self.hf_config and self.hf_config[key] is None:  # unlike in sizes, null does not mean a default
            self.refuse(key, None, f'but {key} must be a number')
        value = float(self.value(key, default, (int, float), 'a number'))
        if not math.isfinite(value):
            self.refuse(key, value, f'but {key} must be finite')
        return value

    def flag(self, key, default):
        return self.value(key, default, (bool,), 'true or false')

    def list(self, key, default, allowed):
        """The list of that key, one element for each layer."""
        found = self.value(key, default, (list,), 'a list')
        n_layer = self.integer('num_hidden_layers')
        if len(found) < n_layer or any(element not in allowed for element in found):
            self.refuse(key, found, f'but each of the {n_layer} layers must have one of {allowed}')
        return found[:n_layer]

    def only(self, key, *allowed):
        """Refuse all values of a key but `allowed`; a missing key is allowed."""
        if key in self.hf_config and self.hf_config[key] not in allowed:
            self.refuse(key, self.hf_config[key], 'which our model cannot represent')


def biases(norm=False, qkv=False, proj=False, mlp=False):
    """The arguments `bias` and `bias_of` for a model whose norms and linears have biases or not."""
    chosen = [name for name, has in (('qkv', qkv), ('proj', proj), ('mlp', mlp)) if has]
    if len(chosen) in (0, 3):
        return dict(bias=bool(chosen))
    return dict(bias=norm, bias_of='+'.join(chosen))


def shortest(pattern):
    """The shortest text that gives the pattern when repeated."""
    lengths = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in lengths if pattern == (pattern[:n] * len(pattern))[:len(pattern)])


def stated_rope(entries):
    """The entries of RoPE that stand in an object of their own."""
    # The second key is new in version 5 of transformers, which prefers the first one, as we do.
    found = [entries.value(key, {}, (dict,), 'an object') for key in ('rope_scaling', 'rope_parameters')]
    return dict(found[0] or found[1])


def read_rope(entries, theta=10000.0, share=None):
    """The arguments of RoPE. theta, share: the family's defaults; share None means that all is rotated."""
    found = stated_rope(entries)
    local = found.pop('sliding_attention', None)
    found |= found.pop('full_attention', None) or {}
    name = found.pop('rope_type', None) or found.pop('type', None) or 'default'
    found.pop('type', None)
    theta = found.pop('rope_theta', None) or entries.number('rope_theta', theta)
    found_share = (found.pop('partial_rotary_factor', None) or entries.hf_config.get('partial_rotary_factor')
                   or share or 1.0)
    if share is None and found_share != 1:
        entries.refuse('partial_rotary_factor', found_share, 'but this family rotates all features')
    if name == 'default':
        found = {}
    longest = entries.integer('max_position_embeddings')
    if name in ('yarn', 'llama3') and 'original_max_position_embeddings' not in found:
        found['original_max_position_embeddings'] = longest
    if name == 'dynamic':
        found['original_max_position_embeddings'] = longest
        longest = int(longest * found.get('factor', 1))
    scaling = {key: value for key, value in found.items() if value is not None}
    wrong = [key for key, value in scaling.items() if type(value) not in (int, float, bool)]
    if wrong or not all(type(value) in (int, float) for value in (theta, found_share)):
        entries.refuse('rope_scaling', found or dict(rope_theta=theta), 'which our model cannot represent')
    texts = [f'{key}={float(value)!r}'.removesuffix('.0') for key, value in sorted(scaling.items())]
    arguments = dict(block_size=longest, rope_theta=float(theta), rope_share=float(found_share),
                     rope_scaling='' if name == 'default' else ' '.join([str(name), *texts]))
    if not local:
        return arguments
    if local.get('rope_type', 'default') != 'default':
        entries.refuse('rope_parameters', dict(sliding_attention=local), 'which our model cannot represent')
    return arguments | dict(rope_theta_window=float(local['rope_theta']))


def write_rope(config):
    """The entries of RoPE, as versions 4 and 5 of transformers read them."""
    name, scaling = read_scaling(config.rope_scaling or 'default')
    scaling = {key: int(value) if value.is_integer() else value for key, value in scaling.items()}
    if 'truncate' in scaling:
        scaling['truncate'] = bool(scaling['truncate'])
    share = dict(partial_rotary_factor=config.rope_share) if config.rope_share != 1 else {}
    length = scaling['original_max_position_embeddings'] if name == 'dynamic' else config.block_size
    return share | dict(
        max_position_embeddings=length, rope_theta=config.rope_theta,
        rope_scaling=None if name == 'default' else dict(rope_type=name, **scaling),
        rope_parameters=dict(rope_type=name, rope_theta=config.rope_theta, **scaling, **share))


def with_two_ropes(entries, theta, local_theta):
    """Entries in which rope_parameters has the angles of both kinds of layers, as version 5 of transformers writes it.

    theta, local_theta: those of layers without and with a window, if their own entries do not say it. A scaling
    under rope_scaling is of layers without a window.
    """
    ropes = entries.value('rope_parameters', {}, (dict,), 'an object')
    if ropes.keys() - {'full_attention', 'sliding_attention'}:
        entries.refuse('rope_parameters', ropes, 'but it must have those of full_attention and sliding_attention')
    scaling = entries.value('rope_scaling', {}, (dict,), 'an object')
    if 'type' in scaling:  # of version 4, which transformers 5.24 takes for no scaling in these families
        scaling = dict(rope_type=scaling['type']) | scaling
    full = dict(rope_theta=theta) | (ropes.get('full_attention') or {}) | scaling
    local = dict(rope_theta=local_theta) | (ropes.get('sliding_attention') or {})
    ropes = dict(rope_scaling=None, rope_parameters=dict(full_attention=full, sliding_attention=local))
    return Entries(entries.hf_config | ropes, entries.source)


def with_local_rope(written, config):
    """The entries that write_rope gave, with the angles of layers with a window beside those of the others."""
    local = dict(rope_type='default', rope_theta=config.rope_theta_window or config.rope_theta)
    return written | dict(rope_parameters=dict(full_attention=written['rope_parameters'], sliding_attention=local))


def read_windows(entries, types):
    """The arguments of windows. types: 'sliding_attention' or 'full_attention' for each layer."""
    window = entries.integer('sliding_window', 0)
    pattern = ''.join('S' if kind == 'sliding_attention' else 'L' for kind in types)
    return dict(window=window, window_pattern=shortest(pattern)) if window and 'S' in pattern else {}


def read_most_windows(entries, every, window):
    """The arguments of windows where each `every`-th layer has none, unless the entries say otherwise.

    window: the family's default.
    """
    n_layer = entries.integer('num_hidden_layers')
    types = ['sliding_attention' if (i + 1) % every else 'full_attention' for i in range(n_layer)]
    types = entries.list('layer_types', types, ('sliding_attention', 'full_attention'))
    return read_windows(Entries(dict(sliding_window=window) | entries.hf_config, entries.source), types)


def layer_types(config):
    """The kind of attention of each layer, as transformers calls it."""
    return ['sliding_attention' if config.window_of(i) else 'full_attention' for i in range(config.n_layer)]


def read_llama(entries, head_width=0, tied=False, eps=1e-6, mlp='swiglu', **rope):
    """The arguments that most families name as Llama does. rope: the family's defaults for read_rope."""
    n_head = entries.integer('num_attention_heads')
    if mlp == 'swiglu':
        entries.only('hidden_act', 'silu', 'swish', None)
    return dict(
        vocab_size=entries.integer('vocab_size'), n_layer=entries.integer('num_hidden_layers'), n_head=n_head,
        n_kv_head=entries.integer('num_key_value_heads', n_head),
        head_width=entries.integer('head_dim', 0) or head_width, n_embd=entries.integer('hidden_size'),
        n_hidden=entries.integer('intermediate_size'), pos='rope', norm='rmsnorm', mlp=mlp, bias=False,
        tie_weights=entries.flag('tie_word_embeddings', tied),
        norm_eps=entries.number('rms_norm_eps', eps)) | read_rope(entries, **rope)


def write_llama(config):
    return dict(
        hidden_size=config.n_embd, intermediate_size=config.n_hidden, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head, head_dim=config.head_width,
        hidden_act='silu', attention_bias=config.has_bias('qkv'), rms_norm_eps=config.norm_eps,
        ) | write_rope(config)


def write_llama_with_share(config):
    """As `write_llama`, for families of which transformers otherwise takes a share of rotated features below 1."""
    entries, share = write_llama(config), dict(partial_rotary_factor=config.rope_share)
    return entries | share | dict(rope_parameters=entries['rope_parameters'] | share)


def read_attention_bias(entries):
    has_bias = entries.flag('attention_bias', False)
    return dict(qkv=has_bias, proj=has_bias)


def mistral_read(entries, **defaults):
    return read_llama(entries, **defaults) | read_windows(
        entries, ['sliding_attention'] * entries.integer('num_hidden_layers'))


def mistral_write(config):
    return write_llama(config) | dict(sliding_window=config.window or None)


def read_qwen_windows(entries, has_window=lambda layer, first: layer >= first):
    """The arguments of windows. has_window(layer, max_window_layers): whether a layer has one without layer_types."""
    if not entries.flag('use_sliding_window', False):
        return {}
    n_layer, first = entries.integer('num_hidden_layers'), entries.integer('max_window_layers', 28)
    types = ['sliding_attention' if has_window(layer, first) else 'full_attention' for layer in range(n_layer)]
    return read_windows(entries, entries.list('layer_types', types, ('sliding_attention', 'full_attention')))


def write_qwen(config):
    return write_llama(config) | dict(use_sliding_window=config.window > 0, layer_types=layer_types(config),
                                      sliding_window=config.window or None, max_window_layers=config.n_layer)
