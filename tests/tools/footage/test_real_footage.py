"""The whole way with real videos: known cuts, what moves and what does not, writing, copies, damage; then training on it."""

import itertools
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import av
import pytest

from opensora.datasets.video.read_video import read_frames
from tests.real_clips import find_clip, real_clip
from tools.datasets import doctor
from tools.footage.__main__ import run
from tools.footage.rows import read_rows

CLIPS = Path(__file__).parents[3] / "assets" / "clips"
CUTS = [0, 30, 76, 137, 187, 242]  # of bikes.mp4, by two detectors of others
ONE_ROW_A_ROW = ("probe", "unique", "detect", "score", "filter", "caption", "table")


pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # all wait for the footage to be cut


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """A folder of videos with two copies, two damaged files and a text planted among them."""
    folder = tmp_path_factory.mktemp("videos")
    for name in ("bikes.mp4", "bigbuckbunny.mp4"):
        shutil.copy(real_clip(name), folder / name)
    excerpt(real_clip("trailer_bbb.mp4"), folder / "trailer_bbb.mp4", 36, 52)
    if vtest := find_clip("vtest.avi")[0]:  # a package of Debian: not on every machine
        excerpt(vtest, folder / vtest.name, 0, 2)
    shutil.copy(CLIPS / "three_rodents.mp4", folder / "three_rodents.mp4")
    (folder / "deep").mkdir()
    shutil.copy(folder / "bikes.mp4", folder / "deep" / "same.mp4")
    smaller(folder / "bikes.mp4", folder / "smaller.mp4")
    data = (folder / "bigbuckbunny.mp4").read_bytes()
    (folder / "cut_off.mp4").write_bytes(data[: len(data) // 2])
    (folder / "damaged.mp4").write_bytes(data[: len(data) // 2] + bytes(100_000) + data[len(data) // 2 + 100_000 :])
    (folder / "notes.txt").write_text("Bikes, then a bunny.")
    return folder


def excerpt(source: Path, target: Path, start: float, end: float) -> None:
    """Some seconds of a video, not coded again: from the keyframe before them to the one after."""
    with av.open(str(source)) as whole, av.open(str(target), "w") as container:
        video = whole.streams.video[0]
        stream = container.add_stream_from_template(video)
        whole.seek(int(start / video.time_base), stream=video)
        begin = None
        for packet in whole.demux(video):
            if packet.dts is None or (packet.is_keyframe and packet.pts * packet.time_base >= end):
                break
            begin = packet.dts if begin is None else begin
            packet.pts, packet.dts = packet.pts - begin, packet.dts - begin
            packet.stream = stream
            container.mux(packet)


def smaller(source: Path, target: Path) -> None:
    """The first two scenes of bikes.mp4 in another size and quality: what no digest sees."""
    with av.open(str(target), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"crf": "28", "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt = 320, 136, "yuv420p"
        for frame in read_frames(source, 0, 76).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(320, 136)))
        container.mux(stream.encode())


@pytest.fixture(scope="module")
def work(videos, endpoint, tmp_path_factory) -> Path:
    """The folder that the chain leaves."""
    folder = tmp_path_factory.mktemp("work")
    recipe = folder / "recipe.yaml"
    scorers = "flow: {}, ocr: {}, duplicate: {}"
    recipe.write_text(f"""stages:
- {{type: find, folder: {videos}}}
- {{type: probe}}
- {{type: unique}}
- {{type: detect, detector: auto}}
- {{type: cut, min_seconds: 0.3, max_seconds: 100, how: copy}}
- {{type: score, scorers: {{{scorers}}}}}
- {{type: filter, fmin: 8, flowmin: 0.5, empty: [duplicate_of]}}
- {{type: caption, model: m, endpoint: {endpoint!r}, frames: 1, retries: 0}}
- {{type: table, output: train.csv}}
""")
    run(recipe, folder)
    return folder


def kept(work: Path, kind: str) -> list[dict]:
    return list(read_rows(next(p for p in work.glob(f"*-{kind}-????????.jsonl"))))


def dropped(work: Path, kind: str) -> list[dict]:
    return list(read_rows(next(work.glob(f"*-{kind}-*.dropped.jsonl"))))


def of(rows: list[dict], name: str) -> list[dict]:
    return [row for row in rows if Path(row.get("source") or row["path"]).name == name]


@pytest.mark.nightly
def test_known_cuts_are_found(work):
    starts = [row["start_frame"] for row in of(kept(work, "cut") + dropped(work, "cut"), "bikes.mp4")]
    assert sorted(starts) == pytest.approx(CUTS, abs=1)
    assert len(of(kept(work, "cut"), "trailer_bbb.mp4")) >= 4


@pytest.mark.nightly
def test_planted_copies_and_damage_are_reported(work):
    assert [row["reason"] for row in dropped(work, "find")] == ["1 .txt files"]
    assert {Path(row["path"]).name for row in dropped(work, "unique")} == {"same.mp4"}
    damaged = {Path(row["path"]).name: row["reason"] for row in dropped(work, "probe") + dropped(work, "detect")}
    assert set(damaged) == {"cut_off.mp4", "damaged.mp4"}
    assert all(len(reason) > 20 for reason in damaged.values())
    repeats = of(dropped(work, "filter"), "smaller.mp4")
    assert [row["reason"] for row in repeats] == ["duplicate_of is not empty"] * 2
    assert all("bikes" in row["duplicate_of"] for row in repeats)


@pytest.mark.nightly
def test_moving_and_still_clips_are_told_apart(work):
    assert [row["reason"] for row in of(dropped(work, "filter"), "three_rodents.mp4")] == ["flow < 0.5"]
    flows = {
        name: [row["flow"] for row in of(kept(work, "score"), name)] for name in ("bikes.mp4", "three_rodents.mp4")
    }
    assert min(flows["bikes.mp4"]) > 10 * max(flows["three_rodents.mp4"])
    assert len(of(kept(work, "filter"), "bikes.mp4")) == len(CUTS)


def test_writing_is_found(work):
    scored = kept(work, "score")
    assert max(row["ocr"] for row in of(scored, "trailer_bbb.mp4")) >= 1
    assert {row["ocr"] for row in of(scored, "bigbuckbunny.mp4")} == {0}


def test_nothing_is_lost_silently(videos, work):
    before = kept(work, "find")
    assert {row["path"] for row in before} == {
        str(path) for path in videos.rglob("*.*") if path.suffix in (".mp4", ".avi")
    }
    for kind in ("probe", "unique", "detect", "cut", "score", "filter", "caption", "table"):
        good, bad = kept(work, kind), dropped(work, kind)
        assert all(row["reason"] for row in bad), kind
        if kind in ONE_ROW_A_ROW:
            paths = Counter(row["path"] for row in before)
            assert Counter(row["path"] for row in good + bad) == paths, kind
        else:
            for video in before:  # to the frame: each second of each video is in a clip or in a row with a reason
                parts = sorted((p["start"], p["end"]) for p in good + bad if p["source"] == video["path"])
                assert parts[0][0] == 0
                assert all(end == pytest.approx(start, abs=1e-6) for (_, end), (start, _) in itertools.pairwise(parts))
                assert parts[-1][1] == pytest.approx(video["num_frames"] / video["fps"], rel=0.01)
        before = good


def test_the_report_shows_all_of_it(work):
    report = (work / "report.html").read_text()
    for words in ("duplicate_of is not empty", "same digest as an earlier row", "1 .txt files", "flow &lt; 0.5"):
        assert words in report
    assert report.count("data:image/jpeg") > 30


def test_the_table_trains_and_the_doctor_is_content(work, toy_training, train_script, tmp_path, monkeypatch, capsys):
    config = toy_training(work / "train.csv")
    monkeypatch.setattr(sys, "argv", ["doctor", str(config)])
    with pytest.raises(SystemExit) as exit_:
        doctor.main()
    assert exit_.value.code == 0, capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["train.py", str(config), f"--outputs={tmp_path}", "--exp-name=run"])
    train_script.main()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(0 < line["loss"] < 3 for line in lines)
