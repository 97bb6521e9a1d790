"""Decode just the frames a sample needs, exactly, from videos and pictures.

Frame i of a video is the i-th in order of presentation. Times are those of the packets: headers lie about the number of
frames (`stream.frames`) and about the rate (`average_rate`) in many real files. Where timestamps cannot be trusted, a
file is decoded from its start and frames are counted.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream
from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from opensora.utils.errors import UserError

VIDEO_EXTENSIONS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".gif")
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
IMAGE_FPS = 120.0  # what Open-Sora tells its models about pictures

BT709, UNSPECIFIED, BT601 = 1, 2, 6  # numbers of ISO/IEC 23091-2, as FFmpeg counts
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}
FULL_RANGE = 2
# without these flags swscale rounds down and smears chroma: up to 3/255 off
SCALER = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT


class VideoInfo(NamedTuple):
    """Size as displayed (after rotation), number of frames, and frames per second."""

    num_frames: int
    height: int
    width: int
    fps: float


class TooFewFrames(UserError):
    """A clip is shorter than was asked for; `available` is what it has."""

    def __init__(self, message: str, available: int) -> None:
        super().__init__(message)
        self.available = available

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.available)


def is_image(path: str | Path) -> bool:
    """Whether a file is a picture, by its extension."""
    return Path(path).suffix.lower() in IMAGE_EXTENSIONS


def frames_needed(num_frames: int, frame_interval: int) -> int:
    """Source frames that a clip of `num_frames`, every `frame_interval`-th, spans."""
    return (num_frames - 1) * frame_interval + 1


def count_frames(path: str | Path) -> int:
    """Frames of a file, without decoding it; a picture has one."""
    return probe(path).num_frames


def probe(path: str | Path) -> VideoInfo:
    """Size, length and rate of a file; remembered until the file changes.

    Raises:
        UserError: it cannot be read.
    """
    return _index(*_identity(path)).info


def read_frames(path: str | Path, start: int, num_frames: int, frame_interval: int = 1) -> Tensor:
    """Frames start, start + interval, ... of a video, or a picture as one frame: [T, H, W, 3] uint8 RGB.

    Raises:
        TooFewFrames: the file ends before the last of them.
        UserError: it cannot be read.
    """
    wanted = [start + i * frame_interval for i in range(num_frames)]
    if start < 0 or num_frames < 1 or frame_interval < 1:
        raise ValueError(f"start={start}, num_frames={num_frames}, frame_interval={frame_interval}")
    identity = _identity(path)
    if is_image(path):
        if wanted != [0]:
            raise TooFewFrames(f"{path} is a picture; frames {wanted[0]} to {wanted[-1]} were asked for.", 1)
        return torch.from_numpy(_read_image(Path(path))[None])
    index = _index(*identity)
    if wanted[-1] >= index.info.num_frames:
        raise _too_few(path, wanted, index.info.num_frames)
    frames = _read_by_seeking(str(path), index, wanted)
    if frames is None:
        frames = _read_by_counting(str(path), wanted)
    if len({frame.shape for frame in frames}) > 1:
        raise UserError(f"{path}: the frame size changes within the clip; re-encode it at one size.")
    return torch.from_numpy(np.stack(frames))


# --------------------------------------------------------------------------------------------- index of a file


@dataclass(frozen=True)
class _Index:
    """What demuxing a file tells. `times` are empty when they cannot be trusted."""

    info: VideoInfo
    times: np.ndarray  # [N] int64, presentation times in order, in units of the stream's time base
    keyframes: np.ndarray  # [K] int64, presentation times of the keyframes, in order


def _identity(path: str | Path) -> tuple[str, int, int]:
    try:
        stat = Path(path).stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if stat.st_size == 0:
        raise UserError(f"{path} is empty (0 bytes); fetch it again or remove its row.")
    return str(path), stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=4096)
def _index(path: str, size: int, mtime_ns: int) -> _Index:
    if is_image(path):
        height, width = _image_size(Path(path))
        nothing = np.empty(0, np.int64)
        return _Index(VideoInfo(1, height, width, IMAGE_FPS), nothing, nothing)
    with _open(path) as (container, stream):
        in_header, is_mp4 = stream.frames, "mp4" in container.format.name
        packets = [packet for packet in container.demux(stream) if packet.size]
        shown = [packet for packet in packets if not packet.is_discard]
        if any(packet.is_corrupt for packet in packets) or (is_mp4 and len(packets) < in_header):
            raise UserError(
                f"{path} is truncated: {len(packets)} of {in_header or 'unknown'} frames are there; "
                "fetch it again or remove its row."
            )
        times = np.array([packet.pts for packet in shown if packet.pts is not None], np.int64)
        keys = np.array([p.pts for p in packets if p.is_keyframe and p.pts is not None], np.int64)
        # AVI stores no times of presentation: with B-frames they are guesses
        guessed = container.format.name == "avi" and stream.codec_context.has_b_frames
        if guessed or len(times) < len(shown) or len(np.unique(times)) < len(times):
            times = keys = np.empty(0, np.int64)
        rate = _frame_rate(stream, np.sort(times))
    height, width = _displayed_size(path)
    return _Index(VideoInfo(len(shown), height, width, rate), np.sort(times), np.sort(keys))


def _frame_rate(stream: VideoStream, times: np.ndarray) -> float:
    """The rate that the times agree with; `average_rate` alone is wrong where a frame is shown longer than others."""
    # PyAV types the rates as always there; files without one exist
    rates: list[Fraction | None] = [stream.guessed_rate, stream.base_rate, stream.average_rate]
    candidates = [rate for rate in rates if rate]
    if len(times) > 1 and stream.time_base:
        ticks = float(np.median(np.diff(times)))
        # times are rounded to the time base: a rate within one tick is the better-known number
        for rate in candidates:
            if abs(float(1 / rate / stream.time_base) - ticks) <= 1:
                return float(rate)
        return float(1 / (ticks * stream.time_base))
    if not candidates:
        raise UserError(f"{stream.container.name}: no frame rate can be told from it; re-encode it.")
    return float(candidates[0])


def _displayed_size(path: str) -> tuple[int, int]:
    with _open(path) as (container, stream):
        frame = next(_decode(path, container, stream), None)
        if frame is None:
            raise UserError(f"{path}: no frame could be decoded; re-encode it or remove its row.")
        return (frame.width, frame.height) if frame.rotation % 180 else (frame.height, frame.width)


# ---------------------------------------------------------------------------------------------------- decoding


@contextmanager
def _open(path: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    try:
        container = av.open(path)
    except (av.FFmpegError, OSError) as error:
        raise UserError(f"{path} cannot be opened as a video ({error.strerror}); it is damaged or no video.") from error
    try:
        if not container.streams.video:
            raise UserError(f"{path} has no video stream.")
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1  # loader workers are the parallelism; threads would fight over the cores
        yield container, stream
    except av.FFmpegError as error:
        raise UserError(f"{path} is damaged ({error.strerror}); re-encode it or remove its row.") from error
    finally:
        container.close()


def _decode(path: str, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    for frame in container.decode(stream):
        if frame.is_corrupt:
            raise UserError(
                f"{path} is damaged: the frame at {frame.time} s is corrupt; re-encode it or remove its row."
            )
        yield frame


def _read_by_seeking(path: str, index: _Index, wanted: Sequence[int]) -> list[np.ndarray] | None:
    """The wanted frames, or None where the file's times or its seeking cannot be trusted."""
    if not len(index.times):
        return None
    targets = [int(time) for time in index.times[wanted]]
    earlier = index.keyframes[index.keyframes <= targets[0]]
    if not len(earlier):
        return None
    found: dict[int, np.ndarray] = {}
    with _open(path) as (container, stream):
        if len(earlier) > 1:
            try:
                container.seek(int(earlier[-1]), stream=stream)
            except av.FFmpegError:  # no index in this container; the caller decodes from the start
                return None
        before: int | None = None
        for frame in _decode(path, container, stream):
            if frame.pts is None or (before is None and len(earlier) > 1 and frame.pts > earlier[-1]):
                return None  # no times, or the seek landed too late
            if before is not None and frame.pts <= before:
                return None  # times that are not in the order of presentation
            before = frame.pts
            if frame.pts in targets:
                found[frame.pts] = _to_rgb(path, frame)
            if frame.pts >= targets[-1]:
                break
    return [found[time] for time in targets] if len(found) == len(targets) else None


def _read_by_counting(path: str, wanted: Sequence[int]) -> list[np.ndarray]:
    frames: list[np.ndarray] = []
    i = -1
    with _open(path) as (container, stream):
        for i, frame in enumerate(_decode(path, container, stream)):
            if i == wanted[len(frames)]:
                frames.append(_to_rgb(path, frame))
                if len(frames) == len(wanted):
                    return frames
    raise _too_few(path, wanted, i + 1)


def _too_few(path: str | Path, wanted: Sequence[int], available: int) -> TooFewFrames:
    return TooFewFrames(
        f"{path} has {available} frames, but frames {wanted[0]} to {wanted[-1]} were asked for.", available
    )


# ------------------------------------------------------------------------------------------------------ colour


def _to_rgb(path: str, frame: VideoFrame) -> np.ndarray:
    """[H, W, 3] uint8, turned the way it is displayed."""
    if transfer := HDR_TRANSFERS.get(frame.color_trc):
        raise UserError(f"{path} is HDR ({transfer}), which would come out washed out; tone-map it to BT.709 first.")
    matrix = frame.colorspace
    if matrix == UNSPECIFIED:  # what players assume
        matrix = BT709 if frame.height >= 720 else BT601
    has_alpha = any(component.is_alpha for component in frame.format.components) or frame.format.name == "pal8"
    rgb = frame.reformat(
        format="rgba" if has_alpha else "rgb24",
        src_colorspace=matrix,
        src_color_range=frame.color_range,
        dst_color_range=FULL_RANGE,
        interpolation=SCALER,
        threads=1,
    ).to_ndarray()
    if has_alpha:
        rgb = _on_white(Image.fromarray(rgb))
    # the rotation is counter-clockwise, like numpy's
    return np.ascontiguousarray(np.rot90(rgb, round(frame.rotation / 90)))


def _read_image(path: Path) -> np.ndarray:
    """[H, W, 3] uint8, turned by its EXIF orientation, transparency on white."""
    with _open_image(path) as file:
        file.load()
        image: Image.Image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I;16") or image.mode == "I":
            return np.repeat((np.asarray(image, np.uint32) >> 8).astype(np.uint8)[..., None], 3, axis=2)
        if image.has_transparency_data:
            return _on_white(image.convert("RGBA"))
        return np.array(image.convert("RGB"))


def _image_size(path: Path) -> tuple[int, int]:
    """Height and width as `_read_image` returns them, from the file's header: the pixels are decoded when they are read."""
    with _open_image(path) as file:
        width, height = file.size
        if isinstance(file, TiffImageFile):  # some versions of PIL give the size as stored, some as displayed
            width, height = file.tag_v2[ExifTags.Base.ImageWidth], file.tag_v2[ExifTags.Base.ImageLength]
        # PIL decodes a PNG that has no EXIF in front of its pixels, to look behind them; the base class does not
        look_behind = not isinstance(file, PngImageFile) or not _ends_with_pixels(path)
        exif = file.getexif() if look_behind else Image.Image.getexif(file)
        turned = exif.get(ExifTags.Base.Orientation, 1) >= 5  # 5 to 8 exchange rows and columns
    return (width, height) if turned else (height, width)


def _ends_with_pixels(path: Path) -> bool:
    """Whether no metadata follow the pixels of a PNG, going from chunk to chunk by their lengths."""
    kinds = []
    with path.open("rb") as file:
        file.seek(8)  # signature
        while len(head := file.read(8)) == 8:
            kinds.append(head[4:])
            file.seek(int.from_bytes(head[:4], "big") + 4, 1)  # data and checksum
    behind = kinds[kinds.index(b"IDAT") :] if b"IDAT" in kinds else []
    return not {b"eXIf", b"iTXt", b"tEXt", b"zTXt"}.intersection(behind)


@contextmanager
def _open_image(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as file:
            yield file
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # all that PIL raises
        raise UserError(f"{path} cannot be read as a picture ({error}); it is damaged or no picture.") from error


def _on_white(image: Image.Image) -> np.ndarray:
    white = Image.new("RGBA", image.size, "white")
    return np.array(Image.alpha_composite(white, image).convert("RGB"))
