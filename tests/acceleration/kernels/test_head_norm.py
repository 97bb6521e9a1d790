"""The kernel that normalises and rotates queries and keys, run on the CPU by Triton's interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util

import pytest
import torch
from torch import Tensor

from opensora.models.layers.attention import Attention, RMSNorm
from opensora.models.layers.positions import rotary_table
from tests.acceleration.kernels.interpreter import interpreted

SIZES = [(2, 3, 5, 4, 72), (1, 40, 7, 2, 8), (2, 1, 3, 3, 64), (1, 2, 300, 1, 24), (2, 3, 1, 4, 8), (1, 1, 1, 2, 16)]
"""B, T, S, H, d"""
PARTS = {"_FORWARD": {"BLOCK": 4}, "_BACKWARD": {"BLOCK": 4}, "_STEPS": 2}
INTERPRETED = [
    (2, 3, 2, 2, 24),
    (1, 5, 3, 2, 8),
    (2, 1, 3, 3, 12),
    (1, 2, 11, 1, 16),
    (2, 3, 1, 4, 8),
    (1, 1, 1, 2, 16),
]
"""The same in small, with blocks of 4 rows of which a program takes two."""
AXES = (None, "time", "space", "all")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("size", INTERPRETED)
def test_output_and_gradients_equal_the_layers_in_the_interpreter(size):
    from opensora.acceleration.kernels import head_norm

    with interpreted(head_norm, **PARTS):
        for axis in AXES:
            for dynamic in (False, True) if size == INTERPRETED[0] and axis in (None, "time") else ():
                torch._dynamo.reset()
                compare(
                    size, axis, device="cpu", dtype=torch.float32, tolerance=1e-6, backend="aot_eager", dynamic=dynamic
                )
            compare(size, axis, device="cpu", dtype=torch.float32, tolerance=1e-6)
            compare(size, axis, device="cpu", dtype=torch.bfloat16, tolerance=1e-2)


def test_a_table_of_another_length_is_an_error():
    layer = Attention(16, 2, axis="time", qk_norm=True)
    with pytest.raises(ValueError, match=r"7.*3 positions.*8 channels"):
        layer(torch.randn(2, 3, 5, 16), rotary_table(8, torch.arange(7)))


def place(size: tuple[int, ...], axis: str | None) -> tuple[Tensor | None, Tensor | None, int]:
    """The table for positions along an axis, the same for tokens [B, T, S, H, d], and `every`."""
    _, T, S, _, d = size
    if axis is None:
        return None, None, 1
    table = rotary_table(d, torch.arange({"time": T, "space": S, "all": T * S}[axis]) * 0.37)
    shapes = {"time": (2, T, 1, 1, d), "space": (2, 1, S, 1, d), "all": (2, T, S, 1, d)}
    return table, table.view(shapes[axis]), S if axis == "time" else 1


def compare(
    size: tuple[int, ...],
    axis: str | None,
    *,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    backend: str | None = None,
    dynamic: bool = False,
) -> None:
    """Result and gradients, of a third of a packed tensor, against our layers in fp64; the gradient comes in another order in memory."""
    from opensora.acceleration.kernels.head_norm import norm_heads

    B, T, S, H, d = size
    torch.manual_seed(0)
    packed = torch.randn(B, T, S, 3, H, d, device=device, dtype=dtype)
    norm = RMSNorm(d).to(device)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    grad = torch.randn(B, S, H, T, d, device=device, dtype=dtype).permute(0, 3, 1, 2, 4)
    table, wide, every = (each.to(device) if isinstance(each, Tensor) else each for each in place(size, axis))
    run = torch.compile(norm_heads, fullgraph=True, backend=backend, dynamic=dynamic) if backend else norm_heads
    own, weight = packed.clone().requires_grad_(), norm.weight.detach().clone().requires_grad_()
    out = run(own[:, :, :, 1], weight, norm.eps, table, every)
    out.backward(grad)
    exact, weight64 = packed.double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    x = exact[:, :, :, 1]
    right = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight64
    if wide is not None:
        cos, sin = wide.double()
        right = right * cos + right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin
    right.backward(grad.double())
    with torch.no_grad():
        without = run if device == "cuda" else norm_heads  # the interpreter cannot be compiled into a program
        assert torch.equal(without(packed[:, :, :, 1], weight, norm.eps, table, every), out), (size, axis)
    if S == 1:  # strides of an axis of one token say nothing: tokens in another order than those after a copy
        lying = packed[:, :, :, 1].permute(0, 2, 1, 3, 4).contiguous().permute(0, 2, 1, 3, 4)
        turned = (
            torch.randn(S, T, B, H, d, device=device, dtype=dtype)
            .copy_(packed[:, :, :, 1].transpose(0, 2))
            .transpose(0, 2)
        )
        for other in (lying, turned):
            assert torch.equal(norm_heads(other, weight, norm.eps, table, every), out), (size, axis, other.stride())
    for ours, theirs in ((out, right), (own.grad, exact.grad), (weight.grad, weight64.grad)):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < tolerance, (size, axis, float(error))


def test_the_layer_gives_the_kernel_what_it_gives_its_own_formula():
    import opensora.acceleration.kernels.attention as module

    calls = []
    norm_heads = module.head_norm.norm_heads
    for axis in ("time", "space", "all"):
        torch.manual_seed(0)
        layer = Attention(16, 2, axis=axis, qk_norm=True)
        torch.nn.init.normal_(layer.q_norm.weight, 1.0, 0.3)
        x = torch.randn(2, 3, 5, 16)
        rope = rotary_table(8, torch.arange({"time": 3, "space": 5, "all": 15}[axis]))
        plain = layer(x, rope)
        with interpreted(module.head_norm), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_heads_fit", lambda _: True)
            patch.setattr(module.head_norm, "norm_heads", lambda *args: calls.append(1) or norm_heads(*args))
            torch.testing.assert_close(layer(x, rope), plain)
    assert len(calls) == 6


def test_selective_checkpointing_computes_it_again_and_no_attention():
    import opensora.acceleration.kernels.attention as module
    from opensora.acceleration.checkpointing import checkpoint_activations
    from tests.acceleration.products import Products

    torch.manual_seed(0)
    counts = {}
    with interpreted(module.head_norm), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_heads_fit", lambda _: True)
        for level in ("none", "selective"):
            layer = Attention(16, 2, axis="space", qk_norm=True)
            checkpoint_activations([layer], level)
            with Products() as products:
                layer(torch.randn(2, 3, 5, 16, requires_grad=True)).sum().backward()
            counts[level] = products.count
    assert (counts["none"]["opensora::norm_heads"], counts["selective"]["opensora::norm_heads"]) == (2, 4)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert counts["none"][name] == counts["selective"][name] == 1


@pytest.mark.slow
def test_what_torch_compile_assumes_about_the_operators():
    from opensora.acceleration.kernels import head_norm

    x, weight = torch.randn(2, 3, 5, 3, 4, 8)[:, :, :, 0], torch.randn(8)
    table = rotary_table(8, torch.arange(3))
    learned = (x.clone().requires_grad_(), weight.clone().requires_grad_())
    with interpreted(head_norm):
        torch.library.opcheck(head_norm.norm_heads, (x, weight, 1e-6, table, 5))
        torch.library.opcheck(head_norm.norm_heads, (*learned, 1e-6, None, 1))
        torch.library.opcheck(head_norm.norm_heads_backward, (x, x.clone(), weight, 1e-6, table, 5))
