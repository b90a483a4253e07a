"""Rotary position embeddings (RoPE, Su et al. 2021) and the scalings that extend a model's context.

Imports torch alone. The scalings have the names and entries of `transformers`, so that a model card's
`rope_scaling` can be typed as it is: 'yarn factor=4 original_max_position_embeddings=32768'.

Shapes in comments: B batch, T positions, H heads, D head width, R rotated features.
"""
import math

import torch

# {scaling: (entries that it needs, entries that it may have)}
SCALINGS = dict(
    linear=({'factor'}, set()),
    dynamic=({'factor', 'original_max_position_embeddings'}, set()),
    yarn=({'factor', 'original_max_position_embeddings'},
          {'beta_fast', 'beta_slow', 'attention_factor', 'mscale', 'mscale_all_dim', 'truncate'}),
    llama3=({'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'}, set()),
)


def read_scaling(text):
    """(name, {entry: number}) of a rope_scaling such as 'linear factor=4'. ValueError if it is malformed.

    Commas may stand for spaces, which a shell would want in quotes.
    """
    name, *pairs = text.replace(',', ' ').split()
    entries = {}
    for pair in pairs:
        key, _, value = pair.partition('=')
        try:
            entries[key] = float(value)
        except ValueError:
            raise ValueError(f'rope_scaling is {text!r}: {pair!r} is not an entry such as factor=4') from None
    return name, entries


def is_dynamic(text):
    """Whether a rope_scaling turns queries and keys by the length of the whole text."""
    return bool(text.strip()) and read_scaling(text)[0] == 'dynamic'


def check_scaling(text):
    """Raise ValueError if rope_scaling is neither '' nor a scaling with all its entries."""
    if not text.strip():
        return
    name, entries = read_scaling(text)
    if name not in SCALINGS:
        raise ValueError(f'rope_scaling is {text!r}: it must begin with one of {", ".join(SCALINGS)}')
    needed, optional = SCALINGS[name]
    if needed - entries.keys():
        missing = ', '.join(sorted(needed - entries.keys()))
        raise ValueError(f'rope_scaling is {text!r}: {name} also needs {missing}')
    if entries.keys() - needed - optional:
        unknown = ', '.join(sorted(entries.keys() - needed - optional))
        raise ValueError(f'rope_scaling is {text!r}: {name} has no {unknown}')
    if not entries['factor'] >= 1 or not all(math.isfinite(value) for value in entries.values()):
        raise ValueError(f'rope_scaling is {text!r}: all entries must be finite, and factor at least 1')


def rope_tables(config, positions, length):
    """{name of ModelOptions.rope_of: (cos, sin)}, each (B, T, 1, R/2), for `rotate`.

    positions (B, T): the positions to rotate. length: of the whole sequence, a number or a tensor; only the
    scaling 'dynamic' depends on it.
    """
    if config.pos != 'rope':
        return {}
    tables = {'whole': _table(config, config.rope_theta, config.rope_scaling, positions, length)}
    if config.rope_theta_window:
        tables['window'] = _table(config, config.rope_theta_window, '', positions, length)
    return tables


def _table(config, theta, scaling, positions, length):
    exponents = torch.arange(0, config.rotary_width, 2, device=positions.device) / config.rotary_width
    magnitude = 1.0
    if not scaling.strip():
        frequencies = theta ** -exponents
    else:
        name, entries = read_scaling(scaling)
        if name == 'linear':  # position interpolation (Chen et al. 2023)
            frequencies = theta ** -exponents / entries['factor']
        elif name == 'dynamic':
            frequencies = _dynamic(theta, exponents, length, **entries)
        elif name == 'llama3':
            frequencies = _llama3(theta ** -exponents, **entries)
        else:
            frequencies, magnitude = _yarn(theta, exponents, **entries)
    angles = positions[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)


def _dynamic(theta, exponents, length, factor, original_max_position_embeddings):
    """Frequencies that fall with the length of the text, beyond the original one (dynamic NTK scaling)."""
    original, R = original_max_position_embeddings, 2 * len(exponents)
    length = torch.as_tensor(length, device=exponents.device).clamp(min=original)
    stretched = theta * (factor * length / original - (factor - 1)) ** (R / max(R - 2, 1))
    return stretched ** -exponents


def _llama3(frequencies, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    """Long wavelengths times `factor`, short ones as they are, a mixture between (Llama 3.1)."""
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)  # in the original context
    share = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _yarn(theta, exponents, factor, original_max_position_embeddings, beta_fast=32.0, beta_slow=1.0,
          attention_factor=None, mscale=0.0, mscale_all_dim=0.0, truncate=1.0):
    """(frequencies, factor of cos and sin) of YaRN (Peng et al. 2023, 3.2 to 3.4).

    Features with more than beta_fast turns in the original context stay as they are, those with fewer than
    beta_slow are interpolated, and between these the share falls linearly with the number of the feature.
    """
    R = 2 * len(exponents)

    def feature_with(turns):
        wavelength = original_max_position_embeddings / (turns * 2 * math.pi)
        return R * math.log(wavelength) / (2 * math.log(theta))

    low, high = feature_with(beta_fast), feature_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    numbers = torch.arange(len(exponents), device=exponents.device)
    interpolated = ((numbers - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = theta ** -exponents
    frequencies = interpolated * frequencies / factor + (1 - interpolated) * frequencies

    def magnitude(scale):
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if attention_factor is None:
        attention_factor = magnitude(1.0)
        if mscale and mscale_all_dim:  # DeepSeek's variant
            attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    return frequencies, attention_factor


def rotate(x, cos, sin):
    """Rotate pairs (i, i + R/2) of the first R features of x (B, T, H, D). cos, sin (B, T, 1, R/2). float32."""
    R = 2 * cos.size(-1)
    rest = [x[..., R:]] if R < x.size(-1) else []
    first, second = x[..., :R].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *rest), dim=-1)
