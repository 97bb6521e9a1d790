"""When each frame of a video is shown, from its packets without decoding any.

Headers lie about the number of frames and about the rate in many real files, and say nothing of them in MKV, WebM and MPEG. So
the packets are listed. An MP4 of constant rate has them listed in its header, which saves reading a long file for a short clip.
"""

import functools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream

from opensora.datasets.video.files import BadFile, check_pixels, file_stat_key

FileKey = tuple[str, int, int]
Opened = tuple[InputContainer, VideoStream]

# titles that are no UTF-8 are no reason to refuse a video; PyAV 19 and newer never do, and know no such argument
LENIENT: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "replace"}
# bytes of a packet of an MPEG transport stream: plain, with a timestamp (M2TS), with error correction
TS_PACKET_SIZES = (188, 192, 204)
# few: datasets of short clips never come back in time, and a long video's times take 8 bytes a frame
MAX_KNOWN = 256
_known: "OrderedDict[FileKey, Timeline]" = OrderedDict()  # whose every call is one step for other threads


@dataclass(frozen=True)
class Timeline:
    """Times are in units of the stream's time base. Both arrays are empty where a file's times cannot be trusted."""

    num_frames: int  # that are shown
    fps: float  # while the video runs
    times: np.ndarray  # [N] int64, when each is shown, in order
    keyframes: np.ndarray  # [K] int64, their times, from which decoding can begin; none where a seek changes the times
    exact_keys: bool  # False: a keyframe may be shown a little later than its time here
    time_base: Fraction  # seconds of a unit

    def seconds(self) -> np.ndarray:
        """[N] float64, seconds from the first frame; as `fps` has it where there are no times."""
        if not len(self.times):
            return np.arange(self.num_frames) / self.fps
        return (self.times - self.times[0]) * float(self.time_base)


@contextmanager
def open_video(path: str) -> Iterator[Opened]:
    """The container and its video, which decodes in one thread; closed at the end. Sound is not read. A `BadFile` where it cannot
    be opened, has no video, is too large, or is found damaged inside the block."""
    try:
        container = av.open(str(Path(path).absolute()), **LENIENT)  # absolute: FFmpeg takes "00:01.mp4" for a URL
    except (av.FFmpegError, OSError) as error:
        raise BadFile(f"{path} cannot be opened as a video ({error.strerror}); it is damaged or no video.") from error
    with container, naming_damage(path):
        streams = container.streams.video
        covers = [s for s in streams if s.disposition & av.stream.Disposition.attached_pic]
        videos = [s for s in streams if s not in covers]
        if not videos:
            raise BadFile(f"{path} has no video stream{', only a cover image' if covers else ''}.")
        video = videos[0] if len(videos) == 1 else _main_video(path, container, videos)
        for stream in container.streams:
            if stream.index != video.index:
                stream.discard = av.stream.Discard.all
        if video.codec_context is None:
            raise BadFile(f"{path}: its video has a codec that this FFmpeg does not know; re-encode it.")
        check_pixels(path, video.codec_context.width, video.codec_context.height)
        video.codec_context.thread_count = 1  # loader workers are the parallelism; threads would fight over the cores
        yield container, video


def _main_video(path: str, container: InputContainer, videos: Sequence[VideoStream]) -> VideoStream:
    """The first, unless another has at least twice as many frames: then the first is a still, such as a cover without its flag."""
    counts = [stream.frames for stream in videos]
    if "mp4" not in container.format.name or 0 in counts:
        packets = _count_packets(*file_stat_key(path))
        counts = [packets[stream.index] for stream in videos]
    return next((stream for stream, count in zip(videos, counts, strict=True) if 2 * count > max(counts)), videos[0])


@functools.lru_cache(maxsize=MAX_KNOWN)
def _count_packets(path: str, size: int, mtime_ns: int) -> Counter[int]:
    with av.open(str(Path(path).absolute()), **LENIENT) as container:
        return Counter(packet.stream.index for packet in container.demux(container.streams.video) if packet.size)


@contextmanager
def naming_damage(path: str) -> Iterator[None]:
    """FFmpeg's errors inside the block become `BadFile`, and so do PyAV's slips over what FFmpeg accepts."""
    try:
        yield
    except (av.FFmpegError, IndexError) as error:
        reason = error.strerror if isinstance(error, av.FFmpegError) else error
        raise BadFile(f"{path} is damaged ({reason}); re-encode it or remove its row.") from error


def pixel_aspect(stream: VideoStream) -> float:
    """Width of a pixel / its height."""
    return float(stream.sample_aspect_ratio or 1)


@contextmanager
def open_timeline(file_key: FileKey) -> Iterator[tuple[Timeline, Opened | None]]:
    """The timeline of a file, remembered by `file_stat_key`; and the file where it is still as it was opened."""
    if known := _known.get(file_key):
        yield known, None
        return
    with open_video(file_key[0]) as opened:
        from_header = _from_header(*opened)
        _known[file_key] = timeline = from_header or _from_packets(file_key[0], *opened)
        while len(_known) > MAX_KNOWN:  # no lock, which a thread that a fork left behind might hold
            with suppress(KeyError):  # other threads took the last ones
                _known.popitem(last=False)
        yield timeline, opened if from_header else None


def _from_header(container: InputContainer, stream: VideoStream) -> Timeline | None:
    """The timeline of an MP4 or MOV of constant rate whose header is complete; None for all else."""
    entries = stream.index_entries
    if stream.codec_context.name == "vp8":  # the header does not say which frames are hidden
        return None
    if "mp4" not in container.format.name or stream.start_time is None or not 1 < len(entries) == stream.frames:
        return None
    decoded_at = np.empty(len(entries), np.int64)
    keys, end = [], 0
    for i, entry in enumerate(entries):
        if entry.is_discard:
            return None
        decoded_at[i] = entry.timestamp
        end = max(end, entry.pos + entry.size)
        if entry.is_keyframe:
            keys.append(i)
    steps = np.unique(np.diff(decoded_at))
    if len(steps) != 1 or steps[0] <= 0 or end > Path(container.name).stat().st_size:
        return None
    times = stream.start_time + steps[0] * np.arange(len(entries))
    # a keyframe's index in the file is its index in time, or earlier where frames after it are shown before it
    rate, time_base = _frame_rate(stream, times)
    return Timeline(len(entries), rate, times, times[keys if _can_seek(container, stream) else []], False, time_base)


def _can_seek(container: InputContainer, stream: VideoStream) -> bool:
    """Whether frames are the same after a seek. A palette may come with the first packet alone, and FFmpeg marks frames of RPZA, Dirac
    and APNG as keyframes that need the one before."""
    codec = stream.codec_context
    return codec.pix_fmt != "pal8" and codec.name not in ("rpza", "dirac") and container.format.name != "apng"


def _from_packets(path: str, container: InputContainer, stream: VideoStream) -> Timeline:
    in_header, is_mp4, codec = stream.frames, "mp4" in container.format.name, stream.codec_context.name
    times: list[Any] = []  # of frames that are shown; None where a packet has none
    decoding_times: list[int] = []
    keys: list[int] = []
    is_key: list[bool] = []  # of each packet
    marked: list[int] = []  # packets with something missing
    begin_in_file = True
    for packet in container.demux(stream):
        if not packet.size:
            continue
        # a frame of a GIF ends with an empty block, the last one perhaps with the file's end mark
        if packet.is_corrupt or (codec == "gif" and not bytes(packet).rstrip(b";").endswith(b"\0")):
            marked.append(len(is_key))
        is_key.append(packet.is_keyframe)
        begin_in_file &= packet.pos is not None  # else it is part of what the file has as one packet, as in MPEG-PS
        if packet.dts is not None:
            decoding_times.append(packet.dts)
        if not packet.is_discard and not _is_hidden(packet, codec):
            times.append(packet.pts)
        if packet.is_keyframe and packet.pts is not None:
            keys.append(packet.pts)
    num_packets, num_shown, in_part = len(is_key), len(times), False
    if container.format.name == "mpegts":
        in_part = all(Path(path).stat().st_size % size for size in TS_PACKET_SIZES)
        # FFmpeg marks the packet before the one with the gap. Where a keyframe is next, it is where two streams were joined.
        marked = [i for i in marked if is_key[i + 2 : i + 3] != [True]]
    if marked or in_part or (is_mp4 and num_packets < in_header):
        raise BadFile(
            f"{path} is truncated: {num_packets} of {in_header or 'unknown'} frames are there; "
            "fetch it again or remove its row."
        )
    # AVI stores no times of presentation: with B-frames they are guesses
    guessed = container.format.name == "avi" and stream.codec_context.has_b_frames
    begin_anew = decoding_times != sorted(decoding_times)  # where files were joined
    if guessed or begin_anew or None in times or len(set(times)) < len(times):
        times, keys = [], []
    # where packets are parts of others FFmpeg guessed times, and would guess others after a seek
    if not begin_in_file or not _can_seek(container, stream):
        keys = []
    if not num_shown:
        raise BadFile(f"{path} has a video stream without frames; fetch it again or remove its row.")
    shown, keyframes = (np.array(sorted(values), np.int64) for values in (times, keys))
    rate, time_base = _frame_rate(stream, shown)
    return Timeline(num_shown, rate, shown, keyframes, True, time_base)


def _is_hidden(packet: av.Packet, codec: str) -> bool:
    """Whether a packet gives no frame, as VP8's and VP9's alternate references. AV1 has them in one packet with a shown frame."""
    if codec == "vp8":  # RFC 6386, 9.1
        return not memoryview(packet)[0] & 0b0001_0000
    if codec == "dirac":  # the end of a sequence is a header alone
        return packet.size == 13
    if codec != "vp9":
        return False
    # VP9 bitstream specification, 6.2 and annex B
    head, last = memoryview(packet)[0], memoryview(packet)[-1]
    is_superframe = last & 0b1110_0000 == 0b1100_0000
    is_profile_3 = head & 0b0011_0000 == 0b0011_0000  # which has one bit more in front
    shows = 0b0000_0101 if is_profile_3 else 0b0000_1010  # "show_existing_frame" and "show_frame"
    return not is_superframe and not head & shows


def _frame_rate(stream: VideoStream, times: np.ndarray) -> tuple[float, Fraction]:
    """The rate that the times agree with, and their time base; `average_rate` is wrong where a frame is shown longer than others."""
    time_base = Fraction(stream.time_base or Fraction(1, 90000))  # PyAV 19 has a rational type of its own
    # PyAV types the rates as always there; files without one exist
    rates: list[Fraction | None] = [stream.guessed_rate, stream.base_rate, stream.average_rate]
    candidates = [rate for rate in rates if rate]
    if len(times) > 1 and stream.time_base:
        ticks = float(np.median(np.diff(times)))
        # times are rounded to the time base: a rate within one tick is the better-known number
        for rate in candidates:
            if abs(float(1 / rate / stream.time_base) - ticks) <= 1:
                return float(rate), time_base
        return float(1 / (ticks * stream.time_base)), time_base
    if not candidates:
        raise BadFile(f"{stream.container.name}: its frame rate is unknown; re-encode it.")
    return float(candidates[0]), time_base
