"""Pieces of a video as files of their own, by PyAV: encoded anew in a pass over the video, or copied packet by packet.

"encode" is exact to the frame. What is written is what training would have seen of the long video: upright, with square
pixels, deinterlaced, HDR tone-mapped; 4:2:0, BT.709. "copy" cannot begin between two keyframes: it begins with the first
keyframe of a piece, so that no frame of the scene before gets in, and ends where the first packet of the next scene comes,
so that no frame refers to one that is missing. Sound is left out.

Scenes may overlap and come in any order: each clip gets every frame of its own.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from tools.scene_cut.pieces import Dropped, Piece, Rules, choose_pieces

BT709, LIMITED = 1, 1  # ITU-T H.273
SUFFIXES = (".mp4", ".mkv")
IN_MP4 = ("h264", "hevc", "av1", "mpeg4")  # what players take in an MP4; other codecs are copied into MKV
STEADY = 0.02  # of a frame's time: times that are off by less are those of a constant rate
TICKS = 90_000  # of a second, for rates that are not constant
MOST_OPEN = 4  # clips that are encoded at a time, where scenes overlap: x264 takes 0.3 GB for each at 1080p
EMPTY_PACKETS = 8  # that may lie at the end of a file


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
    pieces, dropped = choose_pieces(scenes, footage.times(), rules)
    targets = [folder / f"{stem}_scene-{i}.mp4" for i in range(len(pieces))]
    jobs = list(zip(pieces, targets, strict=True))
    copied = [job for job in jobs if rules.how == "copy" or (rules.how == "auto" and _begins_with_key(footage, job[0]))]
    encoded = [job for job in jobs if job not in copied]
    clips: list[Clip] = []
    with _nothing_left(targets):
        if encoded:
            clips += _encode(footage, encoded, rules)
            dropped += _undecoded(encoded, clips, footage.times())
        if copied:
            more, lost = _copy(footage, copied, rules)
            clips, dropped = clips + more, dropped + lost
    clips.sort(key=lambda clip: (clip.start_frame, clip.end_frame, clip.scene))
    return clips, sorted(dropped, key=lambda part: part.start)


@contextmanager
def _nothing_left(targets: Sequence[Path]) -> Iterator[None]:
    """Where the block fails, the clips that it had written are removed."""
    try:
        yield
    except BadFile:
        for target in targets:
            for suffix in SUFFIXES:
                target.with_suffix(suffix).unlink(missing_ok=True)
        raise


@contextmanager
def _naming_unwritable(footage: Footage) -> Iterator[None]:
    """What FFmpeg cannot write inside the block is a `BadFile`: no video ends a job of many."""
    try:
        yield
    except UserError:
        raise
    except (av.FFmpegError, ValueError) as error:  # PyAV's own are ValueErrors, such as of formats that lack a codec
        raise BadFile(f"{footage.path}: a clip of it cannot be written ({error}); try how='encode'.") from error


# ---------------------------------------------------------------------------------------------------- encode

Job = tuple[Piece, Path]
Timing = Literal["constant", "sampled", "as shown"]
"""Frames of a clip: all at one rate; those that are shown at the moments of one; all, at the times that they have."""


def _encode(footage: Footage, jobs: Sequence[Job], rules: Rules) -> list[Clip]:
    """Args: jobs: in order of their first frames."""
    times = footage.times()
    clips = []
    with ExitStack() as unfinished:
        for together in _passes(jobs):
            writers = [_Encoder(target, footage, times, piece, rules) for piece, target in together]
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
            piece = job[0]
            while ends and ends[0] <= piece.start:
                heapq.heappop(ends)
            if len(ends) < MOST_OPEN:
                heapq.heappush(ends, piece.end)
                now.append(job)
            else:
                later.append(job)
        yield now
        jobs = later


def _undecoded(jobs: Sequence[Job], clips: Sequence[Clip], times: np.ndarray) -> list[Dropped]:
    """What clips at the end of a file lack of their pieces."""
    ends = {clip.path: clip.end_frame for clip in clips}
    short = [(piece, ends[str(target)]) for piece, target in jobs if ends[str(target)] < piece.end]
    why = "the file's last packets hold no picture"
    return [Dropped(piece.scene, float(times[end]), float(times[piece.end]), why) for piece, end in short]


def _encode_together(footage: Footage, writers: Sequence["_Encoder"]) -> list[Clip]:
    """One pass: each frame goes to all clips that it is in. Of a few packets without a picture at the end clips are shorter."""
    waiting, seen = deque(writers), 0
    writing: list[_Encoder] = []
    clips: list[Clip] = []
    for timed in footage.frames():
        seen = timed.index + 1
        while waiting and waiting[0].piece.start <= timed.index:
            writing.append(waiting.popleft())
        for writer in writing:
            writer.take(timed)
        clips += [writer.close() for writer in writing if writer.piece.end <= seen]
        writing = [writer for writer in writing if writer.piece.end > seen]
        if not writing and not waiting:
            return clips
    if not waiting and footage.num_frames - seen <= EMPTY_PACKETS:
        return clips + [writer.close(seen) for writer in writing]
    raise BadFile(f"{footage.path}: only {seen} of {footage.num_frames} frames could be decoded; re-encode it.")


@dataclass
class _Encoder:
    """One clip; the file gets its name when it is complete."""

    target: Path
    footage: Footage
    times: np.ndarray
    piece: Piece
    rules: Rules

    def __post_init__(self) -> None:
        self.partial = self.target.with_name(f".{self.target.stem}.partial.mp4")
        self.output: OutputContainer | None = None
        self.stream: Any = None
        self.written, self.last = 0, -1  # frames, and the pts of the last
        self.rate, self.timing = self._choose_rate()

    def take(self, timed: Timed) -> None:
        """The next frame of the piece."""
        moments = list(self._moments(timed))
        if not moments:
            return
        picture = self.footage.rgb(timed.frame)
        if self.output is None:
            self._open(picture)
        assert self.output is not None
        small = reformat(
            VideoFrame.from_ndarray(picture, format="rgb24"),
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

    def close(self, end: int | None = None) -> Clip:
        """Finish the file; `end`: one behind the last frame there was, where it is not that of the piece."""
        assert self.output is not None, "the first frame of a piece is always shown"
        self.output.mux(self.stream.encode())
        self.output.close()
        size = self.stream.height, self.stream.width
        self.output = None
        self.partial.replace(self.target)
        end = self.piece.end if end is None else end
        place = self.piece.scene, float(self.times[self.piece.start]), float(self.times[end]), self.piece.start, end
        return Clip(str(self.target), *place, self.written, *size, float(self.rate), "encode")

    def discard(self) -> None:
        """After an error: nothing is left of it."""
        if self.output is not None:
            self.output.close()
        self.partial.unlink(missing_ok=True)
        self.target.unlink(missing_ok=True)

    def _choose_rate(self) -> tuple[Fraction, Timing]:
        """Frames per second, and how frames come to their times."""
        start, end, footage = self.piece.start, self.piece.end, self.footage
        known = min(end, footage.num_frames - 1)  # a film's last frame has no end of its own
        steps = np.diff(self.times[start : known + 1])
        fps, is_constant = _rate_of(steps, end - start, footage.fps, float(footage.timeline.time_base))
        wanted = self.rules.target_fps
        if wanted is not None and wanted < fps * (1 - STEADY):
            return as_fraction(wanted), "sampled"
        return as_fraction(fps), "constant" if is_constant else "as shown"

    def _moments(self, timed: Timed) -> Iterator[int]:
        """The pts at which the clip shows the frame, in its time base."""
        start = float(self.times[self.piece.start])
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
            yield timed.index - self.piece.start

    @property
    def time_base(self) -> Fraction:
        return Fraction(1, TICKS) if self.timing == "as shown" else 1 / self.rate

    def _open(self, picture: np.ndarray) -> None:
        height, width = _even_size(picture.shape[0], picture.shape[1], self.rules.shorter_side)
        self.output = av.open(str(self.partial), "w", options={"movflags": "+faststart"})
        options = {"crf": str(self.rules.crf), "preset": "fast"}
        self.stream = self.output.add_stream("libx264", rate=self.rate, options=options)
        self.stream.height, self.stream.width, self.stream.pix_fmt = height, width, "yuv420p"
        context = self.stream.codec_context
        context.time_base = self.time_base
        context.thread_count = 1  # one video per process is the parallelism
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED


def as_fraction(fps: float) -> Fraction:
    """A rate as encoders take it; one below 1, as of a film of a frame an hour, by the seconds of a frame."""
    return Fraction(fps).limit_denominator(1001) if fps >= 1 else 1 / (1 / Fraction(fps)).limit_denominator(1001)


def _rate_of(steps: np.ndarray, num_frames: int, fps: float, tick: float) -> tuple[float, bool]:
    """The rate of a piece, and whether it has exactly that one all through.

    Args:
        steps: seconds that its frames are shown; perhaps without the last of the `num_frames`.
        fps: the rate of the film, which may have several; the better-known number where the piece has it.
        tick: seconds of a unit of the film's times, to which steps are rounded.
    """
    inner = steps[: num_frames - 1]  # what a reader of the clip sees
    if not len(inner):
        return fps, _is_steady(steps, fps)
    middle, mean = float(np.median(inner)), float(inner.mean())
    own = fps if abs(middle - 1 / fps) <= tick else 1 / middle
    for rate in (fps, own, 1 / mean):
        if _is_steady(steps, rate):
            return rate, True
    return own, False


def _is_steady(steps: np.ndarray, fps: float) -> bool:
    return bool(np.abs(np.cumsum(steps - 1 / fps)).max(initial=0) < STEADY / fps * max(1, len(steps) / 10))


def _even_size(height: int, width: int, shorter_side: int | None) -> tuple[int, int]:
    scale = 1.0 if shorter_side is None else min(1.0, shorter_side / min(height, width))
    return max(2, 2 * round(height * scale / 2)), max(2, 2 * round(width * scale / 2))


# ---------------------------------------------------------------------------------------------------- copy


def _begins_with_key(footage: Footage, piece: Piece) -> bool:
    line = footage.timeline
    return bool(len(line.times)) and int(line.times[piece.start]) in set(line.keyframes.tolist())


def _copy(footage: Footage, jobs: Sequence[Job], rules: Rules) -> tuple[list[Clip], list[Dropped]]:
    if not len(footage.timeline.times) or not len(footage.timeline.keyframes):
        raise BadFile(f"{footage.path}: its frames' times cannot be trusted, so it cannot be copied; use how='encode'.")
    times, clips, dropped = footage.times(), [], []
    first = next(footage.frames(), None)
    matrix = None if first is None else display_matrix(first.frame)
    for piece, target in jobs:
        span = _copy_piece(footage, piece, target, matrix)
        reason = "no keyframe in it: how='encode' would keep it"
        if span is not None:
            path, start, end = span
            if times[end] - times[start] >= rules.min_seconds - 1e-6:
                info = probe(path)
                place = piece.scene, float(times[start]), float(times[end]), start, end
                clips.append(Clip(str(path), *place, *info, "copy"))
                dropped += _uncopied(piece, times, start, end)
                continue
            path.unlink()
            reason = f"shorter than {rules.min_seconds:g} s from its first keyframe on: how='encode' would keep it"
        dropped.append(Dropped(piece.scene, float(times[piece.start]), float(times[piece.end]), reason))
    return clips, dropped


def _uncopied(piece: Piece, times: np.ndarray, start: int, end: int) -> list[Dropped]:
    """What a copy leaves out at the two ends of a piece."""
    ends = [
        (piece.start, start, "before the scene's first keyframe: how='encode' would keep it"),
        (end, piece.end, "its frames refer to the next scene: how='encode' would keep it"),
    ]
    return [Dropped(piece.scene, float(times[a]), float(times[b]), why) for a, b, why in ends if a < b]


def _copy_piece(
    footage: Footage, piece: Piece, target: Path, matrix: Sequence[int] | None
) -> tuple[Path, int, int] | None:
    """The file and the frames [start, end) in it; None where there is no keyframe."""
    times = footage.timeline.times
    with open_video(str(footage.path)) as (container, stream):
        packets = _closed_packets(footage, container, stream, piece)
        first = next(packets, None)
        if first is None:
            return None
        path = target if stream.codec_context.codec.canonical_name in IN_MP4 else target.with_suffix(".mkv")
        partial = path.with_name(f".{path.stem}.partial{path.suffix}")
        shown = [int(first.pts or 0)]
        try:
            with _naming_unwritable(footage), av.open(str(partial), "w") as output:
                copy = _same_stream(output, stream, matrix)
                _mux(output, copy, first, shown[0])
                for packet in packets:
                    shown.append(int(packet.pts or 0))
                    _mux(output, copy, packet, shown[0])
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    start, last = (int(np.searchsorted(times, time)) for time in (min(shown), max(shown)))
    return path, start, last + 1


def _same_stream(output: OutputContainer, stream: Any, matrix: Sequence[int] | None) -> Any:
    """A stream that takes packets of `stream`."""
    # else PyAV looks for an encoder of the decoder's name; there is none of libdav1d, and of some codecs there is none at all
    options = {} if _is_encoder(stream.codec_context.codec.name) else {"opaque": True}
    copy = output.add_stream_from_template(stream, **options)
    if matrix is not None:  # all of it: a rotation alone would lose a mirror
        copy.set_display_matrix(matrix)
    return copy


def _is_encoder(name: str) -> bool:
    try:
        return av.Codec(name, "w").is_encoder
    except av.codec.codec.UnknownCodecError:
        return False


def _closed_packets(footage: Footage, container: Any, stream: Any, piece: Piece) -> Iterator[av.Packet]:
    """Packets that refer to none but each other, from the first keyframe of a piece on.

    Raises:
        BadFile: the film is damaged there.
    """
    times = footage.timeline.times
    begin = int(times[piece.start])
    end = int(times[piece.end]) if piece.end < len(times) else None
    container.seek(begin, stream=stream, backward=True)
    key: int | None = None
    for packet in _demuxed(footage, container, stream):
        if packet.pts is None or not packet.size:
            continue
        if key is None and (not packet.is_keyframe or packet.pts < begin):
            continue
        if end is not None and packet.pts >= end:
            return
        key = packet.pts if key is None else key
        if packet.pts >= key:  # frames before the keyframe that come behind it refer to the scene before
            yield packet


def _demuxed(footage: Footage, container: Any, stream: Any) -> Iterator[av.Packet]:
    packets = container.demux(stream)
    while True:
        with naming_damage(str(footage.path)):  # the reader's slips alone, none of who writes the packets
            packet = next(packets, None)
        if packet is None:
            return
        yield packet


def _mux(output: OutputContainer, stream: Any, packet: av.Packet, start: int) -> None:
    packet.stream = stream
    packet.pts = None if packet.pts is None else packet.pts - start
    packet.dts = None if packet.dts is None else packet.dts - start
    output.mux(packet)
