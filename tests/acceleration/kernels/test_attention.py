"""The attention dispatcher: every kernel computes the same function."""

import pytest
import torch

import opensora.acceleration.kernels.attention as module
from opensora.acceleration.kernels.attention import KERNELS, attention, kernel_from_flag, layer_norm


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_equal_the_formula_in_fp64(kernel, masked):
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    mask = torch.rand(2, 9) > 0.4 if masked else None
    scores = q.double() @ k.double().transpose(-1, -2) / 8**0.5
    if mask is not None:
        mask[:, 0] = True
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    expected = (scores.softmax(-1) @ v.double()).float()
    torch.testing.assert_close(attention(q, k, v, mask, kernel), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(kernel):
    q = torch.randn(2, 1, 3, 4, requires_grad=True)
    mask = torch.tensor([[False, False], [True, False]])
    out = attention(q, torch.randn(2, 1, 2, 4), torch.randn(2, 1, 2, 4), mask, kernel)
    assert not out[0].any()
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", ["tokens", "heads"])
def test_queries_in_parts_give_the_same(masked, order):
    shape = (2, 24, 3, 8) if order == "tokens" else (2, 3, 24, 8)  # of which dimension the tokens are, in memory
    q = torch.randn(shape).transpose(1, 2) if order == "tokens" else torch.randn(shape)
    k, v = torch.randn(2, 2, 3, 5, 8)
    seen = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])
    allowed = seen[:, None, None, :] if masked else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = module._sdpa_in_parts(*leaves, allowed, parts=4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, weight)
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=allowed)
    for a, b in zip(grads, torch.autograd.grad(out, plain, weight), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("size", "idle"),
    [
        ((1, 16, 54000, 300), True),  # one video, a caption
        ((5, 16, 54000, 300), True),
        ((6, 16, 54000, 300), False),  # 288 programs
        ((1, 16, 8184, 300), False),  # few queries
        ((1, 16, 54001, 300), False),  # no eight parts
        ((1, 2, 16384, 16384), False),  # self-attention of the heads that one of eight processes has
    ],
)
def test_who_leaves_a_gpu_idle(size, idle, monkeypatch):
    B, H, N, L = size
    monkeypatch.setattr(module, "_on_gpu", lambda _: True)
    q, k = torch.empty(B, H, N, 8, device="meta"), torch.empty(B, H, L, 8, device="meta")
    assert module._leaves_a_gpu_idle(q, k) == idle
    with torch.no_grad():
        assert not module._leaves_a_gpu_idle(q, k)


def test_unknown_kernel_lists_the_known():
    with pytest.raises(ValueError, match="auto, sdpa, math"):
        attention(*torch.randn(3, 1, 1, 2, 2).unbind(0), kernel="flush")


def test_the_seeds_flags():
    flags = [kernel_from_flag(enable_flash_attn=flag) for flag in (None, True, False)]
    assert flags == ["auto", "auto", "math"]


def test_layer_norm_falls_back_with_a_warning():
    x = torch.randn(2, 8)
    with pytest.warns(UserWarning, match="apex is not installed"):
        norm = layer_norm(8, fused=True)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (8,), eps=1e-6))
