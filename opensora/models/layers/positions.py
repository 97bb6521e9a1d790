"""Positions of tokens, computed for the size at hand and never saved: sine-cosine tables and rotations.

The two-dimensional table encodes the column in its first half and the row in its second, which is the order of DiT's
and PixArt's weights. Rotary positions (Su et al. 2021, arXiv:2104.09864, section 3.4) rotate channels in neighbouring pairs,
(0, 1), (2, 3), ..., which is the order of Open-Sora 1.1's and 1.2's; pair k of position p turns by `p * theta^(-2k / D)`.
"""

import torch
from torch import Tensor


def sincos_1d(dim: int, positions: Tensor) -> Tensor:
    """`positions [..., N] -> [..., N, dim]` fp32: `[sin(p w_k), cos(p w_k)]`, `w_k = 10000^(-k / (dim / 2))`."""
    if dim % 2:
        raise ValueError(f"a sine-cosine table needs an even width, not {dim}")
    k = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[..., None] * 10000.0 ** (-k / (dim / 2))  # [..., N, dim / 2]
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def sincos_2d(dim: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Coordinates `rows [..., H]` and `columns [..., W]` -> `[..., H * W, dim]` fp32, row-major."""
    at_row = sincos_1d(dim // 2, rows)[..., :, None, :]  # [..., H, 1, dim / 2]
    at_column = sincos_1d(dim // 2, columns)[..., None, :, :]  # [..., 1, W, dim / 2]
    table = torch.cat(torch.broadcast_tensors(at_column, at_row), dim=-1)
    return table.flatten(-3, -2)


def sincos_grid(
    dim: int,
    grid: tuple[int, int],
    *,
    scale: float | Tensor = 1.0,
    base: float | tuple[int, int] | None = None,
    device: torch.device,
) -> Tensor:
    """`sincos_2d` of the coordinates of `grid`, rows and columns: `[H * W, dim]`, or `[B, H * W, dim]`.

    `scale`, `base`: see `grid_coordinates`; two bases are those of the rows and the columns.
    """
    bases = base if isinstance(base, tuple) else (base, base)
    rows, columns = (grid_coordinates(n, scale=scale, base=b, device=device) for n, b in zip(grid, bases, strict=True))
    return sincos_2d(dim, rows, columns)


def grid_coordinates(
    length: int, *, scale: float | Tensor = 1.0, base: float | None = None, device: torch.device | None = None
) -> Tensor:
    """The coordinates of `length` rows or columns: `i / scale`, and with `base` times `base / length`.

    A model trained at 512x512 with scale 1 sees the same span of positions at 256x256 with scale 0.5. With `base`, the
    length of the side that the model was trained on, any length spans `base / scale` (PixArt-alpha's multi-scale models).
    Returns `[length]`, or for `scale [B]` of samples of different size `[B, length]`.
    """
    steps = torch.arange(length, dtype=torch.float64, device=device)
    if base is not None:
        steps = steps * (base / length)
    return steps / (scale.double()[:, None] if isinstance(scale, Tensor) else scale)


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

    A table of more axes, `[2, ..., D]`, has an entry wherever x's axes do not repeat one. The other channel of a pair is
    fetched by a flip, which a compiler turns into an index; two stacked halves would be a tensor twice as wide as the tokens.
    """
    if table is None:
        return x
    cos, sin = table.unbind(0)
    wide = x.float()
    other = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (wide * cos + other * sin).to(x.dtype)
