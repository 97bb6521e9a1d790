"""`flow`: how much moves, the mean length of the optical flow in pixels per third of a second, at 576 pixels of width.

Open-Sora 1.1 looked at frames 0, 10, 20, 30 (a third of a second apart at 30 fps) of 320 x 576 pixels and took the mean of
|u| and |v|; here it is the mean length, the pairs are spread over the whole clip, and times are those of the file. It is what
`--flowmin` filters by, what captions call the motion score, and the number that NOVA's motion tokens get.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.scoring.fields import flow_method
from tools.scoring.frames import Row, each_file, mean, pairs
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

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """0 for a still clip, some 10 for a fast one; None for a picture."""
        fields = flow_method(self.method, self.device)

        def measure(path: Path) -> Row:
            found = pairs(path, self.fps, self.pairs)
            if not found:
                return {"flow": None}
            lengths = [np.linalg.norm(field, axis=-1).mean() for field in fields(found)]
            return {"flow": mean(n * UNIT_S / pair.seconds for n, pair in zip(lengths, found, strict=True))}

        return each_file(paths, self.columns, measure)


SCORERS["flow"] = Flow()
