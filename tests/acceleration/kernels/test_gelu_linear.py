"""The Triton kernel of a linear layer with GELU, run on the CPU by Triton's interpreter. On a GPU: tests/test_gpu.py."""

import importlib.util

import pytest
import torch
from torch.nn.functional import gelu, linear

from tests.acceleration.kernels.interpreter import interpreted

SIZES = [(2, 5, 8, 24), (1, 300, 16, 136), (3, 1, 4, 8), (600, 1, 8, 128)]  # B, N, inputs, outputs
PARTS = {"ROWS": 8, "COLUMNS": 16, "_BLOCK_ROWS": 4}
INTERPRETED = [(2, 5, 8, 24), (1, 19, 4, 40), (3, 1, 4, 8), (16, 1, 8, 16)]
"""The same in small, with parts of 8 rows and 16 columns."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


@pytest.mark.parametrize("size", INTERPRETED)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # the sigmoid of the interpreter
def test_output_and_gradients_equal_pytorchs_in_the_interpreter(size):
    from opensora.acceleration.kernels import gelu_linear

    torch._dynamo.reset()
    with interpreted(gelu_linear, **PARTS):
        compare(size, device="cpu", dtype=torch.float32, tolerance=1e-6)
        compare(size, device="cpu", dtype=torch.float32, tolerance=1e-6, backend="aot_eager")


def compare(
    size: tuple[int, ...], *, device: str, dtype: torch.dtype, tolerance: float, backend: str | None = None
) -> None:
    """Output and three gradients against linear and gelu in float64."""
    from opensora.acceleration.kernels.gelu_linear import linear_gelu

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


def test_what_torch_compile_assumes_about_the_operator():
    from opensora.acceleration.kernels import gelu_linear

    with interpreted(gelu_linear, **PARTS):
        torch.library.opcheck(gelu_linear.gelu_backward, (torch.randn(2, 9, 24), torch.randn(2, 9, 24)))
