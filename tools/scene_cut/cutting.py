"""Clips of a video as files of their own, by PyAV: encoded anew in a pass over the video, or copied packet by packet.

"encode" is exact to the frame. What is written is what training would have seen of the long video: upright, with square
pixels, deinterlaced, HDR tone-mapped; 4:2:0, BT.709. "copy" cannot begin between two keyframes: it begins with the first
keyframe of a span, so that no frame of the scene before gets in, and ends where the first packet of the next scene comes,
so that no frame refers to one that is missing. Sound is left out.

Scenes may overlap and come in any order: each clip gets every frame of its own.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import OutputContainer
from av.video.frame import VideoFrame

from opensora.datasets.video.color import display_matrix, reformat
from opensora.datasets.video.files import BadFile
from opensora.datasets.video.read_video import probe
from opensora.datasets.video.timeline import naming_damage, open_video
from opensora.utils.errors import UserError
from tools.scene_cut.frames import Footage, Timed
from tools.scene_cut.rules import Dropped, Rules, Span, choose_spans

BT709, LIMITED = 1, 1  # ITU-T H.273
SUFFIXES = (".mp4", ".mkv")
IN_MP4 = ("h264", "hevc", "av1", "mpeg4")  # what players take in an MP4; other codecs are copied into MKV
STEADY = 0.02  # of a frame's time: times that are off by less are those of a constant rate
TICKS = 90_000  # of a second, for rates that are not constant
MOST_OPEN = 4  # clips that are encoded at a time, where scenes overlap: x264 takes 0.3 GB for each at 1080p
EMPTY_PACKETS = 8  # that may lie at the end of a file

Job = tuple[Span, Path]


class Clip(NamedTuple):
    """A file that was cut out. Times and frames are those of the video that it is from."""

    path: str
    scene: int
    start: float
    end: float
    start_frame: int
    end_frame: int
    num_frames: int
    height: int
    width: int
    fps: float
    cut_by: str


def cut_video(
    footage: Footage, scenes: Sequence[tuple[int, int]], rules: Rules, folder: Path, stem: str
) -> tuple[list[Clip], list[Dropped]]:
    """Cut the scenes of a video into `folder/{stem}_scene-{i}.mp4`; every part of each scene is in a clip or reported.

    Args:
        scenes: [start, end) frames, in any order; they may overlap.

    Raises:
        BadFile: the video is damaged; no file is left behind.
    """
    if scenes and max(end for _, end in scenes) > footage.num_frames:
        raise BadFile(f"{footage.path} has {footage.num_frames} frames, fewer than its scenes; look for scenes again.")
    folder.mkdir(parents=True, exist_ok=True)
    times = footage.times()
    spans, dropped = choose_spans(scenes, times, rules)
    jobs = [(span, folder / f"{stem}_scene-{i}.mp4") for i, span in enumerate(spans)]
    times_of_keys = set(footage.timeline.keyframes.tolist()) if len(footage.timeline.times) else set()
    copied = [
        job
        for job in jobs
        if rules.how == "copy"
        or (rules.how == "auto" and times_of_keys and int(footage.timeline.times[job[0].start]) in times_of_keys)
    ]
    encoded = [job for job in jobs if job not in copied]
    clips: list[Clip] = []
    try:
        if encoded:
            clips += _encode(footage, encoded, rules)
            ends = {clip.path: clip.end_frame for clip in clips}
            for span, target in encoded:
                if (end := ends[str(target)]) < span.end:
                    why = "the file's last packets hold no image"
                    dropped.append(Dropped(span.scene, float(times[end]), float(times[span.end]), why))
        if copied:
            more, lost = _copy(footage, copied, rules)
            clips, dropped = clips + more, dropped + lost
    except BadFile:
        for _, target in jobs:
            for suffix in SUFFIXES:
                target.with_suffix(suffix).unlink(missing_ok=True)
        raise
    clips.sort(key=lambda clip: (clip.start_frame, clip.end_frame, clip.scene))
    return clips, sorted(dropped, key=lambda part: part.start)


# ---------------------------------------------------------------------------------------------------- encode


def _encode(footage: Footage, jobs: Sequence[Job], rules: Rules) -> list[Clip]:
    """`jobs`: in order of their first frames."""
    times = footage.times()
    clips = []
    with ExitStack() as unfinished:
        for together in _passes(jobs):
            writers = [_Encoder(target, footage, times, span, rules) for span, target in together]
            for writer in writers:
                unfinished.callback(writer.discard)
            try:
                clips += _encode_together(footage, writers)
            except av.FFmpegError as error:  # what it cannot write ends no job
                raise BadFile(f"{footage.path}: a clip of it cannot be written ({error.strerror}).") from error
        unfinished.pop_all()
    return clips


def _passes(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """The jobs in as few passes over the video as have at most `MOST_OPEN` of them open at any frame."""
    while jobs:
        now: list[Job] = []
        later: list[Job] = []
        ends: list[int] = []  # of those that are open, as a heap
        for job in jobs:
            while ends and ends[0] <= job[0].start:
                heapq.heappop(ends)
            if len(ends) < MOST_OPEN:
                heapq.heappush(ends, job[0].end)
                now.append(job)
            else:
                later.append(job)
        yield now
        jobs = later


def _encode_together(footage: Footage, writers: Sequence["_Encoder"]) -> list[Clip]:
    """One pass: each frame goes to all clips that it is in. A few empty packets at the end make a clip shorter."""
    waiting, seen = deque(writers), 0
    writing: list[_Encoder] = []
    clips: list[Clip] = []
    for timed in footage.frames():
        seen = timed.index + 1
        while waiting and waiting[0].span.start <= timed.index:
            writing.append(waiting.popleft())
        for writer in writing:
            writer.take(timed)
        clips += [writer.close(writer.span.end) for writer in writing if writer.span.end <= seen]
        writing = [writer for writer in writing if writer.span.end > seen]
        if not writing and not waiting:
            return clips
    if not waiting and footage.num_frames - seen <= EMPTY_PACKETS:
        return clips + [writer.close(seen) for writer in writing]
    raise BadFile(f"{footage.path}: only {seen} of {footage.num_frames} frames could be decoded; re-encode it.")


class _Encoder:
    """One clip; the file gets its name when it is complete.

    Its frames are all at one rate ("constant"); those that are shown at the moments of one ("sampled"); or all, at the times
    that they have ("as shown").
    """

    def __init__(self, target: Path, footage: Footage, times: np.ndarray, span: Span, rules: Rules) -> None:
        self.target, self.footage, self.times, self.span, self.rules = target, footage, times, span, rules
        self.partial = target.with_name(f".{target.stem}.partial.mp4")
        self.output: OutputContainer | None = None
        self.stream: Any = None
        self.written, self.last = 0, -1  # frames, and the pts of the last
        known = min(span.end, footage.num_frames - 1)  # a video's last frame has no end of its own
        steps = np.diff(times[span.start : known + 1])
        fps, is_constant = _rate_of(steps, span.end - span.start, footage.fps, float(footage.timeline.time_base))
        if rules.target_fps is not None and rules.target_fps < fps * (1 - STEADY):
            fps, self.timing = rules.target_fps, "sampled"
        else:
            self.timing = "constant" if is_constant else "as shown"
        self.rate = as_fraction(fps)
        self.time_base = Fraction(1, TICKS) if self.timing == "as shown" else 1 / self.rate

    def take(self, timed: Timed) -> None:
        """The next frame of the span."""
        moments = list(self._moments(timed))
        if not moments:
            return
        image = self.footage.rgb(timed.frame)
        if self.output is None:
            self._open(*image.shape[:2])
        assert self.output is not None
        small = reformat(
            VideoFrame.from_ndarray(image, format="rgb24"),
            width=self.stream.width,
            height=self.stream.height,
            format="yuv420p",
            dst_colorspace="ITU709",
            interpolation="AREA",
        )
        for pts in moments:
            small.pts, small.time_base = pts, self.time_base
            self.output.mux(self.stream.encode(small))
            self.written, self.last = self.written + 1, pts

    def close(self, end: int) -> Clip:
        """Finish the file; `end`: one behind its last frame."""
        assert self.output is not None, "the first frame of a span is always shown"
        self.output.mux(self.stream.encode())
        self.output.close()
        size = self.stream.height, self.stream.width
        self.output = None
        self.partial.replace(self.target)
        start = self.span.start
        where = self.span.scene, float(self.times[start]), float(self.times[end]), start, end
        return Clip(str(self.target), *where, self.written, *size, float(self.rate), "encode")

    def discard(self) -> None:
        """After an error: nothing is left of it."""
        if self.output is not None:
            self.output.close()
        self.partial.unlink(missing_ok=True)
        self.target.unlink(missing_ok=True)

    def _moments(self, timed: Timed) -> Iterator[int]:
        """The pts at which the clip shows the frame, in its time base."""
        start = float(self.times[self.span.start])
        shown, until = timed.seconds - start, float(self.times[timed.index + 1]) - start
        if self.timing == "as shown":
            yield max(round(shown * TICKS), self.last + 1)  # two frames may lie within a tick
        elif self.timing == "sampled":
            # the frame that is shown at the moment k / rate, as sampling at a rate does it: where rates vary, a frame may
            # be shown at several; the first is, however short it is
            moment = self.written
            while moment == 0 or float(moment / self.rate) < until - 1e-6:
                yield moment
                moment += 1
        else:
            yield timed.index - self.span.start

    def _open(self, height: int, width: int) -> None:
        side = self.rules.shorter_side
        scale = 1.0 if side is None else min(1.0, side / min(height, width))
        self.output = av.open(str(self.partial), "w", options={"movflags": "+faststart"})
        options = {"crf": str(self.rules.crf), "preset": "fast"}
        self.stream = self.output.add_stream("libx264", rate=self.rate, options=options)
        self.stream.height, self.stream.width = (max(2, 2 * round(n * scale / 2)) for n in (height, width))
        self.stream.pix_fmt = "yuv420p"
        context = self.stream.codec_context
        context.time_base = self.time_base
        context.thread_count = 1  # one video per process is the parallelism
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED


def as_fraction(fps: float) -> Fraction:
    """A rate as encoders take it; one below 1, as of a frame an hour, by the seconds of a frame."""
    return Fraction(fps).limit_denominator(1001) if fps >= 1 else 1 / (1 / Fraction(fps)).limit_denominator(1001)


def _rate_of(steps: np.ndarray, num_frames: int, fps: float, tick: float) -> tuple[float, bool]:
    """The rate of a span, and whether it has exactly that one all through.

    Args:
        steps: seconds that its frames are shown; perhaps without the last of the `num_frames`.
        fps: the rate of the video, which may have several; the better-known number where the span has it.
        tick: seconds of a unit of the video's times, to which steps are rounded.
    """

    def is_steady(steps: np.ndarray, fps: float) -> bool:
        return bool(np.abs(np.cumsum(steps - 1 / fps)).max(initial=0) < STEADY / fps * max(1, len(steps) / 10))

    inner = steps[: num_frames - 1]  # what a reader of the clip sees
    if not len(inner):
        return fps, is_steady(steps, fps)
    middle, mean = float(np.median(inner)), float(inner.mean())
    own = fps if abs(middle - 1 / fps) <= tick else 1 / middle
    for rate in (fps, own, 1 / mean):
        if is_steady(steps, rate):
            return rate, True
    return own, False


# ---------------------------------------------------------------------------------------------------- copy


def _copy(footage: Footage, jobs: Sequence[Job], rules: Rules) -> tuple[list[Clip], list[Dropped]]:
    if not len(footage.timeline.times) or not len(footage.timeline.keyframes):
        raise BadFile(f"{footage.path}: its frames' times cannot be trusted, so it cannot be copied; use how='encode'.")
    times = footage.times()
    clips: list[Clip] = []
    dropped: list[Dropped] = []

    def drop(scene: int, a: int, b: int, why: str) -> None:
        dropped.append(Dropped(scene, float(times[a]), float(times[b]), f"{why}: how='encode' would keep it"))

    first = next(footage.frames(), None)
    matrix = None if first is None else display_matrix(first.frame)
    for span, target in jobs:
        found = _copy_span(footage, span, target, matrix)
        if found is None:
            drop(span.scene, span.start, span.end, "no keyframe in it")
            continue
        path, start, end = found
        if times[end] - times[start] < rules.min_seconds - 1e-6:
            path.unlink()
            why = f"shorter than {rules.min_seconds:g} s from its first keyframe on"
            drop(span.scene, span.start, span.end, why)
            continue
        where = span.scene, float(times[start]), float(times[end]), start, end
        clips.append(Clip(str(path), *where, *probe(path), "copy"))
        if span.start < start:
            drop(span.scene, span.start, start, "before the scene's first keyframe")
        if end < span.end:
            drop(span.scene, end, span.end, "its frames refer to the next scene")
    return clips, dropped


def _copy_span(
    footage: Footage, span: Span, target: Path, matrix: Sequence[int] | None
) -> tuple[Path, int, int] | None:
    """The file and the frames [start, end) in it; None where there is no keyframe."""
    times = footage.timeline.times
    with open_video(str(footage.path)) as (container, stream):
        packets = _closed_packets(footage, container, stream, span)
        first = next(packets, None)
        if first is None:
            return None
        path = target if stream.codec_context.codec.canonical_name in IN_MP4 else target.with_suffix(".mkv")
        partial = path.with_name(f".{path.stem}.partial{path.suffix}")
        shown = [int(first.pts or 0)]
        try:
            with _naming_unwritable(footage), av.open(str(partial), "w") as output:
                # PyAV looks for an encoder of the decoder's name; there is none of libdav1d, and of some codecs none at all
                options = {} if _is_encoder(stream.codec_context.codec.name) else {"opaque": True}
                copy = output.add_stream_from_template(stream, **options)
                if matrix is not None:  # all of it: a rotation alone would lose a mirror
                    copy.set_display_matrix(matrix)
                _mux(output, copy, first, shown[0])
                for packet in packets:
                    shown.append(int(packet.pts or 0))
                    _mux(output, copy, packet, shown[0])
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    start, last = (int(np.searchsorted(times, time)) for time in (min(shown), max(shown)))
    return path, start, min(last + 1, len(times))  # packets behind the last frame that is shown have no time


@contextmanager
def _naming_unwritable(footage: Footage) -> Iterator[None]:
    """What FFmpeg cannot write inside the block is a `BadFile`: no video ends a job of many."""
    try:
        yield
    except UserError:
        raise
    except (av.FFmpegError, ValueError) as error:  # PyAV's own are ValueErrors, such as of formats that lack a codec
        raise BadFile(f"{footage.path}: a clip of it cannot be written ({error}); try how='encode'.") from error


def _is_encoder(name: str) -> bool:
    try:
        return av.Codec(name, "w").is_encoder
    except av.codec.codec.UnknownCodecError:
        return False


def _closed_packets(footage: Footage, container: Any, stream: Any, span: Span) -> Iterator[av.Packet]:
    """Packets that refer to none but each other, from the first keyframe of a span on.

    Raises:
        BadFile: the video is damaged there.
    """
    times = footage.timeline.times
    begin = int(times[span.start])
    end = int(times[span.end]) if span.end < len(times) else None
    container.seek(begin, stream=stream, backward=True)
    key: int | None = None
    packets = container.demux(stream)
    while True:
        with naming_damage(str(footage.path)):  # errors of the reader alone, not of who writes the packets
            packet = next(packets, None)
        if packet is None:
            return
        if packet.pts is None or not packet.size:
            continue
        if key is None and (not packet.is_keyframe or packet.pts < begin):
            continue
        if end is not None and packet.pts >= end:
            return
        key = packet.pts if key is None else key
        if packet.pts >= key:  # frames before the keyframe that come behind it refer to the scene before
            yield packet


def _mux(output: OutputContainer, stream: Any, packet: av.Packet, start: int) -> None:
    packet.stream = stream
    packet.pts = None if packet.pts is None else packet.pts - start
    packet.dts = None if packet.dts is None else packet.dts - start
    output.mux(packet)
