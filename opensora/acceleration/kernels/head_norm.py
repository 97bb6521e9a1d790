"""RMS normalisation of queries and keys with rotary positions, as one Triton kernel for each pass.

A head is a row of some 64 to 128 channels, and a long video has millions. Compilers make reductions of them that take two rows
a program, or read each row twice. Here a program takes a block of rows, and the backward pass gives the gradients of rows and
weights at once, the weights' as fp32 sums for each program, which are added after it: the result is deterministic. All arithmetic is
fp32. See docs/explanation/benchmarks/goals.md for the gain.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HEAD_DIM = 256
"""A program holds whole rows in registers."""
_FORWARD, _BACKWARD = {"BLOCK": 32, "num_warps": 4}, {"BLOCK": 16, "num_warps": 8}
"""Rows of a program at a time, and its warps: the fastest of some sixty on an H200, or within 5 % of it."""
_STEPS = 16
"""Blocks of rows whose gradients of the weights a program sums up."""


@torch.library.custom_op("opensora::norm_heads", mutates_args=())
def norm_heads(x: Tensor, weight: Tensor, eps: float, table: Tensor | None, every: int) -> Tensor:
    """`x / rms(x) * weight`, rotated by `table`: `opensora.models.layers`' RMSNorm and apply_rotary.

    Args:
        x: [B, T, S, H, d] in any strides, d up to `MAX_HEAD_DIM`.
        weight: [d].
        eps: added to the mean of squares.
        table: rotary table [2, N, d] in fp32, see `opensora.models.layers.positions`; None = no positions.
        every: token i of the B T S is at position `(i // every) % N`.

    Returns:
        [B, T, S, H, d], contiguous, in x's dtype.
    """
    x, token = _by_token(x)
    H, d = x.shape[-2:]
    rows, out = x.numel() // d, x.new_empty(x.shape)
    _norm_heads_forward_kernel[(triton.cdiv(rows, _FORWARD["BLOCK"]),)](
        x, weight.contiguous(), *_positions(table, every, x), out, rows, token, x.stride(3), eps,
        H=H, d=d, **_sizes(d, table, token, x.stride(3)), **_FORWARD,
    )  # fmt: skip
    return out


@norm_heads.register_fake
def _(x: Tensor, weight: Tensor, eps: float, table: Tensor | None, every: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("opensora::norm_heads_backward", mutates_args=())
def norm_heads_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, table: Tensor | None, every: int
) -> tuple[Tensor, Tensor]:
    """The gradient of x, contiguous, and fp32 sums [P, d] of the weight's over parts of the rows."""
    (grad, grad_token), (x, token) = _by_token(grad), _by_token(x)
    H, d = x.shape[-2:]
    rows, dx = x.numel() // d, x.new_empty(x.shape)
    parts = triton.cdiv(rows, _BACKWARD["BLOCK"] * _STEPS)
    weights, strides = x.new_empty(parts, d, dtype=torch.float32), (token, x.stride(3), grad_token, grad.stride(3))
    _norm_heads_backward_kernel[(parts,)](
        grad, x, weight.contiguous(), *_positions(table, every, x), dx, weights, rows, *strides, eps,
        STEPS=_STEPS, H=H, d=d, **_sizes(d, table, *strides), **_BACKWARD,
    )  # fmt: skip
    return dx, weights


@norm_heads_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float, table: Tensor | None, every: int) -> tuple[Tensor, Tensor]:
    rows, d = x.numel() // x.shape[-1], x.shape[-1]
    parts = (rows + _BACKWARD["BLOCK"] * _STEPS - 1) // (_BACKWARD["BLOCK"] * _STEPS)
    return x.new_empty(x.shape), x.new_empty(parts, d, dtype=torch.float32)


def _save(ctx, inputs: tuple[Tensor, Tensor, float, Tensor | None, int], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    x, weight, ctx.eps, table, ctx.every = inputs
    ctx.save_for_backward(x, weight, table)


def _grad(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[no-untyped-def]
    x, weight, table = ctx.saved_tensors
    dx, weights = norm_heads_backward(grad.to(x.dtype), x, weight, ctx.eps, table, ctx.every)
    return dx, weights.sum(0).to(weight.dtype), None, None, None


norm_heads.register_autograd(_grad, setup_context=_save)


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """x itself, if its tokens follow each other at one distance, as those of a linear layer's output do, else a copy; and the distance."""
    (B, T, S, H, d), (b, t, s, _, last) = x.shape, x.stride()
    axes = [(stride, before) for n, stride, before in ((S, s, 1), (T, t, S), (B, b, T * S)) if n > 1]
    token = axes[0][0] // axes[0][1] if axes else H * d  # the stride of an axis of length 1 says nothing
    if last == 1 and all(stride == token * before for stride, before in axes):
        return x, token
    return x.new_empty(x.shape).copy_(x), H * d  # `contiguous` leaves such strides as they are


def _positions(table: Tensor | None, every: int, placeholder: Tensor) -> tuple[Tensor, int, int]:
    return (placeholder, 1, 1) if table is None else (table.contiguous(), every, table.shape[1])


def _sizes(d: int, table: Tensor | None, *strides: int) -> dict[str, int | bool]:
    """What the kernels know when they are compiled; ALIGN says whether rows can be read 16 bytes at a time."""
    return {"ALIGN": math.gcd(8, d, *strides), "CHANNELS": triton.next_power_of_2(d), "ROTATE": table is not None}


@triton.jit
def _other_of_pair(x, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Channels 0, 1, 2, 3, ... in the order 1, 0, 3, 2, ..."""
    first, second = tl.split(tl.reshape(x, (BLOCK, CHANNELS // 2, 2)))
    return tl.reshape(tl.join(second, first), (BLOCK, CHANNELS))


@triton.jit
def _starts(rows, stride_token, stride_head, H: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the rows begin, in 64 bits: a batch of long videos has more than 2^31 activations."""
    return tl.multiple_of((rows // H).to(tl.int64) * stride_token + (rows % H).to(tl.int64) * stride_head, ALIGN)


@triton.jit
def _turns(table_ptr, rows, columns, inside, every, N, H: tl.constexpr, d: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines and signed sines of the rows."""
    where = ((rows // H) // every % N)[:, None] * d + columns[None, :]
    cos = tl.load(table_ptr + where, mask=inside, other=0.0)
    return cos, tl.load(table_ptr + N * d + where, mask=inside, other=0.0)


@triton.jit
def _norm_heads_forward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x_ptr, weight_ptr, table_ptr, every, N, out_ptr, num_rows, xt, xh, eps,
    H: tl.constexpr, d: tl.constexpr, ALIGN: tl.constexpr, CHANNELS: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)  # a compiled program passes numbers in fp64
    columns = tl.arange(0, CHANNELS)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < d)[None, :]
    x = tl.load(x_ptr + _starts(rows, xt, xh, H, ALIGN)[:, None] + columns[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    weight = tl.load(weight_ptr + columns, mask=columns < d, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / d + eps)
    y = x * rstd[:, None] * weight[None, :]
    if ROTATE:
        cos, sin = _turns(table_ptr, rows, columns, inside, every, N, H, d)
        y = y * cos + _other_of_pair(y, BLOCK, CHANNELS) * sin
    to = _starts(rows, H * d, d, H, ALIGN)[:, None] + columns[None, :]
    tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    grad_ptr, x_ptr, weight_ptr, table_ptr, every, N, dx_ptr, weights_ptr, num_rows, xt, xh, gt, gh, eps, STEPS: tl.constexpr,
    H: tl.constexpr, d: tl.constexpr, ALIGN: tl.constexpr, CHANNELS: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    columns = tl.arange(0, CHANNELS)
    weight = tl.load(weight_ptr + columns, mask=columns < d, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK, CHANNELS), tl.float32)
    for step in range(STEPS):
        rows = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = (rows < num_rows)[:, None] & (columns < d)[None, :]
        x = tl.load(x_ptr + _starts(rows, xt, xh, H, ALIGN)[:, None] + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        grad = tl.load(
            grad_ptr + _starts(rows, gt, gh, H, ALIGN)[:, None] + columns[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        if ROTATE:
            cos, sin = _turns(table_ptr, rows, columns, inside, every, N, H, d)
            grad = grad * cos + _other_of_pair(grad * sin, BLOCK, CHANNELS)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / d + eps)[:, None]
        normed = x * rstd
        total += grad * normed
        of_normed = grad * weight[None, :]
        # the norm has no component along itself that x could change
        along = (tl.sum(of_normed * normed, 1) / d)[:, None]
        to = _starts(rows, H * d, d, H, ALIGN)[:, None] + columns[None, :]
        tl.store(dx_ptr + to, (rstd * (of_normed - normed * along)).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(weights_ptr + tl.program_id(0) * d + columns, tl.sum(total, 0), mask=columns < d)
