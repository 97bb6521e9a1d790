"""Frames that are hidden, times that are guessed, and what is remembered of files, by many threads at once."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from av.video.stream import VideoStream

from opensora.datasets.video import timeline
from opensora.datasets.video.files import file_stat_key
from opensora.datasets.video.read_video import probe, read_frames
from opensora.datasets.video.timeline import Timeline, open_timeline
from tests.datasets.video.videos import decoded_in_order, frame_numbers, numbered_frames, remux

# ----------------------------------------------------------------------------------------------- hidden frames


def altered(packet: av.Packet, first_byte: int, later: int = 0) -> av.Packet:
    """A copy with another first byte."""
    copy = av.Packet(bytes([first_byte]) + bytes(packet)[1:])
    copy.pts = copy.dts = packet.pts + later
    copy.time_base = packet.time_base
    return copy


def hide_vp8(_: VideoStream, packets: list[av.Packet]) -> list[av.Packet]:
    """Behind every 7th packet a frame that is not shown, and changes what follows."""
    made = []
    for i, packet in enumerate(packets):
        made.append(packet)
        if i % 7 == 3:
            made.append(altered(packet, bytes(packet)[0] & ~0b0001_0000, later=1))
    return made


def hide_vp9(_: VideoStream, packets: list[av.Packet]) -> list[av.Packet]:
    """In front of every keyframe but the first the same one, not shown; the times go on, one for each packet."""
    made = []
    for packet in packets:
        if packet.is_keyframe and made:
            made.append(altered(packet, bytes(packet)[0] & ~0b0000_0010))
        made.append(packet)
    for i, packet in enumerate(made):
        packet.pts = packet.dts = 40 * i
    return made


def assert_windows_are_those_of(path: Path, full: np.ndarray, length: int = 4) -> None:
    """That every window has the frames that FFmpeg decodes there; the two round colours differently."""
    assert probe(path).num_frames == len(full)
    for start in range(len(full) - length + 1):
        window = read_frames(path, start, length).numpy().astype(int)
        assert np.abs(window - full[start : start + length]).mean() < 2, start


@pytest.mark.parametrize("kind", ["webm", "mkv", "avi"])
def test_hidden_frames_of_vp8_are_not_counted(write_video, tmp_path, kind):
    source = write_video("plain.webm", numbered_frames(40), codec="libvpx", options={"g": "12", "lag-in-frames": "0"})
    path = remux(source, tmp_path / f"hidden.{kind}", hide_vp8)
    with av.open(str(path)) as container:
        assert sum(packet.size > 0 for packet in container.demux(video=0)) == 46
    assert probe(source).num_frames == 40
    assert_windows_are_those_of(path, decoded_in_order(path))


def test_hidden_frames_of_vp8_in_a_header_are_not_counted(write_video, tmp_path):
    """FFmpeg does not write VP8 in MOV, so it gets the name of another codec."""
    source, path = write_video("plain.webm", numbered_frames(20), codec="libvpx"), tmp_path / "hidden.mov"
    with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
        stream = writer.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for i, packet in enumerate(hide_vp8(stream, [p for p in reader.demux(video=0) if p.size])):
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, i, i, Fraction(1, 25)
            writer.mux(packet)
    path.write_bytes(path.read_bytes().replace(b"jpeg", b"vp08"))
    full = decoded_in_order(path)
    assert len(full) == 20
    assert_windows_are_those_of(path, full)


@pytest.mark.parametrize(("kind", "packets"), [("avi", 43), ("webm", 40)])
def test_hidden_frames_of_vp9_are_not_counted(write_video, tmp_path, kind, packets):
    """WebM has them in one packet with the next frame, a superframe; AVI has packets of their own."""
    source = write_video("plain.webm", numbered_frames(40), codec="libvpx-vp9", options={"g": "10", "cpu-used": "8"})
    path = remux(source, tmp_path / f"hidden.{kind}", hide_vp9)
    with av.open(str(path)) as container:
        assert sum(packet.size > 0 for packet in container.demux(video=0)) == packets
    assert probe(path).num_frames == 40
    assert frame_numbers(read_frames(path, 0, 40)) == list(range(40))
    for start in (9, 10, 19, 33):
        assert frame_numbers(read_frames(path, start, 4, 2)) == list(range(start, start + 8, 2))


@pytest.mark.parametrize("profile", range(4))
def test_the_header_of_vp9_has_a_bit_more_in_profile_3(profile):
    """Frames as the specification writes them: marker 2, profile, a zero in profile 3, then what is shown."""
    for existing, key, shown in np.ndindex(2, 2, 2):
        bits = f"10{profile & 1}{profile >> 1}{'0' * (profile == 3)}{existing}{key}{shown}0"
        frame = av.Packet(bytes([int(bits[:8], 2), 0, 0b0101_0101]))
        assert timeline._is_hidden(frame, "vp9") == (not existing and not shown)
        assert not timeline._is_hidden(frame, "h264")


def test_hidden_frames_of_av1_are_in_the_packets_of_others(write_video):
    frames = [np.roll(frame, 3 * i, axis=1) for i, frame in enumerate(numbered_frames(40))]
    path = write_video("a.webm", frames, codec="libsvtav1", options={"g": "20", "preset": "10"})
    assert_windows_are_those_of(path, decoded_in_order(path))


# ------------------------------------------------------------------------------------------------ guessed times


def ramps(count: int) -> list[np.ndarray]:
    """A ramp that becomes redder, with a bar that moves."""
    frames = []
    for i in range(count):
        frame = np.zeros((48, 64, 3), np.uint8)
        frame[..., 0] = 8 * i % 256
        frame[..., 1] = np.arange(64) * 255 // 64
        frame[..., 2] = np.arange(48)[:, None] * 255 // 48
        frame[:, 3 * i % 64 : 3 * i % 64 + 8] = 255
        frames.append(frame)
    return frames


@pytest.mark.parametrize(("codec", "count", "options"), [
    ("mpeg1video", 70, {"g": "1", "bf": "0"}), ("mpeg2video", 70, {"g": "1", "bf": "0"}), ("mpeg2video", 70, {"g": "2", "bf": "0"}),
    ("mpeg1video", 150, {"g": "6", "bf": "1"}),
])  # fmt: skip
def test_windows_of_mpeg_ps_are_exact(write_video, codec, count, options):
    """Several frames have one time; FFmpeg guesses the others, and guesses otherwise after a seek."""
    path = write_video("a.mpg", ramps(count), codec=codec, options=options)
    full = read_frames(path, 0, count)
    assert np.abs(full.numpy().astype(int) - decoded_in_order(path)).mean() < 2
    for start in range(count - 3):
        assert torch.equal(read_frames(path, start, 4), full[start : start + 4]), start


def test_mpeg_with_a_time_for_each_frame_is_sought_in(write_video):
    noise = np.random.default_rng(0).integers(0, 255, (24, 48, 64, 3)).astype(np.uint8)
    coding = {"g": "6", "bf": "0", "sc_threshold": "1000000000", "b": "9000k"}
    for name in ("large.mpg", "large.ts"):
        path = write_video(name, list(noise), codec="mpeg2video", options=coding)
        with open_timeline(file_stat_key(path)) as (found, _):
            assert np.searchsorted(found.times, found.keyframes).tolist() == [0, 6, 12, 18]
        full = read_frames(path, 0, 24)
        for start in range(20):
            assert torch.equal(read_frames(path, start, 4), full[start : start + 4]), (name, start)


# -------------------------------------------------------------------------------------------------- remembering


@pytest.fixture
def busy_threads():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 4])
def test_threads_may_open_files_at_once(monkeypatch, busy_threads, most):
    """Two threads forgot the same file: KeyError in one of them, or a dict that changed while it was looked at."""

    @contextmanager
    def no_file(path):
        yield None, None

    monkeypatch.setattr(timeline, "MAX_KNOWN", most)
    monkeypatch.setattr(timeline, "open_video", no_file)
    monkeypatch.setattr(
        timeline, "_from_header", lambda *_: Timeline(1, 25.0, *[np.empty(0, np.int64)] * 2, True, Fraction(1))
    )
    monkeypatch.setattr(timeline, "_known", type(timeline._known)())

    def open_many(thread: int) -> None:
        for i in range(3000):
            with open_timeline((f"{thread}.mp4", i, 0)) as (known, _):
                assert known.num_frames == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(open_many, range(8)))
    assert len(timeline._known) <= most
