"""Encoding and decoding in parts, so that memory is that of a part: tiles in space, chunks in time.

Tiles have one size: the last of a row is moved inwards instead of being cut. Over an overlap of n pixels, the outer quarter
of a tile counts nothing, the middle half blends linearly into its neighbour, and the inner quarter counts fully. So where the
network looks no further than a quarter of the overlap, the result is the plain one. Where it looks at the whole image (group
normalisation, attention), tiles differ slightly in colour and contrast, and blending hides the seams.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from opensora.utils.errors import UserError


def chunk_lengths(num_frames: int, chunk: int | None) -> list[int]:
    """How many frames each chunk has, the last one what is left; None: one chunk."""
    size = chunk or num_frames
    return [min(size, num_frames - start) for start in range(0, num_frames, size)]


def check_tile_size(size: int, cell: tuple[int, int]) -> None:
    """Raise a UserError, with the nearest size that fits, where tiles do not hold cells of `cell` pixels (height, width)."""
    for side in cell:
        if size < side or size % side:
            near = max(round(size / side), 1) * side
            raise UserError(f"tile_size={size} is no multiple of the VAE's {side} pixels; try {near}.")


def tiled(
    network: Callable[[Tensor], Tensor],
    x: Tensor,
    size: int | None,
    overlap: float,
    cell: tuple[int, int],
    *,
    decoding: bool,
) -> Tensor:
    """`network(x)`, computed in square tiles of `size` pixels.

    Args:
        network: Videos or images [N, C, ..., H, W] -> latents [N, C', ..., H / cell, W / cell], or the reverse.
        size: Of a tile, see `check_tile_size`; None: no tiles.
        overlap: Of neighbouring tiles, as a part of `size`; rounded down to whole latent cells.
        cell: Height and width in pixels of a latent cell.
        decoding: x are latents.
    """
    into, out_of = ((1, 1), cell) if decoding else (cell, (1, 1))  # per cell: entries of x, and of the result
    cells = [length // step for length, step in zip(x.shape[-2:], into, strict=True)]
    if size is None or all(n * step <= size for n, step in zip(cells, cell, strict=True)):
        return network(x)
    rows, columns = (
        _tiles_along(n, size // side, int(size * overlap) // side, step, step_out, x.device)
        for n, side, step, step_out in zip(cells, cell, into, out_of, strict=True)
    )
    height, width = (n * step for n, step in zip(cells, out_of, strict=True))
    out, weights = None, torch.zeros(height, width, device=x.device)
    for (row, top, down), (column, left, across) in itertools.product(rows, columns):
        part = network(x[..., row, column]).float()
        if out is None:
            out = part.new_zeros(*part.shape[:-2], height, width)
        weight = down[:, None] * across[None, :]
        out[..., top, left] += part * weight
        weights[top, left] += weight
    assert out is not None
    return out / weights


def _tiles_along(
    cells: int, side: int, shared: int, into: int, out_of: int, device: torch.device
) -> list[tuple[slice, slice, Tensor]]:
    """The tiles along one axis: their part of x, their part of the result, and its weights."""
    side = min(side, cells)
    position = torch.arange(side * out_of, device=device, dtype=torch.float32) + 0.5
    distance, overlap = torch.minimum(position, side * out_of - position), shared * out_of
    ramp = ((distance - overlap / 4) / (overlap / 2)).clamp(0, 1) if overlap else torch.ones_like(distance)
    tiles, half = [], len(ramp) // 2
    for i in range(1 + -(-(cells - side) // (side - shared)) if cells > side else 1):
        start = min(i * (side - shared), cells - side)
        weights = ramp.clone()
        if start == 0:  # the image's own edge has no neighbour to blend into
            weights[:half] = 1
        if start + side == cells:
            weights[half:] = 1
        entries, results = (slice(start * step, (start + side) * step) for step in (into, out_of))
        tiles.append((entries, results, weights))
    return tiles
