"""A linear layer followed by GELU whose backward pass sums the bias gradient while it computes GELU's.

The gradient of a linear layer's bias is the column sum of its output's gradient. Left to the compiler, that is one more
pass over the widest tensor of a block, [B N, 4 D], straight after GELU's backward pass wrote it. Here the kernel that
writes it adds up the columns on the way; each program sums some rows in fp32, and the few partial sums are added after
it, so the result is deterministic. The forward pass is PyTorch's own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import gelu, linear

ROWS, COLUMNS = 256, 128
"""Of the part that a program takes."""
_BLOCK_ROWS = 32
_WARPS = 4


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x W^T + b), GELU in its tanh form, for `x [..., in]`, `weight [out, in]`, `bias [out]` -> [..., out]."""
    return _Gelu.apply(linear(x, weight, bias.detach()), bias)


class _Gelu(torch.autograd.Function):
    """GELU of `h`, which holds `bias` already; the bias' gradient goes this way, not through the linear layer."""

    @staticmethod
    def forward(ctx, h: Tensor, bias: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h)
        ctx.bias_dtype = bias.dtype
        return gelu(h, approximate="tanh")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        dh, sums = gelu_backward(grad.contiguous(), ctx.saved_tensors[0].contiguous())
        return dh, sums.sum(0).to(ctx.bias_dtype)


@torch.library.custom_op("opensora::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """GELU's backward pass, both contiguous [..., C].

    Returns:
        The gradient of h, and fp32 sums [P, C] of it over parts of the rows.
    """
    C = h.shape[-1]
    rows = h.numel() // C
    dh, sums = torch.empty_like(h), h.new_empty(triton.cdiv(rows, ROWS), C, dtype=torch.float32)
    _gelu_backward_kernel[(len(sums), triton.cdiv(C, COLUMNS))](
        grad, h, dh, sums, rows, C, ROWS=ROWS, BLOCK_ROWS=_BLOCK_ROWS, COLUMNS=COLUMNS, num_warps=_WARPS
    )
    return dh, sums


@gelu_backward.register_fake
def _(grad: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    C = h.shape[-1]
    parts = (h.numel() // C + ROWS - 1) // ROWS
    return torch.empty_like(h), h.new_empty(parts, C, dtype=torch.float32)


@triton.jit
def _gelu_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    grad_ptr, h_ptr, dh_ptr, sums_ptr, num_rows, C,
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)  # a batch of long videos has more than 2^31 activations
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    for first in range(0, ROWS, BLOCK_ROWS):
        rows = part * ROWS + first + tl.arange(0, BLOCK_ROWS)
        inside = (rows < num_rows)[:, None] & (columns < C)[None, :]
        where = rows[:, None] * C + columns[None, :]
        x = tl.load(h_ptr + where, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + where, mask=inside, other=0.0).to(tl.float32)
        # gelu(x) = x s with s = sigmoid(2 u), since 1 + tanh(u) = 2 sigmoid(2 u); u = sqrt(2 / pi) (x + 0.044715 x^3)
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = s + x * s * (1 - s) * (1.5957691216057308 + 0.2140644488178735 * x * x)  # 3 x 0.044715 x 1.5957...
        dh = grad * slope
        tl.store(dh_ptr + where, dh.to(dh_ptr.dtype.element_ty), mask=inside)
        total += dh
    tl.store(sums_ptr + part * C + columns, tl.sum(total, 0), mask=columns < C)
