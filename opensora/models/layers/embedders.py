"""What enters a denoiser: latent patches, the timestep, sizes and rates, the caption or class."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import without_autocast
from opensora.models.layers.mlp import Mlp
from opensora.utils.errors import UserError


class PatchEmbed3D(nn.Module):
    """Latent -> tokens by a convolution whose stride is its kernel. Name: `proj`."""

    def __init__(self, patch_size: tuple[int, int, int], in_channels: int, dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv3d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """`x [B, C, T, H, W] -> [B, D, T', H', W']`; sizes are padded with zeros at the end to whole patches."""
        # F.pad wants the last axis first
        pad = [
            p for size, n in zip(reversed(self.patch_size), reversed(x.shape[2:]), strict=True) for p in (0, -n % size)
        ]
        if any(pad):
            x = F.pad(x, pad)
        return self.proj(x)


class ScalarEmbedder(nn.Module):
    """Sinusoid of a number, then an MLP: for timesteps, sizes, aspect ratios, frame rates. Names: `mlp.0`, `mlp.2`.

    The sinusoid is `[cos(t w_k), sin(t w_k)]`, `w_k = 10000^(-k / half)`, cosines first as in DiT. It is computed in
    fp32 and the MLP outside autocast: the numbers reach 1000 and more, and bf16 does not tell 513 from 514.
    """

    outside_autocast = True

    def __init__(self, dim: int, num_frequencies: int = 256) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.mlp = nn.Sequential(nn.Linear(num_frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        """`t [B]`, integers or floats -> `[B, D]` in the weights' dtype; `[B, K] -> [B, K D]`."""
        scalars = t.reshape(-1)
        with without_autocast(t.device.type):
            weight = next(self.mlp.parameters())
            embedded = self.mlp(timestep_sinusoid(scalars, self.num_frequencies).to(weight.dtype))
        return embedded.reshape(len(t), -1)


def timestep_sinusoid(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """`t [B] -> [B, dim]` fp32, cosines first (Vaswani et al. 2017, in the order of DiT)."""
    half = dim // 2
    frequencies = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t.float()[:, None] * frequencies[None]  # [B, half]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class CaptionEmbedder(nn.Module):
    """Text features -> model width, and the table that stands for "no text". Names: `y_proj.{fc1,fc2}`, `y_embedding`.

    `y_embedding [L, C]` is a buffer: random, saved, never trained, as in PixArt's and Open-Sora's checkpoints. It means
    something only together with the weights that were trained with it.
    """

    y_embedding: Tensor

    null_known: bool = True
    """False: the weights came from a file without a table (see `opensora.models.loading`), and this one means nothing.

    Training that drops captions (`opensora.training.batch_encoder.drop_text`) gives it one.
    """

    def __init__(self, in_channels: int, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.y_proj = Mlp(in_channels, dim, dim)
        self.register_buffer("y_embedding", torch.randn(num_tokens, in_channels) / in_channels**0.5)

    def forward(self, y: Tensor) -> Tensor:
        """`y [B, 1, L, C] -> [B, L, D]`."""
        return self.y_proj(rearrange(y, "B 1 L C -> B L C"))

    def null(self, batch: int) -> Tensor:
        """The features of "no text" for a whole batch: `[batch, 1, L, C]`."""
        return self.y_embedding[None, None].expand(batch, 1, -1, -1)

    @torch.no_grad()
    def clear_null(self) -> None:
        """Make the table zero, which in files stands for "no table"."""
        self.y_embedding.zero_()


class LabelEmbedder(nn.Module):
    """Class label, 0 ... num_classes - 1, -> model width. Name: `embedding_table`.

    `with_null` adds a row, index `num_classes`, that stands for "no class" in classifier-free guidance.
    """

    def __init__(self, num_classes: int, dim: int, *, with_null: bool = True) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.with_null = with_null
        self.embedding_table = nn.Embedding(num_classes + int(with_null), dim)

    def forward(self, y: Tensor) -> Tensor:
        """`y`, B integers in any shape, such as [B] or [B, 1, 1, 1] -> `[B, D]`."""
        return self.embedding_table(y.reshape(-1).long())

    def null(self, batch: int) -> Tensor:
        """The label of "no class" for a whole batch: `[batch, 1, 1, 1]` int64."""
        if not self.with_null:
            raise UserError("class_dropout_prob=0 leaves the model without a row for 'no class': use cfg_scale=1.")
        device = self.embedding_table.weight.device
        return torch.full((batch, 1, 1, 1), self.num_classes, dtype=torch.int64, device=device)
