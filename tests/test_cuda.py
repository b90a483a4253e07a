"""What GPUs are given: decisions for made-up devices, and that the replaced parts compute the same."""
import pytest
import torch

from kilogpt import cuda
from model import GPT, Experts, GPTConfig, loop_over_experts

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
    ('float32', (9, 0), 24, False), ('float16', (9, 0), 24, False),
    ('bfloat16', (9, 0), 20, False)])  # rows of 40 bytes
def test_experts_products_are_grouped_where_the_gpu_has_the_kernel(monkeypatch, dtype, capability, width,
                                                                   is_grouped):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    model = GPT(GPTConfig(block_size=16, vocab_size=97, n_layer=1, n_head=4, n_embd=32, mlp='moe',
                          expert_hidden=width), seed=None)
    cuda.use_grouped_products(model, torch.device('cuda'), dtype)
    products = model.transformer.h['0'].mlp.routed.experts.products
    assert products is (cuda.grouped_products if is_grouped else loop_over_experts)


@pytest.mark.parametrize('form', ['swiglu', 'relu2'])
@pytest.mark.parametrize('dtype, sizes, tolerance', [
    (torch.float32, [5, 0, 11, 1], 1e-6), (torch.bfloat16, [0, 3, 29, 0], 2e-2), (torch.float32, [0] * 4, 0)])
def test_grouped_products_equal_the_loop(form, dtype, sizes, tolerance):
    """Outputs and all gradients, which are zeros for an expert that no token goes to, or where none came."""
    config = GPTConfig(n_embd=32, n_head=4, mlp='moe', n_experts=4, expert_hidden=24, expert_mlp=form)
    generator, results = torch.Generator().manual_seed(0), []
    experts = Experts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3, generator=generator)
    experts.to(dtype)
    x = torch.randn(sum(sizes), 32, generator=generator).to(dtype)
    for experts.products in (loop_over_experts, cuda.grouped_products):
        leaves = [x.clone().requires_grad_(), *experts.parameters()]
        y = experts(leaves[0], torch.tensor(sizes).cumsum(0))
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for found, expected in zip(*results):
        assert found.shape == expected.shape and found.dtype == dtype
        scale = max(1, expected.abs().amax().item() if expected.numel() else 1)
        torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=0)
    for gradients in results[1][2:]:
        assert [bool(matrix.any()) for matrix in gradients] == [size > 0 for size in sizes]
