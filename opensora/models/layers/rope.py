"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.4).

Channels are rotated in neighbouring pairs, (0, 1), (2, 3), ..., which is the order of the weights of Open-Sora 1.1 and
1.2; pair k of position p turns by `p * theta^(-2k / D)`. Tables are computed for the positions at hand, never saved.
"""

import torch
from torch import Tensor


def rotary_table(dim: int, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """`positions [N]` -> cosines and signed sines `[2, N, dim]`, fp32; each pair of channels has the same angle.

    The sine is negative at the first channel of a pair, where the second one is subtracted.
    """
    if dim % 2:
        raise ValueError(f"rotary positions need an even number of channels for each head, not {dim}.")
    k = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * theta ** (-k / dim)  # [N, dim / 2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cos, cos], dim=-1), torch.stack([-sin, sin], dim=-1)]).flatten(-2).float()


def apply_rotary(x: Tensor, table: Tensor | None) -> Tensor:
    """Rotate `x [..., N, D]` by `table [2, N, D]`, in fp32 and back to x's dtype; None leaves x alone.

    A table of more axes, `[2, ..., D]`, has an entry wherever x's axes do not repeat one. The other channel of a pair is fetched by a flip,
    which a compiler turns into an index; stacking two halves would materialise a tensor twice as wide as the tokens.
    """
    if table is None:
        return x
    cos, sin = table.unbind(0)
    wide = x.float()
    other = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (wide * cos + other * sin).to(x.dtype)
