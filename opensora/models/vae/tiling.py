"""A network over a large picture in overlapping tiles, so that memory is that of one tile.

All tiles have one size: the last of a row is moved inwards instead of being cut. Over an overlap of n numbers, the outer
quarter of a tile counts nothing, the middle half blends linearly into its neighbour, and the inner quarter counts fully. So
where the network looks no further than a quarter of the overlap, the result is the plain one. Where it looks at the whole
picture (group normalisation, attention), tiles differ slightly in colour and contrast, and blending hides the seams.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opensora.utils.errors import UserError


@dataclass(frozen=True)
class Tiles:
    """How a picture is cut.

    Args:
        size: Height and width of a tile in pixels.
        overlap: Of neighbouring tiles, as a part of `size`; rounded down to whole latent cells.
        cell: Height and width in pixels of a latent cell.
    """

    size: int
    overlap: float
    cell: tuple[int, int]

    def __post_init__(self) -> None:
        for cell in self.cell:
            if self.size < cell or self.size % cell:
                near = max(round(self.size / cell), 1) * cell
                raise UserError(f"tile_size={self.size} is no multiple of the VAE's {cell} pixels; try {near}.")

    def cut(self, length: int, axis: int) -> tuple[list[int], int]:
        """For `length` pixels of height (axis 0) or width (axis 1): where tiles begin, and their overlap, in pixels."""
        cell = self.cell[axis]
        overlap = int(self.size * self.overlap) // cell * cell
        if length <= self.size:
            return [0], overlap
        step = self.size - overlap
        count = 1 + -(-(length - self.size) // step)
        return [min(i * step, length - self.size) for i in range(count)], overlap


def tiled(
    network: Callable[[Tensor], Tensor], x: Tensor, tiles: Tiles, pixels: tuple[int, int], scale: tuple[float, float]
) -> Tensor:
    """`network(x)`, computed in tiles.

    Args:
        network: [N, C, T, H, W] -> [N, C', T', scale H, scale W].
        x: Input.
        tiles: How to cut, in pixels.
        pixels: Pixels per number of x, in height and width: 1 for a picture, the cell for latents.
        scale: Output numbers per number of x, in height and width.
    """
    height, width = x.shape[-2] * pixels[0], x.shape[-1] * pixels[1]
    (rows, by_row), (columns, by_column) = tiles.cut(height, 0), tiles.cut(width, 1)
    if len(rows) == len(columns) == 1:
        return network(x)
    side = [min(tiles.size, height) // pixels[0], min(tiles.size, width) // pixels[1]]  # of a tile, in numbers of x
    out = weights = None
    for row in (start // pixels[0] for start in rows):
        for column in (start // pixels[1] for start in columns):
            part = network(x[..., row : row + side[0], column : column + side[1]]).float()
            if out is None:
                size = (round(x.shape[-2] * scale[0]), round(x.shape[-1] * scale[1]))
                out, weights = part.new_zeros(*part.shape[:-2], *size), part.new_zeros(size)
                ramps = (
                    ramp(part.shape[-2], by_row * scale[0] / pixels[0], part),
                    ramp(part.shape[-1], by_column * scale[1] / pixels[1], part),
                )
            at = (round(row * scale[0]), round(column * scale[1]))
            weight = _inside(ramps[0], at[0], size[0])[:, None] * _inside(ramps[1], at[1], size[1])[None, :]
            where = (..., slice(at[0], at[0] + part.shape[-2]), slice(at[1], at[1] + part.shape[-1]))
            out[where] += part * weight
            weights[where] += weight  # type: ignore[index]
    assert out is not None
    assert weights is not None
    return out / weights


def ramp(length: int, overlap: float, like: Tensor) -> Tensor:
    """Weights [length] of a tile along one axis: 0 in the outer quarter of the overlap, 1 beyond three quarters of it."""
    position = torch.arange(length, device=like.device, dtype=torch.float32) + 0.5
    distance = torch.minimum(position, length - position)
    if overlap <= 0:
        return torch.ones_like(distance)
    return ((distance - overlap / 4) / (overlap / 2)).clamp(0, 1)


def _inside(weights: Tensor, start: int, length: int) -> Tensor:
    """The picture's own edge has no neighbour to blend into: there the weight is full."""
    weights, half = weights.clone(), len(weights) // 2
    if start == 0:
        weights[:half] = 1
    if start + len(weights) == length:
        weights[half:] = 1
    return weights
