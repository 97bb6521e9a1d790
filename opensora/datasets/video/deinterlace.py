"""Interlaced frames, which show two moments in alternate lines, made into one moment each by FFmpeg's bwdif filter."""

from collections.abc import Iterable, Iterator

import av
import av.filter
from av.video.frame import VideoFrame
from av.video.stream import VideoStream


class InterlacedFrame(Exception):
    """A frame that is wanted is interlaced."""


def deinterlaced(stream: VideoStream, frames: Iterable[VideoFrame]) -> Iterator[VideoFrame]:
    """The same number of frames at the same times; those that are not marked as interlaced are left as they are.

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
    for frame in frames:
        graph.push(frame)
        yield from _pulled(graph, stream)
    graph.push(None)
    yield from _pulled(graph, stream)


def _pulled(graph: av.filter.Graph, stream: VideoStream) -> Iterator[VideoFrame]:
    while True:
        try:
            frame = graph.pull()
        except (av.BlockingIOError, av.EOFError):  # it wants more, or is at its end
            return
        assert isinstance(frame, VideoFrame)
        if (
            frame.pts is not None and frame.time_base and stream.time_base
        ):  # the filter counts in halves of the time base
            frame.pts = round(frame.pts * frame.time_base / stream.time_base)
            frame.time_base = stream.time_base
        yield frame
