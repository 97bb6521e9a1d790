"""`static`: the share of the clip in which nothing moves, 0 to 1: frozen images, slides, a screen on which nothing happens.

Two frames are the same image when no block of an 18 x 32 grid has changed by more than two grey levels, the noise that
compression leaves. A fixed camera in front of something that moves is not static; see `cmotion` for the camera.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.scoring.frames import Pair, Row, check_pairs, each_file, luma, mean, opencv, pairs
from tools.scoring.registry import SCORERS

BLOCKS = (32, 18)  # width, height
CHANGE = 2.0  # of 255


@dataclass(frozen=True)
class Static:
    """`fps`: pairs of frames are 1 / fps seconds apart; `pairs`: at most so many, spread over the clip."""

    fps: float = 4.0
    pairs: int = 12
    columns = ("static",)
    needs = ()

    def __post_init__(self) -> None:
        check_pairs("static", self.fps, self.pairs)

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """1 for a still clip, and for an image."""

        def measure(path: Path) -> Row:
            found = pairs(path, self.fps, self.pairs)
            return {"static": mean(is_same(pair) for pair in found) if found else 1.0}

        return each_file(paths, self.columns, measure)


def is_same(pair: Pair) -> bool:
    """Whether two frames show the same image."""
    cv2 = opencv()
    first, second = (
        cv2.resize(luma(frame), BLOCKS, interpolation=cv2.INTER_AREA) for frame in (pair.first, pair.second)
    )
    return bool(np.abs(first - second).max() <= CHANGE)


SCORERS["static"] = Static()
