"""Self-attention and cross-attention, with the parameter names of DiT and PixArt checkpoints.

Tokens keep their axes, `[B, T, S, D]`: attention over space, over time or over all tokens differs in one rearrangement
of queries, keys and values, so that no block moves the tokens themselves.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import attention, normed_heads, packed_attention
from opensora.models.layers.positions import apply_rotary

Axis = Literal["space", "time", "all"]
NormOrder = Literal["norm_then_rope", "rope_then_norm"]


def split_heads(x: Tensor, num_heads: int, axis: Axis) -> Tensor:
    """Tokens `[B, T, S, H d]` -> "space": [B T, H, S, d], "time": [B, S, H, T, d], "all": [B, H, T S, d].

    Without einops, which at a sampler's sizes takes as long as the attention.
    """
    return sequences(x.unflatten(-1, (num_heads, -1)), axis)


def sequences(x: Tensor, axis: Axis) -> Tensor:
    """`[B, T, S, H, d]` -> the sequences along the axis, see `split_heads`."""
    B, T, S, H, d = x.shape
    if axis == "time":
        return x.permute(0, 2, 3, 1, 4)  # B T S H d -> B S H T d
    rows, N = (B * T, S) if axis == "space" else (B, T * S)
    return x.reshape(rows, N, H, d).transpose(1, 2)  # rows H N d


def join_heads(x: Tensor, grid: tuple[int, int, int], axis: Axis) -> Tensor:
    """`split_heads` undone, for `(B, T, S)` -> [B, T, S, H d]."""
    x = x.permute(0, 3, 1, 2, 4) if axis == "time" else x.transpose(1, 2)  # the heads' channels come last
    return x.reshape(*grid, x.shape[-2] * x.shape[-1])


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis, computed in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., dim] -> [..., dim]`, in x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Multi-head self-attention. Names: `qkv`, `proj`, with `qk_norm` also `q_norm`, `k_norm`.

    Args:
        dim, num_heads: width, and the number of heads that share it.
        axis: which tokens see each other: "space" = those of a frame, "time" = those at a
            spatial position, "all".
        qk_norm: RMS-normalise queries and keys, head by head (Henry et al. 2020).
        norm_order: whether rotary positions come after that normalisation, or before it as in the weights of
            Open-Sora 1.1.
        kernel: see `opensora.acceleration.kernels.attention`.
    """

    exchange: Callable[["Attention", Tensor, Tensor | None, tuple[int, int] | None], Tensor] | None = None
    """`forward` where tokens are sharded over processes, set by `opensora.acceleration.sequence_parallel`; None = they are not."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        axis: Axis = "all",
        qk_norm: bool = False,
        norm_order: NormOrder = "norm_then_rope",
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"hidden_size={dim} is not divisible by num_heads={num_heads}.")
        if norm_order not in get_args(NormOrder):
            raise ValueError(f"norm_order={norm_order!r} is not one of {', '.join(get_args(NormOrder))}.")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.axis = axis
        self.norm_order = norm_order
        self.kernel = kernel
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)
        # whether there are as many keys as queries; and nothing but positions between the linear layer and the attention
        self.keeps_keys = type(self).reduce_keys is Attention.reduce_keys
        self.is_plain = not qk_norm and self.keeps_keys

    def forward(self, x: Tensor, rope: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        """Attend along the axis: tokens `x [B, T, S, D] -> [B, T, S, D]`.

        `rope` is the `rotary_table` of the positions along the axis, `grid` rows and columns of the S tokens.
        """
        if self.exchange is not None:
            return self.exchange(self, x, rope, grid)
        return self.forward_local(x, rope, grid)

    def forward_local(self, x: Tensor, rope: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        """`forward` where all tokens that see each other are here."""
        return self.proj(self.attend_qkv(self.qkv(x), rope, grid))

    def attend_qkv(self, qkv: Tensor, rope: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        """Attention between the two linear layers, for any number H of heads: `qkv [B, T, S, 3 H d] -> [B, T, S, H d]`."""
        B, T, S, width = qkv.shape
        heads = width // (3 * self.head_dim)
        if rope is None and self.is_plain:
            packed = packed_attention(qkv, heads, self.axis, self.kernel)
            if packed is not None:
                return packed
        # split before rearranging: one concatenation then joins the gradients
        if not self.keeps_keys:
            q, k, v = (split_heads(part, heads, self.axis) for part in qkv.chunk(3, dim=-1))  # each [..., H, N, d]
            k, v = self.reduce_keys(k, v, grid)
            return join_heads(self.attend(q, k, v, rope), (B, T, S), self.axis)
        # normalise and rotate in the tokens' own order: a compiler needs fewer passes
        q, k, v = qkv.unflatten(-1, (3, heads, self.head_dim)).unbind(-3)  # each [B, T, S, H, d]
        q, k = self._norm_and_rotate_tokens(q, k, rope)
        q, k, v = (sequences(part, self.axis) for part in (q, k, v))
        return join_heads(attention(q, k, v, kernel=self.kernel), (B, T, S), self.axis)

    def _norm_and_rotate_tokens(self, q: Tensor, k: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_norm_and_rotate` of `[B, T, S, H, d]`; `rope` is the table for the positions along the axis."""
        _, T, S, _, d = q.shape
        positions = {"time": T, "space": S, "all": T * S}[self.axis]
        if rope is not None and rope.shape != (2, positions, d):
            raise ValueError(f"a rotary table {list(rope.shape)} for {positions} positions of heads with {d} channels")
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.norm_order == "norm_then_rope" and isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            every = S if self.axis == "time" else 1
            q_normed = normed_heads(q, q_norm.weight, q_norm.eps, rope, every, self.kernel)
            k_normed = normed_heads(k, k_norm.weight, k_norm.eps, rope, every, self.kernel)
            if q_normed is not None and k_normed is not None:
                return q_normed, k_normed
        if rope is not None and self.axis == "all":
            rope = rope.unflatten(1, (T, S))[:, :, :, None]  # [2, T, S, 1, d]
        elif rope is not None:
            rope = rope[:, :, None, None] if self.axis == "time" else rope[:, :, None]  # [2, T, 1, 1, d], [2, S, 1, d]
        return self._norm_and_rotate(q, k, rope)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor | None = None) -> Tensor:
        """Rotary positions, normalisation, softmax and weighted sum: `q [..., H, N, d]`, `k, v [..., H, L, d]` -> q's shape."""
        q, k = self._norm_and_rotate(q, k, rope)
        return attention(q, k, v, kernel=self.kernel)

    def _norm_and_rotate(self, q: Tensor, k: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalisation and rotary positions; `rope` is a table for the axes that q and k have."""
        if self.norm_order == "norm_then_rope":
            return apply_rotary(self.q_norm(q), rope), apply_rotary(self.k_norm(k), rope)
        return self.q_norm(apply_rotary(q, rope)), self.k_norm(apply_rotary(k, rope))

    def reduce_keys(self, k: Tensor, v: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """A hook for variants that attend to fewer keys than there are queries; `k, v [..., H, N, d]`."""
        return k, v

    def num_keys(self, grid: tuple[int, int]) -> int:
        """Keys per frame after `reduce_keys`."""
        return grid[0] * grid[1]

    def flops(self, T: int, S: int, grid: tuple[int, int] | None = None) -> int:
        """Floating-point operations for T x S tokens of one sample, `grid` = rows and columns of S for `reduce_keys`."""
        dim = self.proj.in_features
        keys = {"space": S, "time": T, "all": T * (S if grid is None else self.num_keys(grid))}[self.axis]
        return 2 * T * S * (4 * dim * dim + 2 * keys * dim)


class CrossAttention(nn.Module):
    """Multi-head attention from tokens to text. Names: `q_linear`, `kv_linear`, `proj`."""

    def __init__(self, dim: int, num_heads: int, *, kernel: str = "auto") -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kernel = kernel
        self.q_linear = nn.Linear(dim, dim)
        self.kv_linear = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """`x [B, T, S, D]`, text `y [B, L, D]`, `mask [B, L]` (True = real token) -> `[B, T, S, D]`.

        A padded text token changes nothing: captions of different length may share a batch.
        """
        B, T, S, D = x.shape
        q = split_heads(self.q_linear(x), self.num_heads, "all")  # [B, H, T S, d]
        k, v = (
            part.reshape(B, -1, self.num_heads, D // self.num_heads).transpose(1, 2)  # [B, H, L, d]
            for part in self.kv_linear(y).chunk(2, dim=-1)
        )
        return self.proj(join_heads(attention(q, k, v, mask, kernel=self.kernel), (B, T, S), "all"))

    def flops(self, num_tokens: int, text_len: int) -> int:
        """Floating-point operations for the tokens of one sample."""
        dim = self.proj.in_features
        return 2 * (num_tokens * 2 * dim * dim + text_len * 2 * dim * dim + 2 * num_tokens * text_len * dim)
