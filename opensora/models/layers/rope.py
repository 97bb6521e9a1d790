"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.4).

Channels are rotated in neighbouring pairs, (0, 1), (2, 3), ..., which is the order of the weights of Open-Sora 1.1 and
1.2; pair k of position p turns by `p * theta^(-2k / D)`. Tables are computed for the positions at hand, never saved.
"""

import torch
from torch import Tensor


def rotary_table(dim: int, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """`positions [N]` -> cosines and sines `[2, N, dim]`, fp32; each pair of channels has the same angle."""
    if dim % 2:
        raise ValueError(f"rotary positions need an even number of channels for each head, not {dim}.")
    k = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * theta ** (-k / dim)  # [N, dim / 2]
    angles = angles.repeat_interleave(2, dim=1)
    return torch.stack([angles.cos(), angles.sin()]).float()


def apply_rotary(x: Tensor, table: Tensor | None) -> Tensor:
    """Rotate `x [..., N, D]` by `table [2, N, D]`, in fp32 and back to x's number format; None leaves x alone."""
    if table is None:
        return x
    cos, sin = table.unbind(0)
    wide = x.float()
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)  # [..., N, D / 2]
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (wide * cos + turned * sin).to(x.dtype)
