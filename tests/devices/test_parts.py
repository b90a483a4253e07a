"""GPT.replaceable names parts that exist, and replace_parts replaces them all."""
import pytest

from kilogpt.devices.parts import find_parts, replace_parts
from kilogpt.layers.preferences import use_preferences
from model import GPT, GPTConfig

pytestmark = pytest.mark.quick

# The first block is dense, the second has experts.
MIXED = GPTConfig(block_size=16, vocab_size=97, n_layer=2, n_head=4, n_embd=32, mlp='moe', moe_first_layer=1,
                  n_shared_experts=1, attention_conv=3, mlp_conv=3)


# What does not go with the keys of MIXED.
OTHERS = GPTConfig(block_size=16, vocab_size=97, n_layer=2, n_head=4, n_embd=32, mixer_pattern='DA', pos='rope',
                   kv_latent=24, attention_sinks=True, mlp='moe', expert_bias=True)


def test_every_path_of_the_table_leads_to_a_part():
    names_of = {kind: [] for kind in GPT.replaceable}
    for config in (MIXED, OTHERS):
        model = GPT(config, seed=None)
        use_preferences(model, 0.1)
        names = {module: name for name, module in model.named_modules()}
        for kind in model.replaceable:
            found = [f'{names[module]}.{name}' for module, name in find_parts(model, kind)]
            assert len(found) == len(set(found))
            names_of[kind] += found
    for kind, paths in GPT.replaceable.items():
        for path in paths:
            assert any(name.endswith(path) for name in names_of[kind]), path


def test_parts_are_found_in_each_block_that_has_them():
    model = GPT(MIXED, seed=None)
    first, second = model.transformer.h.values()
    assert find_parts(model, 'attention') == [(first.attn, 'dot_product'), (second.attn, 'dot_product')]
    assert find_parts(model, 'activation') == [(first.mlp, 'activate'), (second.mlp.shared, 'activate')]
    assert find_parts(model, 'dispatch') == [(second.mlp.routed, 'dispatch')]
    assert find_parts(model, 'loss') == [(model, 'loss')]


def test_parts_are_replaced_by_what_is_built_from_them():
    model = GPT(MIXED, seed=None)
    matrices = model.transformer.h['1'].mlp.routed.experts.matrices
    replace_parts(model, 'matrices', lambda part: (part, 'replaced'))
    assert model.transformer.h['1'].mlp.routed.experts.matrices == (matrices, 'replaced')
