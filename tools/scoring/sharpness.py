"""`sharpness`: the variance of the Laplacian of the grey image, at 576 pixels of width; the mean over three frames.

Pech-Pacheco et al. 2000, "Diatom autofocusing in brightfield microscopy". Below some 20 an image is blurred or plain, above
1000 it is full of detail or noise: it tells sharp from blurred takes of the same kind of image, not good from bad.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.scoring.frames import KEY_POINTS, Row, each_file, key_frames, luma, mean, opencv, shrunk
from tools.scoring.registry import SCORERS


@dataclass(frozen=True)
class Sharpness:
    """`points`: shares of the clip's length at which frames are looked at."""

    points: tuple[float, ...] = KEY_POINTS
    columns = ("sharpness",)
    needs = ()

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """0 for a plain image."""

        def measure(path: Path) -> Row:
            return {"sharpness": mean(detail(frame) for frame in key_frames(path, self.points))}

        return each_file(paths, self.columns, measure)


def detail(frame: np.ndarray) -> float:
    """The variance of the Laplacian of a frame [H, W, 3] uint8."""
    cv2 = opencv()
    return float(cv2.Laplacian(luma(shrunk(frame)), cv2.CV_32F).var())


SCORERS["sharpness"] = Sharpness()
