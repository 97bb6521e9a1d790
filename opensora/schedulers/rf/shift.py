"""Larger videos are trained and sampled at noisier times (Esser et al. 2024, section 5.3.2).

The same noise hides less of an image with more cells, so that its time tau is shifted towards 1:
tau' = r tau / (1 + (r - 1) tau). Sizes are those of the latent, so nothing here depends on a VAE's strides.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from opensora.utils.errors import UserError

Tau = TypeVar("Tau", float, Tensor)
SHIFTS = ("none", "resolution", "length")


def check_shift(shift: str | float, scale: float) -> None:
    """Raise a UserError for an unknown shift, or for a scale that would have no effect."""
    if isinstance(shift, str) and shift not in SHIFTS:
        raise UserError(f"scheduler.shift={shift!r} is not one of {', '.join(SHIFTS)}, nor a number.")
    if not isinstance(shift, str) and shift <= 0:
        raise UserError(f"scheduler.shift={shift} must be positive; 1 does not shift.")
    if scale <= 0:
        raise UserError(f"scheduler.transform_scale={scale} must be positive.")
    if scale != 1 and (shift == "none" or not isinstance(shift, str)):
        raise UserError(
            f"scheduler.transform_scale={scale} multiplies the ratio of shift='resolution' or 'length'; with "
            f"shift={shift!r} it has no effect."
        )


def shift_ratio(
    shift: str | float, latent_size: Sequence[float], base_size: Sequence[float] = (64, 64), scale: float = 1.0
) -> float:
    """r, of latents of (T, H, W) cells.

    Args:
        shift: a number is r itself; "none" is 1; "resolution" (Open-Sora 1.2) is sqrt(H W / base) sqrt(T); "length"
            (Open-Sora 2.0) is a line through 1 at 1024 cells a frame and 3 at 16384, times sqrt(T).
        base_size: rows and columns of the latent frame with r = 1; (64, 64) is 512 x 512 pixels with 8 x 8 in a cell.
        scale: multiplies the ratio.
    """
    if not isinstance(shift, str):
        return float(shift)
    T, H, W = latent_size
    if shift == "none":
        return 1.0
    if shift == "resolution":
        return math.sqrt(H * W / (base_size[0] * base_size[1])) * math.sqrt(T) * scale
    # of a latent frame: 1024 and 16384 cells are 256 and 4096 tokens of 2 x 2 cells
    line = 1.0 + (3.0 - 1.0) / (16384 - 1024) * (H * W - 1024)
    return line * math.sqrt(T) * scale


def shifted(tau: Tau, ratio: float) -> Tau:
    """tau' in [0, 1] of tau in [0, 1]; 0 and 1 stay, and the order is kept."""
    return ratio * tau / (ratio * tau + (1 - tau))  # exact at both ends
