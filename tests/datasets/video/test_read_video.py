"""Reading videos: every frame is the right one, the right way up, in the right colours; what cannot be read is named."""

import pickle
import random
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.video.files import TooFewFrames, is_image
from opensora.datasets.video.read_video import count_frames, frames_needed, probe, read_frames
from opensora.utils.errors import UserError
from tests.datasets.video.videos import CLIPS, frame_numbers, numbered_frames

CLIP_PATHS = sorted(CLIPS.glob("*.mp4"))


def decode_all(path: Path) -> list[np.ndarray]:
    """The plainest possible reader."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="yuv420p") for frame in container.decode(video=0)]


def test_there_are_clips():
    assert CLIP_PATHS


@pytest.mark.parametrize("path", CLIP_PATHS, ids=lambda path: path.stem)
def test_seeking_gives_the_frames_of_a_full_decode(path):
    full = read_frames(path, 0, count_frames(path))
    decoded = decode_all(path)
    assert len(full) == len(decoded)
    rng = random.Random(path.name)
    for _ in range(4):
        interval, num_frames = rng.choice([1, 2, 3, 5]), rng.randint(1, 4)
        start = rng.randint(0, len(full) - frames_needed(num_frames, interval))
        window = read_frames(path, start, num_frames, interval)
        assert torch.equal(window, full[start::interval][:num_frames])
    # the full read itself agrees with the plain reader, in order: brightness follows luma
    i = rng.randrange(len(full))
    brightness = full[i].double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    y = (decoded[i][: full.shape[1]].astype(float) - 16) * 255 / 219
    assert abs(float(brightness.mean()) - y.mean()) < 3


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("b_frames.mp4", "libx264", {"bf": "3", "g": "8"}),
        ("open_gop.mp4", "libx264", {"bf": "2", "g": "8", "x264-params": "open-gop=1"}),
        ("hevc.mp4", "libx265", {"x265-params": "log-level=none:keyint=8:bframes=3:pools=1"}),
        ("matroska.mkv", "libx264", {"bf": "2", "g": "8"}),
        ("vp9.webm", "libvpx-vp9", {"g": "8", "deadline": "realtime", "cpu-used": "8"}),
        ("mpeg4.avi", "mpeg4", {"bf": "2", "g": "8", "qscale": "1"}),
        ("program_stream.mpg", "mpeg2video", {"bf": "2", "g": "8"}),
        ("transport.ts", "libx264", {"bf": "2", "g": "8"}),
    ],
)
def test_frames_are_exact_in_every_container(write_video, name, codec, options):
    path = write_video(name, numbered_frames(40), codec=codec, options=options)
    full = read_frames(path, 0, count_frames(path))
    # MPEG's B-frames may repeat a neighbour, so the number on a frame is only near; the windows must be equal
    assert all(abs(number - i) <= 1 for i, number in enumerate(frame_numbers(full)))
    assert len(full) == 40
    for start in (0, 5, 7, 8, 9, 15, 16, 23, 31):
        assert torch.equal(read_frames(path, start, 3, 4), full[start::4][:3])


def test_variable_frame_rate_keeps_every_frame(write_video):
    times = [0, 1, 2, 10, 11, 12, 13, 14, 40, 41, 42, 43]
    path = write_video("vfr.mp4", numbered_frames(12), times=times, rate=30, options={"g": "4"})
    info = probe(path)
    assert info.num_frames == 12
    assert info.fps == 30  # the rate while it runs, not the average of 8.6
    assert frame_numbers(read_frames(path, 2, 5, 2)) == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("name", ["a.mp4", "a.webm"])
@pytest.mark.parametrize("rate", [Fraction(24000, 1001), Fraction(30000, 1001), 10, 25])
def test_frame_rate(write_video, name, rate):
    codec = "libx264" if name.endswith("mp4") else "libvpx-vp9"
    options = {"deadline": "realtime", "cpu-used": "8"} if codec == "libvpx-vp9" else {}
    path = write_video(name, numbered_frames(8), rate=rate, codec=codec, options=options)
    assert probe(path).fps == pytest.approx(float(rate), rel=1e-4)


def test_only_the_window_is_decoded(write_video, monkeypatch):
    path = write_video("long.mp4", numbered_frames(42), options={"g": "6", "bf": "0"})
    probe(path)
    decoded = []
    import opensora.datasets.video.pyav_clip as module

    decode = module.decoded
    monkeypatch.setattr(module, "decoded", lambda *args: (decoded.append(0) or frame for frame in decode(*args)))
    read_frames(path, 37, 3)
    assert len(decoded) <= 6  # keyframe 36 to frame 39, not 42


@pytest.mark.parametrize(("degrees", "turns"), [(90, 1), (-90, 3), (180, 2)])
def test_rotation_is_applied(write_video, tmp_path, degrees, turns):
    corner = np.zeros((48, 64, 3), np.uint8)
    corner[:16, :16] = 255  # top left
    source, path = write_video("upright.mp4", [corner] * 3), tmp_path / "turned.mp4"
    with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
        stream = writer.add_stream_from_template(reader.streams.video[0])
        stream.set_display_rotation(degrees)
        for packet in reader.demux(reader.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                writer.mux(packet)
    frame = read_frames(path, 1, 1)[0].numpy()
    expected = np.rot90(corner, turns)  # counter-clockwise, as OpenCV shows such files
    assert frame.shape == expected.shape
    assert (probe(path).height, probe(path).width) == expected.shape[:2]
    assert np.abs(frame.astype(int) - expected).mean() < 4


@pytest.mark.parametrize(("height", "width"), [(47, 33), (1, 1), (143, 251)])
def test_odd_sizes(write_video, height, width):
    path = write_video("odd.mkv", numbered_frames(3, height, width), codec="ffv1", pix_fmt="yuv444p")
    assert read_frames(path, 0, 3).shape == (3, height, width, 3)
    assert (probe(path).height, probe(path).width) == (height, width)


COLOURS = [(200, 30, 30), (30, 180, 40), (20, 40, 210), (255, 255, 255), (0, 0, 0), (128, 128, 128), (230, 200, 20)]


@pytest.mark.parametrize(
    ("size", "matrix", "tags"),
    [
        ((64, 96), 6, {"colorspace": 6, "color_range": 1}),
        ((64, 96), 1, {"colorspace": 1, "color_range": 1}),
        ((64, 96), 6, {}),  # untagged and small: BT.601
        ((720, 96), 1, {}),  # untagged and HD: BT.709
        ((64, 96), 1, {"colorspace": 1, "color_range": 2}),
        ((64, 96), 9, {"colorspace": 9, "color_range": 1}),
    ],
)
def test_colours(write_video, size, matrix, tags):
    frames = [np.broadcast_to(np.array(colour, np.uint8), (*size, 3)).copy() for colour in COLOURS]
    path = write_video("colour.mp4", frames, matrix=matrix, options={"crf": "5", "preset": "ultrafast"}, **tags)
    read = read_frames(path, 0, len(COLOURS)).numpy().astype(int)
    for frame, colour in zip(read, COLOURS, strict=True):
        assert np.abs(frame - np.array(colour)).max() <= 4, colour


def test_ten_bits(write_video):
    path = write_video("ten.mp4", numbered_frames(4), pix_fmt="yuv420p10le")
    assert frame_numbers(read_frames(path, 0, 4)) == [0, 1, 2, 3]


def test_asking_beyond_the_end(write_video):
    path = write_video("a.mp4", numbered_frames(5))
    with pytest.raises(TooFewFrames, match=r"a.mp4 has 5 frames, but frames 1 to 7 were asked for") as caught:
        read_frames(path, 1, 4, 2)
    assert caught.value.available == 5
    assert pickle.loads(pickle.dumps(caught.value)).available == 5
    assert len(read_frames(path, 0, 3, 2)) == 3  # exactly fits: 0, 2, 4


def test_a_changed_file_is_indexed_anew(write_video):
    assert probe(write_video("a.mp4", numbered_frames(5))).num_frames == 5
    assert probe(write_video("a.mp4", numbered_frames(7))).num_frames == 7


def test_unreadable_files(write_video, tmp_path):
    video = write_video("good.mp4", numbered_frames(40)).read_bytes()
    for name, content, message in [
        ("empty.mp4", b"", "empty.mp4 is empty"),
        ("noise.mp4", b"this is no video" * 99, "noise.mp4 cannot be opened as a video"),
        ("cut.mp4", video[: len(video) // 2], "cut.mp4 cannot be opened as a video"),  # its index is at the end
        ("empty.png", b"", "empty.png is empty"),
        ("noise.png", b"this is no image", "noise.png cannot be read as an image"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_frames(tmp_path / name, 0, 1)
    with pytest.raises(UserError, match=r"gone.mp4 cannot be read: No such file"):
        probe(tmp_path / "gone.mp4")


def test_truncated_video_whose_index_is_whole(tmp_path):
    content = CLIP_PATHS[0].read_bytes()  # its index is at the beginning
    path = tmp_path / "cut.mp4"
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(UserError, match=r"cut.mp4 is truncated"):
        read_frames(path, 0, 1)


def test_sound_without_images(tmp_path):
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(UserError, match=r"sound.mp4 has no video stream"):
        probe(path)


# ---------------------------------------------------------------------------------------------------- images


def test_extensions():
    assert is_image("A.JPG")
    assert is_image(Path("a.webp"))
    assert not is_image("a.mp4")


def test_image_is_one_frame(write_image):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    path = write_image("a.png", pixels)
    assert np.array_equal(read_frames(path, 0, 1)[0], pixels)
    assert probe(path) == (1, 5, 7, 120.0)
    with pytest.raises(TooFewFrames, match="is an image"):
        read_frames(path, 0, 2)


def test_exif_orientation(write_image):
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:, :24] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to display
    path = write_image("turned.jpg", pixels, exif=exif, quality=95)
    frame = read_frames(path, 0, 1)[0].numpy()
    assert frame.shape == (48, 32, 3)
    assert frame[:20].mean() > 250
    assert frame[-20:].mean() < 5
    assert probe(path)[1:3] == (48, 32)


@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.webp"])
def test_the_header_gives_the_size_that_the_pixels_have(write_image, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write_image(name, np.zeros((24, 40, 3), np.uint8), exif=exif)
    assert read_frames(path, 0, 1).shape[1:3] == ((40, 24) if orientation >= 5 else (24, 40))
    assert probe(path)[1:3] == read_frames(path, 0, 1).shape[1:3]


def test_the_size_of_a_png_with_exif_behind_its_pixels(write_image):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = write_image("late.png", np.zeros((24, 40, 3), np.uint8), exif=exif)
    content = path.read_bytes()
    at = content.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(content[at : at + 4], "big")
    last = content.index(b"IEND") - 4
    path.write_bytes(content[:at] + content[end:last] + content[at:end] + content[last:])
    assert probe(path)[1:3] == read_frames(path, 0, 1).shape[1:3] == (40, 24)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp"])
def test_probing_an_image_decodes_none_of_its_pixels(write_image, name):
    path = write_image(name, np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])  # the header is whole, the pixels are not
    assert probe(path) == (1, 64, 96, 120.0)
    with pytest.raises(UserError, match="cannot be read as an image"):
        read_frames(path, 0, 1)


def test_alpha_is_laid_on_white(write_image):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:2, :, 3] = 255  # black above, transparent below
    frame = read_frames(write_image("alpha.png", pixels), 0, 1)[0].numpy()
    assert (frame[:2] == 0).all()
    assert (frame[2:] == 255).all()


@pytest.mark.parametrize(("mode", "level"), [("L", 90), ("P", 90), ("CMYK", 90), ("I;16", 90), ("1", 255), ("LA", 90)])
def test_other_modes(tmp_path, mode, level):
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 4), level * 256 + 7, np.uint16))
    else:
        image = Image.new("RGB", (4, 4), (level,) * 3).convert(mode, palette=Image.Palette.ADAPTIVE)
    path = tmp_path / f"a.{'tif' if mode in ('CMYK', 'I;16') else 'png'}"
    image.save(path)
    frame = read_frames(path, 0, 1)[0].numpy()
    assert frame.shape == (4, 4, 3)
    assert np.abs(frame.astype(int) - level).max() <= 2


def test_truncated_image(write_image, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    content = write_image("a.jpg", pixels).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cut.jpg cannot be read as an image"):
        read_frames(tmp_path / "cut.jpg", 0, 1)
