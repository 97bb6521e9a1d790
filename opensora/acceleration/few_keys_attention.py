"""Attention to few keys - the tokens of a small frame, or a caption - as Triton kernels.

Kernels made for long sequences lose much of their time here. cuDNN spends a quarter of the backward pass on two helper
kernels that only pay off over many keys, pads a head of 72 channels to 128, and returns the gradients of q, k and v as
three tensors that must be joined. Here one program keeps a block of keys on the chip and walks over the queries; heads
are split into powers of two (72 = 64 + 16, the last 8 empty); and gradients go straight to where they are wanted.

The arithmetic is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691): fp32 softmax and accumulation, probabilities
recomputed in the backward pass from the logarithm of their sum. Deterministic: nothing is added atomically.
See docs/benchmarks/attention.md for the gain.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_KEYS = 256
"""Beyond, cuDNN's kernels are at least as fast."""
MAX_HEAD_DIM = 128
_PROGRAMS = 512
"""What keeps a large GPU busy: with fewer heads than that, the queries of a head are shared among programs."""


@torch.library.custom_op("opensora::few_keys_attention", mutates_args=())
def few_keys_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d)) v for `q [B, H, N, d]`, `k, v [B, H, L, d]` in any strides.

    Args:
        q, k, v: see above.
        mask: [B, L] bool, True at the keys that may be seen; a row without any gives zeros.

    Returns:
        The result [B, H, N, d], which lies in memory as [B, N, H, d], and log2 of the softmax's denominator [B, H, N].
    """
    q, k, v = (_rows_whole(each) for each in (q, k, v))
    out = _like_tokens(q)
    return out, _forward(q, k, v, mask, out)


@few_keys_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like_tokens(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("opensora::few_keys_attention_backward", mutates_args=())
def few_keys_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad, q, k, v = (_rows_whole(each) for each in (grad, q, k, v))
    grads = (_like_tokens(q), _like_tokens(k), _like_tokens(v))
    _backward(grad, (q, k, v), mask, out, lse, grads)
    return grads


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


@torch.library.custom_op("opensora::few_keys_attention_packed", mutates_args=())
def few_keys_attention_packed(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Self-attention straight from a linear layer's output, `qkv [B, N, 3 H d]`; the gradient is one tensor too.

    Returns:
        The result [B, N, H d], and log2 of the softmax's denominator [B, H, N].
    """
    qkv = qkv.contiguous()
    out = qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)
    return out, _forward(*_parts(qkv, num_heads), None, _heads(out, num_heads))


@few_keys_attention_packed.register_fake
def _(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    B, N, width = qkv.shape
    return qkv.new_empty(B, N, width // 3), qkv.new_empty(B, num_heads, N, dtype=torch.float32)


@torch.library.custom_op("opensora::few_keys_attention_packed_backward", mutates_args=())
def few_keys_attention_packed_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, num_heads: int
) -> Tensor:
    """The gradient of qkv, [B, N, 3 H d]."""
    qkv, grad = qkv.contiguous(), grad.contiguous()
    grad_qkv = torch.empty_like(qkv)
    grad, out = _heads(grad, num_heads), _heads(out, num_heads)
    _backward(grad, _parts(qkv, num_heads), None, out, lse, _parts(grad_qkv, num_heads))
    return grad_qkv


@few_keys_attention_packed_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save_packed(ctx, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    qkv, ctx.num_heads = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output)


def _grad_packed(ctx, grad: Tensor, _: None) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
    return few_keys_attention_packed_backward(grad, *ctx.saved_tensors, ctx.num_heads), None


few_keys_attention_packed.register_autograd(_grad_packed, setup_context=_save_packed)


def _rows_whole(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like_tokens(x: Tensor) -> Tensor:
    B, H, N, d = x.shape
    return x.new_empty(B, N, H, d).transpose(1, 2)


def _heads(tokens: Tensor, num_heads: int) -> Tensor:
    B, N, width = tokens.shape
    return tokens.view(B, N, num_heads, width // num_heads).transpose(1, 2)  # [B, H, N, d]


def _parts(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, N, width = qkv.shape
    q, k, v = qkv.view(B, N, 3, num_heads, width // (3 * num_heads)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v  # each [B, H, N, d]


def _split(d: int) -> tuple[int, int]:
    """d channels as a power of two and a rest that is padded to one: 72 -> 64, 16; 64 -> 64, 0."""
    if d <= 16:
        return 16, 0
    first = 1 << (d.bit_length() - 1)
    return first, 0 if first == d else max(16, triton.next_power_of_2(d - first))


FORWARD = {"BLOCK_Q": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 2}
BACKWARD = {"BLOCK_Q": 64, "BLOCK_K": 128, "num_warps": 8, "num_stages": 2}
"""Block sizes, the fastest of those tried on an H100 with 72 channels a head."""


def _blocks(blocks: dict[str, int], num_queries: int, num_keys: int) -> dict[str, int]:
    smaller = {name: max(16, triton.next_power_of_2(n)) for name, n in (("BLOCK_Q", num_queries), ("BLOCK_K", num_keys))}
    return {name: min(value, smaller.get(name, value)) for name, value in blocks.items()}


def _mask_arguments(mask: Tensor | None, q: Tensor) -> tuple[Tensor, int]:
    return (q, 0) if mask is None else (mask.contiguous().view(torch.uint8), mask.shape[1])


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor) -> Tensor:
    (B, H, N, d), L = q.shape, k.shape[2]
    lse = q.new_empty(B, H, N, dtype=torch.float32)
    D1, D2 = _split(d)
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]]
    mask, mask_stride = _mask_arguments(mask, q)
    options = _blocks(FORWARD, N, L)
    _forward_kernel[(triton.cdiv(N, options["BLOCK_Q"]), B * H)](
        q, k, v, out, lse, mask, *strides, mask_stride, H, N, L, d, d**-0.5, HAS_MASK=mask_stride > 0, D1=D1, D2=D2, **options
    )  # fmt: skip
    return lse


def _backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, v = inputs
    (B, H, N, d), L = q.shape, k.shape[2]
    D1, D2 = _split(d)
    options = _blocks(BACKWARD, N, L)
    share = triton.cdiv(N, min(triton.cdiv(_PROGRAMS, B * H), triton.cdiv(N, options["BLOCK_Q"])))
    share = triton.cdiv(share, options["BLOCK_Q"]) * options["BLOCK_Q"]  # queries of a program
    num_shares = triton.cdiv(N, share)
    dq, dk, dv = grads
    if num_shares > 1:
        dk, dv = q.new_empty(2, num_shares, B, H, L, d, dtype=torch.float32)
        strides_of_keys = [*dk.stride()[1:4], *dv.stride()[1:4], dk.stride(0)]
    else:
        strides_of_keys = [*dk.stride()[:3], *dv.stride()[:3], 0]
    strides = [stride for tensor in (q, k, v, out, grad, dq) for stride in tensor.stride()[:3]]
    mask, mask_stride = _mask_arguments(mask, q)
    _backward_kernel[(num_shares, B * H)](
        q, k, v, out, grad, lse, mask, dq, dk, dv, *strides, *strides_of_keys, mask_stride, H, N, L, d, share, d**-0.5,
        HAS_MASK=mask_stride > 0, D1=D1, D2=D2, **options
    )  # fmt: skip
    if num_shares > 1:
        for grad_of, parts in zip(grads[1:], (dk, dv), strict=True):
            grad_of.copy_(parts.sum(0))


@triton.jit
def _rows(ptr, rows, stride, inside, d, FIRST: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Channels FIRST ... FIRST + WIDTH - 1 of some rows; 0 outside."""
    channels = FIRST + tl.arange(0, WIDTH)
    where = inside[:, None] & (channels < d)[None, :]
    return tl.load(ptr + rows[:, None] * stride + channels[None, :], mask=where, other=0.0)


@triton.jit
def _write(ptr, rows, stride, inside, d, value, FIRST: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    channels = FIRST + tl.arange(0, WIDTH)
    where = inside[:, None] & (channels < d)[None, :]
    tl.store(ptr + rows[:, None] * stride + channels[None, :], value.to(ptr.dtype.element_ty), mask=where)


@triton.jit
def _seen(mask_ptr, keys, L, HAS_MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    seen = keys < L
    if HAS_MASK:
        seen = seen & (tl.load(mask_ptr + keys, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, mask_ptr,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, mask_stride, H, N, L, d, scale,
    HAS_MASK: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    q_ptr += b * qb + h * qh
    k_ptr += b * kb + h * kh
    v_ptr += b * vb + h * vh
    o_ptr += b * ob + h * oh
    mask_ptr += b * mask_stride
    queries = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = queries < N
    q1 = _rows(q_ptr, queries, qn, inside, d, 0, D1)
    if D2 > 0:
        q2 = _rows(q_ptr, queries, qn, inside, d, D1, D2)
        acc2 = tl.zeros([BLOCK_Q, D2], tl.float32)
    acc1 = tl.zeros([BLOCK_Q, D1], tl.float32)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for start in range(0, L, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        seen = _seen(mask_ptr, keys, L, HAS_MASK)
        scores = tl.dot(q1, tl.trans(_rows(k_ptr, keys, kn, keys < L, d, 0, D1)), input_precision="ieee")
        if D2 > 0:
            scores += tl.dot(q2, tl.trans(_rows(k_ptr, keys, kn, keys < L, d, D1, D2)), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * (scale * 1.4426950408889634), float("-inf"))  # exp(x) = 2^(x log2 e)
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - finite_top[:, None])
        old = tl.exp2(top - finite_top)
        total = total * old + tl.sum(p, 1)
        p = p.to(v_ptr.dtype.element_ty)
        v1 = _rows(v_ptr, keys, vn, keys < L, d, 0, D1)
        acc1 = acc1 * old[:, None] + tl.dot(p, v1, input_precision="ieee")
        if D2 > 0:
            v2 = _rows(v_ptr, keys, vn, keys < L, d, D1, D2)
            acc2 = acc2 * old[:, None] + tl.dot(p, v2, input_precision="ieee")
        top = new_top
    total_or_1 = tl.where(total == 0.0, 1.0, total)
    _write(o_ptr, queries, on, inside, d, acc1 / total_or_1[:, None], 0, D1)
    if D2 > 0:
        _write(o_ptr, queries, on, inside, d, acc2 / total_or_1[:, None], D1, D2)
    lse = tl.where(total == 0.0, 0.0, top + tl.log2(total_or_1))
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * N + queries, lse, mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    q_ptr, k_ptr, v_ptr, o_ptr, g_ptr, lse_ptr, mask_ptr, dq_ptr, dk_ptr, dv_ptr,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, gb, gh, gn, dqb, dqh, dqn,
    dkb, dkh, dkn, dvb, dvh, dvn, share_stride, mask_stride, H, N, L, d, share, scale,
    HAS_MASK: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    q_ptr += b * qb + h * qh
    k_ptr += b * kb + h * kh
    v_ptr += b * vb + h * vh
    o_ptr += b * ob + h * oh
    g_ptr += b * gb + h * gh
    dq_ptr += b * dqb + h * dqh
    dk_ptr += b * dkb + h * dkh + tl.program_id(0).to(tl.int64) * share_stride
    dv_ptr += b * dvb + h * dvh + tl.program_id(0).to(tl.int64) * share_stride
    lse_ptr += tl.program_id(1).to(tl.int64) * N
    mask_ptr += b * mask_stride
    first = tl.program_id(0) * share
    for start in range(0, L, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        seen = _seen(mask_ptr, keys, L, HAS_MASK)
        k1 = _rows(k_ptr, keys, kn, keys < L, d, 0, D1)
        v1 = _rows(v_ptr, keys, vn, keys < L, d, 0, D1)
        dk1 = tl.zeros([BLOCK_K, D1], tl.float32)
        dv1 = tl.zeros([BLOCK_K, D1], tl.float32)
        if D2 > 0:
            k2 = _rows(k_ptr, keys, kn, keys < L, d, D1, D2)
            v2 = _rows(v_ptr, keys, vn, keys < L, d, D1, D2)
            dk2 = tl.zeros([BLOCK_K, D2], tl.float32)
            dv2 = tl.zeros([BLOCK_K, D2], tl.float32)
        for block in range(first, min(first + share, N), BLOCK_Q):
            queries = block + tl.arange(0, BLOCK_Q)
            inside = queries < N
            q1 = _rows(q_ptr, queries, qn, inside, d, 0, D1)
            g1 = _rows(g_ptr, queries, gn, inside, d, 0, D1)
            o1 = _rows(o_ptr, queries, on, inside, d, 0, D1)
            lse = tl.load(lse_ptr + queries, mask=inside, other=0.0)
            delta = tl.sum(g1.to(tl.float32) * o1.to(tl.float32), 1)  # [BLOCK_Q]: g · out
            scores = tl.dot(k1, tl.trans(q1), input_precision="ieee")  # [BLOCK_K, BLOCK_Q], transposed
            dp = tl.dot(v1, tl.trans(g1), input_precision="ieee")
            if D2 > 0:
                q2 = _rows(q_ptr, queries, qn, inside, d, D1, D2)
                g2 = _rows(g_ptr, queries, gn, inside, d, D1, D2)
                o2 = _rows(o_ptr, queries, on, inside, d, D1, D2)
                delta += tl.sum(g2.to(tl.float32) * o2.to(tl.float32), 1)
                scores += tl.dot(k2, tl.trans(q2), input_precision="ieee")
                dp += tl.dot(v2, tl.trans(g2), input_precision="ieee")
            p = tl.exp2(scores * (scale * 1.4426950408889634) - lse[None, :])
            p = tl.where(seen[:, None], p, 0.0)
            # queries beyond N have gradient 0, so they add nothing to the sums over queries
            ds = (p * (dp - delta[None, :]) * scale).to(k_ptr.dtype.element_ty)
            p = p.to(k_ptr.dtype.element_ty)
            dv1 += tl.dot(p, g1, input_precision="ieee")
            dk1 += tl.dot(ds, q1, input_precision="ieee")
            dsq = tl.trans(ds)
            dq1 = tl.dot(dsq, k1, input_precision="ieee")
            if start > 0:
                dq1 += _rows(dq_ptr, queries, dqn, inside, d, 0, D1).to(tl.float32)
            _write(dq_ptr, queries, dqn, inside, d, dq1, 0, D1)
            if D2 > 0:
                dv2 += tl.dot(p, g2, input_precision="ieee")
                dk2 += tl.dot(ds, q2, input_precision="ieee")
                dq2 = tl.dot(dsq, k2, input_precision="ieee")
                if start > 0:
                    dq2 += _rows(dq_ptr, queries, dqn, inside, d, D1, D2).to(tl.float32)
                _write(dq_ptr, queries, dqn, inside, d, dq2, D1, D2)
        _write(dk_ptr, keys, dkn, keys < L, d, dk1, 0, D1)
        _write(dv_ptr, keys, dvn, keys < L, d, dv1, 0, D1)
        if D2 > 0:
            _write(dk_ptr, keys, dkn, keys < L, d, dk2, D1, D2)
            _write(dv_ptr, keys, dvn, keys < L, d, dv2, D1, D2)
