"""Finding cuts, and cutting: distinct frames prove which of them a clip holds."""

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from opensora.datasets.video.files import BadFile
from opensora.datasets.video.read_video import probe, read_frames
from opensora.utils.errors import UserError
from tests.real_clips import real_clip
from tools.scene_cut.cutting import cut_video
from tools.scene_cut.detectors import find_cuts, peaks, resolve, scenes_of
from tools.scene_cut.frames import Footage
from tools.scene_cut.rules import Rules, choose_spans, from_timestamp, to_timestamp

CLIPS = Path(__file__).parents[3] / "assets" / "clips"


def write(path: Path, frames: list[np.ndarray], fps: int = 25, **options: str) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"qp": "8", **options})
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def grey(levels: list[int]) -> list[np.ndarray]:
    return [np.full((64, 96, 3), level, np.uint8) for level in levels]


def scenery(seed: int, count: int) -> list[np.ndarray]:
    """An image that glides by 2 pixels a frame."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(30, 255, (2, 8, 3)).astype(np.uint8)
    wide = np.kron(coarse, np.ones((32, 32, 1), np.uint8))
    return [np.ascontiguousarray(wide[:, 2 * i : 2 * i + 96]) for i in range(count)]


@pytest.fixture(scope="module")
def three_scenes(tmp_path_factory) -> Path:
    """Cuts at 30 and 70; a keyframe at every 15th frame."""
    frames = scenery(1, 30) + scenery(2, 40) + scenery(3, 30)
    return write(tmp_path_factory.mktemp("v") / "three.mp4", frames, g="15", sc_threshold="0")


def levels_of(path: Path | str) -> list[int]:
    frames = read_frames(path, 0, probe(path).num_frames).float()
    return [round(float(frame.mean())) for frame in frames]


def test_cuts_are_found_and_motion_is_none(three_scenes):
    assert find_cuts(Footage(three_scenes), "content") == [30, 70]


@pytest.mark.parametrize("name", ["white_dog.mp4", "city_teal.mp4", "pink_clouds.mp4", "meadow_run.mp4"])
def test_clips_of_one_scene_have_no_cut(name):
    assert find_cuts(Footage(CLIPS / name), "content") == []


def test_joined_clips_are_cut_where_they_were_joined(tmp_path):
    parts = [
        read_frames(CLIPS / f"{n}.mp4", 0, 24).numpy()[:, :176, :176]
        for n in ("white_dog", "city_teal", "cup_portrait")
    ]
    path = write(tmp_path / "joined.mp4", [np.ascontiguousarray(frame) for part in parts for frame in part])
    assert find_cuts(Footage(path), "content") == [24, 48]


def test_black_between_scenes_is_a_scene(tmp_path):
    glide = scenery(4, 40)
    fade = [np.rint(f * share).astype(np.uint8) for f, share in zip(glide[20:], np.linspace(1, 0, 20), strict=True)]
    path = write(tmp_path / "fade.mp4", glide[:20] + fade + grey([0] * 10) + scenery(5, 25))
    cuts = find_cuts(Footage(path), "content")
    assert cuts[-1] == 50
    assert len(cuts) == 2
    assert 34 < cuts[0] <= 41


KNOWN = {
    "bikes.mp4": [30, 76, 137, 187, 242],
    "shot_change.mp4": [96],
    "bigbuckbunny.mp4": [],
    "small.mp4": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_known_cuts_of_real_videos(name):
    footage = Footage(real_clip(name))
    for detector in ("content", "adaptive"):
        assert find_cuts(footage, detector) == pytest.approx(KNOWN[name], abs=1), detector
    assert resolve("auto") == "adaptive"


def test_a_peak_stands_out_from_what_is_around():
    change = np.array([0, 2, 2, 40, 2, 2, 30, 30, 30, 30.0])
    assert peaks(change, 3.0) == [3]


def test_unknown_and_absent_detectors_are_named():
    with pytest.raises(UserError, match="Did you mean 'content'"):
        resolve("contents")


def test_encoding_is_exact_to_the_frame(tmp_path):
    source = write(tmp_path / "a.mp4", grey([8 + 4 * i for i in range(50)]))
    clips, dropped = cut_video(
        Footage(source), [(0, 17), (17, 20), (20, 50)], Rules(min_seconds=0.5), tmp_path / "c", "a"
    )
    assert [(c.start_frame, c.end_frame, c.scene) for c in clips] == [(0, 17, 0), (20, 50, 2)]
    assert [(d.scene, d.reason) for d in dropped] == [(1, "scene shorter than 0.5 s")]
    for clip in clips:
        wanted = [8 + 4 * i for i in range(clip.start_frame, clip.end_frame)]
        assert levels_of(clip.path) == pytest.approx(wanted, abs=2)
        assert clip.end - clip.start == pytest.approx(clip.num_frames / 25)
        assert probe(clip.path) == (clip.num_frames, 64, 96, 25.0)


def test_colors_survive(tmp_path):
    source = CLIPS / "city_teal.mp4"
    footage = Footage(source)
    clips, _ = cut_video(footage, [(5, 40)], Rules(min_seconds=0.5, crf=8), tmp_path, "c")
    before, after = read_frames(source, 5, 35).float(), read_frames(clips[0].path, 0, 35).float()
    assert float((before - after).abs().mean()) < 3
    assert (before.mean((0, 1, 2)) - after.mean((0, 1, 2))).abs().max() < 1


def test_a_lower_rate_takes_the_frame_that_is_shown(tmp_path):
    source = write(tmp_path / "a.mp4", grey([8 + 4 * i for i in range(50)]))
    clips, _ = cut_video(
        Footage(source), [(0, 50)], Rules(min_seconds=0.5, target_fps=10, shorter_side=32), tmp_path / "c", "a"
    )
    assert (clips[0].num_frames, clips[0].height, clips[0].width, clips[0].fps) == (20, 32, 48, 10.0)
    # k / 10 s is frame floor(2.5 k)
    assert levels_of(clips[0].path) == pytest.approx([8 + 4 * (5 * k // 2) for k in range(20)], abs=2)


def test_a_higher_rate_or_size_changes_nothing(tmp_path):
    source = write(tmp_path / "a.mp4", grey([8 + 4 * i for i in range(50)]))
    clips, _ = cut_video(
        Footage(source), [(0, 50)], Rules(min_seconds=0.5, target_fps=60, shorter_side=500), tmp_path / "c", "a"
    )
    assert clips[0][6:10] == (50, 64, 96, 25.0)


def test_copies_begin_with_a_keyframe_and_report_what_they_lack(three_scenes, tmp_path):
    footage = Footage(three_scenes)
    clips, dropped = cut_video(
        footage, [(0, 30), (30, 70), (70, 100)], Rules(min_seconds=0.5, how="copy"), tmp_path, "t"
    )
    assert [(c.start_frame, c.end_frame) for c in clips][0::2] == [(0, 30), (75, 100)]
    assert clips[1].start_frame == 30
    assert any(part.start == pytest.approx(70 / 25) and part.end == pytest.approx(75 / 25) for part in dropped)
    for clip in clips:
        original = read_frames(three_scenes, clip.start_frame, clip.num_frames)
        assert (original == read_frames(clip.path, 0, clip.num_frames)).all()
    covered = sum(c.end - c.start for c in clips) + sum(d.end - d.start for d in dropped)
    assert covered == pytest.approx(4.0)


def test_auto_copies_where_it_loses_nothing(three_scenes, tmp_path):
    clips, _dropped = cut_video(
        Footage(three_scenes), [(0, 30), (30, 70), (70, 100)], Rules(min_seconds=0.5, how="auto"), tmp_path, "t"
    )
    assert [c.cut_by for c in clips] == ["copy", "copy", "encode"]
    assert (clips[2].start_frame, clips[2].end_frame) == (70, 100)


@pytest.mark.parametrize(
    ("longer", "spans", "rest"), [("split", [(0, 34), (34, 67), (67, 100)], []), ("truncate", [(0, 37)], [1.48])]
)
def test_long_scenes(longer, spans, rest):
    times = np.arange(101) / 25
    found, dropped = choose_spans([(0, 100)], times, Rules(min_seconds=1, max_seconds=1.5, longer=longer))
    assert [(span.start, span.end) for span in found] == spans
    assert [d.start for d in dropped] == pytest.approx(rest)
    assert all(times[b] - times[a] <= 1.5 for a, b in spans)


def test_timestamps_are_read_back_and_so_are_open_soras():
    times = np.arange(101) / 30
    assert from_timestamp(to_timestamp([(0, 31), (31, 100)], times), times) == [(0, 31), (31, 100)]
    theirs = "[('00:00:00.000', '00:00:01.033'), ('00:00:01.033', '00:00:03.333')]"
    assert from_timestamp(theirs, times) == [(0, 31), (31, 100)]
    with pytest.raises(UserError, match="no list"):
        from_timestamp("__import__('os')", times)
    assert json.loads(to_timestamp(scenes_of([31], 100), times))[0] == [0.0, 1.033333]


def test_rules_report_all_that_is_wrong():
    with pytest.raises(UserError, match=r"below min_seconds.*target_fps.*need how='encode'"):
        Rules(min_seconds=3, max_seconds=2, how="copy", target_fps=8)


def test_a_damaged_video_leaves_nothing_behind(tmp_path):
    whole = write(tmp_path / "a.mkv", scenery(1, 30) + scenery(2, 30))
    cut_off = tmp_path / "b.mkv"
    data = bytearray(whole.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 3000] = np.random.default_rng(0).bytes(3000)
    cut_off.write_bytes(data)
    try:
        clips, _ = cut_video(Footage(cut_off), [(0, 30), (30, 60)], Rules(min_seconds=0.5), tmp_path / "c", "b")
    except BadFile:
        assert not list(tmp_path.glob("c/*"))
    else:  # what FFmpeg takes for sound
        assert sum(c.num_frames for c in clips) == 60
