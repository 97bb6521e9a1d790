"""The layers of NOVA (Deng et al. 2024, arXiv:2412.14169): what enters it, its transformers, and the head.

Names, and what the numbers mean, are those of the published weights. Sinusoids have sines first, but for the head's timestep,
which has cosines first; what comes out of the head has the channel fastest, while patches that go in have it slowest.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora.models.layers.embedders import timestep_sinusoid
from opensora.models.layers.mlp import Mlp
from opensora.models.layers.positions import apply_rotary, rotary_table, sincos_1d

NUM_FREQUENCIES = 256
NULL_TOKENS = 512
NORM_EPS = 1e-6  # where the condition scales and shifts; other norms have 1e-5

KeysValues = tuple[Tensor, Tensor]  # [B, H, N, d] each, of the tokens so far, of one block

Lengths = Literal["few", "many"]  # how many sequence lengths a block sees over time

FOR_MANY_LENGTHS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's kernels without cuDNN's, which it prefers on an H100 or H200: cuDNN builds a plan for each new length, forward and
backward, reported to take tens of milliseconds of host time (not measured here). With few lengths that amortises.
"""


class TextEmbed(nn.Module):
    """Text features -> tokens. Fixed random tokens fill a caption's padding; they alone are "no text"."""

    weight: Tensor

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels, dim)
        self.norm = nn.LayerNorm(dim).requires_grad_(False)  # frozen in training, as published
        self.register_buffer("weight", torch.randn(NULL_TOKENS, in_channels) * 0.02)

    def forward(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """`y [B, 1, L, C]`, `mask [B, L]` bool, True at real tokens -> `[B, L, D]`."""
        y = y[:, 0]
        if mask is not None:
            y = torch.where(mask[..., None].bool(), y, self.weight[: y.shape[1]].to(y.dtype))
        return self.norm(self.proj(y))


def _sinusoid_mlp(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(NUM_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))


class MotionEmbed(nn.Module):
    """Motion (an optical-flow score) and frames per second -> two tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.flow_proj, self.fps_proj = _sinusoid_mlp(dim), _sinusoid_mlp(dim)

    def forward(self, flow: Tensor, fps: Tensor) -> Tensor:
        """`[B]` each `-> [B, 2, D]`."""
        dtype = next(self.parameters()).dtype
        flow, fps = (sincos_1d(NUM_FREQUENCIES, value).to(dtype) for value in (flow, fps))
        return torch.stack([self.flow_proj(flow), self.fps_proj(fps)], dim=1)


class VideoPosEmbed(nn.Module):
    """Absolute positions of latent frames in time, which span `base_length` frames however many there are; None = they count."""

    def __init__(self, dim: int, base_length: int | None) -> None:
        super().__init__()
        self.base_length = base_length
        self.time_proj = _sinusoid_mlp(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, frames: Tensor, num_frames: int) -> Tensor:
        """Indices `[T]` of frames of a video of `num_frames` latent frames -> `[T, D]`."""
        times = frames.double() * (1.0 if self.base_length is None else self.base_length / num_frames)
        return self.norm(self.time_proj(sincos_1d(NUM_FREQUENCIES, times).to(self.norm.weight.dtype)))


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


def rotary_3d(head_dim: int, frames: Tensor, grid: tuple[int, int], before: int) -> Tensor:
    """Rotations `[2, before + T H W, head_dim]` of the tokens of frames `[T]`; the identity for the `before` tokens.

    An eighth of the channels is for time, the rest for space.
    """
    rows, columns = (torch.arange(n, device=frames.device) for n in grid)
    where = torch.cartesian_prod(frames.double(), rows.double(), columns.double())  # [T H W, 3]
    where = torch.cat([where.new_zeros(before, 3), where])
    side = head_dim * 7 // 16 // 2 * 2
    widths = (head_dim - 2 * side, side, side)
    return torch.cat([rotary_table(width, where[:, i]) for i, width in enumerate(widths)], dim=-1)


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
        past: KeysValues | None = None,
        lengths: Lengths = "few",
    ) -> tuple[Tensor, KeysValues]:
        """See `NovaBlock.forward`."""
        q, k, v = rearrange(self.qkv(x), "B N (three H d) -> three B H N d", three=3, H=self.num_heads)
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        with sdpa_kernel(FOR_MANY_LENGTHS) if lengths == "many" else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(rearrange(out, "B H N d -> B N (H d)")), (k, v)


class NovaBlock(nn.Module):
    """Attention and MLP, each normalised before it is added: `x + LN(attention(x))`, `x + LN(MLP(x))`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = CausalAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim, act=nn.GELU())

    def forward(
        self,
        x: Tensor,
        allowed: Tensor | None = None,
        rotary: Tensor | None = None,
        past: KeysValues | None = None,
        lengths: Lengths = "few",
    ) -> tuple[Tensor, KeysValues]:
        """One block, `x [B, N, D] -> [B, N, D]`, and keys and values of all M tokens.

        Args:
            allowed: [N, M] bool, which of the M tokens so far each may attend to; None = all.
            rotary: [2, N, d] or [2, B, 1, N, d], see `apply_rotary`.
            past: keys and values of the M - N tokens before.
            lengths: "many" where M differs from step to step: a kernel that needs no plan for it.
        """
        attended, cache = self.attn(x, allowed, rotary, past, lengths)
        x = x + self.norm1(attended)
        return x + self.norm2(self.mlp(x)), cache


class Mixer(nn.Module):
    """Later frames as changes of the first one (section 3.2, "scaling and shift"): `c_0 (1 + scale(c_t)) + shift(c_t)`.

    `rank` is that of the map from c_t to scale and shift; -1: full.
    """

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        if rank < -1:
            raise ValueError(f"mixer_rank={rank} is not -1 (full), 0 (no mixer) or a rank.")
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
        past: Sequence[KeysValues] | None = None,
        lengths: Lengths = "few",
    ) -> tuple[Tensor, list[KeysValues]]:
        """Tokens `x [B, N, D]` through some of the blocks, and their keys and values; see `NovaBlock.forward`.

        `past`: the keys and values that each block returned before.
        """
        if torch.is_autocast_enabled(x.device.type):
            x = (
                x.float()
            )  # as the first block's norms make it: then compiled blocks, the first among them, share a program
        caches = []
        for i in blocks:
            x, cache = self.blocks[i](x, allowed, rotary, None if past is None else past[i], lengths=lengths)
            caches.append(cache)
        return x, caches


class TimeCondEmbed(nn.Module):
    """The embeddings of each token's timestep and condition."""

    def __init__(self, condition_dim: int, dim: int) -> None:
        super().__init__()
        self.timestep_proj = Mlp(NUM_FREQUENCIES, dim, dim, act=nn.SiLU())
        self.condition_proj = Mlp(condition_dim, dim, dim, act=nn.SiLU())

    def timestep_embedding(self, timestep: Tensor) -> Tensor:
        """`[...] -> [..., D]`."""
        sinusoid = timestep_sinusoid(timestep.flatten(), NUM_FREQUENCIES).reshape(*timestep.shape, -1)
        return self.timestep_proj(sinusoid.to(self.timestep_proj.fc1.weight.dtype))


class Modulation(nn.Module):
    """Layer norm without weights of its own; shifts and scales come from the condition. Name: `proj`."""

    def __init__(self, dim: int, num_stats: int) -> None:
        super().__init__()
        self.num_stats = num_stats
        self.proj = nn.Linear(dim, num_stats * dim)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x normalised, scaled and shifted, and the remaining vectors; `condition` has been through SiLU."""
        scale, shift, *rest = self.proj(condition).chunk(self.num_stats, dim=-1)
        return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift, tuple(rest)


class HeadBlock(nn.Module):
    """A gated residual MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = Modulation(dim, 3)
        self.proj = Mlp(dim, dim, dim, act=nn.SiLU())
        self.norm2 = nn.LayerNorm(dim)

    @property
    def mlp(self) -> nn.Module:
        """For activation checkpointing; its name in files is `proj`."""
        return self.proj

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`x, condition [..., D]`, the condition after SiLU."""
        modulated, (gate,) = self.norm1(x, condition)
        return x + gate * self.norm2(self.proj(modulated))


class DiffusionMLP(nn.Module):
    """Predicts the velocity of noised patches, each on its own, conditioned on the transformer's token for it.

    Li et al. 2024 (MAR, arXiv:2406.11838), section 3.2, with flow matching. Every token has a timestep of its own.
    """

    def __init__(self, depth: int, dim: int, condition_dim: int, patch_size: int, in_channels: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(patch_size, in_channels, dim)
        self.time_cond_embed = TimeCondEmbed(condition_dim, dim)
        self.blocks = nn.ModuleList(HeadBlock(dim) for _ in range(depth))
        self.norm = Modulation(dim, 2)
        self.head = nn.Linear(dim, patch_size**2 * in_channels)

    def forward(self, patches: Tensor, timestep: Tensor, z: Tensor) -> Tensor:
        """Noised patches `[..., C p p]`, timesteps `[...]` in [0, 1000], tokens `z [..., D_z]` -> velocities, fp32."""
        embed = self.time_cond_embed
        return self.denoise(patches, embed.timestep_embedding(timestep) + embed.condition_proj(z))

    def denoise(self, patches: Tensor, condition: Tensor) -> Tensor:
        """`forward` with timestep and condition embedded, `[..., D]`: a sampler has the same tokens at every noise level."""
        condition = F.silu(condition)  # once for all blocks
        x = self.patch_embed.embed_patches(patches)
        for block in self.blocks:
            x = block(x, condition)
        out = self.head(self.norm(x, condition)[0])
        pixels = rearrange(out, "... (p C) -> ... C p", p=self.patch_embed.patch_size**2)
        return pixels.to(torch.float32, memory_format=torch.contiguous_format).flatten(-2)  # cast and order in one copy
