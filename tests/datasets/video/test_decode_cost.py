"""What decoding costs: few frames of a long file, no memory that stays, nothing that stays open."""

from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from opensora.datasets.video import pyav_clip
from opensora.datasets.video.files import BadFile
from opensora.datasets.video.read_video import probe, read_frames
from tests.datasets.video.videos import CLIPS, numbered_frames

MINUTES_10 = 6000  # frames, at 10 a second


@pytest.fixture(scope="module")
def long_video(tmp_path_factory) -> dict[str, Path]:
    """Ten minutes of small images in three containers."""
    folder = tmp_path_factory.mktemp("long")
    paths = {name: folder / name for name in ("long.mp4", "long.mkv", "long.ts")}
    grey = [av.VideoFrame.from_ndarray(np.full((32, 32, 3), i, np.uint8), format="rgb24") for i in range(0, 256, 4)]
    with av.open(str(paths["long.mp4"]), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"preset": "ultrafast", "g": "25", "bf": "2"})
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.thread_count = 1
        for i in range(MINUTES_10):
            frame = grey[i % len(grey)].reformat(format="yuv420p")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    for name in ("long.mkv", "long.ts"):
        with av.open(str(paths["long.mp4"])) as reader, av.open(str(paths[name]), "w") as writer:
            copy = writer.add_stream_from_template(reader.streams.video[0])
            for packet in reader.demux(reader.streams.video[0]):
                if packet.size:
                    packet.stream = copy
                    writer.mux(packet)
    return paths


@pytest.mark.parametrize("name", ["long.mp4", "long.mkv"])
def test_sixteen_frames_of_ten_minutes_touch_less_than_a_hundredth(long_video, monkeypatch, name):
    decode, decoded = pyav_clip.decoded, []
    monkeypatch.setattr(pyav_clip, "decoded", lambda *args: (decoded.append(0) or frame for frame in decode(*args)))
    for start in (0, 1234, 3001, MINUTES_10 - 16):
        decoded.clear()
        frames = read_frames(long_video[name], start, 16)
        levels = frames.float().mean((1, 2, 3)).round().numpy()
        assert np.abs(levels - 4 * (np.arange(start, start + 16) % 64)).max() <= 2
        assert len(decoded) < MINUTES_10 / 100


def test_a_container_that_seeks_badly_still_gives_the_right_frames(long_video):
    levels = read_frames(long_video["long.ts"], 3001, 4, 3).float().mean((1, 2, 3)).round().numpy()
    assert np.abs(levels - 4 * (np.arange(3001, 3013, 3) % 64)).max() <= 2


def test_an_mp4_is_not_read_as_a_whole(long_video):
    """Its header tells all frames, so that bytes are read where the clip is."""
    process = psutil.Process()
    before = process.io_counters().read_chars
    read_frames(long_video["long.mp4"], 3000, 16)
    size = long_video["long.mp4"].stat().st_size
    header = 28 * MINUTES_10  # bytes that the header takes for these frames, at most
    assert process.io_counters().read_chars - before < 0.5 * size + header


@pytest.mark.slow
def test_two_hundred_decodes_keep_no_memory(write_video):
    path, process = write_video("a.mp4", numbered_frames(40, 128, 192), options={"g": "10"}), psutil.Process()
    length = probe(path).num_frames
    for _ in range(10):  # fills what is filled once
        read_frames(path, length - 16, 16)
    before = process.memory_info().rss
    for i in range(200):
        read_frames(path, i % (length - 16), 16)
    assert process.memory_info().rss - before < 50 * 2**20


def test_nothing_stays_open(tmp_path, long_video):
    path = sorted(CLIPS.glob("*.mp4"))[0]
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(path.read_bytes()[:20_000])
    process = psutil.Process()

    def read_all() -> None:
        read_frames(path, 5, 8)
        read_frames(long_video["long.ts"], 100, 2)
        with pytest.raises(BadFile):
            read_frames(broken, 0, 1)

    read_all()
    files, threads = process.num_fds(), process.num_threads()
    for _ in range(5):
        read_all()
    assert process.num_fds() == files
    assert process.num_threads() == threads
