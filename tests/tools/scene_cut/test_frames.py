"""Frames for cutting are the frames of training, also where a video becomes interlaced on the way."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from opensora.datasets.video.files import Decoding
from opensora.datasets.video.read_video import probe, read_frames
from tests.datasets.video.videos import combs, write_interlaced
from tools.scene_cut import frames
from tools.scene_cut.frames import Footage


def write_progressive(path: Path, count: int) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg2video", rate=25, options={"g": "5", "qscale": "1", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for i in range(count):
            rgb = np.full((64, 96, 3), 40, np.uint8)
            rgb[:, 4 * i : 4 * i + 12] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        container.mux(stream.encode())
    return path


def joined(path: Path, parts: list[Path]) -> Path:
    with av.open(str(path), "w") as writer:
        stream, shift = None, 0
        for part in parts:
            with av.open(str(part)) as reader:
                stream = stream or writer.add_stream_from_template(reader.streams.video[0])
                packets = [packet for packet in reader.demux(video=0) if packet.size]
            first = packets[0].dts
            for packet in packets:
                packet.pts, packet.dts = packet.pts - first + shift, packet.dts - first + shift
                packet.stream = stream
                writer.mux(packet)
            shift = packets[-1].dts + 3600
    return path


@pytest.fixture
def parts(tmp_path) -> dict[str, Path]:
    """Of 13 frames each."""
    return {
        "progressive": write_progressive(tmp_path / "p.ts", 13),
        "interlaced": write_interlaced(tmp_path / "i.ts", 13),
    }


def images(path: Path) -> torch.Tensor:
    footage = Footage(path)
    return torch.from_numpy(np.stack([footage.rgb(timed.frame) for timed in footage.frames()]))


@pytest.mark.parametrize("kinds", [
    ("progressive", "interlaced"), ("interlaced", "progressive"), ("progressive", "interlaced", "progressive"), ("interlaced",),
])  # fmt: skip
def test_films_that_become_interlaced_are_deinterlaced_from_there(tmp_path, parts, kinds):
    """The first frame decided for the whole video."""
    path = joined(tmp_path / "video.ts", [parts[kind] for kind in kinds])
    count = probe(path).num_frames
    assert count == 13 * len(kinds)
    with av.open(str(path)) as container:
        flags = [frame.interlaced_frame for frame in container.decode(video=0)]
    assert flags == [kind == "interlaced" for kind in kinds for _ in range(13)]
    made, kept = images(path), read_frames(path, 0, count, decoding=Decoding(interlaced="keep"))
    assert combs(made[flags]) < 0.3 * combs(kept[flags])
    assert torch.equal(made, read_frames(path, 0, count))
    assert torch.equal(made[~torch.tensor(flags)], kept[~torch.tensor(flags)])


def test_progressive_films_do_not_pass_a_filter(parts, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("a progressive video was deinterlaced")

    monkeypatch.setattr(frames, "deinterlaced", never)
    assert len(images(parts["progressive"])) == 13
