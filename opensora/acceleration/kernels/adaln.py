"""adaLN whose backward pass reads each tensor once.

A token row h = LN(x) (1 + scale) + shift has three gradients: that of x needs two sums over the row's channels, and those of
shift and scale are sums over all rows that share them. Left to the compiler these are separate passes over the tokens, and so is
the sum with the residual path's gradient. Here a program takes some rows of one sample (or frame), keeps their column sums in
registers, and writes one partial sum each in fp32; the few are added after it, so the result is deterministic. A gate's backward
pass is done in the same way. The forward passes are PyTorch's own, which the compiler fuses with what is around them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from opensora.acceleration.kernels.attention import without_autocast

ROWS = 64
"""Of the part whose columns a program sums up."""
COLUMNS = 128
"""Of the part, in a gate's backward pass."""
MAX_CHANNELS = 4096
"""A program holds whole rows in registers."""
_NORM_ROWS, _GATE_ROWS = 1, 32
"""At a time."""
_NORM_WARPS, _GATE_WARPS = 8, 4


def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, and LN(x) (1 + scale) + shift without affine parameters, in `dtype`.

    Take the x that is returned for the residual path: then the kernel adds that path's gradient.

    Args:
        x: tokens [B, T, S, D], D up to `MAX_CHANNELS`.
        shift, scale: [B, 1 or T, 1, D].
        eps: added to the variance.
        dtype: also of what is kept for the backward pass, and of the gradients in it.
    """
    x, h = _NormModulate.apply(x, shift, scale, eps, dtype)
    return x, h


def gate_residual(x: Tensor, gate: Tensor, branch: Tensor, dtype: torch.dtype) -> Tensor:
    """x + gate branch in `dtype`, for `x, branch [B, T, S, D]` and `gate [B, 1 or T, 1, D]`; gradients in the branch's dtype."""
    return _Gate.apply(x, gate, branch, dtype)


class _NormModulate(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(x.device.type):
            normed, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        ctx.save_for_backward(x.to(dtype), mean, rstd, scale)
        ctx.x_dtype, ctx.shift_dtype = x.dtype, shift.dtype
        # the compiler leaves the copy out; without it, it would have to know that an output is an input
        same = x.clone() if torch.compiler.is_compiling() else x
        h = normed * (1 + scale).to(x.dtype) + shift.to(x.dtype)
        # torch.compile of PyTorch 2.11 loses the gradient of a result that went through a `to` that changes nothing
        return same, h if h.dtype == dtype else h.to(dtype)

    @staticmethod
    def backward(ctx, residual: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[no-untyped-def]
        x, mean, rstd, scale = ctx.saved_tensors
        dx, shifts, scales = norm_modulate_backward(
            grad.contiguous(), residual.to(x.dtype).contiguous(), x.contiguous(), mean, rstd, scale.contiguous()
        )
        dshift, dscale = (sums.sum(1).view(scale.shape) for sums in (shifts, scales))
        return dx.to(ctx.x_dtype), dshift.to(ctx.shift_dtype), dscale.to(scale.dtype), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, branch: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, branch)
        ctx.x_dtype = x.dtype
        return x.to(dtype) + gate.to(dtype) * branch

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        gate, branch = ctx.saved_tensors
        dbranch, gates = gate_backward(grad.to(branch.dtype).contiguous(), branch.contiguous(), gate.contiguous())
        return grad.to(ctx.x_dtype), gates.sum(1).view(gate.shape).to(gate.dtype), dbranch, None


@torch.library.custom_op("opensora::norm_modulate_backward", mutates_args=())
def norm_modulate_backward(
    grad: Tensor, residual: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of `norm_modulate`: `grad, residual` of both results, `x [B, T, S, D]`, `mean, rstd [B, T, S, 1]` in fp32.

    Returns:
        The gradient of x, and fp32 sums [G, P, D] of those of shift and scale over parts of the rows that share them.
    """
    (groups, parts), C = _parts(x, scale), x.shape[-1]
    dx = torch.empty_like(x)
    shifts, scales = (x.new_empty(groups, parts, C, dtype=torch.float32) for _ in range(2))
    _norm_modulate_backward_kernel[(groups, parts)](
        grad, residual, x, mean, rstd, scale, dx, shifts, scales, x.numel() // C // groups, C,
        ROWS=ROWS, BLOCK_ROWS=_NORM_ROWS, CHANNELS=triton.next_power_of_2(C), num_warps=_NORM_WARPS,
    )  # fmt: skip
    return dx, shifts, scales


@norm_modulate_backward.register_fake
def _(
    grad: Tensor, residual: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*_parts(x, scale), x.shape[-1])
    shifts, scales = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), shifts, scales


@torch.library.custom_op("opensora::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass of `gate_residual`, for `grad, branch [B, T, S, D]` and `gate [B, 1 or T, 1, D]`, contiguous.

    Returns:
        The gradient of the branch, and fp32 sums [G, P, D] of the gate's over parts of the rows that share it.
    """
    (groups, parts), C = _parts(branch, gate), branch.shape[-1]
    dbranch, gates = torch.empty_like(branch), branch.new_empty(groups, parts, C, dtype=torch.float32)
    _gate_backward_kernel[(groups, parts, triton.cdiv(C, COLUMNS))](
        grad, branch, gate, dbranch, gates, branch.numel() // C // groups, C,
        ROWS=ROWS, BLOCK_ROWS=_GATE_ROWS, COLUMNS=COLUMNS, num_warps=_GATE_WARPS,
    )  # fmt: skip
    return dbranch, gates


@gate_backward.register_fake
def _(grad: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(branch), branch.new_empty(*_parts(branch, gate), branch.shape[-1], dtype=torch.float32)


def _parts(x: Tensor, vectors: Tensor) -> tuple[int, int]:
    """How many groups of rows share a vector, and in how many parts each is taken."""
    B, T, S, _ = x.shape
    frames = vectors.shape[1]
    return B * frames, (T // frames * S + ROWS - 1) // ROWS


@triton.jit
def _norm_modulate_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    grad_ptr, residual_ptr, x_ptr, mean_ptr, rstd_ptr, scale_ptr, dx_ptr, shifts_ptr, scales_ptr, group_rows, C,
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    group, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, CHANNELS)
    exists = columns < C
    factor = 1 + tl.load(scale_ptr + group * C + columns, mask=exists, other=0.0).to(tl.float32)
    shift_sum = tl.zeros((CHANNELS,), tl.float32)
    scale_sum = tl.zeros((CHANNELS,), tl.float32)
    for first in range(0, ROWS, BLOCK_ROWS):
        within = part * ROWS + first + tl.arange(0, BLOCK_ROWS)
        rows = group * group_rows + within  # 64 bits: a batch of long videos has more than 2^31 activations
        inside = (within < group_rows)[:, None] & exists[None, :]
        where = rows[:, None] * C + columns[None, :]
        grad = tl.load(grad_ptr + where, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=within < group_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=within < group_rows, other=0.0)[:, None]
        normed = tl.where(inside, (x - mean) * rstd, 0.0)
        of_normed = grad * factor[None, :]
        # LN's output has neither mean nor component along itself that x could change
        constant = tl.sum(of_normed, 1)[:, None] / C
        along = tl.sum(of_normed * normed, 1)[:, None] / C
        dx = residual + rstd * (of_normed - constant - normed * along)
        tl.store(dx_ptr + where, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        shift_sum += tl.sum(grad, 0)
        scale_sum += tl.sum(grad * normed, 0)
    to = (group * tl.num_programs(1) + part) * C + columns
    tl.store(shifts_ptr + to, shift_sum, mask=exists)
    tl.store(scales_ptr + to, scale_sum, mask=exists)


@triton.jit
def _gate_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    grad_ptr, branch_ptr, gate_ptr, dbranch_ptr, gates_ptr, group_rows, C,
    ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < C
    gate = tl.load(gate_ptr + group * C + columns, mask=exists, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    for first in range(0, ROWS, BLOCK_ROWS):
        within = part * ROWS + first + tl.arange(0, BLOCK_ROWS)
        inside = (within < group_rows)[:, None] & exists[None, :]
        where = (group * group_rows + within)[:, None] * C + columns[None, :]
        grad = tl.load(grad_ptr + where, mask=inside, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(dbranch_ptr + where, (grad * gate[None, :]).to(dbranch_ptr.dtype.element_ty), mask=inside)
        total += grad * branch
    to = (group * tl.num_programs(1) + part) * C + columns
    tl.store(gates_ptr + to, tl.sum(total, 0), mask=exists)
