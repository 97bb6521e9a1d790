"""Self-attention among the tokens of a frame, a few hundred at most, with one pass for the gradients of q, k and v.

A fused kernel for long sequences cuts the keys into blocks that different programs work on, so that gradients of queries
need a second pass or atomic additions, and PyTorch's give three tensors that are then joined to one, the gradient of the linear layer
before. Here a program has one head of one frame: it walks over its key blocks, adds up the gradients of the queries where they
belong, and writes all three where that layer wants them; the column sums, which are the gradient of its bias, come with it.

A head of 72 channels is computed as 64 + 16, not as the next power of two: what tensor cores do falls by three eighths.
The arithmetic is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691): fp32 softmax and accumulation, probabilities recomputed
from the logarithm of their sum. Deterministic. Where there are two blocks of keys the queries' gradient is rounded twice.
"""

import triton
import triton.language as tl
from torch import Tensor, empty_like, float32
from torch.library import custom_op

from opensora.acceleration.triton_tiles import add_product, inner, load_rows, store_rows, store_sum, tiles, zeros

MAX_TOKENS = 256
"""Of a frame: beyond, kernels for long sequences are good at it."""
MAX_HEAD_DIM = 128
_FORWARD = {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}
_BACKWARD = {"BLOCK_Q": 64, "BLOCK_K": 128, "num_warps": 8, "num_stages": 1}


def attend_packed(qkv: Tensor, num_heads: int, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v among the tokens of each frame.

    Args:
        qkv: [B, T, S, 3 H d], the output of a linear layer: q, k and v one after the other, in each the heads.
        num_heads: H.
        bias: [3 H d], that of the layer, if it was added without gradient: it gets its gradient here.

    Returns:
        [B, T, S, H d].
    """
    return frame_attention(qkv, bias, num_heads)[0]


@custom_op("opensora::frame_attention", mutates_args=())
def frame_attention(qkv: Tensor, bias: Tensor | None, num_heads: int) -> tuple[Tensor, Tensor]:
    """See `attend_packed`; beside its result log2 of the softmax's denominator [B T, H, S], which the backward pass needs."""
    qkv = qkv.contiguous()
    B, T, S, width = qkv.shape
    d = width // (3 * num_heads)
    out, lse = qkv.new_empty(B, T, S, width // 3), qkv.new_empty(B * T, num_heads, S, dtype=float32)
    blocks = _within(_FORWARD, S)
    _forward_kernel[(triton.cdiv(S, blocks["BLOCK_Q"]), B * T * num_heads)](
        qkv, out, lse, num_heads, S, d**-0.5, d=d, **tiles(d), **blocks
    )
    return out, lse


@frame_attention.register_fake
def _(qkv: Tensor, bias: Tensor | None, num_heads: int) -> tuple[Tensor, Tensor]:
    B, T, S, width = qkv.shape
    return qkv.new_empty(B, T, S, width // 3), qkv.new_empty(B * T, num_heads, S, dtype=float32)


@custom_op("opensora::frame_attention_backward", mutates_args=())
def frame_attention_backward(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    """The gradient of qkv, and fp32 sums [P, 3 H d] whose sum is that of all tokens' gradients."""
    qkv, grad = qkv.contiguous(), grad.to(qkv.dtype).contiguous()
    B, T, S, width = qkv.shape
    d = width // (3 * num_heads)
    blocks = _within(_BACKWARD, S)
    grad_qkv = empty_like(qkv)
    sums = qkv.new_empty(B * T * triton.cdiv(S, blocks["BLOCK_K"]), width, dtype=float32)
    _backward_kernel[(B * T * num_heads,)](
        qkv, out, grad, lse, grad_qkv, sums, num_heads, S, d**-0.5, d=d, **tiles(d), **blocks
    )
    return grad_qkv, sums


@frame_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    B, T, S, width = qkv.shape
    parts = B * T * triton.cdiv(S, _within(_BACKWARD, S)["BLOCK_K"])
    return qkv.new_empty(qkv.shape), qkv.new_empty(parts, width, dtype=float32)


def _save(ctx, inputs: tuple[Tensor, Tensor | None, int], output: tuple[Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    qkv, bias, ctx.num_heads = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output)


def _grad(ctx, grad: Tensor, _: None) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[no-untyped-def]
    grad_qkv, sums = frame_attention_backward(grad, *ctx.saved_tensors, ctx.num_heads)
    return grad_qkv, None if ctx.bias_dtype is None else sums.sum(0).to(ctx.bias_dtype), None


frame_attention.register_autograd(_grad, setup_context=_save)


def _within(blocks: dict[str, int], num_tokens: int) -> dict[str, int]:
    """No larger than what there is."""
    most = max(16, triton.next_power_of_2(num_tokens))
    return {name: min(value, most) if name.startswith("BLOCK") else value for name, value in blocks.items()}


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    qkv_ptr, o_ptr, lse_ptr, H, N, scale,
    d: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32) * 1.4426950408889634  # exp(x) = 2^(x log2 e)
    frame, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    width = H * d
    q_ptr = qkv_ptr + frame * N * 3 * width + head * d
    queries = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    asked = queries < N
    q0, q1 = load_rows(q_ptr, queries, 3 * width, asked, d, D0, D1)
    out0, out1 = zeros(BLOCK_Q, D0, D1)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    for first in range(0, N, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        there = keys < N
        k0, k1 = load_rows(q_ptr + width, keys, 3 * width, there, d, D0, D1)
        v0, v1 = load_rows(q_ptr + 2 * width, keys, 3 * width, there, d, D0, D1)
        scores = tl.where(there[None, :], inner(q0, q1, k0, k1, D1) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))  # a block has a key, so that it is finite
        p = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.sum(p, 1)
        out0, out1 = add_product(out0 * shrunk[:, None], out1 * shrunk[:, None], p.to(v0.dtype), v0, v1, D1)
        top = higher
    out0, out1 = out0 / total[:, None], out1 / total[:, None]
    store_rows(o_ptr + frame * N * width + head * d, queries, width, asked, out0, out1, d, D0, D1)
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * N + queries, top + tl.log2(total), mask=asked)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    qkv_ptr, o_ptr, g_ptr, lse_ptr, dqkv_ptr, sums_ptr, H, N, scale,
    d: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    frame, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    width = H * d
    q_ptr = qkv_ptr + frame * N * 3 * width + head * d
    dq_ptr = dqkv_ptr + frame * N * 3 * width + head * d
    o_ptr += frame * N * width + head * d
    g_ptr += frame * N * width + head * d
    lse_ptr += tl.program_id(0).to(tl.int64) * N
    sums_ptr += frame * tl.cdiv(N, BLOCK_K) * 3 * width + head * d
    for first in range(0, N, BLOCK_K):
        keys = first + tl.arange(0, BLOCK_K)
        there = keys < N
        k0, k1 = load_rows(q_ptr + width, keys, 3 * width, there, d, D0, D1)
        v0, v1 = load_rows(q_ptr + 2 * width, keys, 3 * width, there, d, D0, D1)
        dk0, dk1 = zeros(BLOCK_K, D0, D1)
        dv0, dv1 = zeros(BLOCK_K, D0, D1)
        asking = tl.zeros([BLOCK_K], tl.float32)  # the gradient of the scores, summed over the queries
        for block in range(0, N, BLOCK_Q):
            queries = block + tl.arange(0, BLOCK_Q)
            asked = queries < N
            q0, q1 = load_rows(q_ptr, queries, 3 * width, asked, d, D0, D1)
            g0, g1 = load_rows(g_ptr, queries, width, asked, d, D0, D1)
            o0, o1 = load_rows(o_ptr, queries, width, asked, d, D0, D1)
            lse = tl.load(lse_ptr + queries, mask=asked, other=0.0)
            delta = tl.sum(g0.to(tl.float32) * o0.to(tl.float32), 1)  # [BLOCK_Q]: gradient · result
            if D1 > 0:
                delta += tl.sum(g1.to(tl.float32) * o1.to(tl.float32), 1)
            p = tl.exp2(inner(k0, k1, q0, q1, D1) * (scale * 1.4426950408889634) - lse[None, :])  # [BLOCK_K, BLOCK_Q]
            p = tl.where(there[:, None], p, 0.0)
            # queries beyond N have gradient 0, so they add nothing to the sums over queries
            ds = p * (inner(v0, v1, g0, g1, D1) - delta[None, :]) * scale
            asking += tl.sum(ds, 1)
            ds = ds.to(q0.dtype)
            dv0, dv1 = add_product(dv0, dv1, p.to(q0.dtype), g0, g1, D1)
            dk0, dk1 = add_product(dk0, dk1, ds, q0, q1, D1)
            dq0, dq1 = zeros(BLOCK_Q, D0, D1)
            if first > 0:  # what the keys before gave
                before0, before1 = load_rows(dq_ptr, queries, 3 * width, asked, d, D0, D1)
                dq0 += before0
                if D1 > 0:
                    dq1 += before1
            dq0, dq1 = add_product(dq0, dq1, tl.trans(ds), k0, k1, D1)
            store_rows(dq_ptr, queries, 3 * width, asked, dq0, dq1, d, D0, D1)
        store_rows(dq_ptr + width, keys, 3 * width, there, dk0, dk1, d, D0, D1)
        store_rows(dq_ptr + 2 * width, keys, 3 * width, there, dv0, dv1, d, D0, D1)
        # what the keys of this block add to the gradients of all queries
        store_sum(sums_ptr, asking[:, None] * k0, asking[:, None] * k1, d, D0, D1)
        store_sum(sums_ptr + width, dk0, dk1, d, D0, D1)
        store_sum(sums_ptr + 2 * width, dv0, dv1, d, D0, D1)
        sums_ptr += 3 * width
        tl.debug_barrier()  # the next round reads what other threads of this program wrote
