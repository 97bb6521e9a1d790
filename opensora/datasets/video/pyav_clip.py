"""Videos decoded by PyAV: by seeking where a file's times can be trusted, else by counting from its start."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

import av
import av.filter
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from opensora.datasets.video.color import displayed_size, to_rgb
from opensora.datasets.video.files import BadFile, Decoding, too_few
from opensora.datasets.video.timeline import Opened, Timeline, naming_damage, open_video, pixel_aspect

SEEKS = 2  # keyframes that are tried, going back, before a file is decoded from its start


class _InterlacedFrame(Exception):
    """A frame that is wanted is interlaced."""


class _LandedLate(Exception):
    """A seek ended behind the frame it was for."""


class PyavClip:
    """A video; see `read_video.Clip`. It is opened anew for each read but the first, for a used decoder is no fresh one."""

    def __init__(self, path: str, timeline: Timeline, opened: Opened | None, decoding: Decoding) -> None:
        self.path, self.timeline, self.decoding = path, timeline, decoding
        self.num_frames, self.fps = timeline.num_frames, timeline.fps
        self._fresh = opened

    def seconds(self) -> np.ndarray:
        """See `read_video.Clip`."""
        return self.timeline.seconds()

    def size(self) -> tuple[int, int]:
        """See `read_video.Clip`."""
        with self._open() as opened:
            frame = next(self._frames(opened, deinterlace=False), None)
            if frame is None:
                raise BadFile(f"{self.path}: no frame could be decoded; re-encode it or remove its row.")
            return displayed_size(frame, pixel_aspect(opened[1]))

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """See `read_video.Clip`."""
        try:
            return self._read(indices, deinterlace=False)
        except _InterlacedFrame as error:
            if self.decoding.interlaced == "refuse":
                raise BadFile(
                    f"{self.path} is interlaced, and decode['interlaced'] is 'refuse'; deinterlace it or set 'deinterlace'."
                ) from error
            return self._read(indices, deinterlace=True)

    def _read(self, indices: Sequence[int], *, deinterlace: bool) -> list[np.ndarray]:
        times, frames = self.timeline.times, None
        if len(times):
            # missing lines are filled in from the frames before and after
            first = int(times[max(indices[0] - deinterlace, 0)])
            keys = self.timeline.keyframes[1:]  # the first is where a file begins
            for key in [*reversed(keys[keys <= first][-SEEKS:].tolist()), None]:
                with suppress(_LandedLate):
                    frames = self._read_from(key, first, times[list(indices)].tolist(), deinterlace=deinterlace)
                    break
        return self._read_by_counting(indices, deinterlace=deinterlace) if frames is None else frames

    def _read_from(
        self, key: int | None, first: int, wanted: Sequence[int], *, deinterlace: bool
    ) -> list[np.ndarray] | None:
        """The frames at the wanted times, decoding from a keyframe; None where times are not in order or missing."""
        found: dict[int, np.ndarray] = {}
        with self._open() as opened:
            container, stream = opened
            if key is not None:
                try:
                    container.seek(key, stream=stream)
                except av.FFmpegError as error:  # no index in this container
                    raise _LandedLate from error
            latest = key if self.timeline.exact_keys else first  # at which decoding may begin
            before: int | None = None
            for frame in self._frames(opened, deinterlace=deinterlace):
                if frame.pts is None or (before is not None and frame.pts <= before):
                    return None
                if before is None and key is not None and latest is not None and frame.pts > latest:
                    raise _LandedLate
                before = frame.pts
                if frame.pts in wanted:
                    found[frame.pts] = self._to_rgb(opened, frame, deinterlace=deinterlace)
                if frame.pts >= wanted[-1]:
                    break
        return [found[time] for time in wanted] if len(found) == len(wanted) else None

    def _read_by_counting(self, indices: Sequence[int], *, deinterlace: bool) -> list[np.ndarray]:
        frames: list[np.ndarray] = []
        i = -1
        with self._open() as opened:
            for i, frame in enumerate(self._frames(opened, deinterlace=deinterlace)):
                if i == indices[len(frames)]:
                    frames.append(self._to_rgb(opened, frame, deinterlace=deinterlace))
                    if len(frames) == len(indices):
                        return frames
        raise too_few(self.path, indices, i + 1)

    @contextmanager
    def _open(self) -> Iterator[Opened]:
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            with open_video(self.path) as opened:
                yield opened
        else:
            with naming_damage(self.path):
                yield fresh

    def _frames(self, opened: Opened, *, deinterlace: bool) -> Iterator[VideoFrame]:
        def sound() -> Iterator[VideoFrame]:
            for frame in decoded(*opened):
                if frame.is_corrupt:
                    raise BadFile(
                        f"{self.path} is damaged: the frame at {frame.time} s is corrupt; re-encode it or remove its row."
                    )
                yield frame

        return deinterlaced(opened[1], sound()) if deinterlace else sound()

    def _to_rgb(self, opened: Opened, frame: VideoFrame, *, deinterlace: bool) -> np.ndarray:
        if frame.interlaced_frame and not deinterlace and self.decoding.interlaced != "keep":
            raise _InterlacedFrame
        return to_rgb(self.path, frame, pixel_aspect(opened[1]), self.decoding)


def decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """All frames from here on; apart, so that tests can count them."""
    yield from container.decode(stream)


def deinterlaced(stream: VideoStream, frames: Iterable[VideoFrame]) -> Iterator[VideoFrame]:
    """As many frames at the same times, interlaced ones made progressive by FFmpeg's bwdif filter.

    A frame's missing lines come from it and from its two neighbours, so a window needs one frame more on both sides.
    """
    graph = av.filter.Graph()
    graph.threads = 1
    source = graph.add_buffer(template=stream)
    bwdif = graph.add("bwdif", "mode=send_frame:parity=auto:deint=interlaced")
    sink = graph.add("buffersink")
    source.link_to(bwdif)
    bwdif.link_to(sink)
    graph.configure()
    for pushed in chain(frames, [None]):
        graph.push(pushed)
        while True:
            try:
                frame = graph.pull()
            except (av.BlockingIOError, av.EOFError):  # it wants more, or is at its end
                break
            assert isinstance(frame, VideoFrame)
            if frame.pts is not None and frame.time_base and stream.time_base:
                # the filter counts in halves of the time base
                frame.pts = round(frame.pts * frame.time_base / stream.time_base)
                frame.time_base = stream.time_base
            yield frame
