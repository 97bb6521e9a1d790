"""How one self-attention computes when its tokens are sharded over processes along S.

`DSP` is dynamic sequence parallelism (DSP, Zhao et al. 2024, arXiv:2403.10266) for attention within a frame: the
sharded axis becomes T for the time of the attention. `Ulysses` is DeepSpeed-Ulysses (Jacobs et al. 2023,
arXiv:2309.14509): each process gets all tokens of some heads. Attention over time needs neither, as each process has
all frames of its tokens.

DSP is usually described with tokens that stay sharded over S or T until the next attention needs the other one. Coming back to S
costs the same two all-to-alls a pair of attentions, and keeps frame masks, temporal positions and the residual stream as they are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from opensora.acceleration.sequence_parallel.collectives import Ranks

Grid = tuple[int, int]  # rows and columns of a frame


SelfAttention = Any
"""An `opensora.models.layers.attention.Attention`, which acceleration cannot import."""


@dataclass(frozen=True)
class Ulysses:
    """All tokens of some heads: one all-to-all of 3 D channels before the attention and one of D after it.

    Where the heads are not a multiple of the processes, heads of zeros fill up; they are dropped afterwards.
    """

    ranks: Ranks

    def __call__(self, attn: SelfAttention, x: Tensor, rope: Tensor | None, grid: Grid | None) -> Tensor:
        """Tokens `x [B, T, S / p, D]` -> `[B, T, S / p, D]`."""
        qkv = rearrange(attn.qkv(x), "B T S (K H d) -> B T S K H d", K=3, d=attn.head_dim)
        qkv = self.ranks.all_to_all(qkv, scatter=4, gather=2, length=_tokens_per_frame(grid))  # [B, T, S, 3, H / p, d]
        out = attn.attend_qkv(rearrange(qkv, "B T S K H d -> B T S (K H d)"), rope, grid)
        return attn.proj(self.back(attn, out))

    def back(self, attn: SelfAttention, out: Tensor) -> Tensor:
        """All tokens of some heads `[B, T, S, D / p]` -> all heads of some tokens `[B, T, S / p, D]`."""
        out = rearrange(out, "B T S (H d) -> B T S H d", d=attn.head_dim)
        out = self.ranks.all_to_all(out, scatter=2, gather=3, length=attn.num_heads)
        return rearrange(out, "B T S H d -> B T S (H d)")


class DSP(Ulysses):
    """All tokens of some frames: one all-to-all of D channels before and one after an attention within frames.

    With fewer frames than processes some would have nothing to do: then, as for images, `Ulysses`.
    """

    def __call__(self, attn: SelfAttention, x: Tensor, rope: Tensor | None, grid: Grid | None) -> Tensor:
        T = x.shape[1]
        if self.ranks.size > T:
            return Ulysses.__call__(self, attn, x, rope, grid)
        x = self.ranks.all_to_all(x, scatter=1, gather=2, length=_tokens_per_frame(grid))  # [B, T / p, S, D]
        return self.ranks.all_to_all(attn.forward_local(x, rope, grid), scatter=2, gather=1, length=T)


class UlyssesShortKV(Ulysses):
    """`Ulysses` for an attention that compresses its keys, for which it needs all heads of whole frames.

    Keys and values are first sharded by frames, compressed there, and only then, fewer, by heads.
    """

    def __call__(self, attn: SelfAttention, x: Tensor, rope: Tensor | None, grid: Grid | None) -> Tensor:
        T, S = x.shape[1], _tokens_per_frame(grid)
        qkv = rearrange(attn.qkv(x), "B T S (K H d) -> K B T S H d", K=3, d=attn.head_dim)
        q = self.ranks.all_to_all(qkv[0], scatter=3, gather=2, length=S)  # [B, T, S, H / p, d]
        kv = self.ranks.all_to_all(qkv[1:], scatter=2, gather=3, length=S)  # [2, B, T / p, S, H, d]
        frames = kv.shape[2]
        k, v = rearrange(kv, "K B T S H d -> K B H (T S) d").unbind(0)
        kv = torch.stack(attn.reduce_keys(k, v, grid))
        kv = rearrange(kv, "K B H (T S) d -> K B T S H d", T=frames)
        kv = self.ranks.all_to_all(kv, scatter=4, gather=2, length=T)  # [2, B, T, few, H / p, d]
        k, v = rearrange(kv, "K B T S H d -> K B H (T S) d").unbind(0)
        out = attn.attend(rearrange(q, "B T S H d -> B H (T S) d"), k, v, rope)
        return attn.proj(self.back(attn, rearrange(out, "B H (T S) d -> B T S (H d)", T=T)))


def _tokens_per_frame(grid: Grid | None) -> int:
    assert grid is not None, "an attention whose tokens are sharded needs the rows and columns of a frame"
    return grid[0] * grid[1]
