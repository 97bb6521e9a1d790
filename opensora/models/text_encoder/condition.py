"""What text encoders give."""

from typing import NamedTuple

from torch import Tensor


class TextCondition(NamedTuple):
    """Encoded captions: `y [B, 1, L, D]`, and `mask [B, L]` (bool, True at real tokens)."""

    y: Tensor
    mask: Tensor
