"""The transformers of NOVA (Deng et al. 2024, arXiv:2412.14169): normalisation after each branch, inside the residual.

    x = x + LN(attention(x));  x = x + LN(MLP(x))

Names are those of the published weights: `blocks.N.{norm1, attn.qkv, attn.proj, norm2, mlp.fc1, mlp.fc2}`, `norm` and
`mixer.{lora, proj}`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora.models.layers.rope import apply_rotary

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values [B, H, N, d] of the tokens so far, of each block."""

Lengths = Literal["few", "many"]
"""How many sequence lengths a block sees over time."""

FOR_MANY_LENGTHS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's kernels without cuDNN's, which it prefers on an H100 or H200: cuDNN builds a plan for each new length, forward and
backward, reported to take tens of milliseconds of host time (not measured here). With few lengths that amortises.
"""


class CausalAttention(nn.Module):
    """Self-attention that may be masked, and may continue from a cache of keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"a width of {dim} is no multiple of num_heads={num_heads}.")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        allowed: Tensor | None = None,
        rotary: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
        lengths: Lengths = "few",
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """See `NovaBlock.forward`."""
        q, k, v = rearrange(self.qkv(x), "B N (three H d) -> three B H N d", three=3, H=self.num_heads)
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        with sdpa_kernel(FOR_MANY_LENGTHS) if lengths == "many" else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(rearrange(out, "B H N d -> B N (H d)")), (k, v)


class NovaBlock(nn.Module):
    """Attention and MLP, each normalised before it is added."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = CausalAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))  # timm's: GELU without approximation

    def forward(
        self,
        x: Tensor,
        allowed: Tensor | None = None,
        rotary: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
        lengths: Lengths = "few",
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One block.

        Args:
            x: [B, N, D].
            allowed: [N, M] bool, which of the M tokens so far each may attend to; None = all.
            rotary: [2, N, d] or [2, B, 1, N, d], see `apply_rotary`.
            past: keys and values of the M - N tokens before.
            lengths: "many" where M differs from step to step: a kernel that needs no plan for it.

        Returns:
            [B, N, D], and keys and values of all M tokens.
        """
        attended, cache = self.attn(x, allowed, rotary, past, lengths)
        x = x + self.norm1(attended)
        return x + self.norm2(self.mlp(x)), cache


class PatchEmbed(nn.Module):
    """An image's latent -> tokens, by a convolution whose stride is its kernel. Name: `proj`."""

    def __init__(self, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W] -> [B, N, D]`, row-major, contiguous."""
        return self.proj(x).flatten(2).transpose(1, 2).contiguous()

    def embed_patches(self, patches: Tensor) -> Tensor:
        """`[..., C p p]`, the channel slowest, `-> [..., D]`: any patches, not only those of a whole image."""
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Mixer(nn.Module):
    """Later frames as changes of the first one (section 3.2, "scaling and shift"): `c_0 (1 + scale(c_t)) + shift(c_t)`.

    Args:
        rank: of the map from c_t to scale and shift; -1: full.
    """

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.lora = nn.Identity() if rank < 0 else nn.Linear(dim, rank, bias=False)
        self.proj = nn.Linear(dim if rank < 0 else rank, 2 * dim)

    def forward(self, first: Tensor, later: Tensor) -> Tensor:
        """`first [B, 1, N, D]`, `later [B, T, N, D] -> [B, T, N, D]`."""
        scale, shift = self.proj(self.lora(F.silu(later))).chunk(2, dim=-1)
        return first * (1 + scale) + shift


class VisionTransformer(nn.Module):
    """A patch embedding and blocks, and for `mixer_rank` but 0 a mixer; what goes through them is up to the model."""

    def __init__(
        self, depth: int, dim: int, num_heads: int, patch_size: int, in_channels: int, mixer_rank: int = 0
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(patch_size, in_channels, dim)
        self.blocks = nn.ModuleList(NovaBlock(dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.mixer = Mixer(dim, mixer_rank) if mixer_rank else None

    def run(
        self,
        x: Tensor,
        blocks: Sequence[int],
        allowed: Tensor | None = None,
        rotary: Tensor | None = None,
        lengths: Lengths = "few",
    ) -> Tensor:
        """Tokens `x [B, N, D]` through some of the blocks."""
        x = _match_norm_dtype(x)
        for i in blocks:
            x, _ = self.blocks[i](x, allowed, rotary, lengths=lengths)
        return x

    def decode_step(self, x: Tensor, cache: Cache | None, rotary: Tensor | None = None) -> tuple[Tensor, Cache]:
        """Tokens that follow those of `cache` through all blocks and the norm; they see all of these and each other."""
        grown: Cache = []
        x = _match_norm_dtype(x)
        for i, block in enumerate(self.blocks):
            x, entry = block(x, None, rotary, None if cache is None else cache[i])
            grown.append(entry)
        return self.norm(x), grown


def _match_norm_dtype(x: Tensor) -> Tensor:
    """In fp32 under autocast, as the first block's norms make it: then compiled blocks, the first among them, share a program."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x
