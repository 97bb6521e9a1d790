"""Attention over very short sequences, such as the 16 frames of one spatial position of a video, as one Triton kernel.

There is next to nothing to compute: what counts is how often queries, keys and values travel through memory, and whether they
must be copied into another order first. Here each program handles one head of one sequence: it reads its N rows of q, k and v in
whatever order they lie in memory, does everything in registers, and writes N rows. The backward pass recomputes the
probabilities from q and k, so that nothing but the inputs is kept. Softmax and sums are fp32. See docs/explanation/benchmarks/train_step.md for
the gain.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_LENGTH = 64
"""Longest sequence: beyond, the rows of one head no longer fit into the registers of a few warps."""
MAX_HEAD_DIM = 128


@torch.library.custom_op("opensora::short_attention", mutates_args=())
def short_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for `q, k, v [B, S, H, N, d]` in any strides, N <= MAX_LENGTH -> the same shape.

    The result lies in memory as [B, N, S, H, d], which is the order of tokens.
    """
    q, k, v = (_rows_whole(each) for each in (q, k, v))
    out = _empty_like_tokens(q)
    _launch(_short_attention_forward_kernel, q, k, v, out)
    return out


@short_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _empty_like_tokens(q)


@torch.library.custom_op("opensora::short_attention_backward", mutates_args=())
def short_attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each [B, S, H, N, d]."""
    grad, q, k, v = (_rows_whole(each) for each in (grad, q, k, v))
    grads = (_empty_like_tokens(q), _empty_like_tokens(q), _empty_like_tokens(q))
    _launch(_short_attention_backward_kernel, q, k, v, grad, *grads)
    return grads


@short_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like_tokens(q), _empty_like_tokens(q), _empty_like_tokens(q)


def _save(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _grad(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    return short_attention_backward(grad, *ctx.saved_tensors)


short_attention.register_autograd(_grad, setup_context=_save)


@torch.library.custom_op("opensora::short_attention_packed", mutates_args=())
def short_attention_packed(qkv: Tensor, num_heads: int) -> Tensor:
    """Attention over time straight from a linear layer's output: `qkv [B, N, S, 3 H d] -> [B, N, S, H d]`.

    The same as `short_attention` of its three parts, but the gradient is written as one tensor: joining the gradients of q, k
    and v afterwards would cost half as much as the attention.
    """
    qkv = qkv.contiguous()
    tokens = qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)
    _launch(_short_attention_forward_kernel, *_parts(qkv, num_heads), _heads(tokens, num_heads))
    return tokens


@short_attention_packed.register_fake
def _(qkv: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)


@torch.library.custom_op("opensora::short_attention_packed_backward", mutates_args=())
def short_attention_packed_backward(grad: Tensor, qkv: Tensor, num_heads: int) -> Tensor:
    """The gradient of qkv, [B, N, S, 3 H d]."""
    qkv, grad = qkv.contiguous(), _rows_whole(_heads(grad, num_heads))
    grad_qkv = torch.empty_like(qkv)
    _launch(_short_attention_backward_kernel, *_parts(qkv, num_heads), grad, *_parts(grad_qkv, num_heads))
    return grad_qkv


@short_attention_packed_backward.register_fake
def _(grad: Tensor, qkv: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save_packed(ctx, inputs: tuple[Tensor, int], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    qkv, ctx.num_heads = inputs
    ctx.save_for_backward(qkv)


def _grad_packed(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
    return short_attention_packed_backward(grad, *ctx.saved_tensors, ctx.num_heads), None


short_attention_packed.register_autograd(_grad_packed, setup_context=_save_packed)


def _heads(tokens: Tensor, num_heads: int) -> Tensor:
    B, N, S, width = tokens.shape
    return tokens.view(B, N, S, num_heads, width // num_heads).permute(0, 2, 3, 1, 4)  # [B, S, H, N, d]


def _parts(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, N, S, width = qkv.shape
    parts = qkv.view(B, N, S, 3, num_heads, width // (3 * num_heads))
    q, k, v = parts.permute(3, 0, 2, 4, 1, 5).unbind(0)  # each [B, S, H, N, d]
    return q, k, v


def _rows_whole(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like_tokens(x: Tensor) -> Tensor:
    B, S, H, N, d = x.shape
    return x.new_empty(B, N, S, H, d).permute(0, 2, 3, 1, 4)


def _launch(kernel: Any, *tensors: Tensor) -> None:
    """A program for each head of each sequence; `tensors` are [B, S, H, N, d], inputs first."""
    B, S, H, N, d = tensors[0].shape
    strides = tuple(stride for tensor in tensors for stride in tensor.stride()[:4])
    block_n, block_d = max(16, triton.next_power_of_2(N)), max(16, triton.next_power_of_2(d))
    # by `d` and ALIGN the compiler knows that rows can be read 16 bytes at a time
    kernel[(B * S * H,)](
        *tensors, *strides, S, H, N, d**-0.5, d=d, ALIGN=math.gcd(8, *strides), BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=1 if block_n == 16 else 4,
    )  # fmt: skip


@triton.jit
def _offsets(pid, sb, ss, sh, sn, S, H, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    sequence = pid // H
    start = (sequence // S).to(tl.int64) * sb + (sequence % S).to(tl.int64) * ss + (pid % H).to(tl.int64) * sh
    rows = tl.multiple_of(start + tl.arange(0, BLOCK_N).to(tl.int64) * sn, ALIGN)
    return rows[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _probabilities(q, k, scale, N, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(tl.arange(0, BLOCK_N)[None, :] < N, scores, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return scores / tl.sum(scores, axis=1)[:, None]


@triton.jit
def _short_attention_forward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    q_ptr, k_ptr, v_ptr, o_ptr,
    qb, qp, qh, qn, kb, kp, kh, kn, vb, vp, vh, vn, ob, op, oh, on,
    S, H, N, scale, d: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    scale = tl.cast(scale, tl.float32)  # a compiled program passes numbers in fp64
    inside = (tl.arange(0, BLOCK_N)[:, None] < N) & (tl.arange(0, BLOCK_D)[None, :] < d)
    q = tl.load(q_ptr + _offsets(pid, qb, qp, qh, qn, S, H, ALIGN, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    k = tl.load(k_ptr + _offsets(pid, kb, kp, kh, kn, S, H, ALIGN, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    v = tl.load(v_ptr + _offsets(pid, vb, vp, vh, vn, S, H, ALIGN, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    p = _probabilities(q, k, scale, N, BLOCK_N)
    out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    tl.store(o_ptr + _offsets(pid, ob, op, oh, on, S, H, ALIGN, BLOCK_N, BLOCK_D), out.to(v.dtype), mask=inside)


@triton.jit
def _short_attention_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr,
    qb, qp, qh, qn, kb, kp, kh, kn, vb, vp, vh, vn, gb, gp, gh, gn,
    dqb, dqp, dqh, dqn, dkb, dkp, dkh, dkn, dvb, dvp, dvh, dvn,
    S, H, N, scale, d: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    inside = (tl.arange(0, BLOCK_N)[:, None] < N) & (tl.arange(0, BLOCK_D)[None, :] < d)
    q = tl.load(q_ptr + _offsets(pid, qb, qp, qh, qn, S, H, ALIGN, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    k = tl.load(k_ptr + _offsets(pid, kb, kp, kh, kn, S, H, ALIGN, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    v = tl.load(v_ptr + _offsets(pid, vb, vp, vh, vn, S, H, ALIGN, BLOCK_N, BLOCK_D), mask=inside, other=0.0)
    g = tl.load(g_ptr + _offsets(pid, gb, gp, gh, gn, S, H, ALIGN, BLOCK_N, BLOCK_D), mask=inside, other=0.0).to(
        v.dtype
    )
    p = _probabilities(q, k, scale, N, BLOCK_N)
    # rows beyond N have gradient 0, so they add nothing to the columns' sums; what is done is written, registers are few
    dv = tl.dot(tl.trans(p).to(v.dtype), g, input_precision="ieee").to(q.dtype)
    tl.store(dv_ptr + _offsets(pid, dvb, dvp, dvh, dvn, S, H, ALIGN, BLOCK_N, BLOCK_D), dv, mask=inside)
    dp = tl.dot(g, tl.trans(v), input_precision="ieee")
    ds = (p * (dp - tl.sum(p * dp, axis=1)[:, None]) * scale).to(q.dtype)
    dq = tl.dot(ds, k, input_precision="ieee").to(q.dtype)
    tl.store(dq_ptr + _offsets(pid, dqb, dqp, dqh, dqn, S, H, ALIGN, BLOCK_N, BLOCK_D), dq, mask=inside)
    dk = tl.dot(tl.trans(ds), q, input_precision="ieee").to(q.dtype)
    tl.store(dk_ptr + _offsets(pid, dkb, dkp, dkh, dkn, S, H, ALIGN, BLOCK_N, BLOCK_D), dk, mask=inside)
