"""NOVA's head: an MLP that denoises each patch on its own, conditioned on the transformer's token for it.

Li et al. 2024 (MAR, arXiv:2406.11838), section 3.2, with flow matching. Every token has a timestep of its own. Names are those
of the published weights: `patch_embed.proj`, `time_cond_embed.{timestep_proj, condition_proj}.{fc1, fc2}`,
`blocks.N.{norm1.proj, proj.fc1, proj.fc2, norm2}`, `norm.proj`, `head`. What comes out of `head` has the channel fastest,
as published, while patches that go in have it slowest.
"""

from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Mlp
from torch import Tensor, nn

from opensora.models.layers.embedders import timestep_sinusoid
from opensora.models.nova.blocks import PatchEmbed

NUM_FREQUENCIES = 256
NORM_EPS = 1e-6  # where the condition scales and shifts; other norms have 1e-5


class TimeCondEmbed(nn.Module):
    """The sum of the embeddings of each token's timestep and condition."""

    def __init__(self, condition_dim: int, dim: int) -> None:
        super().__init__()
        self.timestep_proj = Mlp(NUM_FREQUENCIES, dim, dim, act_layer=nn.SiLU)
        self.condition_proj = Mlp(condition_dim, dim, dim, act_layer=nn.SiLU)

    def forward(self, timestep: Tensor, z: Tensor) -> Tensor:
        """`timestep [...]`, `z [..., D_z] -> [..., D]`."""
        return self.timestep_embedding(timestep) + self.condition_proj(z)

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
        self.proj = Mlp(dim, dim, dim, act_layer=nn.SiLU)
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
    """Predicts the velocity of noised patches.

    Args:
        depth, dim: of the blocks.
        condition_dim: width of the transformer whose tokens are the condition.
        patch_size, in_channels: of the patches.
    """

    def __init__(self, depth: int, dim: int, condition_dim: int, patch_size: int, in_channels: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(patch_size, in_channels, dim)
        self.time_cond_embed = TimeCondEmbed(condition_dim, dim)
        self.blocks = nn.ModuleList(HeadBlock(dim) for _ in range(depth))
        self.norm = Modulation(dim, 2)
        self.head = nn.Linear(dim, patch_size**2 * in_channels)

    def zero_init_layers(self) -> list[nn.Linear]:
        """Layers that start at zero, so that every block is the identity and the output 0."""
        return [self.head, self.norm.proj, *(cast(HeadBlock, block).norm1.proj for block in self.blocks)]

    def forward(self, patches: Tensor, timestep: Tensor, z: Tensor) -> Tensor:
        """The velocity of each patch.

        Args:
            patches: noised, [..., C p p].
            timestep: [...], in [0, 1000].
            z: [..., D_z], the transformer's tokens.

        Returns:
            [..., C p p] fp32.
        """
        return self.denoise(patches, self.time_cond_embed(timestep, z))

    def denoise(self, patches: Tensor, condition: Tensor) -> Tensor:
        """`forward`, with timestep and condition embedded already, `[..., D]`: a sampler has the same tokens at every noise level."""
        condition = F.silu(condition)  # once for all blocks
        x = self.patch_embed.embed_patches(patches)
        for block in self.blocks:
            x = block(x, condition)
        out = self.head(self.norm(x, condition)[0])
        pixels = rearrange(out, "... (p C) -> ... C p", p=self.patch_embed.patch_size**2)
        return pixels.to(torch.float32, memory_format=torch.contiguous_format).flatten(-2)  # cast and order in one copy
