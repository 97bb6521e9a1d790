from fractions import Fraction

import av
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from opensora.inference.output import PALETTE_FRAMES, check_rate, exact_fps, sample_file_name, save_sample, to_uint8
from opensora.utils.errors import UserError


def colour_bars(frames: int, height: int, width: int) -> torch.Tensor:
    """The eight corners of the RGB cube as vertical bars, moving by 16 pixels a frame: [3, T, H, W] in [-1, 1]."""
    corners = torch.tensor([[r, g, b] for r in (-1.0, 1.0) for g in (-1.0, 1.0) for b in (-1.0, 1.0)]) * 0.9
    bars = corners[torch.arange(width) * 8 // width].T  # [3, W]
    return torch.stack([bars.roll(16 * i, dims=1)[:, None].expand(3, height, width) for i in range(frames)], dim=1)


def decode(path) -> tuple[np.ndarray, Fraction, str]:
    """Frames [T, H, W, 3], converted as their tags say, by a decoder that shares nothing with the writer; frame rate; codec."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.colorspace == 1
        assert stream.codec_context.color_primaries == stream.codec_context.color_trc == 1
        assert stream.codec_context.color_range == 1
        assert stream.codec_context.pix_fmt == "yuv420p"
        frames = [
            frame.reformat(format="rgb24", src_colorspace=int(frame.colorspace)).to_ndarray()
            for frame in container.decode(stream)
        ]
        return np.stack(frames), stream.average_rate, stream.codec_context.name


def presentation_times(path) -> list[Fraction]:
    with av.open(path) as container:
        return [frame.pts * frame.time_base for frame in container.decode(video=0)]


@pytest.mark.parametrize(("height", "width"), [(64, 128), (720, 1280)])
def test_colours_survive_below_and_above_hd(tmp_path, height, width):
    video = colour_bars(3, height, width)
    frames, _, codec = decode(save_sample(video, tmp_path / "bars", fps=8))
    assert frames.shape == (3, height, width, 3)
    error = np.abs(frames.astype(int) - to_uint8(video).astype(int))
    assert error.mean() < 4  # of 255; measured: 1.0. BT.601 in place of BT.709 gives 8.0, full for limited range 14.5
    assert codec == "h264"


@pytest.mark.parametrize(
    ("fps", "rate"),
    [(8, Fraction(8)), (23.976, Fraction(24000, 1001)), (24, Fraction(24)), (29.97, Fraction(30000, 1001))],
)
def test_frame_rate_and_count_are_read_back(tmp_path, fps, rate):
    path = save_sample(torch.rand(3, 9, 16, 16) * 2 - 1, tmp_path / "v1.0", fps=fps)
    assert path.name == "v1.0.mp4"
    frames, read_rate, _ = decode(path)
    assert len(frames) == 9
    assert read_rate == rate
    assert presentation_times(path) == [i / rate for i in range(9)]


@pytest.mark.parametrize(("fps", "rate"), [(8, 8), (23.976, 24000 / 1001), (24, 24), (29.97, 30000 / 1001)])
def test_duration_is_read_back(tmp_path, fps, rate):
    video = torch.rand(3, 30, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with av.open(save_sample(video, tmp_path / "x", fps=fps)) as container:
        assert container.duration / av.time_base == pytest.approx(30 / rate, abs=1e-3)
        stream = container.streams.video[0]
        # where x264 reorders frames, as in this noise, the file says its length in whole milliseconds
        assert float(stream.duration * stream.time_base) == pytest.approx(30 / rate, abs=5e-4)
        assert stream.frames == 30


@pytest.mark.parametrize("fps", [8, 23.976])
def test_webm_keeps_colours_and_time(tmp_path, fps):
    video = colour_bars(12, 64, 128)
    path = save_sample(video, tmp_path / "bars", fps=fps, save_format="webm")
    assert path.name == "bars.webm"
    frames, _, codec = decode(path)
    assert codec in ("vp9", "libvpx-vp9")
    assert np.abs(frames.astype(int) - to_uint8(video).astype(int)).mean() < 4
    times = np.array(presentation_times(path))
    assert np.abs(times - np.arange(12) / fps).max() < 1.1e-3  # WebM counts milliseconds


def test_gif_keeps_size_colours_and_time(tmp_path):
    video = colour_bars(13, 33, 47)
    path = save_sample(video, tmp_path / "bars", fps=23.976, save_format="gif")
    assert path.name == "bars.gif"
    with Image.open(path) as gif:
        frames, seconds = [], 0.0
        for i in range(gif.n_frames):
            gif.seek(i)
            frames.append(np.asarray(gif.convert("RGB")))
            seconds += gif.info["duration"] / 1000
        assert gif.info["loop"] == 0  # for ever
    assert seconds == pytest.approx(13 * 1001 / 24000, abs=0.006)
    assert np.abs(np.stack(frames).astype(int) - to_uint8(video).astype(int)).mean() < 4


def test_equal_frames_of_a_gif_are_one_that_stays(tmp_path):
    video = torch.zeros(3, 2 * PALETTE_FRAMES, 16, 16)
    with Image.open(save_sample(video, tmp_path / "still", fps=8, save_format="gif")) as gif:
        assert gif.info["duration"] * gif.n_frames == 2000


def test_settings_that_a_format_cannot_hold(tmp_path):
    video = torch.zeros(3, 2, 16, 16)
    with pytest.raises(UserError, match="no more than 50"):
        save_sample(video, tmp_path / "x", fps=60, save_format="gif")
    with pytest.raises(UserError, match="mp4, webm or gif"):
        save_sample(video, tmp_path / "x", fps=8, save_format="avi")
    with pytest.raises(UserError, match=r"0 \(best\) to 51"):
        save_sample(video, tmp_path / "x", fps=8, crf="60")
    with pytest.raises(ValueError, match="no effect"):
        save_sample(video, tmp_path / "x", fps=8, save_format="gif", crf="20")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("save_format", ["mp4", "webm", "gif"])
def test_the_same_frames_make_the_same_file(tmp_path, save_format):
    rng = torch.Generator().manual_seed(0)
    rough = F.interpolate(torch.randn(6, 3, 4, 12, 20, generator=rng) * 0.5, (4, 96, 160), mode="trilinear")
    for video in rough + 0.05 * torch.randn(rough.shape, generator=rng):
        files = {save_sample(video, tmp_path / "x", fps=8, save_format=save_format).read_bytes() for _ in range(4)}
        assert len(files) == 1


def test_exact_fps():
    assert exact_fps(59.94) == Fraction(60000, 1001)
    assert exact_fps(23.98) == Fraction(24000, 1001)
    assert exact_fps(23.976 / 3) == Fraction(8000, 1001)
    assert exact_fps(8 / 3) == Fraction(8, 3)
    assert exact_fps(12.5) == Fraction(25, 2)
    assert exact_fps(1) == 1
    for fps in (0, -8):
        with pytest.raises(UserError, match="positive"):
            exact_fps(fps)


def test_one_frame_is_a_png_without_loss(tmp_path):
    video = colour_bars(1, 33, 47)
    path = save_sample(video, tmp_path / "still", fps=24)
    assert path.name == "still.png"
    assert np.array_equal(np.asarray(Image.open(path)), to_uint8(video)[0])


def test_odd_sizes_grow_by_a_repeated_edge(tmp_path):
    ramp = torch.linspace(-1, 1, 33 * 47).reshape(33, 47)
    video = torch.stack([ramp, -ramp, ramp.flip(0)])[:, None].expand(3, 2, 33, 47)
    frames, *_ = decode(save_sample(video, tmp_path / "odd", fps=8))
    assert frames.shape == (2, 34, 48, 3)
    expected = np.pad(to_uint8(video), ((0, 0), (0, 1), (0, 1), (0, 0)), mode="edge")
    assert np.abs(frames.astype(int) - expected.astype(int)).mean() < 4


def test_uint8_clamps_and_rounds():
    values = torch.tensor([-1.5, -1.0, 0.0, 1.0, 1.5, 10.4 / 127.5 - 1, 10.6 / 127.5 - 1]).expand(3, 1, 1, 7)
    assert to_uint8(values)[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255, 10, 11]
    assert to_uint8(values.to(torch.bfloat16)).dtype == np.uint8


@pytest.mark.parametrize(
    "video",
    [
        torch.zeros(3, 2, 8, 8, dtype=torch.uint8),
        torch.zeros(1, 3, 2, 8, 8),
        torch.zeros(2, 3, 8, 8),
        torch.zeros(3, 0, 8, 8),
        torch.full((3, 2, 8, 8), float("nan")),
    ],
)
def test_what_is_no_video_is_refused_and_leaves_nothing(tmp_path, video):
    with pytest.raises(ValueError, match="video"):
        save_sample(video, tmp_path / "x", fps=8)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_nothing_behind(tmp_path):
    (tmp_path / "x.png").mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError, match=r"x\.png"):
        save_sample(torch.zeros(3, 1, 8, 8), tmp_path / "x", fps=8)
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]


HOSTILE = [
    "x" * 300,
    "../../etc/passwd",
    'a/b\\c:d*e?f"g<h>i|j',
    "line one\nline two\r\0",
    "平静的湖 🌅",
    "Café Ünïcode",
    "; touch x $(reboot) `ls`",
    ".hidden",
    "-rf",
    "CON",
    "",
    "   ",
]


def test_names_from_hostile_prompts(tmp_path):
    names = [sample_file_name(prompt, i, prompt_as_path=True) for i, prompt in enumerate(HOSTILE)]
    assert len({name.lower() for name in names}) == len(HOSTILE)
    for name in names:
        assert name.isascii()
        assert all(c.isalnum() or c == "-" for c in name)
        assert name[0].isalnum()
        assert len(name) <= 80 + 9
        save_sample(torch.zeros(3, 1, 8, 8), tmp_path / name, fps=8)
    assert len(list(tmp_path.iterdir())) == len(HOSTILE)
    assert sample_file_name("Café Ünïcode", 0, prompt_as_path=True).startswith("cafe-unicode-")
    assert sample_file_name("a", 0, prompt_as_path=True) == sample_file_name("a", 0, prompt_as_path=True)
    assert sample_file_name("a", 0, prompt_as_path=True) != sample_file_name("a", 1, prompt_as_path=True)


def test_numbered_names():
    assert sample_file_name("p", 7) == "sample_0007"
    assert sample_file_name("p", 12345, 2, num_sample=3, sample_name="my run") == "my run_12345-2"
    for bad in ("a/b", "", ".x", "a\nb", "x" * 101, "湖" * 90):
        with pytest.raises(UserError, match="sample_name"):
            sample_file_name("p", 0, sample_name=bad)


def test_rates_that_a_format_cannot_hold_are_reported_before_there_is_a_video():
    for save_format, fps in (("mp4", 60), ("webm", 60), ("gif", 50), ("gif", 24)):
        check_rate(save_format, fps)
    with pytest.raises(UserError, match=r"save_format='gif' with 60 frames per second.*no more than 50.*--save-fps"):
        check_rate("gif", 60)
    with pytest.raises(UserError, match=r"at least 0\.001"):
        check_rate("mp4", 0.0001)
