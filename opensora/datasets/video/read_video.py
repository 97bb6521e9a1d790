"""Decode just the frames a sample needs, exactly, from videos and images.

Frame i of a video is the i-th in order of presentation, whichever way it is reached: a window read by seeking equals the
same frames of a full decode. Where a file's times cannot be trusted, it is decoded from its start and frames are counted.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from opensora.datasets.video.files import (
    DEFAULT,
    IMAGE_EXTENSIONS,
    IMAGE_FPS,
    BadFile,
    Decoding,
    TooFewFrames,
    file_stat_key,
    is_image,
    too_few,
)
from opensora.datasets.video.frame_times import EveryNth, frames_needed
from opensora.datasets.video.images import ImageClip

__all__ = [
    "DEFAULT", "IMAGE_FPS", "Clip", "Decoding", "TooFewFrames", "VideoInfo", "count_frames", "frames_needed", "is_image", "open_clip",
    "probe", "read_frames", "read_indices",
]  # fmt: skip


class VideoInfo(NamedTuple):
    """Size as displayed (after rotation, with square pixels), number of frames, and frames per second."""

    num_frames: int
    height: int
    width: int
    fps: float


class Clip(Protocol):
    """An open file."""

    num_frames: int
    fps: float  # while it runs

    def seconds(self) -> np.ndarray:
        """[N] float64, when each frame is shown, from the first."""

    def size(self) -> tuple[int, int]:
        """Height and width of its first frame, as `read` gives it."""

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """[H, W, 3] uint8 RGB for each of the frames, which ascend and exist."""


def count_frames(path: str | Path) -> int:
    """Frames of a file, without decoding it; an image has one."""
    with open_clip(path) as clip:
        return clip.num_frames


def probe(path: str | Path) -> VideoInfo:
    """Size, length and rate of a file; remembered until the file changes. Decodes one frame, of an image none.

    Raises:
        BadFile: it cannot be read.
    """
    return _probe(*file_stat_key(path))


def read_frames(
    path: str | Path,
    start: int,
    num_frames: int,
    frame_interval: int = 1,
    decoding: Decoding = DEFAULT,
) -> Tensor:
    """Frames start, start + interval, ... of a video, or an image as one frame: [T, H, W, 3] uint8 RGB.

    Raises:
        TooFewFrames: the file ends before the last of them.
        BadFile: it cannot be read.
    """
    if start < 0:
        raise ValueError(f"start={start}")
    with open_clip(path, decoding) as clip:
        return read_indices(path, clip, EveryNth(num_frames, frame_interval).indices(np.empty(0), start))


def read_indices(path: str | Path, clip: Clip, indices: Sequence[int] | np.ndarray) -> Tensor:
    """Frames of an open file, in ascending order, some perhaps more than once: [T, H, W, 3] uint8 RGB.

    Raises:
        TooFewFrames: the file ends before the last of them.
        BadFile: it is damaged, or its frames differ in size.
    """
    indices = [int(index) for index in indices]
    if indices[-1] >= clip.num_frames:
        raise too_few(path, indices, clip.num_frames)
    once = sorted(set(indices))
    frames = dict(zip(once, clip.read(once), strict=True))
    if len({frame.shape for frame in frames.values()}) > 1:
        raise BadFile(f"{path}: the frame size changes within the clip; re-encode it at one size.")
    return torch.from_numpy(np.stack([frames[index] for index in indices]))


@contextmanager
def open_clip(path: str | Path, decoding: Decoding = DEFAULT) -> Iterator[Clip]:
    """A video or image to read from; opened once, whatever is asked of it, and closed with everything it started.

    Raises:
        BadFile: it cannot be read.
    """
    file_key = file_stat_key(path)
    if Path(path).suffix.lower() in IMAGE_EXTENSIONS:
        yield ImageClip(Path(path))
        return
    # here: images are read where there is no PyAV
    from opensora.datasets.video.pyav_clip import PyavClip
    from opensora.datasets.video.timeline import open_timeline

    with open_timeline(file_key) as (timeline, opened):
        yield PyavClip(file_key[0], timeline, opened, decoding)


@functools.lru_cache(maxsize=4096)
def _probe(path: str, size: int, mtime_ns: int) -> VideoInfo:
    with open_clip(path) as clip:
        return VideoInfo(clip.num_frames, *clip.size(), clip.fps)
