"""All frames of a video once, in order, without holding more than a few: what detecting and cutting both need.

Frames are numbered and timed as `opensora.datasets.video.read_video` does, so that frame i here is frame i there.
"""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from av.video.frame import VideoFrame

from opensora.datasets.video.color import displayed_size, reformat, to_rgb
from opensora.datasets.video.files import DEFAULT, BadFile, file_stat_key
from opensora.datasets.video.pyav_clip import decoded, deinterlaced
from opensora.datasets.video.timeline import Opened, Timeline, open_timeline, open_video, pixel_aspect


class Timed(NamedTuple):
    """A decoded frame, its number, and when it is shown, in seconds from the first."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seconds: float
    frame: VideoFrame


class Footage:
    """A video file to be read from its start to its end.

    Raises:
        BadFile: it cannot be opened, has no video, or is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_timeline(file_stat_key(path)) as (timeline, _):
            self.timeline: Timeline = timeline
        self.fps, self.num_frames = timeline.fps, timeline.num_frames
        self.pixel_aspect = 1.0

    def times(self) -> np.ndarray:
        """[N + 1] float64, seconds from the first frame at which each is shown; the last number is the end."""
        shown = self.timeline.seconds()
        return np.append(shown, shown[-1] + 1 / self.fps)

    def frames(self) -> Iterator[Timed]:
        """Every frame in order.

        Raises:
            BadFile: the file is damaged, when reading gets there.
        """
        times = self.times()
        with open_video(str(self.path)) as opened:
            self.pixel_aspect = pixel_aspect(opened[1])
            for index, frame in enumerate(self._progressive(opened)):
                if index >= self.num_frames:
                    return  # a frame that the packets do not announce has no time
                yield Timed(index, float(times[index]), frame)

    def small(self, width: int, height: int) -> Iterator[np.ndarray]:
        """Every frame shrunk to a size, whatever its shape: [height, width, 3] uint8 RGB, not turned upright."""
        for _, _, frame in self.frames():
            yield reformat(frame, width=width, height=height, format="rgb24", interpolation="AREA").to_ndarray()

    def rgb(self, frame: VideoFrame) -> np.ndarray:
        """[H, W, 3] uint8 as training sees the frame: upright, square pixels, HDR tone-mapped."""
        return to_rgb(str(self.path), frame, self.pixel_aspect, DEFAULT)

    def size(self, frame: VideoFrame) -> tuple[int, int]:
        """Height and width of what `rgb` gives."""
        return displayed_size(frame, self.pixel_aspect)

    def _progressive(self, opened: Opened) -> Iterator[VideoFrame]:
        """Frames that show one moment each. Up to the first interlaced one, which may be any, they are just passed on."""
        frames = self._sound(opened)
        before: list[VideoFrame] = []  # the last frame that was passed on
        for frame in frames:
            if frame.interlaced_frame:
                # the frame before is part of its missing lines
                made = deinterlaced(opened[1], chain(before, [frame], frames))
                yield from islice(made, len(before), None)
                return
            yield frame
            before = [frame]
        if not before:
            raise BadFile(f"{self.path}: no frame could be decoded; re-encode it or remove its row.")

    def _sound(self, opened: Opened) -> Iterator[VideoFrame]:
        for frame in decoded(*opened):
            if frame.is_corrupt:
                raise BadFile(f"{self.path} is damaged: the frame at {frame.time} s is corrupt; re-encode it.")
            yield frame
