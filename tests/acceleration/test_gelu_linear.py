"""The Triton kernel of a linear layer with GELU, run on the CPU by Triton's interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, linear

from tests.acceleration.interpreter import interpreted

HERE = Path(__file__).resolve()
SIZES = [(2, 5, 8, 24), (1, 300, 16, 136), (3, 1, 4, 8), (600, 1, 8, 128)]  # B, N, inputs, outputs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


def test_output_and_gradients_equal_pytorchs_in_the_interpreter():
    assert interpreted(HERE).count("equal") == len(SIZES)


def compare(
    size: tuple[int, ...], *, device: str, dtype: torch.dtype, tolerance: float, backend: str | None = None
) -> None:
    """Output and three gradients against linear and gelu in float64."""
    from opensora.acceleration.gelu_linear import linear_gelu

    B, N, inputs, outputs = size
    torch.manual_seed(0)
    shapes = ((B, N, inputs), (outputs, inputs), (outputs,))
    leaves = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    grad = torch.randn(B, N, outputs, device=device, dtype=dtype)
    ours = torch.compile(linear_gelu, fullgraph=True, backend=backend) if backend else linear_gelu
    results = []
    for layer, kind in ((ours, dtype), (lambda *a: gelu(linear(*a), approximate="tanh"), torch.float64)):
        own = [leaf.to(kind, copy=True).requires_grad_() for leaf in leaves]
        out = layer(*own)
        out.backward(grad.to(kind))
        results.append([out.detach(), *(each.grad for each in own)])
    for got, right in zip(*results, strict=True):
        error = (got.double() - right).norm() / right.norm()
        assert error < tolerance, (size, float(error))


def check_compilable() -> None:
    """What torch.compile assumes about the operator is true."""
    from opensora.acceleration.gelu_linear import gelu_backward

    torch.library.opcheck(gelu_backward, (torch.randn(2, 300, 24), torch.randn(2, 300, 24)))


if __name__ == "__main__":
    check_compilable()
    for size in SIZES:
        compare(size, device="cpu", dtype=torch.float32, tolerance=1e-6)
        compare(size, device="cpu", dtype=torch.float32, tolerance=1e-6, backend="aot_eager")
        print("equal")
