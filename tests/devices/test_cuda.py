"""What GPUs are given: decisions for made-up devices, and that the replaced parts compute the same."""
import pytest
import torch

from helpers import graph
from kilogpt.devices import cuda
from model import GPT, GPTConfig

pytestmark = pytest.mark.quick


@pytest.mark.parametrize('dtype, capability, has_flash, runs_grouped', [
    ('bfloat16', (8, 0), True, True), ('float16', (9, 0), True, True), ('bfloat16', (12, 0), True, True),
    ('float32', (9, 0), True, False), ('float16', (7, 5), True, False), ('float16', (7, 0), True, False),
    ('bfloat16', (8, 0), False, False)])  # PyTorch built without flash attention
def test_heads_are_repeated_where_no_fused_kernel_takes_groups(monkeypatch, dtype, capability, has_flash,
                                                               runs_grouped):
    """And then logits and gradients are those of grouped heads."""
    monkeypatch.setattr(torch.backends.cuda, 'is_flash_attention_available', lambda: has_flash)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, **options):
        seen.append((q.size(1), k.size(1), v.size(1), options['enable_gqa']))
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', noted)
    config = GPTConfig(block_size=16, vocab_size=97, n_layer=1, n_head=4, n_kv_head=2, n_embd=32, pos='rope')
    model, grouped = GPT(config), GPT(config)
    cuda.use_fused_attention(model, torch.device('cuda'), dtype)
    x = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    for one in (model, grouped):
        one(x, x).backward()
    assert seen == [(4, 2, 2, True) if runs_grouped else (4, 4, 4, False), (4, 2, 2, True)]
    for (name, parameter), (_, other) in zip(model.named_parameters(), grouped.named_parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text: f'{name}: {text}')


@pytest.mark.parametrize('dtype, capability, width, is_grouped', [
    ('bfloat16', (9, 0), 24, True), ('bfloat16', (8, 0), 24, True), ('bfloat16', (7, 5), 24, False),
    ('float32', (9, 0), 24, False), ('float64', (9, 0), 24, False),
    ('bfloat16', (9, 0), 20, False)])  # rows of 40 bytes
def test_experts_products_are_grouped_where_the_gpu_has_the_kernel(monkeypatch, dtype, capability, width,
                                                                   is_grouped):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    model = GPT(GPTConfig(block_size=16, vocab_size=97, n_layer=1, n_head=4, n_embd=32, mlp='moe',
                          expert_hidden=width)).to(getattr(torch, dtype))
    cuda.use_grouped_products(model, torch.device('cuda'))
    x = torch.randn(1, 16, 32, dtype=getattr(torch, dtype), requires_grad=True)
    y = model.transformer.h['0'].mlp(x)
    assert ('GroupedMm' in graph(y)) == is_grouped
