"""Whole tables: parts, resuming, several processes, merging."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pytest

from opensora.datasets.table.files import read_frame
from opensora.utils.errors import UserError
from tools.scoring.__main__ import chosen_scorers
from tools.scoring.job import Job, compared, run
from tools.scoring.parts import Part, failed_in, lines_so_far, score_part
from tools.scoring.registry import scorer

ROOT = Path(__file__).parents[3]
CLIPS = ROOT / "assets" / "clips"
NAMES = [path.name for path in sorted(CLIPS.glob("*.mp4"))]


@dataclass(frozen=True)
class Length:
    """A scorer that notes which files it is asked for, and dies at one."""

    log: str = ""
    dies_at: str = ""
    fails_at: str = ""
    columns = ("length",)
    needs = ("text",)

    def score(self, paths, **needed):
        for path in paths:
            with Path(self.log).open("a") as file:
                file.write(f"{path.name}\n")
            if path.name == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if path.name == self.fails_at:
                raise UserError(f"no weights for {path.name}")
        return [{"length": len(text)} for text in needed["text"]]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "clips.csv"
    pd.DataFrame({"path": NAMES, "text": [f'é, "{n}"\n' for n in NAMES], "x": ["007"] * len(NAMES)}).to_csv(
        path, index=False
    )
    return path


def job(table, scorers, out="out.csv", **settings):
    return Job(table, table.with_name(out), scorers, CLIPS, **{"batch_size": 3, "part_rows": 4, **settings})


def names_in(log):
    return Path(log).read_text().split() if Path(log).exists() else []


def test_columns_are_added_and_everything_else_stays(table):
    out = read_frame(run(job(table, {"black": scorer("black"), "sharpness": scorer("sharpness")}), 0))
    before = read_frame(table)
    assert list(out.columns) == ["path", "text", "x", "status", "black", "sharpness"]
    assert out[["path", "text", "x"]].equals(before)
    assert set(out["status"]) == {"ok"}
    assert out["sharpness"].astype(float).min() > 0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_any_number_of_processes_gives_the_same_table(table, kind):
    scorers = {"sharpness": scorer("sharpness"), "duplicate": scorer("duplicate")}
    one = run(job(table, scorers, f"one.{kind}"), 0)
    three = run(job(table, scorers, f"three.{kind}", batch_size=2), 3)
    assert one.read_bytes() == three.read_bytes()
    assert len(read_frame(one)) == len(NAMES)


def test_what_was_done_is_kept_and_not_mixed_with_other_settings(table, tmp_path):
    log = str(tmp_path / "log")
    with pytest.raises(UserError, match="no weights"):
        run(job(table, {"length": Length(log, fails_at=NAMES[9])}), 0)
    assert names_in(log) == NAMES[:10]
    failed = job(table, {"length": Length(log, fails_at=NAMES[9])})
    with pytest.raises(UserError, match="other scorers"):
        run(dataclasses.replace(failed, scorers={"length": Length(log)}), 0)
    assert len(list(failed.parts.glob("part-*.jsonl"))) == 2


@pytest.mark.multiprocess
def test_a_file_that_kills_its_decoder_costs_its_own_row_alone(table, tmp_path):
    log = str(tmp_path / "log")
    out = read_frame(run(job(table, {"length": Length(log, dies_at=NAMES[5])}, batch_size=4), 2))
    assert out["length"].tolist() == [str(len(text)) if i != 5 else "" for i, text in enumerate(out["text"])]
    assert [i for i, status in enumerate(out["status"]) if status != "ok"] == [5]
    assert "crashes its decoder" in out["status"][5]
    counts = {name: names_in(log).count(name) for name in NAMES}
    assert counts[NAMES[5]] == 3  # in a batch, and twice alone
    assert all(counts[name] == 1 for i, name in enumerate(NAMES) if i // 4 != 1)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_and_started_again_equals_one_go(table, tmp_path):
    argv = [
        sys.executable, "-m", "tools.scoring", str(table), "--root", str(CLIPS), "--scorers", "flow,camera_motion,duplicate",
        "--num-workers", "1", "--batch-size", "1", "--part-rows", "5", "--out",
    ]  # fmt: skip
    parts = tmp_path / "killed.csv.parts"
    process = subprocess.Popen([*argv, str(tmp_path / "killed.csv")], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (parts / "part-00000001.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in parts.glob("part-*.jsonl")}
    assert "part-00000000.jsonl" in done
    assert not (tmp_path / "killed.csv").exists()
    subprocess.run([*argv, str(tmp_path / "killed.csv")], cwd=ROOT, check=True, timeout=200)
    assert {name: (parts / name).stat().st_mtime_ns for name in done} == done
    whole = run(job(table, chosen_scorers("flow,camera_motion,duplicate", [], "cpu"), "whole.csv"), 0)
    assert (tmp_path / "killed.csv").read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_under_torchrun_the_last_rank_merges(table, run_ranks, tmp_path):
    options = ("--scorers", "sharpness", "--root", CLIPS, "--part-rows", "4")
    run_ranks("tools/scoring/__main__.py", table, *options, "--out", tmp_path / "two.csv")
    one = run(job(table, {"sharpness": scorer("sharpness")}), 0)
    assert (tmp_path / "two.csv").read_bytes() == one.read_bytes()


def test_a_torn_line_is_done_again(table, tmp_path):
    log = str(tmp_path / "log")
    part = Part(tmp_path, 0)
    part.partial.write_text('{"length": 3}\n{"length": 4}\n{"leng')
    block = {"path": NAMES[:5], "text": ["abc", "abcd", "a", "ab", "abc"]}
    score_part(part, block, [CLIPS / n for n in NAMES[:5]], {"length": Length(log)}, 2, lambda behind, scored: None)
    assert part.done.read_text().split("\n")[:-1] == [f'{{"length": {n}}}' for n in (3, 4, 1, 2, 3)]
    assert names_in(log) == NAMES[2:5]


def test_a_broken_file_is_named_in_the_table_and_a_known_fault_stays(table, tmp_path, capsys):
    frame = pd.DataFrame({"path": [NAMES[0], "none.mp4", NAMES[1]], "status": ["ok", "ok", "too dark"]})
    frame.to_csv(table, index=False)
    out = read_frame(run(job(table, {"black": scorer("black")}), 0))
    assert out["status"][0] == "ok"
    assert "none.mp4" in out["status"][1]
    assert out["status"][2] == "too dark"
    assert out["black"].tolist() == ["0", "", "0"]
    assert "black: 1 files could not be read" in capsys.readouterr().out


def status_and_length(path):
    frame = read_frame(path)
    return list(zip(frame["status"].tolist(), frame["length"].tolist(), strict=True))


@dataclass(frozen=True)
class Choosy:
    """A scorer that has nothing for some files, by a file next to them."""

    folder: str
    columns = ("length",)
    needs = ()

    def score(self, paths, **needed):
        folder = Path(self.folder)
        with (folder / "log").open("a") as file:
            file.writelines(f"{path.name}\n" for path in paths)
        bad = (folder / "bad").read_text().split()
        if "crash" in bad and any(path.name == NAMES[10] for path in paths):
            raise UserError("no server")
        return [
            {"length": None, "error": "none today"} if path.name in bad else {"length": len(path.name)}
            for path in paths
        ]


def test_rows_that_failed_are_scored_again_also_of_parts_that_are_not_complete(table, tmp_path):
    bad, log = tmp_path / "bad", tmp_path / "log"
    bad.write_text(" ".join([NAMES[1], NAMES[3], NAMES[9], "crash"]))
    choosy = job(table, {"choosy": Choosy(str(tmp_path))}, batch_size=1)
    again = dataclasses.replace(choosy, retry_failed=True)
    with pytest.raises(UserError, match="no server"):
        run(choosy, 0)  # in the third part, whose second row failed
    log.unlink()
    bad.write_text(f"{NAMES[3]} crash")
    with pytest.raises(UserError, match="no server"):
        run(again, 0)
    assert names_in(log) == [NAMES[1], NAMES[3], NAMES[9], NAMES[10]]
    log.unlink()
    bad.write_text("")
    run(choosy, 0)  # the same command as at first resumes, and leaves what failed
    assert names_in(log) == NAMES[10:]
    lengths = [("ok", str(len(name))) for name in NAMES]
    expected = [*lengths[:3], ("none today", ""), *lengths[4:]]
    assert status_and_length(choosy.out) == expected
    log.unlink()
    run(again, 0)
    assert names_in(log) == [NAMES[3]]
    assert status_and_length(choosy.out) == lengths
    assert {path.suffix for path in choosy.parts.glob("part-*")} == {".jsonl"}


def test_the_newest_lines_of_a_part_that_is_not_complete(tmp_path):
    part = Part(tmp_path, 0)
    assert lines_so_far(part) == {}
    part.before.write_text('{"length": 1}\n{"errors": {"a": "none today"}}\n{"length": 3}\n{"errors": {}}\n')
    assert failed_in(part) == 1
    part.partial.write_text('{"length": 2}\n{"length": 4}\n{"length": 5}\n{"leng')  # rows 1, 3 and 4
    assert lines_so_far(part) == {row: {"length": row + 1} for row in range(5)}
    assert failed_in(part) == 0


@pytest.mark.multiprocess
def test_a_file_that_kills_its_decoder_is_tried_again_once_more(table, tmp_path):
    log = tmp_path / "log"
    killing = job(table, {"length": Length(str(log), dies_at=NAMES[5])}, batch_size=4)
    run(killing, 1)
    log.unlink()
    out = read_frame(run(dataclasses.replace(killing, retry_failed=True), 1))
    assert names_in(log) == [NAMES[5]] * 2
    assert "crashes its decoder" in out["status"][5]


def test_under_torchrun_nothing_is_opened_again(table, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"--retry-failed.*--num-workers"):
        run(job(table, {"black": scorer("black")}, retry_failed=True))


@pytest.mark.slow
def test_what_is_compared_is_not_held_as_rows(table, tmp_path):
    count = 20_000
    rng = np.random.default_rng(0)
    table.write_text("path\n" + "".join(f"folder/of/clips/{i:08d}.mp4\n" for i in range(count)))
    chosen = job(table, {"duplicate": scorer("duplicate"), "black": scorer("black")}, part_rows=count)
    chosen.parts.mkdir()
    with Part(chosen.parts, 0).done.open("w") as file:
        for hashes in rng.integers(0, 1 << 63, (count, 3)).tolist():
            phash = "".join(f"{part:016x}" for part in hashes)
            file.write(json.dumps({"phash": phash, "black": 0.5, "more": list(range(9))}) + "\n")
    tracemalloc.start()
    assert set(compared(chosen, count)["duplicate_of"]) == {None}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500 * count  # bytes, of which the tables' reader takes some; with whole rows, 1500


def test_columns_that_are_missing_or_there_already_are_named(table):
    needing = job(table, {"length": type("Needing", (Length,), {"needs": ("phrase",)})("log")})
    with pytest.raises(UserError, match="no column 'phrase'"):
        run(needing, 0)
    table.write_text("path,black\na.mp4,0\n")
    with pytest.raises(UserError, match=r"column 'black' already.*--drop-columns black"):
        run(job(table, {"black": scorer("black")}), 0)


def test_settings_of_the_command_line():
    chosen = chosen_scorers("flow, ocr", ["flow.fps=6", "ocr.points=0.1,0.9", "flow.method=dis"], "cuda")
    assert (chosen["flow"].fps, chosen["flow"].device, chosen["ocr"].points) == (6.0, "cuda", (0.1, 0.9))
    for setting, message in {
        "flow.fps": "expected SCORER.SETTING=VALUE",
        "black.frames=3": "no effect",
        "flow.fsp=3": "Did you mean 'fps'",
        "flow.fps=fast": "expected a value such as 3.0",
        "flow.fps=-3": "fps must be above 0",
    }.items():
        with pytest.raises(UserError, match=message):
            chosen_scorers("flow", [setting], "cpu")


def test_scores_that_parquet_cannot_hold_are_not_lost(table):
    rows = read_frame(table)
    rows["fps"] = ["24"] * 5 + ["unknown"] * (len(rows) - 5)
    rows.to_csv(table, index=False)
    with pytest.raises(UserError, match=r"cannot be written as parquet.*All rows with their scores are in .*jsonl"):
        run(job(table, {"black": scorer("black")}, "out.parquet"), 0)
    assert len(read_frame(table.with_name("out.parquet.jsonl"))["black"]) == len(NAMES)


def test_images_that_are_too_narrow_for_flow_cost_their_own_row_alone(tmp_path):
    for name, size in {"narrow.mp4": (1920, 16), "good.mp4": (64, 48)}.items():
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("libx264", rate=24)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            for value in range(8):
                frame = np.full((size[1], size[0], 3), 20 * value, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
    narrow, good = scorer("flow").score([tmp_path / "narrow.mp4", tmp_path / "good.mp4"])
    assert narrow["flow"] is None
    assert narrow["error"]
    assert good["flow"] is not None
