"""The Triton kernels for attention to few keys, run on the CPU by Triton's interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.acceleration.interpreter import interpreted

HERE = Path(__file__).resolve()
SIZES = [(2, 2, 70, 7, 72), (3, 1, 200, 20, 40), (1, 2, 16, 120, 64), (1, 1, 1, 1, 8)]  # B, H, N, L, d

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


def test_output_and_gradients_equal_the_formula_in_the_interpreter():
    assert interpreted(HERE).count("equal") == 2 * len(SIZES)


def compare(size: tuple[int, ...], *, masked: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
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


def without_gradients(
    size: tuple[int, ...], *, masked: bool, device: str, dtype: torch.dtype, backend: str | None = None
) -> None:
    """What sampling calls, eager or compiled, gives the operator's result bit for bit."""
    from opensora.acceleration.few_keys_attention import attend, few_keys_attention

    B, H, N, L, d = size
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, H, d, device=device, dtype=dtype).transpose(1, 2) for n in (N, L, L))
    mask = torch.rand(B, L, device=device) < 0.5 if masked else None
    run = torch.compile(attend, fullgraph=True, backend=backend) if backend else attend
    expected = few_keys_attention(q, k, v, mask)[0]
    with torch.no_grad():
        assert torch.equal(run(q, k, v, mask), expected), size
    assert torch.equal(attend(q.clone().requires_grad_(), k, v, mask), expected), size


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -1e30)
    p = scores.softmax(-1)
    if mask is not None:
        p = p * mask[:, None, None]
    return (p @ v.float()).to(v.dtype)


def check_compilable() -> None:
    """What torch.compile assumes about the operators is true."""
    from opensora.acceleration.few_keys_attention import few_keys_attention, few_keys_attention_backward

    B, H, N, L, d = SIZES[0]
    q, k, v = (torch.randn(B, n, H, d).transpose(1, 2) for n in (N, L, L))
    mask = torch.ones(B, L, dtype=torch.bool)
    torch.library.opcheck(few_keys_attention, (q, k, v, mask))
    torch.library.opcheck(few_keys_attention, (*(x.requires_grad_() for x in (q, k, v)), None))
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(few_keys_attention_backward, (q, q, k, v, mask, *few_keys_attention(q, k, v, mask)))


if __name__ == "__main__":
    check_compilable()
    for size in SIZES:
        for masked in (False, True):
            compare(size, masked=masked, device="cpu", dtype=torch.float32, tolerance=1e-5)
            without_gradients(size, masked=masked, device="cpu", dtype=torch.float32)
            print("equal")
