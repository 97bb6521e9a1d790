"""The frames that scorers look at, shrunk to one width so that numbers of all files are in the same pixels.

The longer side becomes `LONG_SIDE` pixels; smaller files are enlarged, since a score in pixels must not depend on the file's size.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from opensora.datasets.video.files import TooFewFrames
from opensora.datasets.video.read_video import open_clip
from opensora.utils.errors import UserError

LONG_SIDE = 576  # 324 x 576 of a 16:9 clip; Open-Sora's flow looked at 320 x 576
KEY_POINTS = (0.1, 0.5, 0.9)  # of the clip's length, as Open-Sora's aesthetic score

Row = dict[str, Any]
T = TypeVar("T")


class Pair(NamedTuple):
    """Two frames [H, W, 3] uint8 and the seconds between them."""

    first: np.ndarray
    second: np.ndarray
    seconds: float


def each_file(paths: Sequence[Path], columns: Sequence[str], measure: Callable[[Path], Row]) -> list[Row]:
    """`measure` of each file; a file that cannot be read has None everywhere and the reason under "error"."""
    rows = []
    for path in paths:
        try:
            rows.append(measure(path))
        except (UserError, OSError) as error:
            rows.append(unread(columns, error))
        # OpenCV's own, such as of images that are too narrow for optical flow: its class comes with its import
        except Exception as error:
            if type(error).__module__.split(".")[0] != "cv2":
                raise
            rows.append(unread(columns, error))
    return rows


def unread(columns: Sequence[str], error: Exception) -> Row:
    """The row of a file that could not be measured."""
    return {**dict.fromkeys(columns), "error": str(error) or type(error).__name__}


def key_frames(path: Path, points: Sequence[float] = KEY_POINTS) -> list[np.ndarray]:
    """The frames at these shares of the clip's length, each [H, W, 3] uint8; an image is its own frame at each.

    Raises:
        BadFile: the file cannot be read.
    """
    with open_clip(path) as clip:

        def read(num_frames: int) -> list[np.ndarray]:
            indices = [round(point * (num_frames - 1)) for point in points]
            once = sorted(set(indices))
            frames = dict(zip(once, clip.read(once), strict=True))
            return [frames[index] for index in indices]

        return _of_what_there_is(read, clip.num_frames)


def check_pairs(name: str, fps: float, most: int) -> None:
    """Refuse settings with which there are no pairs of frames.

    Raises:
        UserError: they cannot.
    """
    if not 0 < fps < float("inf") or most < 1:
        raise UserError(f"{name}.fps={fps:g} and {name}.pairs={most}: fps must be above 0, and pairs at least 1.")


def pairs(path: Path, fps: float, most: int) -> list[Pair]:
    """At most `most` pairs of frames about 1 / fps seconds apart, spread over the whole clip, shrunk; none of an image.

    A clip that is shorter than that gives its first and last frame. The seconds are those that lie between the two in the
    file, so that variable and low frame rates are measured right.

    Raises:
        BadFile: the file cannot be read.
    """
    with open_clip(path) as clip:

        def read(num_frames: int) -> list[Pair]:
            if num_frames < 2:
                return []
            shown = np.maximum.accumulate(clip.seconds()[:num_frames])
            starts, ends = _pair_indices(shown, 1 / fps, most)
            once = sorted({*starts, *ends})
            frames = dict(zip(once, (shrunk(frame) for frame in clip.read(once)), strict=True))
            gaps = [float(shown[end] - shown[start]) or 1 / clip.fps for start, end in zip(starts, ends, strict=True)]
            return [Pair(frames[a], frames[b], gap) for a, b, gap in zip(starts, ends, gaps, strict=True)]

        return _of_what_there_is(read, clip.num_frames)


def _of_what_there_is(read: Callable[[int], T], num_frames: int) -> T:
    """`read` of a clip of that many frames, or of those there are where the last packets hold no image, as training does it."""
    try:
        return read(num_frames)
    except TooFewFrames as error:
        if error.available < 1:
            raise
        return read(error.available)


def pairs_of(frames: Sequence[np.ndarray], fps: float, most: int, frame_rate: float) -> list[Pair]:
    """`pairs` of frames [H, W, 3] uint8 at a constant `frame_rate`."""
    if len(frames) < 2:
        return []
    shown = np.arange(len(frames)) / frame_rate
    found = zip(*_pair_indices(shown, 1 / fps, most), strict=True)
    return [Pair(shrunk(frames[a]), shrunk(frames[b]), float(shown[b] - shown[a])) for a, b in found]


def _pair_indices(shown: np.ndarray, gap_s: float, most: int) -> tuple[list[int], list[int]]:
    """Numbers of the first and of the second frames of pairs."""
    last_start = int(np.searchsorted(shown, shown[-1] - gap_s + 1e-6, side="right")) - 1
    if last_start < 0:
        return [0], [len(shown) - 1]
    room = max(1, int((shown[last_start] - shown[0]) / gap_s) + 1)  # pairs that do not overlap
    times = np.linspace(shown[0], shown[last_start], min(most, room))
    starts = [int(np.abs(shown - time).argmin()) for time in times]
    ends = [max(start + 1, int(np.abs(shown - (shown[start] + gap_s)).argmin())) for start in starts]
    return starts, [min(end, len(shown) - 1) for end in ends]


def shrunk(frame: np.ndarray, long_side: int = LONG_SIDE) -> np.ndarray:
    """[H, W, 3] uint8 with the longer side of that many pixels: a box filter downwards, linear upwards."""
    cv2 = opencv()
    height, width = frame.shape[:2]
    scale = long_side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(frame, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)


def luma(frame: np.ndarray) -> np.ndarray:
    """[H, W] float32, 0 to 255, by the weights of BT.601."""
    return frame.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)


def tidy(number: float) -> float:
    """A number with six digits that count, so that tables stay readable."""
    return float(f"{number:.6g}")


def mean(numbers: Iterable[float]) -> float:
    """The mean, with six digits."""
    return tidy(float(np.mean(list(numbers))))


def opencv() -> Any:
    """OpenCV, on one thread: it splits its work among threads, and flow then depends on how many there are.

    Raises:
        UserError: it is not installed.
    """
    try:
        import cv2
    except ImportError as error:
        raise UserError("scoring needs OpenCV, which mmengine brings: pip install opencv-python-headless") from error
    cv2.setNumThreads(1)
    return cv2
