"""Pieces of a video as files of their own, by PyAV: encoded anew in one pass over the video, or copied packet by packet.

"encode" is exact to the frame. What is written is what training would have seen of the long video: upright, with square
pixels, deinterlaced, HDR tone-mapped; 4:2:0, BT.709. "copy" cannot begin between two keyframes: it begins with the first
keyframe of a piece, so that no frame of the scene before gets in, and ends where the first packet of the next scene comes,
so that no frame refers to one that is missing. Sound is left out.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import OutputContainer
from av.video.frame import VideoFrame

from opensora.datasets.files import BadFile
from opensora.datasets.read_video import probe
from opensora.datasets.timeline import open_video
from tools.scene_cut.frames import Footage, Timed
from tools.scene_cut.pieces import Dropped, Piece, Rules, choose_pieces

BT709, LIMITED = 1, 1  # ITU-T H.273
IN_MP4 = ("h264", "hevc", "av1", "mpeg4")  # what players take in an MP4; other codecs are copied into MKV
STEADY = 0.02  # of a frame's time: times that are off by less are those of a constant rate
TICKS = 90_000  # of a second, for rates that are not constant


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
        scenes: [start, end) frames.

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
    if encoded:
        clips += _encode(footage, encoded, rules)
    if copied:
        more, lost = _copy(footage, copied, rules)
        clips, dropped = clips + more, dropped + lost
    return sorted(clips, key=lambda clip: clip.start_frame), sorted(dropped, key=lambda part: part.start)


# ---------------------------------------------------------------------------------------------------- encode

Job = tuple[Piece, Path]


def _encode(footage: Footage, jobs: Sequence[Job], rules: Rules) -> list[Clip]:
    times = footage.times()
    clips = []
    with ExitStack() as unfinished:
        waiting = list(jobs)
        frames = footage.frames()
        while waiting:
            piece, target = waiting.pop(0)
            writer = _Encoder(target, footage, times, piece, rules)
            unfinished.callback(writer.discard)
            last = -1
            for timed in frames:
                last = timed.index
                writer.take(timed)
                if timed.index + 1 >= piece.end:
                    break
            if last + 1 < piece.end:
                raise BadFile(
                    f"{footage.path}: only {last + 1} of {footage.num_frames} frames could be decoded; re-encode it."
                )
            clips.append(writer.close())
        unfinished.pop_all()
    return clips


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
        self.written = 0
        self.rate, self.is_steady = self._choose_rate()

    def take(self, timed: Timed) -> None:
        """A frame of the video; those outside of the piece are passed over."""
        if not self.piece.start <= timed.index < self.piece.end:
            return
        moments = list(self._moments(timed))
        if not moments:
            return
        picture = self.footage.rgb(timed.frame)
        if self.output is None:
            self._open(picture)
        assert self.output is not None
        small = VideoFrame.from_ndarray(picture, format="rgb24").reformat(
            self.stream.width, self.stream.height, "yuv420p", dst_colorspace="ITU709", interpolation="AREA"
        )
        for pts in moments:
            small.pts, small.time_base = pts, self.time_base
            self.output.mux(self.stream.encode(small))
            self.written += 1

    def close(self) -> Clip:
        """Finish the file."""
        assert self.output is not None, "a piece has at least one frame"
        self.output.mux(self.stream.encode())
        self.output.close()
        size = self.stream.height, self.stream.width
        self.output = None
        self.partial.replace(self.target)
        start, end = float(self.times[self.piece.start]), float(self.times[self.piece.end])
        place = self.piece.scene, start, end, self.piece.start, self.piece.end
        return Clip(str(self.target), *place, self.written, *size, float(self.rate), "encode")

    def discard(self) -> None:
        """After an error: nothing is left of it."""
        if self.output is not None:
            self.output.close()
        self.partial.unlink(missing_ok=True)
        self.target.unlink(missing_ok=True)

    def _choose_rate(self) -> tuple[Fraction, bool]:
        """Frames per second, and whether the clip has exactly that rate all through."""
        fps = self.footage.fps
        if self.rules.target_fps is not None and self.rules.target_fps < fps * (1 - STEADY):
            return Fraction(self.rules.target_fps).limit_denominator(1001), True
        steps = np.diff(self.times[self.piece.start : self.piece.end + 1])
        is_steady = bool(np.abs(np.cumsum(steps - 1 / fps)).max() < STEADY / fps * max(1, len(steps) / 10))
        return Fraction(fps).limit_denominator(1001), is_steady

    def _moments(self, timed: Timed) -> Iterator[int]:
        """The pts at which the clip shows the frame, in its time base."""
        start = float(self.times[self.piece.start])
        shown, until = timed.seconds - start, float(self.times[timed.index + 1]) - start
        if not self.is_steady:
            yield round(shown * TICKS)
        elif self.rules.target_fps is not None and self.rate < Fraction(self.footage.fps * (1 - STEADY)):
            # the frame that is shown at the moment k / rate, as sampling at a rate does it
            while float(self.written / self.rate) < until - 1e-6:
                if float(self.written / self.rate) < shown - 1e-6:
                    raise AssertionError("a moment was passed over")
                yield self.written
                if float((self.written + 1) / self.rate) >= until - 1e-6:
                    return
        else:
            yield timed.index - self.piece.start

    @property
    def time_base(self) -> Fraction:
        return 1 / self.rate if self.is_steady else Fraction(1, TICKS)

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


def _even_size(height: int, width: int, shorter_side: int | None) -> tuple[int, int]:
    scale = 1.0 if shorter_side is None else min(1.0, shorter_side / min(height, width))
    return max(2, 2 * round(height * scale / 2)), max(2, 2 * round(width * scale / 2))


# ---------------------------------------------------------------------------------------------------- copy


def _begins_with_key(footage: Footage, piece: Piece) -> bool:
    line = footage.timeline
    return bool(len(line.times)) and int(line.times[piece.start]) in set(line.keyframes.tolist())


def _copy(footage: Footage, jobs: Sequence[Job], rules: Rules) -> tuple[list[Clip], list[Dropped]]:
    if not len(footage.timeline.times):
        raise BadFile(f"{footage.path}: its frames' times cannot be trusted, so it cannot be copied; use how='encode'.")
    times, clips, dropped = footage.times(), [], []
    first = next(footage.frames(), None)
    rotation = 0 if first is None else int(first.frame.rotation)
    for piece, target in jobs:
        span = _copy_piece(footage, piece, target, rotation)
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


def _copy_piece(footage: Footage, piece: Piece, target: Path, rotation: int) -> tuple[Path, int, int] | None:
    """The file and the frames [start, end) in it; None where there is no keyframe."""
    times = footage.timeline.times
    with open_video(str(footage.path)) as (container, stream):
        packets = _closed_packets(container, stream, times, piece)
        first = next(packets, None)
        if first is None:
            return None
        path = target if stream.codec_context.name in IN_MP4 else target.with_suffix(".mkv")
        partial = path.with_name(f".{path.stem}.partial{path.suffix}")
        shown = [int(first.pts or 0)]
        try:
            with av.open(str(partial), "w") as output:
                copy = output.add_stream_from_template(stream)
                if rotation:
                    copy.set_display_rotation(rotation)
                _mux(output, copy, first, shown[0])
                for packet in packets:
                    shown.append(int(packet.pts or 0))
                    _mux(output, copy, packet, shown[0])
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    start, last = (int(np.searchsorted(times, time)) for time in (min(shown), max(shown)))
    return path, start, last + 1


def _closed_packets(container: Any, stream: Any, times: np.ndarray, piece: Piece) -> Iterator[av.Packet]:
    """Packets that refer to none but each other, from the first keyframe of a piece on."""
    begin = int(times[piece.start])
    end = int(times[piece.end]) if piece.end < len(times) else None
    container.seek(begin, stream=stream, backward=True)
    key: int | None = None
    for packet in container.demux(stream):
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
