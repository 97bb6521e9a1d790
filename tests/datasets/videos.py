"""Videos whose frames can be told apart."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

CLIPS = Path(__file__).parents[2] / "assets" / "clips"


def numbered_frames(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames of one grey level each, 6 levels apart: a frame's number can be read off after compression."""
    return [np.full((height, width, 3), 6 * i + 3, np.uint8) for i in range(count)]


def frame_numbers(frames: Iterable[Tensor]) -> list[int]:
    """What `numbered_frames` numbered: of [T, H, W, 3] uint8."""
    return [int(frame.float().mean().round()) // 6 for frame in frames]
