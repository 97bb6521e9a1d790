"""adaLN's kernels, run on the CPU by Triton's interpreter, against PyTorch in float64. On a GPU: tests/test_gpu.py."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from tests.acceleration.kernels.interpreter import interpreted

SIZES = [(2, 3, 40, 24, 1), (2, 3, 70, 24, 3), (1, 1, 200, 136, 1), (3, 4, 1, 8, 4), (1, 2, 3, 160, 1)]
"""B, T, S, D, and the frames that have vectors of their own. Parts of 64 rows: some end inside one, some fill several."""
PARTS = {"ROWS": 8, "COLUMNS": 32, "_GATE_ROWS": 4}
INTERPRETED = [(2, 3, 2, 24, 1), (2, 3, 9, 24, 3), (1, 1, 17, 40, 1), (3, 4, 1, 8, 4)]
"""The same in small, with parts of 8 rows and of 32 columns."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")


@pytest.mark.slow
@pytest.mark.parametrize("size", INTERPRETED)
def test_output_and_gradients_equal_pytorchs_in_the_interpreter(size):
    from opensora.acceleration.kernels import adaln

    torch._dynamo.reset()
    with interpreted(adaln, **PARTS):
        for backend in (None, "aot_eager") if size in INTERPRETED[:2] else (None,):
            compare(size, device="cpu", dtype=torch.float32, tolerance=1e-6, backend=backend)
            compare(size, device="cpu", dtype=torch.bfloat16, tolerance=1e-2, backend=backend, layer=wide)


def plain(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """A residual branch: what it computes is that tokens are squared."""
    h = layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
    return x + gate * h.square()


def fused(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """The same with the kernels."""
    from opensora.acceleration.kernels.adaln import gate_residual, norm_modulate

    dtype = x.dtype
    x, h = norm_modulate(x, shift, scale, 1e-6, dtype)
    return gate_residual(x, gate, h.square(), dtype)


def wide(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """The same with a sum in fp32 before and after, as in a compiled block."""
    from opensora.acceleration.kernels.adaln import gate_residual, norm_modulate

    x, h = norm_modulate(x.float(), shift, scale, 1e-6, x.dtype)
    return gate_residual(x, gate, h.square(), torch.float32)


def compare(
    size: tuple[int, ...],
    *,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    backend: str | None = None,
    layer: Callable[..., Tensor] = fused,
) -> None:
    """Output and four gradients against float64; vectors are fp32, as in training."""
    B, T, S, D, frames = size
    torch.manual_seed(0)
    x = torch.randn(B, T, S, D, device=device, dtype=dtype) + 0.5
    leaves = [x, *(torch.randn(B, frames, 1, D, device=device) / 2 for _ in range(3))]
    grad = torch.randn_like(x)
    ours = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    results = []
    for compute, exact in ((ours, False), (plain, True)):
        own = [leaf.to(torch.float64 if exact else leaf.dtype, copy=True).requires_grad_() for leaf in leaves]
        out = compute(*own)
        out.backward(grad.to(out.dtype))
        results.append([out.detach(), *(each.grad for each in own)])
    for got, right in zip(*results, strict=True):
        error = (got.double() - right).norm() / right.norm()
        assert error < tolerance, (size, float(error))


@pytest.mark.slow
def test_what_torch_compile_assumes_about_the_operators():
    from opensora.acceleration.kernels import adaln

    x, vector = torch.randn(2, 3, 9, 24), torch.randn(2, 3, 1, 24)
    mean, rstd = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    with interpreted(adaln, **PARTS):
        torch.library.opcheck(adaln.norm_modulate_backward, (x, x + 1, x * 2, mean, rstd, vector))
        torch.library.opcheck(adaln.gate_backward, (x, x + 1, vector))
