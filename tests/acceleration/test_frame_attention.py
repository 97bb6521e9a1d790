"""The Triton kernels for attention within frames, run on the CPU by Triton's interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from tests.acceleration.interpreter import interpreted

HERE = Path(__file__).resolve()
SIZES = [
    (1, 2, 70, 2, 72),
    (2, 1, 200, 1, 40),
    (1, 1, 130, 2, 64),
    (1, 1, 16, 1, 8),
    (2, 2, 1, 3, 24),
    (1, 1, 33, 1, 104),
]
"""B, T, S, H, d: one and two blocks of keys, whole and not; heads that are one tile of channels, and two."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


def test_output_and_gradients_equal_the_formula_in_the_interpreter():
    assert interpreted(HERE).count("equal") == len(SIZES)


def compare(
    size: tuple[int, ...], *, device: str, dtype: torch.dtype, tolerance: float, backend: str | None = None
) -> None:
    """A linear layer and attention after it, against the formula in fp64: result, and gradients of input, weight and bias."""
    from opensora.acceleration.frame_attention import attend_packed

    B, T, S, H, d = size
    torch.manual_seed(0)
    width = H * d
    x, grad = (torch.randn(B, T, S, width, device=device, dtype=dtype) for _ in range(2))
    weight = (torch.randn(3 * width, width, device=device) / width**0.5).to(dtype)
    bias = torch.randn(3 * width, device=device, dtype=dtype)

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return attend_packed(linear(x, weight, bias.detach()), H, bias)

    results = []
    for attend, kind in (
        (torch.compile(ours, fullgraph=True, backend=backend) if backend else ours, dtype),
        (formula(H), torch.float64),
    ):
        leaves = [each.to(kind).clone().requires_grad_() for each in (x, weight, bias)]
        out = attend(*leaves)
        out.backward(grad.to(kind))
        results.append([out.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    for found, right in zip(*results, strict=True):
        error = (found - right).norm() / right.norm()
        assert error < tolerance, (size, error)


def formula(H: int):
    def attend(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = linear(x, weight, bias).unflatten(-1, (3, H, -1)).permute(3, 0, 1, 4, 2, 5)  # each [B, T, H, S, d]
        p = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return (p @ v).transpose(2, 3).flatten(-2)

    return attend


def check_compilable() -> None:
    """What torch.compile assumes about the operators is true."""
    from opensora.acceleration.frame_attention import frame_attention, frame_attention_backward

    B, T, S, H, d = SIZES[0]
    qkv, bias = torch.randn(B, T, S, 3 * H * d), torch.randn(3 * H * d)
    torch.library.opcheck(frame_attention, (qkv, None, H))
    torch.library.opcheck(frame_attention, (qkv.clone().requires_grad_(), bias.requires_grad_(), H))
    torch.library.opcheck(frame_attention_backward, (qkv[..., : H * d].clone(), qkv, *frame_attention(qkv, None, H), H))


def test_tiles_of_channels():
    from opensora.acceleration.triton_tiles import tiles

    for d in range(1, 129):
        first, second = tiles(d).values()
        assert d <= first + second <= max(16, 1 << (d - 1).bit_length())
    assert tuple(tiles(72).values()) == (64, 16)
    assert tuple(tiles(64).values()) == (64, 0)
    assert tuple(tiles(88).values()) == (64, 32)
    assert tuple(tiles(24).values()) == (32, 0)


if __name__ == "__main__":
    check_compilable()
    for size in SIZES:
        compare(size, device="cpu", dtype=torch.float32, tolerance=1e-5)
        print("equal")
