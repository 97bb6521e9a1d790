"""`cmotion`: what the camera does: static, pan_left, pan_right, tilt_up, tilt_down, zoom_in, zoom_out or unclassified.

The optical flow of pairs of frames is explained by a camera that pans, tilts, zooms and rolls,

    u = pan + zoom x - roll y,    v = tilt + zoom y + roll x    (x, y from the middle of the image),

fitted by iteratively reweighted least squares (Tukey's biweight, so that what moves by itself does not count; Beaton & Tukey
1974) to the pixels that have texture, since flow in plain areas is a guess. A camera that pans right moves the image to
the left. Open-Sora 1.1 and 1.2 did this with Farneback's flow and thresholds; the words are theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.scoring.fields import flow_method
from tools.scoring.frames import Pair, Row, check_pairs, each_file, luma, pairs
from tools.scoring.registry import SCORERS

GRID = 8  # pixels between the pixels that are looked at
TEXTURE = 6.0  # grey levels that neighbouring pixels differ by, at least
LEAST_PIXELS = 40  # with texture; fewer say nothing
ROUNDS = 12
TUKEY = 4.685  # times the spread of the residuals: 95 % as good as least squares where those are normal
WORDS = {"pan": ("pan_left", "pan_right"), "tilt": ("tilt_down", "tilt_up"), "zoom": ("zoom_out", "zoom_in")}


@dataclass(frozen=True)
class Motion:
    """Pixels per second that the image moves by, at 576 pixels of width; `zoom`, `roll`: at a typical pixel.

    Attributes:
        pan: to the left, as when the camera turns right.
        tilt: down, as when the camera turns up.
        zoom: away from the middle.
        roll: around the middle.
        support: share of the textured pixels that move so.
    """

    pan: float
    tilt: float
    zoom: float
    roll: float
    support: float


@dataclass(frozen=True)
class CameraMotion:
    """Finds the camera's motion.

    Attributes:
        method: see `tools.scoring.fields`.
        fps: pairs of frames are 1 / fps seconds apart.
        pairs: at most so many, spread over the clip.
        still: pixels per second at 576 pixels of width, below which a camera stands still: half a percent of the image.
        dominance: the strongest motion is this many times all others together, or the clip is unclassified.
        support: least share of the textured pixels that follow the camera.
        device: of a network.
    """

    method: str = "dis"
    fps: float = 6.0
    pairs: int = 6
    still: float = 3.0
    dominance: float = 1.5
    support: float = 0.4
    device: str = "cpu"
    columns = ("cmotion",)
    needs = ()

    def __post_init__(self) -> None:
        check_pairs("camera_motion", self.fps, self.pairs)

    def score(self, paths: list[Path], **needed: list[Any]) -> list[Row]:
        """A word; None for an image."""
        fields = flow_method(self.method, self.device)

        def measure(path: Path) -> Row:
            found = pairs(path, self.fps, self.pairs)
            motions = [camera(field, pair) for field, pair in zip(fields(found), found, strict=True)]
            return {"cmotion": self.name([m for m in motions if m is not None]) if found else None}

        return each_file(paths, self.columns, measure)

    def name(self, motions: Sequence[Motion]) -> str:
        """The word for a clip of these motions; a camera that goes back and forth has none."""
        if not motions:
            return "unclassified"
        moved = {part: np.array([getattr(m, part) for m in motions]) for part in ("pan", "tilt", "zoom", "roll")}
        typical = {part: float(np.abs(values).mean()) for part, values in moved.items()}
        total = sum(typical.values())
        if np.mean([m.support for m in motions]) < self.support:
            return "unclassified"
        if max(typical.values()) < self.still:
            return "static"
        strongest = max(WORDS, key=lambda part: typical[part])
        net = float(moved[strongest].mean())
        others = total - typical[strongest]
        if abs(net) < max(self.still, self.dominance * others, typical[strongest] / 2):
            return "unclassified"
        return WORDS[strongest][net > 0]


def camera(field: np.ndarray, pair: Pair) -> Motion | None:
    """The camera's part in a flow field [H, W, 2]; None where the image has too little texture."""
    height, width = field.shape[:2]
    rows, columns = (np.arange(GRID // 2, side, GRID) for side in (height, width))
    textured = _texture(luma(pair.first))[np.ix_(rows, columns)] > TEXTURE
    if textured.sum() < LEAST_PIXELS:
        return None
    y, x = np.meshgrid(rows - (height - 1) / 2, columns - (width - 1) / 2, indexing="ij")
    x, y, flow = x[textured], y[textured], field[np.ix_(rows, columns)][textured].astype(np.float64)
    (pan, tilt, zoom, roll), weights = _fitted(x, y, flow)
    radius, second = float(np.hypot(x, y).mean()), 1 / pair.seconds
    return Motion(-pan * second, tilt * second, zoom * radius * second, roll * radius * second, float(weights.mean()))


def _fitted(x: np.ndarray, y: np.ndarray, flow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pan, tilt, zoom and roll of flow [N, 2] at pixels x, y [N], and the weight of each, 0 to 1."""
    one, none = np.ones_like(x), np.zeros_like(x)
    design = np.stack([np.stack([one, none, x, -y], -1), np.stack([none, one, y, x], -1)], axis=1)  # [N, 2, 4]
    weights = np.ones(len(x))
    # from the median shift, which half of the pixels cannot pull away
    solution = np.array([*np.median(flow, axis=0), 0.0, 0.0])
    for _ in range(ROUNDS):
        residual = np.linalg.norm(flow - design @ solution, axis=-1)
        spread = max(1.4826 * float(np.median(residual)), 0.25)  # quarter of a pixel: what flow is exact to
        weights = np.clip(1 - (residual / (TUKEY * spread)) ** 2, 0, None) ** 2
        root = np.sqrt(weights)[:, None]
        left = (design * root[..., None]).reshape(-1, 4)
        solution = np.linalg.lstsq(left, (flow * root).reshape(-1), rcond=None)[0]
    residual = np.linalg.norm(flow - design @ solution, axis=-1)
    follows = residual < np.maximum(1.0, 0.2 * np.linalg.norm(flow, axis=-1))
    return solution, follows.astype(np.float64)


def _texture(grey: np.ndarray) -> np.ndarray:
    """[H, W] how much the surroundings of a pixel differ, in grey levels."""
    vertical, horizontal = np.gradient(grey)
    return np.hypot(vertical, horizontal)


SCORERS["camera_motion"] = CameraMotion()
