"""Turned and mirrored videos: all eight ways up, as ffmpeg's autorotation shows them, however a frame is reached."""

import io

import av
import av.filter
import numpy as np
import pytest
from PIL import Image

from opensora.datasets.video.color import display_matrix
from opensora.datasets.video.read_video import Decoding, open_clip, probe, read_frames
from tests.datasets.video.videos import combs, decoded_in_order, with_matrix, write_interlaced
from tools.scene_cut.frames import Footage

# m0, m1, m3, m4 of the display matrix -> the filters that ffmpeg's autorotation puts in for it (fftools/ffmpeg_filter.c)
WAYS_UP = {
    (1, 0, 0, 1): "null",
    (-1, 0, 0, 1): "hflip",
    (1, 0, 0, -1): "vflip",
    (-1, 0, 0, -1): "hflip,vflip",
    (0, 1, -1, 0): "transpose=clock",
    (0, -1, 1, 0): "transpose=cclock",
    (0, 1, 1, 0): "transpose=cclock_flip",
    (0, -1, -1, 0): "transpose=clock_flip",
}
MIRRORED = [way for way in WAYS_UP if way[0] * way[3] - way[1] * way[2] < 0]
CLOSE = 3  # colours are rounded in two ways; another way up is ten times as far, and the next frame 5


def lopsided(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """No two of the eight ways up are alike, and no two frames."""
    frames = []
    for i in range(count):
        frame = np.full((height, width, 3), 7 * i, np.uint8)
        frame[: height // 3, : width // 2] = (250, 40, 40)
        frame[height // 2 :, : width // 4] = (40, 40, 250)
        frames.append(frame)
    return frames


def turned(frames: np.ndarray, filters: str) -> np.ndarray:
    """By FFmpeg: [N, H, W, 3] uint8."""
    graph = av.filter.Graph()
    nodes = [graph.add_buffer(width=frames.shape[2], height=frames.shape[1], format="rgb24", time_base=1)]
    nodes += [graph.add(*name.split("=")) for name in filters.split(",")]
    graph.link_nodes(*nodes, graph.add("buffersink")).configure()
    made = []
    for frame in frames:
        graph.push(av.VideoFrame.from_ndarray(frame, format="rgb24"))
        made.append(graph.pull().to_ndarray(format="rgb24"))
    return np.stack(made)


def apart(some: object, others: np.ndarray) -> float:
    return float(np.abs(np.asarray(some).astype(int) - others).mean())


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
@pytest.mark.parametrize(("way", "filters"), WAYS_UP.items())
def test_all_eight_ways_up(write_video, tmp_path, way, filters, kind):
    """Mirrored ones were turned by 180 degrees or not at all."""
    source = write_video("stored.mp4", lopsided(30), options={"g": "6", "bf": "2"})
    path = with_matrix(source, tmp_path / f"shown.{kind}", way)
    expected = turned(decoded_in_order(source), filters)
    assert (probe(path).height, probe(path).width) == expected.shape[1:3]
    assert apart(read_frames(path, 0, 30), expected) < CLOSE
    for start in (1, 13, 18, 25):
        assert apart(read_frames(path, start, 3, 2), expected[start::2][:3]) < CLOSE
    with open_clip(path, Decoding(colors="fast")) as clip:
        assert clip.size() == expected.shape[1:3]
        for index in (20, 3):
            assert apart(clip.read([index])[0], expected[index]) < CLOSE
        assert apart(clip._read_by_counting([5, 21], deinterlace=False), expected[[5, 21]]) < CLOSE
    footage = Footage(path)
    for timed in footage.frames():
        assert footage.size(timed.frame) == expected.shape[1:3]
        assert apart(footage.rgb(timed.frame), expected[timed.index]) < CLOSE


@pytest.mark.parametrize("way", [*MIRRORED, (0, 1, -1, 0)])
def test_interlaced_ones_are_turned_as_well(tmp_path, way):
    source = write_interlaced(tmp_path / "stored.mov")
    expected = turned(read_frames(source, 0, 20).numpy(), WAYS_UP[way])
    path = with_matrix(source, tmp_path / "shown.mov", way)
    assert apart(read_frames(path, 0, 20), expected) == 0
    assert apart(read_frames(path, 7, 4), expected[7:11]) == 0
    assert combs(read_frames(source, 0, 20)) > 0  # of the bar's ends; deinterlaced they are the same in both


def test_pixels_that_are_not_square_are_stretched_before(write_video, tmp_path):
    source = write_video("wide.mp4", lopsided(3), sample_aspect_ratio=2)
    path = with_matrix(source, tmp_path / "shown.mp4", (0, 1, 1, 0))
    assert (probe(path).height, probe(path).width) == (128, 48)
    assert apart(read_frames(path, 0, 3), read_frames(source, 0, 3).numpy().transpose(0, 2, 1, 3)) == 0


def test_what_comes_with_a_frame_may_be_unknown_to_pyav():
    """Before PyAV 19, which knows EXIF, it then lists nothing of it, also no matrix; the rotation is known all the same."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112], exif[0x010F] = 6, "camera"
    Image.fromarray(lopsided(1)[0]).save(file, "JPEG", exif=exif)
    file.seek(0)
    with av.open(file, format="jpeg_pipe") as container:
        frame = next(container.decode(video=0))
    assert display_matrix(frame) == (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
