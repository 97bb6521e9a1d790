"""Videos whose frames differ."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.video.stream import VideoStream
from torch import Tensor

CLIPS = Path(__file__).parents[3] / "assets" / "clips"


def numbered_frames(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames of one grey level each, 6 levels apart: a frame's number can be read off after compression."""
    return [np.full((height, width, 3), 6 * i + 3, np.uint8) for i in range(count)]


def frame_numbers(frames: Iterable[Tensor]) -> list[int]:
    """What `numbered_frames` numbered: of [T, H, W, 3] uint8."""
    return [int(frame.float().mean().round()) // 6 for frame in frames]


def write_interlaced(path: Path, count: int = 20) -> Path:
    """A white bar that moves 2 pixels with each field: the lines of a frame show two moments."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg2video", rate=25, options={"flags": "+ildct+ilme", "g": "5", "qscale": "1"})
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        stream.codec_context.bit_rate = 8_000_000
        for i in range(count):
            rgb = np.zeros((64, 96, 3), np.uint8)
            rgb[1::2, 4 * i : 4 * i + 12] = 255  # this encoder marks the bottom field as the first
            rgb[0::2, 4 * i + 2 : 4 * i + 14] = 255
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = i, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def combs(frames: torch.Tensor) -> float:
    """How much a line differs from both its neighbours alike: of [T, H, W, 3] uint8."""
    lines = frames[..., 0].float()
    return float((lines[:, 1:-1] - (lines[:, :-2] + lines[:, 2:]) / 2).abs().mean())


def remux(source: Path, target: Path, change: Callable[[VideoStream, list[av.Packet]], Iterable[av.Packet]]) -> Path:
    """The same video in another file, of the packets that `change` makes of its own; it may also set up the new stream."""
    with av.open(str(source)) as reader, av.open(str(target), "w") as writer:
        stream = writer.add_stream_from_template(reader.streams.video[0])
        for packet in change(stream, [packet for packet in reader.demux(video=0) if packet.size]):
            packet.stream = stream
            writer.mux(packet)
    return target


def with_matrix(source: Path, target: Path, matrix: Sequence[int]) -> Path:
    """The same video with a display matrix: of its numbers those that turn and mirror, m0, m1, m3 and m4, as -1, 0 or 1."""
    xx, xy, yx, yy = (number << 16 for number in matrix)

    def change(stream: VideoStream, packets: list[av.Packet]) -> list[av.Packet]:
        stream.set_display_matrix([xx, xy, 0, yx, yy, 0, 0, 0, 1 << 30])
        return packets

    return remux(source, target, change)


def decoded_in_order(path: Path) -> np.ndarray:
    """[N, H, W, 3] uint8: all frames as FFmpeg gives them, neither turned nor deinterlaced; no code of ours is used."""
    exact = 0x2 | 0x2000 | 0x40000  # SWS_BILINEAR, SWS_FULL_CHR_H_INT, SWS_ACCURATE_RND
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24", interpolation=exact) for frame in container.decode(video=0)])
