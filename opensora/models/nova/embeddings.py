"""What enters NOVA besides images: text, motion, positions in space and time, and the mask tokens.

Names are those of the published weights: `text_embed.{proj, norm, weight}`, `motion_embed.{flow_proj, fps_proj}.{0, 2}`,
`video_pos_embed.{norm, time_proj.0, time_proj.2}`, `mask_embed.{bos_token, mask_token}`. Sinusoids have sines first, as in
these weights; those of the head's timestep have cosines first.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from opensora.models.layers.pos_embed import sincos_1d
from opensora.models.layers.rope import rotary_table

NUM_FREQUENCIES = 256
NULL_TOKENS = 512
Positions = Literal["absolute", "rotary"]


class TextEmbed(nn.Module):
    """Text features -> tokens. Fixed random tokens fill a caption's padding; they alone are "no text"."""

    weight: Tensor

    def __init__(self, in_channels: int, dim: int, num_tokens: int = NULL_TOKENS) -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels, dim)
        self.norm = nn.LayerNorm(dim).requires_grad_(False)  # frozen in training, as published
        self.register_buffer("weight", torch.randn(num_tokens, in_channels) * 0.02)

    def forward(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """`y [B, 1, L, C]`, `mask [B, L]` bool, True at real tokens -> `[B, L, D]`."""
        y = y[:, 0]
        if mask is not None:
            y = torch.where(mask[..., None].bool(), y, self.weight[: y.shape[1]].to(y.dtype))
        return self.norm(self.proj(y))


class MotionEmbed(nn.Module):
    """Motion (an optical-flow score) and frames per second -> two tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.flow_proj, self.fps_proj = (
            nn.Sequential(nn.Linear(NUM_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(2)
        )

    def forward(self, flow: Tensor, fps: Tensor) -> Tensor:
        """`[B]` each `-> [B, 2, D]`."""
        dtype = next(self.parameters()).dtype
        tokens = [
            project(sincos_1d(NUM_FREQUENCIES, value).to(dtype))
            for project, value in ((self.flow_proj, flow), (self.fps_proj, fps))
        ]
        return torch.stack(tokens, dim=1)


class VideoPosEmbed(nn.Module):
    """Absolute positions of latent frames in time.

    Args:
        base_length: latent frames that the time axis spans, however many there are. None = frames count.
    """

    def __init__(self, dim: int, base_length: int | None) -> None:
        super().__init__()
        self.base_length = base_length
        self.time_proj = nn.Sequential(nn.Linear(NUM_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, frames: Tensor, num_frames: int) -> Tensor:
        """Indices `[T]` of frames of a video of `num_frames` latent frames -> `[T, D]`."""
        times = frames.double() * (1.0 if self.base_length is None else self.base_length / num_frames)
        return self.norm(self.time_proj(sincos_1d(NUM_FREQUENCIES, times).to(self.norm.weight.dtype)))


class MaskEmbed(nn.Module):
    """The token for the frame before the first, and that for a masked patch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bos_token = nn.Parameter(torch.randn(1, dim) * 0.02)
        self.mask_token = nn.Parameter(torch.randn(1, dim) * 0.02)


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
