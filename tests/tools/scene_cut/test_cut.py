"""Cutting whole tables: what is there stays, rows keep their clips apart, and no data ends a job."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.container import OutputContainer

from opensora.datasets.video.color import display_matrix
from opensora.datasets.video.read_video import probe, read_frames
from tools.footage.rows import read_rows
from tools.scene_cut import cut, cutting, scorers
from tools.scene_cut.cutting import cut_video
from tools.scene_cut.frames import Footage
from tools.scene_cut.rules import Rules
from tools.scene_cut.scorers import Cut

CLIPS = Path(__file__).parents[3] / "assets" / "clips"
DOG = CLIPS / "white_dog.mp4"  # 41 frames, 30 a second
VIDEO = CLIPS / "title_meadow.mp4"  # 54 frames, 24 a second, no two of them alike


@pytest.fixture
def folder(tmp_path) -> Path:
    for video in (DOG, VIDEO):
        shutil.copy(video, tmp_path / video.name)
    return tmp_path


def table(path: Path, *rows: tuple[str, object]) -> Path:
    """JSONL or, by the name, CSV of paths and timestamps."""
    cells = [
        {"path": name, "timestamp": spans if isinstance(spans, str) else json.dumps(spans)} for name, spans in rows
    ]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in cells))
    else:
        path.write_text("path,timestamp\n" + "".join(f'{r["path"]},"{r["timestamp"]}"\n' for r in cells))
    return path


def run(monkeypatch, source: Path, out: Path, *more: object) -> int:
    """The command; its exit code."""
    words = [source, "--out", out, "--save_dir", out.parent / "clips", "--min_seconds", 0.2, "--num-workers", 0, *more]
    monkeypatch.setattr(sys, "argv", ["cut", *map(str, words)])
    try:
        cut.main()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def shown(clip: Path | str, source: Path) -> list[int]:
    """Which frame of the source each frame of a clip is most like."""
    ours, theirs = (read_frames(path, 0, probe(path).num_frames)[:, ::4, ::4].float() for path in (clip, source))
    return [int((theirs - frame).abs().mean((1, 2, 3)).argmin()) for frame in ours]


def seconds(*frames: int) -> list[float]:
    return [frame / 24 for frame in frames]


# ---------------------------------------------------------------------------------------------------- what is there


@pytest.mark.parametrize("name", ["o.csv", "o_dropped.csv", "o_cut.jsonl"])
def test_what_exists_is_refused_before_anything_is_done(folder, monkeypatch, capsys, name):
    source = table(folder / "t.csv", (VIDEO.name, [seconds(0, 20)]))
    (folder / name).write_text("precious")
    assert run(monkeypatch, source, folder / "o.csv") == 2
    assert f"{name} exists; name another --out, or pass --overwrite" in capsys.readouterr().err
    assert (folder / name).read_text() == "precious"
    assert not (folder / "clips").exists()
    assert not list(folder.glob("*.parts"))


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("name", "out"), [("t.csv", "t.csv"), ("t_dropped.csv", "t.csv"), ("t_cut.jsonl", "t.csv"), ("t.csv", "link.csv")]
)
def test_the_table_is_never_replaced(folder, monkeypatch, capsys, name, out, more):
    source = table(folder / name, (VIDEO.name, [seconds(0, 20)]))
    before = source.read_bytes()
    (folder / "link.csv").symlink_to(source)
    assert run(monkeypatch, source, folder / out, *more) == 2
    assert "is the table itself" in capsys.readouterr().err
    assert source.read_bytes() == before
    assert not (folder / "clips").exists()


def test_an_unknown_format_is_refused_before_anything_is_done(folder, monkeypatch):
    assert run(monkeypatch, table(folder / "t.csv", (VIDEO.name, [seconds(0, 20)])), folder / "o.txt") == 2
    assert not (folder / "clips").exists()


def test_with_overwrite_both_tables_are_replaced(folder, monkeypatch):
    source = table(folder / "t.csv", (VIDEO.name, [seconds(0, 20)]), ("absent.mp4", [seconds(0, 20)]))
    for name in ("o.csv", "o_dropped.csv"):
        (folder / name).write_text("old")
    assert run(monkeypatch, source, folder / "o.csv", "--overwrite") == 0
    assert len(list(read_rows(folder / "o.csv"))) == 1
    assert ["absent.mp4" in row["reason"] for row in read_rows(folder / "o_dropped.csv")] == [True]
    assert run(monkeypatch, source, folder / "o.csv") == 2  # done; as every tool, it asks before it does it again


def test_a_killed_job_goes_on_without_overwrite_and_does_nothing_twice(folder, monkeypatch):
    source = table(folder / "t.csv", (VIDEO.name, [seconds(0, 18)]), (VIDEO.name, [seconds(18, 36)]))
    out = folder / "o.jsonl"
    assert run(monkeypatch, source, out, "--part-rows", 1) == 0
    rows, clips = list(read_rows(out)), sorted((folder / "clips").glob("*.mp4"))
    first, second = (Path(row["path"]) for row in rows)
    assert sorted((first, second)) == clips
    for path in (out, folder / "o_dropped.jsonl", second, folder / "o_cut.jsonl.parts" / "part-00000001.jsonl"):
        path.unlink()
    written = first.stat().st_mtime_ns
    assert run(monkeypatch, source, out, "--part-rows", 1) == 0
    assert (list(read_rows(out)), sorted((folder / "clips").glob("*.mp4"))) == (rows, clips)
    assert first.stat().st_mtime_ns == written


# ---------------------------------------------------------------------------------------------------- rows of a video


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_one_video_keep_their_clips_apart(folder, monkeypatch, workers):
    spans = [(0, 12), (12, 24), (24, 36)]
    source = table(folder / "t.csv", *[(VIDEO.name, [seconds(*span)]) for span in spans])
    assert run(monkeypatch, source, folder / "o.jsonl", "--num-workers", workers, "--part-rows", 1) == 0
    rows = list(read_rows(folder / "o.jsonl"))
    assert len({row["path"] for row in rows}) == len({row["id"] for row in rows}) == 3
    assert [shown(row["path"], VIDEO) for row in rows] == [list(range(*span)) for span in spans]
    assert len(list((folder / "clips").glob("*.mp4"))) == 3


def test_rows_of_one_video_keep_their_scenes_apart_in_a_batch(tmp_path):
    cells = [json.dumps([seconds(*span)]) for span in ((0, 12), (12, 36))]
    rows = Cut(str(tmp_path), Rules(min_seconds=0.2)).score([VIDEO, VIDEO], timestamp=cells)
    assert [(clip["start_frame"], clip["end_frame"]) for row in rows for clip in row["clips"]] == [(0, 12), (12, 36)]


def test_names_tell_apart_places_timestamps_and_rules():
    whole, half = Rules(), Rules(shorter_side=90)
    made = [("a/v.mp4", "[[0, 1]]", whole), ("b/v.mp4", "[[0, 1]]", whole), ("a/v.mp4", "[[1, 2]]", whole)]
    made.append(("a/v.mp4", "[[0, 1]]", half))
    names = [scorers.stem_of(Path(path), cell, rules) for path, cell, rules in made]
    assert len(set(names)) == 4
    assert names == [scorers.stem_of(Path(path).absolute(), cell, rules) for path, cell, rules in made]


def test_names_are_short_enough_whatever_the_video_is_called(folder, monkeypatch):
    names = [f"{'x' * 240}a.mp4", f"{'x' * 240}b.mp4", f"{'日' * 83}.mp4"]
    for name in names:
        shutil.copy(VIDEO, folder / name)
    source = table(folder / "t.csv", *[(name, [seconds(0, 20)]) for name in names])
    assert run(monkeypatch, source, folder / "o.jsonl") == 0
    rows = list(read_rows(folder / "o.jsonl"))
    assert len({row["path"] for row in rows}) == len(rows) == 3
    assert Path(rows[2]["path"]).name.startswith("日日")
    assert scorers.stem_of(Path("a.mp4"), "", Rules()).startswith("a-")


@pytest.mark.multiprocess
def test_rows_that_are_alike_are_not_cut_at_the_same_time(tmp_path, monkeypatch):
    log = tmp_path / "log"

    def slow(*args: object) -> tuple[list, list]:
        for word in ("in", "out"):
            with log.open("a") as file:
                file.write(f"{word} {os.getpid()}\n")
            time.sleep(0.3)
        return [], []

    monkeypatch.setattr(scorers, "cut_video", slow)
    cutter = Cut(str(tmp_path / "clips"))
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=cutter.score, args=([VIDEO],), kwargs={"timestamp": ["[[0, 1]]"]}) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [word for word, _ in lines] == ["in", "out", "in", "out"]
    assert lines[0][1] == lines[1][1] != lines[2][1]


# ---------------------------------------------------------------------------------------------------- any data


@pytest.mark.parametrize(
    "scenes",
    [
        [(24, 36), (0, 12), (12, 24)],  # in no order
        [(0, 20), (10, 30)],
        [(0, 36), (6, 12), (6, 30), (20, 36)],  # one in another
        [(i, i + 10) for i in range(2 * cutting.MOST_OPEN)],  # more at a time than may be open
    ],
)
@pytest.mark.parametrize("how", ["encode", "auto"])
def test_scenes_in_any_order_get_every_frame_they_should(tmp_path, scenes, how):
    clips, dropped = cut_video(Footage(VIDEO), scenes, Rules(min_seconds=0.1, how=how), tmp_path, "r")
    assert not dropped
    assert [(c.start_frame, c.end_frame) for c in clips] == sorted(scenes)
    assert len({clip.path for clip in clips}) == len(scenes)
    for clip in clips:
        assert (clip.start_frame, clip.end_frame) == scenes[clip.scene]
        assert shown(clip.path, VIDEO) == list(range(clip.start_frame, clip.end_frame))
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_video_of_overlapping_scenes_leaves_nothing_behind(tmp_path, monkeypatch):
    footage = Footage(VIDEO)
    frames = list(footage.frames())
    monkeypatch.setattr(Footage, "frames", lambda self: iter(frames[:25]))
    with pytest.raises(cutting.BadFile, match="only 25 of 54 frames"):
        cut_video(footage, [(0, 30), (5, 12), (20, 36)], Rules(min_seconds=0.2), tmp_path / "c", "r")
    assert not list((tmp_path / "c").glob("*"))


ODD = {
    "[[1.0, 0.2]]": "it ends before it begins",
    "[[7, 8]]": "no frame of the video lies in it",
    "[[NaN, 1]]": "no list of",
    f"[[0, {'9' * 400}]]": "no list of",
    "[[0, Infinity]]": "no list of",
    "": "no list of",
}


@pytest.mark.parametrize("cell", ODD)
def test_odd_timestamps_are_reported_and_end_no_job(folder, monkeypatch, cell):
    source = table(folder / "t.jsonl", (VIDEO.name, cell), (DOG.name, [[0.6, 1.2], [0, 0.9]]))
    assert run(monkeypatch, source, folder / "o.jsonl") == 0
    (lost,) = read_rows(folder / "o_dropped.jsonl")
    assert (lost["path"], ODD[cell] in lost["reason"]) == (VIDEO.name, True)
    assert [(row["start_frame"], row["end_frame"]) for row in read_rows(folder / "o.jsonl")] == [(0, 27), (18, 36)]


def test_whole_videos_and_parts_are_reported_in_one_csv(folder, monkeypatch):
    source = table(folder / "t.csv", ("absent.mp4", [[0, 1]]), (VIDEO.name, [[0, 1], [1, 1.1]]))
    monkeypatch.setattr("tools.footage.rows.BLOCK", 1)  # the columns are those of the first rows
    assert run(monkeypatch, source, folder / "o.csv") == 0
    assert [row["scene"] for row in read_rows(folder / "o_dropped.csv")] == ["", "1"]


def at_times(path: Path, frames: torch.Tensor, microseconds: list[int]) -> Path:
    with av.open(str(path), "w", options={"video_track_timescale": "1000000"}) as container:
        stream = container.add_stream("libx264", rate=25, options={"qp": "8", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1_000_000)
        for image, pts in zip(frames.numpy(), microseconds, strict=True):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = pts, Fraction(1, 1_000_000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_a_frame_that_is_shown_long_fills_all_moments_of_a_lower_rate(tmp_path):
    times = [40_000 * i + 500_000 * (i > 5) for i in range(20)]  # frame 5 is shown for 0.54 s
    video = at_times(tmp_path / "v.mp4", read_frames(VIDEO, 0, 20), times)
    clips, _ = cut_video(Footage(video), [(0, 20)], Rules(min_seconds=0.5, target_fps=10), tmp_path / "c", "v")
    wanted = [int(np.searchsorted(times, 100_000 * k, side="right")) - 1 for k in range(13)]
    assert wanted.count(5) == 6
    assert shown(clips[0].path, video) == wanted


def test_two_frames_within_a_tick_are_written(tmp_path):
    times = [40_000 * i + 13_000 * (i % 3) for i in range(20)]
    times[7] = times[6] + 1
    video = at_times(tmp_path / "v.mp4", read_frames(VIDEO, 0, 20), times)
    clips, _ = cut_video(Footage(video), [(0, 20)], Rules(min_seconds=0.5), tmp_path / "c", "v")
    assert shown(clips[0].path, video) == list(range(20))


def test_a_frame_that_is_hardly_shown_is_a_clip_where_it_may_be(tmp_path):
    times = [40_000 * i for i in range(12)]
    times[7] = times[6] + 1
    video = at_times(tmp_path / "v.mp4", read_frames(VIDEO, 0, 12), times)
    clips, _ = cut_video(Footage(video), [(6, 7)], Rules(min_seconds=0, target_fps=10), tmp_path / "c", "v")
    assert clips[0].num_frames == 1


# ---------------------------------------------------------------------------------------------------- rates


def at_rates(path: Path, *parts: tuple[int, Fraction], codec: str = "libx264") -> Path:
    """A video of parts with numbers of frames and rates of their own."""
    ticks = [0]
    for count, rate in parts:
        ticks += [round(90_000 / rate)] * count
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options={"g": "12", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 90_000)
        for i, pts in enumerate(np.cumsum(ticks)[:-1].tolist()):
            frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 8 + 2 * i % 240, np.uint8), format="rgb24")
            frame.pts, frame.time_base = pts, Fraction(1, 90_000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])  # whose times are rounded to milliseconds
def test_a_clip_has_the_rate_of_its_own_part_of_the_video(tmp_path, suffix):
    video = at_rates(tmp_path / f"v{suffix}", (120, Fraction(30)), (40, Fraction(10)), (40, Fraction(24)))
    scenes = [(0, 120), (120, 160), (160, 200)]
    clips, _ = cut_video(Footage(video), scenes, Rules(min_seconds=0.5), tmp_path / "c", "v")
    assert [clip.fps for clip in clips] == pytest.approx([30, 10, 24], rel=1e-3)
    for clip in clips:
        assert probe(clip.path).fps == pytest.approx(clip.fps, rel=1e-3)
        assert Footage(Path(clip.path)).times()[-2] == pytest.approx((clip.num_frames - 1) / clip.fps, abs=2e-3)


def test_a_part_is_brought_down_by_its_own_rate(tmp_path):
    video = at_rates(tmp_path / "v.mp4", (40, Fraction(10)), (30, Fraction(30)))
    rules = Rules(min_seconds=0.5, target_fps=15)
    slow, fast = cut_video(Footage(video), [(0, 40), (40, 70)], rules, tmp_path / "c", "v")[0]
    assert (slow.num_frames, slow.fps) == (40, 10)
    assert (fast.num_frames, fast.fps) == (pytest.approx(15, abs=1), 15)


@pytest.mark.parametrize("fps", [1 / 2400, 1 / 1500, 1 / 3, 0.4, 1.0, 24000 / 1001, 30.0])
def test_any_rate_is_written_as_what_it_is(fps):
    assert float(cutting.as_fraction(fps)) == pytest.approx(fps, rel=1e-6)


@pytest.mark.parametrize("rules", [Rules(), Rules(target_fps=1 / 4000)])
def test_a_frame_in_forty_minutes_is_cut(tmp_path, rules):
    video = tmp_path / "v.mkv"
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(1, 2400), options={"bf": "0"})
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        for i in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 8 + 20 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = 2400 * i, Fraction(1)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    rules = Rules(max_seconds=None, target_fps=rules.target_fps)
    (clip,), _ = cut_video(Footage(video), [(0, 10)], rules, tmp_path / "c", "v")
    assert clip.fps == pytest.approx(rules.target_fps or 1 / 2400)
    assert clip.num_frames == (10 if rules.target_fps is None else 6)


# ---------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("how", ["copy", "auto"])
def test_av1_is_copied_although_its_decoder_is_no_encoder(folder, monkeypatch, how):
    av1 = at_rates(folder / "av1.mp4", (60, Fraction(30)), codec="libsvtav1")
    source = table(folder / "t.csv", (av1.name, [[0, 2]]), (VIDEO.name, [seconds(0, 20)]))
    assert run(monkeypatch, source, folder / "o.jsonl", "--how", how) == 0
    clip, _ = read_rows(folder / "o.jsonl")
    assert (Path(clip["path"]).suffix, clip["num_frames"], clip["cut_by"]) == (".mp4", 60, "copy")
    assert (read_frames(clip["path"], 0, 60) == read_frames(av1, 0, 60)).all()


@pytest.mark.parametrize("error", [ValueError("no such codec in this format"), av.error.InvalidDataError(1, "bad")])
def test_what_cannot_be_copied_is_a_bad_file_and_ends_no_job(folder, monkeypatch, error):
    copied: list[str] = []
    mux = cutting._mux

    def refuse(output: OutputContainer, *args: Any) -> None:
        if output.name not in copied:
            copied.append(output.name)
        if len(copied) == 2:  # the second clip of the video
            raise error
        mux(output, *args)

    monkeypatch.setattr(cutting, "_mux", refuse)
    source = table(folder / "t.csv", (VIDEO.name, [seconds(0, 20), seconds(0, 30)]), (DOG.name, [[0, 1]]))
    assert run(monkeypatch, source, folder / "o.jsonl", "--how", "copy") == 0
    (clip,), (lost,) = (list(read_rows(folder / name)) for name in ("o.jsonl", "o_dropped.jsonl"))
    assert "a clip of it cannot be written" in lost["reason"]
    assert list((folder / "clips").glob("*.mp4")) == [Path(clip["path"])]


@pytest.mark.parametrize(("codec", "suffix"), [("libx264", ".mp4"), ("mjpeg", ".mkv")])
@pytest.mark.parametrize("flips", [(0, True, False), (0, False, True), (90, True, False), (180, False, False)])
def test_a_copy_is_turned_and_mirrored_as_the_video_is(tmp_path, codec, suffix, flips):
    video = tmp_path / "v.mov"
    with av.open(str(video), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p" if codec == "libx264" else "yuvj420p"
        stream.set_display_rotation(*flips)
        for image in read_frames(VIDEO, 0, 20)[:, :64, :96].numpy():
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            container.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    (clip,), _ = cut_video(Footage(video), [(0, 20)], Rules(min_seconds=0.2, how="copy"), tmp_path / "c", "v")
    matrix, copied = (display_matrix(next(Footage(Path(p)).frames()).frame) for p in (video, clip.path))
    assert matrix is not None
    assert copied == matrix
    assert Path(clip.path).suffix == suffix
    assert (read_frames(clip.path, 0, 20) == read_frames(video, 0, 20)).all()


def test_packets_behind_the_last_frame_that_is_shown_are_copied_without_a_time(tmp_path):
    """As with an edit list that ends early, or a hidden frame at the end."""
    footage = Footage(VIDEO)
    shown = footage.num_frames - 3
    footage.timeline = dataclasses.replace(footage.timeline, num_frames=shown, times=footage.timeline.times[:shown])
    footage.num_frames = shown
    (clip,), dropped = cut_video(footage, [(0, shown)], Rules(min_seconds=0.2, how="copy"), tmp_path, "v")
    assert (clip.start_frame, clip.end_frame, dropped) == (0, shown, [])
    assert clip.end == pytest.approx(float(footage.times()[-1]))
