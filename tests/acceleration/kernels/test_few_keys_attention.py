"""The Triton kernels for attention to few keys, run on the CPU by Triton's interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from tests.acceleration.kernels.interpreter import interpreted

SIZES = [(2, 2, 70, 7, 72), (3, 1, 200, 20, 40), (1, 2, 16, 120, 64), (1, 1, 1, 1, 8)]  # B, H, N, L, d
PARTS = {"_BLOCK": {"BLOCK_Q": 16}, "_PROGRAMS": {"forward": 4, "backward": 4}}
INTERPRETED = [(2, 2, 18, 7, 24), (3, 1, 40, 20, 40), (1, 2, 16, 16, 16), (1, 1, 1, 1, 8)]
"""With blocks of 16 queries, of which a program takes as many as it must: one, two or what is left of two."""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton"),
    pytest.mark.skipif(
        TorchVersion(torch.__version__) < (2, 14) and TorchVersion(np.__version__) >= (2, 5),
        reason="the interpreter of Triton 3.6 makes numbers of arrays of one, which numpy 2.5 refuses",
    ),
]


@pytest.mark.parametrize("size", INTERPRETED)
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_gradients_equal_the_formula_in_the_interpreter(size, masked):
    from opensora.acceleration.kernels import few_keys_attention as module

    with interpreted(module, **PARTS):
        compare(size, masked=masked, device="cpu", dtype=torch.float32, tolerance=1e-5)
        without_gradients(size, masked=masked, device="cpu", dtype=torch.float32)


def compare(size: tuple[int, ...], *, masked: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Three tensors, with a mask whose last row sees nothing, against the formula."""
    from opensora.acceleration.kernels.few_keys_attention import few_keys_attention

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
    from opensora.acceleration.kernels.few_keys_attention import attend, few_keys_attention

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


@pytest.mark.slow
def test_what_torch_compile_assumes_about_the_operators():
    from opensora.acceleration.kernels import few_keys_attention as module

    attention, attention_backward = module.few_keys_attention, module.few_keys_attention_backward
    B, H, N, L, d = INTERPRETED[0]
    q, k, v = (torch.randn(B, n, H, d).transpose(1, 2) for n in (N, L, L))
    mask = torch.ones(B, L, dtype=torch.bool)
    with interpreted(module, **PARTS):
        torch.library.opcheck(attention, (q, k, v, mask))
        torch.library.opcheck(attention, (*(x.detach().requires_grad_() for x in (q, k, v)), None))
        torch.library.opcheck(attention_backward, (q, q, k, v, mask, *attention(q, k, v, mask)))
