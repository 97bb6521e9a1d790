"""`black`: the share of frames that are black, 0 to 1: fades, gaps between programmes, lost signals.

A frame is black when 98 % of its pixels are darker than a tenth of white, the rule of ffmpeg's `blackdetect`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.scoring.frames import Row, each_file, key_frames, luma, mean
from tools.scoring.registry import SCORERS

DARK = 25.5  # of 255
DARK_SHARE = 0.98


@dataclass(frozen=True)
class Black:
    """`frames`: how many are looked at, spread evenly, first and last included."""

    frames: int = 8
    columns = ("black",)
    needs = ()

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """0 for an ordinary clip."""
        points = np.linspace(0, 1, self.frames).tolist()
        return each_file(paths, self.columns, lambda path: {"black": mean(map(is_black, key_frames(path, points)))})


def is_black(frame: np.ndarray) -> bool:
    """Whether a frame [H, W, 3] uint8 is black."""
    return bool((luma(frame) < DARK).mean() >= DARK_SHARE)


SCORERS["black"] = Black()
