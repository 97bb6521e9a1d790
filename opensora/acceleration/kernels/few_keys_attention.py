"""Attention of many queries to few keys - the tokens of a video to a caption - as Triton kernels.

Kernels made for long sequences lose much of their time here: cuDNN spends a third of the backward pass on two helper
kernels that only pay off over many keys, and slows down by a quarter when there is a mask. Here all keys of a head stay
on the chip while a program walks over the queries, so that one pass gives the gradients of all three inputs.

The arithmetic is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691): fp32 softmax and accumulation, probabilities
recomputed in the backward pass from the logarithm of their sum. Deterministic: nothing is added atomically.
See docs/benchmarks/train_step.md for the gain.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opensora.acceleration.kernels.triton_calls import forward_pass, has_symbols

MAX_KEYS = 128
"""With more, keys and values and their gradients no longer fit on the chip."""
MAX_HEAD_DIM = 128
_BLOCK = {"BLOCK_Q": 64}
_FORWARD = {"num_warps": 4, "num_stages": 1}
_BACKWARD = {"num_warps": 8, "num_stages": 1}
"""The fastest of those tried on an H100 with 120 keys of 72 channels."""
_PROGRAMS = {"forward": 2048, "backward": 512}
"""What keeps a large GPU busy: with fewer heads than that, the queries of a head are shared among programs."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for `q [B, H, N, d]`, `k, v [B, H, L, d]` in any strides, L <= MAX_KEYS.

    Args:
        q, k, v: see above.
        mask: [B, L] bool, True at the keys that may be seen; a row without any gives zeros.

    Returns:
        [B, H, N, d], which lies in memory as [B, N, H, d].
    """
    return forward_pass(_with_gradient, few_keys_attention_inlined, _without_gradient, (q, k, v), mask)


def _with_gradient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return few_keys_attention(q, k, v, mask)[0]


def _without_gradient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return _forward(q, k, v, mask)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: Any = None) -> tuple[Tensor, Tensor]:
    q, k, v = (_rows_whole(each) for each in (q, k, v))
    (B, H, N, d), L = q.shape, k.shape[2]
    tokens = q.new_empty(B, N, H, d)  # given to the kernel whole: the compiler would copy what is written to a view
    out, lse = tokens.transpose(1, 2), q.new_empty(B, H, N, dtype=torch.float32)
    share, strides = _share(N, B * H, _PROGRAMS["forward"]), _strides(q, k, v, out)
    (kernel or _few_keys_forward_kernel)[(triton.cdiv(N, share), B * H)](
        q, k, v, tokens, lse, *_mask_arguments(mask, q), *strides, H, N, L, share, d**-0.5,
        **_sizes(strides, L, d), **_BLOCK, **_FORWARD,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("opensora::few_keys_attention", mutates_args=())
def few_keys_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `attend`; beside its result log2 of the softmax's denominator [B, H, N], which the backward pass needs."""
    return _forward(q, k, v, mask)


@few_keys_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like_tokens(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("opensora::few_keys_attention_backward", mutates_args=())
def few_keys_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad, q, k, v = (_rows_whole(each) for each in (grad, q, k, v))
    (B, H, N, d), L = q.shape, k.shape[2]
    share = _share(N, B * H, _PROGRAMS["backward"])
    num_shares = triton.cdiv(N, share)
    dq = _like_tokens(q)
    parts = q.new_empty(2, num_shares, B, L, H, d, dtype=torch.float32)
    dk, dv = parts.transpose(3, 4)  # each [shares, B, H, L, d]
    strides = _strides(q, k, v, out, grad, dq, dk[0], dv[0])
    _few_keys_backward_kernel[(num_shares, B * H)](
        q, k, v, out, grad, lse, dq, dk, dv, *_mask_arguments(mask, q), *strides, dk.stride(0), H, N, L, share, d**-0.5,
        **_sizes(strides, L, d), **_BLOCK, **_BACKWARD,
    )  # fmt: skip
    dk, dv = (part.sum(0).to(q.dtype).transpose(1, 2) for part in parts)  # each [B, H, L, d], of its own memory
    return dq, dk, dv


@few_keys_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_tokens(q), _like_tokens(k), _like_tokens(v)


def _save(ctx, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _grad(ctx, grad: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    return *few_keys_attention_backward(grad, *ctx.saved_tensors), None


few_keys_attention.register_autograd(_grad, setup_context=_save)


def _share(num_queries: int, num_heads: int, programs: int) -> int:
    """How many queries a program takes: whole blocks."""
    blocks = triton.cdiv(num_queries, _BLOCK["BLOCK_Q"])
    return triton.cdiv(blocks, min(triton.cdiv(programs, num_heads), blocks)) * _BLOCK["BLOCK_Q"]


def _rows_whole(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like_tokens(x: Tensor) -> Tensor:
    B, H, N, d = x.shape
    return x.new_empty(B, N, H, d).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _mask_arguments(mask: Tensor | None, placeholder: Tensor) -> tuple[Tensor, int]:
    return (placeholder, 0) if mask is None else (mask.contiguous(), mask.shape[1])


def _sizes(strides: list[int], num_keys: int, d: int) -> dict[str, int]:
    """What the kernels know when they are compiled; ALIGN says whether rows can be read 16 bytes at a time."""
    block_k, block_d = (max(16, triton.next_power_of_2(n)) for n in (num_keys, d))
    return {"d": d, "ALIGN": math.gcd(8, *strides), "BLOCK_K": block_k, "BLOCK_D": block_d}


@triton.jit
def _start(stride_b, stride_h, H, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where this program's head begins."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    return tl.multiple_of(b * stride_b + h * stride_h, ALIGN)


@triton.jit
def _offsets(rows, stride, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(rows * stride, ALIGN)[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _rows(ptr, rows, stride, inside, d: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some rows, 0 outside."""
    where = inside[:, None] & (tl.arange(0, BLOCK_D) < d)[None, :]
    return tl.load(ptr + _offsets(rows, stride, ALIGN, BLOCK_D), mask=where, other=0.0)


@triton.jit
def _write(ptr, rows, stride, inside, value, d: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    where = inside[:, None] & (tl.arange(0, BLOCK_D) < d)[None, :]
    tl.store(ptr + _offsets(rows, stride, ALIGN, BLOCK_D), value.to(ptr.dtype.element_ty), mask=where)


@triton.jit
def _seen(mask_ptr, mask_stride, keys, H, L):  # type: ignore[no-untyped-def]
    """Which keys may be seen; a stride of 0 says that there is no mask."""
    seen = keys < L
    if mask_stride > 0:
        start = (tl.program_id(1) // H).to(tl.int64) * mask_stride
        seen = seen & (tl.load(mask_ptr + start + keys, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _few_keys_forward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, mask_ptr, mask_stride,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, H, N, L, share, scale,
    d: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)  # a compiled program passes numbers in fp64
    q_ptr += _start(qb, qh, H, ALIGN)
    o_ptr += _start(ob, oh, H, ALIGN)
    lse_ptr += tl.program_id(1).to(tl.int64) * N
    keys = tl.arange(0, BLOCK_K)
    seen = _seen(mask_ptr, mask_stride, keys, H, L)
    k = _rows(k_ptr + _start(kb, kh, H, ALIGN), keys, kn, keys < L, d, ALIGN, BLOCK_D)
    v = _rows(v_ptr + _start(vb, vh, H, ALIGN), keys, vn, keys < L, d, ALIGN, BLOCK_D)
    first = tl.program_id(0) * share
    for block in range(first, min(first + share, N), BLOCK_Q):
        queries = block + tl.arange(0, BLOCK_Q)
        inside = queries < N
        q = _rows(q_ptr, queries, qn, inside, d, ALIGN, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)  # exp(x) = 2^(x log2 e)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.max(scores, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(scores - top[:, None])
        total = tl.sum(p, 1)
        total = tl.where(total == 0.0, 1.0, total)  # no key at all: the result is zero
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee") / total[:, None]
        _write(o_ptr, queries, on, inside, out, d, ALIGN, BLOCK_D)
        tl.store(lse_ptr + queries, top + tl.log2(total), mask=inside)


@triton.jit
def _few_keys_backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    q_ptr, k_ptr, v_ptr, o_ptr, g_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr, mask_ptr, mask_stride,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, gb, gh, gn, dqb, dqh, dqn, dkb, dkh, dkn, dvb, dvh, dvn,
    share_stride, H, N, L, share, scale,
    d: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    q_ptr += _start(qb, qh, H, ALIGN)
    o_ptr += _start(ob, oh, H, ALIGN)
    g_ptr += _start(gb, gh, H, ALIGN)
    dq_ptr += _start(dqb, dqh, H, ALIGN)
    lse_ptr += tl.program_id(1).to(tl.int64) * N
    keys = tl.arange(0, BLOCK_K)
    seen = _seen(mask_ptr, mask_stride, keys, H, L)
    k = _rows(k_ptr + _start(kb, kh, H, ALIGN), keys, kn, keys < L, d, ALIGN, BLOCK_D)
    v = _rows(v_ptr + _start(vb, vh, H, ALIGN), keys, vn, keys < L, d, ALIGN, BLOCK_D)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    first = tl.program_id(0) * share
    for block in range(first, min(first + share, N), BLOCK_Q):
        queries = block + tl.arange(0, BLOCK_Q)
        inside = queries < N
        q = _rows(q_ptr, queries, qn, inside, d, ALIGN, BLOCK_D)
        g = _rows(g_ptr, queries, gn, inside, d, ALIGN, BLOCK_D)
        o = _rows(o_ptr, queries, on, inside, d, ALIGN, BLOCK_D)
        lse = tl.load(lse_ptr + queries, mask=inside, other=0.0)
        delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)  # [BLOCK_Q]: gradient · result
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [BLOCK_K, BLOCK_Q], transposed
        dp = tl.dot(v, tl.trans(g), input_precision="ieee")
        p = tl.exp2(scores * (scale * 1.4426950408889634) - lse[None, :])
        p = tl.where(seen[:, None], p, 0.0)
        # queries beyond N have gradient 0, so they add nothing to the sums over queries
        ds = (p * (dp - delta[None, :]) * scale).to(k.dtype)
        dv += tl.dot(p.to(k.dtype), g, input_precision="ieee")
        dk += tl.dot(ds, q, input_precision="ieee")
        _write(dq_ptr, queries, dqn, inside, tl.dot(tl.trans(ds), k, input_precision="ieee"), d, ALIGN, BLOCK_D)
    offset = tl.program_id(0).to(tl.int64) * share_stride
    _write(dk_ptr + offset + _start(dkb, dkh, H, ALIGN), keys, dkn, keys < L, dk, d, ALIGN, BLOCK_D)
    _write(dv_ptr + offset + _start(dvb, dvh, H, ALIGN), keys, dvn, keys < L, dv, d, ALIGN, BLOCK_D)


# below the kernels: PyTorch looks for them when such an operator is made, to know when its cached programs are stale
@torch.library.triton_op("opensora::few_keys_attention_inlined", mutates_args=())
def few_keys_attention_inlined(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The result of `few_keys_attention` without gradients, for compiled programs."""
    if has_symbols(q, k, v):
        return few_keys_attention(q, k, v, mask)[0]
    return _forward(q, k, v, mask, torch.library.wrap_triton(_few_keys_forward_kernel))[0]
