"""Decode just the frames a sample needs, exactly, from videos and images.

Frame i of a video is the i-th in order of presentation, whichever way it is reached: a window read by seeking equals the
same frames of a full decode. Where a file's times cannot be trusted, it is decoded from its start and frames are counted.

Which frames make a clip of T frames is a `FrameRule`: every k-th, or those shown at a steady rate. Both ends count: T frames at
interval k are (T - 1) k + 1 frames of the video, and T frames at r a second take (T - 1) / r seconds.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from opensora.datasets.video.files import DEFAULT, IMAGE_EXTENSIONS, BadFile, Decoding, file_stat_key, too_few
from opensora.datasets.video.images import ImageClip
from opensora.utils.errors import UserError

CLOSE = 1e-3  # of a second's share: times are rounded to the container's time base, often to milliseconds
MAX_REPEATED = 1.05  # a clip at more than this times the video's rate would show frames twice


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


@dataclass(frozen=True)
class FrameRule:
    """Takes every `frame_interval`-th frame, whatever the times between them; with `target_fps`, what is on the screen every
    1 / `target_fps` seconds, as a player shows it, also of a video of variable rate.

    `seconds` [N] float64 are the times of a video's frames, ascending.
    """

    num_frames: int
    frame_interval: int = 1
    target_fps: float | None = None

    def __post_init__(self) -> None:
        if self.num_frames < 1 or self.frame_interval < 1:
            raise UserError(
                f"num_frames={self.num_frames} and frame_interval={self.frame_interval} must be at least 1."
            )
        if self.target_fps is None:
            return
        if not 0 < self.target_fps < np.inf:
            raise UserError(f"target_fps={self.target_fps} must be above 0.")
        if self.frame_interval != 1:
            raise UserError(
                f"frame_interval={self.frame_interval} and target_fps={self.target_fps} exclude one another; give one."
            )

    @property
    def needed(self) -> int:
        """Frames of the video that a clip spans, or, with `target_fps`, at least has."""
        return frames_needed(self.num_frames, self.frame_interval)

    @property
    def span(self) -> float:
        """Seconds from the first frame to the last, with `target_fps`."""
        assert self.target_fps is not None
        return (self.num_frames - 1) / self.target_fps

    def __str__(self) -> str:
        pace = f"frame_interval={self.frame_interval}" if self.target_fps is None else f"target_fps={self.target_fps:g}"
        return f"num_frames={self.num_frames} at {pace}"

    @property
    def length(self) -> str:
        """What a clip needs, for messages."""
        return f"{self.needed} frames" if self.target_fps is None else f"{self.span:.2f} s"

    def num_starts(self, seconds: np.ndarray) -> int:
        """The frames 0 ... n - 1 can begin a clip; 0: the video is too short."""
        if self.target_fps is None:
            return max(len(seconds) - self.needed + 1, 0)
        # a start's last frame must have begun before the video's last one, or with it
        return int(np.searchsorted(seconds, seconds[-1] - self.span + CLOSE, side="right")) if len(seconds) else 0

    def indices(self, seconds: np.ndarray, start: int) -> np.ndarray:
        """[T] int64, the frames of the clip that begins with frame `start`."""
        if self.target_fps is None:
            return start + self.frame_interval * np.arange(self.num_frames)
        wanted = seconds[start] + np.arange(self.num_frames) / self.target_fps
        return np.searchsorted(seconds, wanted + CLOSE, side="right") - 1

    def fps(self, file_fps: float) -> float:
        """The clip's rate, of a video of that rate; a `BadFile` where `target_fps` is higher, so that frames would be shown twice."""
        if self.target_fps is None:
            return file_fps / self.frame_interval
        if is_slow(file_fps, self.target_fps):
            raise BadFile(
                f"target_fps={self.target_fps:g} is more than the {file_fps:g} frames a second of the video, so frames would "
                "be repeated; choose a lower target_fps or leave such videos out."
            )
        return self.target_fps


def is_slow(file_fps: Any, target_fps: float) -> Any:
    """Whether videos of that rate have too few frames a second; of unknown rate (NaN) they have not. Numbers or arrays."""
    return target_fps > MAX_REPEATED * file_fps


def frames_needed(num_frames: int, frame_interval: int) -> int:
    """Source frames that a clip of `num_frames`, every `frame_interval`-th, spans."""
    return (num_frames - 1) * frame_interval + 1


def count_frames(path: str | Path) -> int:
    """Frames of a file, without decoding it; an image has one."""
    with open_clip(path) as clip:
        return clip.num_frames


def probe(path: str | Path) -> VideoInfo:
    """Size, length and rate of a file; remembered until the file changes. Decodes one frame, of an image none."""
    return _probe(*file_stat_key(path))


@functools.lru_cache(maxsize=4096)
def _probe(path: str, size: int, mtime_ns: int) -> VideoInfo:
    with open_clip(path) as clip:
        return VideoInfo(clip.num_frames, *clip.size(), clip.fps)


def read_frames(
    path: str | Path, start: int, num_frames: int, frame_interval: int = 1, decoding: Decoding = DEFAULT
) -> Tensor:
    """Frames start, start + interval, ... of a video, or an image as one frame; returns and raises as `read_indices`."""
    if start < 0:
        raise ValueError(f"start={start}")
    with open_clip(path, decoding) as clip:
        return read_indices(path, clip, FrameRule(num_frames, frame_interval).indices(np.empty(0), start))


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
    """A video or image to read from, opened once, whatever is asked of it. All here raise a `BadFile` where it cannot be read."""
    file_key = file_stat_key(path)
    if Path(path).suffix.lower() in IMAGE_EXTENSIONS:
        yield ImageClip(Path(path))
        return
    # here: images are read where there is no PyAV
    from opensora.datasets.video.pyav_clip import PyavClip
    from opensora.datasets.video.timeline import open_timeline

    with open_timeline(file_key) as (timeline, opened):
        yield PyavClip(file_key[0], timeline, opened, decoding)
