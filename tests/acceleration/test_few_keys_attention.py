"""The Triton kernels for attention to few keys, run on the CPU by Triton's interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.acceleration.test_short_attention import with_gradient

HERE = Path(__file__).resolve()
SELF = [(2, 2, 40, 72), (1, 3, 33, 24), (1, 1, 130, 64), (1, 2, 1, 8), (2, 2, 17, 96)]  # B, H, N, d
CROSS = [(2, 2, 70, 7, 72), (3, 1, 200, 20, 40), (1, 2, 16, 150, 64)]  # B, H, N, L, d

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


def test_output_and_gradients_equal_the_formula_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[2])}
    run = subprocess.run([sys.executable, str(HERE)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("equal") == len(SELF) + 2 * len(CROSS)


def compare_self(size: tuple[int, ...], device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Packed self-attention against the formula."""
    from opensora.acceleration.few_keys_attention import few_keys_attention_packed

    B, H, N, d = size
    torch.manual_seed(0)
    qkv = torch.randn(B, N, 3 * H * d, device=device, dtype=dtype)
    grad = torch.randn(B, N, H * d, device=device, dtype=dtype)

    def expected(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, H, d)).permute(2, 0, 3, 1, 4).unbind(0)
        return formula(q, k, v, None).transpose(1, 2).flatten(-2)

    ours = with_gradient(lambda x: few_keys_attention_packed(x, H)[0], qkv, grad)
    for mine, right in zip(ours, with_gradient(expected, qkv, grad), strict=True):
        torch.testing.assert_close(mine, right, atol=tolerance, rtol=tolerance)


def compare_cross(size: tuple[int, ...], *, masked: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Three tensors, with a mask whose last row sees nothing, against the formula."""
    from opensora.acceleration.few_keys_attention import few_keys_attention

    B, H, N, L, d = size
    torch.manual_seed(0)
    leaves = [torch.randn(B, n, H, d, device=device, dtype=dtype) for n in (N, L, L)]
    grad = torch.randn(B, H, N, d, device=device, dtype=dtype)
    mask = None
    if masked:
        mask = torch.arange(L, device=device)[None] < torch.arange(B, 0, -1, device=device)[:, None] * L // B
        mask[-1] = B == 1
    results = []
    for attend in (lambda *x: few_keys_attention(*x)[0], formula):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        out = attend(*(each.transpose(1, 2) for each in inputs), mask)
        out.backward(grad)
        results.append([out.detach().float(), *(each.grad.float() for each in inputs)])
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, atol=tolerance, rtol=tolerance)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -1e30)
    p = scores.softmax(-1)
    if mask is not None:
        p = p * mask[:, None, None]
    return (p @ v.float()).to(v.dtype)


if __name__ == "__main__":
    for size in SELF:
        compare_self(size, "cpu", torch.float32, 1e-5)
        print("equal")
    for size in CROSS:
        for masked in (False, True):
            compare_cross(size, masked=masked, device="cpu", dtype=torch.float32, tolerance=1e-5)
            print("equal")
