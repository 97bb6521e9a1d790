"""Sine-cosine position tables, computed for the size at hand and never saved.

Coordinates are divided by a scale, so that a model trained at 512x512 (space_scale 1) sees the same span of positions
at 256x256 with space_scale 0.5. The two-dimensional table encodes the column in its first half and the row in its
second, which is the order of DiT's and PixArt's weights.
"""

import torch
from torch import Tensor


def sincos_1d(dim: int, positions: Tensor) -> Tensor:
    """`positions [N] -> [N, dim]` fp32: `[sin(p w_k), cos(p w_k)]`, `w_k = 10000^(-k / (dim / 2))`."""
    if dim % 2:
        raise ValueError(f"a sine-cosine table needs an even width, not {dim}")
    k = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * 10000.0 ** (-k / (dim / 2))  # [N, dim / 2]
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def sincos_2d(dim: int, height: int, width: int, *, scale: float = 1.0, device: torch.device | None = None) -> Tensor:
    """A table for `height x width` tokens, row-major: `[height * width, dim]` fp32."""
    rows = sincos_1d(dim // 2, torch.arange(height, device=device) / scale)  # [H, dim / 2]
    columns = sincos_1d(dim // 2, torch.arange(width, device=device) / scale)  # [W, dim / 2]
    table = torch.cat([columns[None].expand(height, -1, -1), rows[:, None].expand(-1, width, -1)], dim=2)
    return table.reshape(height * width, dim)
