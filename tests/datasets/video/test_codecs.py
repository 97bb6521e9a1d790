"""What FFmpeg can write is read exactly, from its start and in windows, or refused: each encoder in each container."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from opensora.datasets.video.files import VIDEO_EXTENSIONS, BadFile
from opensora.datasets.video.read_video import probe, read_frames

COUNT = 12
CUBE = np.array([[red, green, blue] for red in (0, 255) for green in (0, 255) for blue in (0, 255)], np.uint8)
FORMATS = {"mkv": "matroska", "mpg": "mpeg", "ts": "mpegts", "wmv": "asf"}  # else the extension's name
OTHERS = {".mpeg", ".m2ts"}  # names of containers that are there already
SIZES = {"dvvideo": (576, 720), "h261": (144, 176), "h263": (96, 128), "dnxhd": (128, 256)}
OPTIONS = {"dnxhd": {"profile": "dnxhr_hq"}, "libx265": {"x265-params": "log-level=none:pools=1:keyint=4"}}
OPTIONS |= {"libvpx": {"cpu-used": "8"}, "libvpx-vp9": {"cpu-used": "8"}, "libsvtav1": {"preset": "12", "g": "4"}}
NO_VIDEO = {"vnull", "wrapped_avframe", "libwebp", "libwebp_anim", "webp"}


def colours(codec: str, pix_fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """[N, H, W] of indexed colours, 4 x 4 blocks in each frame, and their RGB [N, H, W, 3]."""
    numbers = np.random.default_rng(0).integers(0, 8, (COUNT, 4, 4))
    if pix_fmt.startswith(("mono", "gray", "ya")):
        numbers = numbers // 4 * 7  # black and white
    height, width = SIZES.get(codec, (32, 32))
    numbers = np.kron(numbers, np.ones((1, height // 4, width // 4), np.uint8)).astype(np.uint8)
    return numbers, CUBE[numbers]


def write(path: Path, codec: str, pix_fmt: str) -> np.ndarray:
    """A file of `colours`, a keyframe every 4 frames where the encoder can -> their RGB. PyAV's errors where FFmpeg cannot."""
    numbers, rgb = colours(codec, pix_fmt)
    palette = np.zeros((256, 4), np.uint8)
    palette[:8] = np.concatenate([np.full((8, 1), 255), CUBE], axis=1)  # ARGB
    kind = path.suffix.removeprefix(".")
    with av.open(str(path), "w", format=FORMATS.get(kind, kind)) as container:
        stream = container.add_stream(
            codec, rate=25, options={"strict": "-2", "g": "4", "bf": "0", **OPTIONS.get(codec, {})}
        )
        stream.height, stream.width, stream.pix_fmt = *rgb.shape[1:3], pix_fmt
        stream.codec_context.thread_count, stream.codec_context.bit_rate = 1, 4_000_000
        for i in range(COUNT):
            if pix_fmt == "pal8":
                frame = av.VideoFrame.from_ndarray((numbers[i], palette), format="pal8")
            else:
                frame = av.VideoFrame.from_ndarray(rgb[i], format="rgb24").reformat(format=pix_fmt)
            frame.pts, frame.time_base = i, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return rgb


def means(frames: np.ndarray) -> np.ndarray:
    """[N, 4, 4, 3] float64, of the middle of each block, which neighbours do not bleed into."""
    height, width = frames.shape[1] // 4, frames.shape[2] // 4
    blocks = frames.reshape(COUNT, 4, height, 4, width, 3)
    return blocks[:, :, height // 4 : -(height // 4), :, width // 4 : -(width // 4)].mean((2, 4))


def differences(frames: np.ndarray, rgb: np.ndarray) -> np.ndarray:
    """[N, N] float64: how far frame i is from what was written as frame j, from 0 to 255."""
    return np.abs(means(frames)[:, None] - means(rgb)[None]).mean((2, 3, 4))


def plainly_decoded(path: Path) -> np.ndarray | None:
    """All frames as FFmpeg gives them from the file's start, on white; None where it fails or the count is another."""
    frames = []
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                rgba = frame.reformat(format="rgba").to_ndarray().astype(float)
                alpha = rgba[..., 3:] / 255
                frames.append(rgba[..., :3] * alpha + 255 * (1 - alpha))
    except (av.FFmpegError, av.error.ArgumentError, IndexError):
        return None
    return np.stack(frames) if len(frames) == COUNT else None


def assert_read_or_refused(path: Path, rgb: np.ndarray) -> bool:
    """Where FFmpeg decodes what was written, so do we, also in windows; else the file is bad, and only `BadFile` is raised -> whether
    it was read."""
    plain = plainly_decoded(path)
    is_right = (
        plain is not None
        and plain.shape == rgb.shape
        and differences(plain, rgb).argmin(1).tolist() == list(range(COUNT))
    )
    try:
        whole = read_frames(path, 0, COUNT).numpy()
    except BadFile:
        assert not is_right
        return False
    if not is_right:
        return False
    assert probe(path).num_frames == COUNT
    if whole.shape == rgb.shape:  # pixels need not be square
        found = differences(whole, rgb)
        assert found.argmin(1).tolist() == list(range(COUNT))
        assert found.diagonal().max() <= differences(plain, rgb).diagonal().max() + 6
        if np.array_equal(plain, rgb):  # nothing is lost; with 15 bits a pixel, swscale makes 248 of white
            assert np.abs(whole.astype(int) - rgb).max() <= 7
    for start, length in ((5, 3), (1, 2), (9, 3), (11, 1)):
        assert np.array_equal(read_frames(path, start, length).numpy(), whole[start : start + length]), start
    return True


@pytest.mark.parametrize(("codec", "pix_fmt", "kind"), [
    ("rawvideo", "pal8", "avi"), ("rawvideo", "pal8", "mov"), ("rawvideo", "monow", "avi"), ("rawvideo", "monob", "mov"),
    ("rawvideo", "gray", "mov"), ("rawvideo", "bgr24", "avi"), ("rawvideo", "yuv420p", "mkv"), ("msrle", "pal8", "avi"),
    ("qtrle", "gray", "mov"), ("png", "pal8", "mov"), ("zmbv", "pal8", "avi"), ("apng", "gray", "apng"), ("apng", "rgba", "apng"),
    ("gif", "pal8", "gif"), ("dirac", "yuv420p", "mp4"), ("dirac", "yuv420p", "ts"), ("rpza", "rgb555le", "mov"), ("flv", "yuv420p", "flv"),
    ("wmv2", "yuv420p", "wmv"), ("mpeg1video", "yuv420p", "mpg"), ("libx264rgb", "bgr24", "mp4"), ("ffv1", "bgr0", "mkv"),
    ("h263", "yuv420p", "3gp"), ("libvpx", "yuv420p", "webm"),
])  # fmt: skip
def test_windows_are_those_of_the_whole_file(tmp_path, codec, pix_fmt, kind):
    path = tmp_path / f"a.{kind}"
    assert assert_read_or_refused(path, write(path, codec, pix_fmt))


@pytest.mark.parametrize("pix_fmt", ["bgr8", "rgb4_byte"])
def test_indexed_colours_without_a_palette_are_refused(tmp_path, pix_fmt):
    """FFmpeg writes 8 bits a pixel into AVI and does not say what they mean."""
    path = tmp_path / "a.avi"
    write(path, "rawvideo", pix_fmt)
    with pytest.raises(BadFile, match=r"a\.avi has indexed colours but no palette"):
        read_frames(path, 0, 2)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [extension.removeprefix(".") for extension in VIDEO_EXTENSIONS if extension not in OTHERS]
)
def test_all_that_ffmpeg_writes(tmp_path, kind):
    num_read, problems = 0, []
    for codec in sorted(av.codecs_available):
        try:
            encoder = av.Codec(codec, "w")
        except ValueError:  # a decoder alone
            continue
        if encoder.type != "video" or codec in NO_VIDEO or encoder.hardware_configs:
            continue
        formats = [each.name for each in encoder.video_formats or []] or ["yuv420p", "rgb24"]
        numbered = [name for name in formats if name in ("pal8", "gray", "monow", "monob")]
        if codec == "rawvideo":
            numbered = [
                "pal8",
                "monow",
                "monob",
                "gray",
                "bgr8",
                "rgb8",
                "rgb4",
                "bgr24",
                "rgb565le",
                "gray16le",
                "uyvy422",
                "bgra",
            ]
        for pix_fmt in dict.fromkeys([formats[0], *numbered]):
            path = tmp_path / f"{codec}-{pix_fmt}.{kind}"
            try:
                rgb = write(path, codec, pix_fmt)
            except (av.FFmpegError, ValueError):
                continue
            try:
                num_read += assert_read_or_refused(path, rgb)
            except AssertionError as error:
                problems.append((path.name, error))
    assert not problems
    assert num_read
