"""Which frames of a video make a clip of T frames: every k-th, or those shown at a steady rate.

Both ends count: T frames at interval k are (T - 1) k + 1 frames of the video, and T frames at r a second take (T - 1) / r
seconds. A rule turns the times of a video's frames into the number of possible starts, and a start into indices.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from opensora.datasets.video.files import BadFile
from opensora.utils.errors import UserError

CLOSE = 1e-3  # of a second's share: times are rounded to the container's time base, often to milliseconds
MAX_REPEATED = 1.05  # a clip at more than this times the video's rate would show frames twice


class Rule(Protocol):
    """What a rule answers. `seconds` [N] float64 are the times of a video's frames, ascending."""

    @property
    def num_frames(self) -> int:
        """T."""

    def num_starts(self, seconds: np.ndarray) -> int:
        """The frames 0 ... n - 1 can begin a clip; 0: the video is too short."""

    def indices(self, seconds: np.ndarray, start: int) -> np.ndarray:
        """[T] int64, the frames of the clip that begins with frame `start`."""

    def fps(self, file_fps: float) -> float:
        """The clip's rate, of a video of that rate."""


@dataclass(frozen=True)
class EveryNth:
    """Every k-th frame, whatever the times between them."""

    num_frames: int
    frame_interval: int = 1

    def __post_init__(self) -> None:
        if self.num_frames < 1 or self.frame_interval < 1:
            raise UserError(
                f"num_frames={self.num_frames} and frame_interval={self.frame_interval} must be at least 1."
            )

    @property
    def needed(self) -> int:
        """Frames of the video that a clip spans."""
        return frames_needed(self.num_frames, self.frame_interval)

    def num_starts(self, seconds: np.ndarray) -> int:
        """See `Rule`."""
        return max(len(seconds) - self.needed + 1, 0)

    def indices(self, seconds: np.ndarray, start: int) -> np.ndarray:
        """See `Rule`."""
        return start + self.frame_interval * np.arange(self.num_frames)

    def fps(self, file_fps: float) -> float:
        """True division: 29.97 at interval 1 is 29.97."""
        return file_fps / self.frame_interval


@dataclass(frozen=True)
class AtRate:
    """What is on the screen every 1 / `target_fps` seconds, as a player shows it, also of a video of variable rate."""

    num_frames: int
    target_fps: float

    def __post_init__(self) -> None:
        if self.num_frames < 1 or not 0 < self.target_fps < np.inf:
            raise UserError(f"num_frames={self.num_frames} must be at least 1, target_fps={self.target_fps} above 0.")

    @property
    def span(self) -> float:
        """Seconds from the first frame to the last."""
        return (self.num_frames - 1) / self.target_fps

    def num_starts(self, seconds: np.ndarray) -> int:
        """See `Rule`; a start's last frame must have begun before the video's last one, or with it."""
        return int(np.searchsorted(seconds, seconds[-1] - self.span + CLOSE, side="right")) if len(seconds) else 0

    def indices(self, seconds: np.ndarray, start: int) -> np.ndarray:
        """See `Rule`."""
        wanted = seconds[start] + np.arange(self.num_frames) / self.target_fps
        return np.searchsorted(seconds, wanted + CLOSE, side="right") - 1

    def fps(self, file_fps: float) -> float:
        """`target_fps`.

        Raises:
            BadFile: the video has fewer frames a second, so that frames would be shown twice.
        """
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
