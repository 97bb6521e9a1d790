"""Encoding and decoding in parts, so that memory is that of a part: tiles in space, chunks in time.

Tiles have one size: the last of a row is moved inwards instead of being cut. Over an overlap of n pixels, the outer quarter
of a tile counts nothing, the middle half blends linearly into its neighbour, and the inner quarter counts fully. So where the
network looks no further than a quarter of the overlap, the result is the plain one. Where it looks at the whole image (group
normalisation, attention), tiles differ slightly in colour and contrast, and blending hides the seams.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from opensora.utils.errors import UserError


def chunk_lengths(num_frames: int, chunk: int | None) -> list[int]:
    """How many frames each chunk has, the last one what is left; None: one chunk."""
    size = chunk or num_frames
    return [min(size, num_frames - start) for start in range(0, num_frames, size)]


def check_tile_size(size: int, cell: tuple[int, int]) -> None:
    """See that tiles hold whole latent cells of `cell` pixels (height, width).

    Raises:
        UserError: they do not; the message has the nearest size that does.
    """
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
        x: Its input.
        size: Of a tile, see `check_tile_size`; None: no tiles.
        overlap: Of neighbouring tiles, as a part of `size`; rounded down to whole latent cells.
        cell: Height and width in pixels of a latent cell.
        decoding: x are latents.
    """
    into, out_of = (
        (1, 1) if decoding else cell,
        cell if decoding else (1, 1),
    )  # per cell: entries of x, and of the result
    cells = [length // step for length, step in zip(x.shape[-2:], into, strict=True)]
    if size is None or all(n * step <= size for n, step in zip(cells, cell, strict=True)):
        return network(x)
    starts, sides, ramps = [], [], []  # in cells
    for axis, n in enumerate(cells):
        side, shared = min(size // cell[axis], n), int(size * overlap) // cell[axis]
        count = 1 + -(-(n - side) // (size // cell[axis] - shared))
        starts.append([min(i * (side - shared), n - side) for i in range(count)])
        sides.append(side)
        ramps.append(_ramp(side * out_of[axis], shared * out_of[axis], x.device))
    height, width = (n * step for n, step in zip(cells, out_of, strict=True))
    out = weights = None
    for row in starts[0]:
        for column in starts[1]:
            rows, columns = (
                slice(start * step, (start + side) * step)
                for start, side, step in zip((row, column), sides, into, strict=True)
            )
            part = network(x[..., rows, columns]).float()
            if out is None or weights is None:
                out, weights = part.new_zeros(*part.shape[:-2], height, width), part.new_zeros(height, width)
            top, left = row * out_of[0], column * out_of[1]
            weight = _inside(ramps[0], top, height)[:, None] * _inside(ramps[1], left, width)[None, :]
            where = (..., slice(top, top + part.shape[-2]), slice(left, left + part.shape[-1]))
            out[where] += part * weight
            weights[where] += weight
    assert out is not None
    assert weights is not None
    return out / weights


def _ramp(length: int, overlap: int, device: torch.device) -> Tensor:
    """Weights [length] of a tile along one axis: 0 in the outer quarter of the overlap, 1 beyond three quarters of it."""
    position = torch.arange(length, device=device, dtype=torch.float32) + 0.5
    distance = torch.minimum(position, length - position)
    return ((distance - overlap / 4) / (overlap / 2)).clamp(0, 1) if overlap else torch.ones_like(distance)


def _inside(weights: Tensor, start: int, length: int) -> Tensor:
    """The image's own edge has no neighbour to blend into: there the weight is full."""
    weights, half = weights.clone(), len(weights) // 2
    if start == 0:
        weights[:half] = 1
    if start + len(weights) == length:
        weights[half:] = 1
    return weights
