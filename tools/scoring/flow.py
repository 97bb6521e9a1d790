"""`flow`: how much moves, the mean length of the optical flow in pixels per third of a second, at 576 pixels of width.

Open-Sora 1.1 looked at frames 0, 10, 20, 30 (a third of a second apart at 30 fps) of 320 x 576 pixels and took the mean of
|u| and |v|; here it is the mean length, the pairs are spread over the whole clip, and times are those of the file. It is what
`--flowmin` filters by, what captions call the motion score, and the number that NOVA's motion tokens get.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.scoring.fields import flow_method
from tools.scoring.frames import Pair, Row, check_pairs, each_file, mean, pairs, pairs_of
from tools.scoring.registry import SCORERS

UNIT_S = 1 / 3


@dataclass(frozen=True)
class Flow:
    """Attributes: see `tools.scoring.fields` for `method`; `fps`: pairs of frames are 1 / fps seconds apart; `pairs`: at most."""

    method: str = "dis"
    fps: float = 3.0
    pairs: int = 4
    device: str = "cpu"
    columns = ("flow",)
    needs = ()

    def __post_init__(self) -> None:
        check_pairs("flow", self.fps, self.pairs)

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """0 for a still clip, some 10 for a fast one; None for an image."""
        flow_method(self.method, self.device)  # what is wrong with it is no file's fault
        return each_file(paths, self.columns, lambda path: {"flow": self._measure(pairs(path, self.fps, self.pairs))})

    def of_frames(self, frames: Sequence[np.ndarray], frame_rate: float) -> float | None:
        """The same of frames [H, W, 3] uint8 at a constant rate; None of a single one."""
        return self._measure(pairs_of(frames, self.fps, self.pairs, frame_rate))

    def _measure(self, found: Sequence[Pair]) -> float | None:
        if not found:
            return None
        fields = flow_method(self.method, self.device)(found)
        lengths = [np.linalg.norm(field, axis=-1).mean() for field in fields]
        return mean(n * UNIT_S / pair.seconds for n, pair in zip(lengths, found, strict=True))


SCORERS["flow"] = Flow()
