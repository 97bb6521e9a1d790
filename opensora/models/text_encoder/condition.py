"""The contract of text encoders (architecture D6)."""

from typing import NamedTuple, Protocol

from torch import Tensor


class TextCondition(NamedTuple):
    """Encoded captions: `y [B, 1, L, D]`, and `mask [B, L]` (bool, True at real tokens)."""

    y: Tensor
    mask: Tensor


class TextEncoder(Protocol):
    """What every text encoder has."""

    output_dim: int
    model_max_length: int

    def encode(self, texts: list[str]) -> TextCondition:
        """B captions -> y [B, 1, L, D], mask [B, L]."""
