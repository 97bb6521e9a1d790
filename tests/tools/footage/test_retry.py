"""--retry-failed of the chain: what failed is looked at again, nothing else is, and the table becomes that of a fresh run."""

import csv
import os
import shutil
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import pytest

from opensora.utils.errors import UserError
from tests.forks import forked
from tests.tools.footage.joined import join
from tools.footage import __main__ as command
from tools.footage import stages
from tools.footage.__main__ import run
from tools.footage.rows import read_rows
from tools.scoring import carry, parts


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Videos of two scenes each, none of them damaged."""
    folder = tmp_path_factory.mktemp("whole")
    join(folder / "b_good.mp4", ["white_dog", "city_teal"])
    join(folder / "d_good.mp4", ["pink_clouds", "meadow_run"])
    join(folder / "a_late.mp4", ["rabbit_climbs_out", "screen_overview"])
    join(folder / "c_late.mp4", ["cup_tilted", "white_dog"])
    return folder


@pytest.fixture
def folder(tmp_path, whole) -> Path:
    """The same when the chain runs first: two have not arrived yet, of which one is half there, and a third is no video."""
    folder = tmp_path / "videos"
    shutil.copytree(whole, folder)
    for path in folder.glob("?_late.mp4"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if path.name[0] == "c" else b"")
    (folder / "e_never.mp4").write_bytes(b"no video")
    return folder


def write_recipe(path: Path, folder: Path, endpoint: str) -> Path:
    path.write_text(f"""
stages = [
    dict(type="find", folder={str(folder)!r}),
    dict(type="probe", part_rows=2),
    dict(type="unique"),
    dict(type="detect", detector="content", part_rows=2),
    dict(type="cut", min_seconds=0.5, shorter_side=96, part_rows=2),
    dict(type="score", scorers=dict(static=dict(), duplicate=dict()), part_rows=3),
    dict(type="filter", fmin=16),
    dict(type="caption", model="m", endpoint={endpoint!r}, frames=1, retries=0, part_rows=3),
    dict(type="table", output="train.csv"),
]
""")
    return path


@pytest.fixture
def recipe(tmp_path, folder, endpoint) -> Path:
    return write_recipe(tmp_path / "recipe.py", folder, endpoint)


def table(out: Path) -> list[dict[str, str]]:
    with (out / "train.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def dropped(out: Path, kind: str) -> dict[str, str]:
    rows = read_rows(next(out.glob(f"*-{kind}-*.dropped.jsonl")))
    return {Path(row["path"]).name: row["reason"] for row in rows}


def clips(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*-cut-*.clips/*.mp4")}


def arrive(folder: Path, whole: Path) -> None:
    """What was late is there, what never comes is wrong in another way, and what was good has gone: nobody may look at it."""
    for path in folder.glob("?_late.mp4"):
        shutil.copyfile(whole / path.name, path)
    for path in folder.glob("?_good.mp4"):
        path.unlink()
    (folder / "e_never.mp4").write_bytes(b"")


def restored(folder: Path, whole: Path) -> None:
    for path in whole.glob("?_good.mp4"):
        shutil.copyfile(path, folder / path.name)


@pytest.mark.slow
@pytest.mark.nightly
def test_what_failed_passes_and_what_succeeded_is_untouched(recipe, folder, whole, tmp_path, monkeypatch, capsys):
    out = tmp_path / "work"
    run(recipe, out)
    first, made, why = table(out), clips(out), dropped(out, "probe")
    assert {Path(row["source"]).name for row in first} == {"b_good.mp4", "d_good.mp4"}
    assert set(why) == {"a_late.mp4", "c_late.mp4", "e_never.mp4"}
    run(recipe, out)
    assert table(out) == first  # without the option nothing is tried again, whatever has arrived

    arrive(folder, whole)
    monkeypatch.setattr(sys, "argv", ["footage", str(recipe), "--out", str(out), "--retry-failed"])
    command.main()
    printed = capsys.readouterr().out
    assert "-probe-" in printed
    assert ": 3 rows that failed are tried again" in printed
    second, again = table(out), dropped(out, "probe")
    assert set(again) == {"e_never.mp4"}
    assert again["e_never.mp4"] != why["e_never.mp4"]
    assert [row for row in second if "_good" in row["source"]] == first
    assert {name: time for name, time in clips(out).items() if name in made} == made
    assert len(clips(out)) > len(made)
    assert {path.suffix for path in out.glob("*.parts/part-*")} == {".jsonl"}
    assert not [path for path in out.iterdir() if path.name.endswith((".fresh", ".outdated"))]

    restored(folder, whole)
    run(recipe, tmp_path / "fresh")
    assert (out / "train.csv").read_bytes() == (tmp_path / "fresh" / "train.csv").read_bytes()
    assert (out / "report.html").read_text().count("<h2>") == (tmp_path / "fresh/report.html").read_text().count("<h2>")


@pytest.mark.nightly
@pytest.mark.slow
def test_what_fails_again_changes_nothing_behind_it(recipe, tmp_path, capsys):
    out = tmp_path / "work"
    run(recipe, out)
    before = {path.name: path.read_bytes() for path in out.glob("*.jsonl")}
    looked_at = {path: path.stat().st_mtime_ns for path in out.glob("*.parts/part-*")}
    capsys.readouterr()
    run(recipe, out, retry_failed=True)
    assert "keep their scores" not in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in out.glob("*.jsonl")} == before
    changed = {path.parent.name for path, time in looked_at.items() if path.stat().st_mtime_ns != time}
    assert len(changed) == 1
    assert "-probe-" in changed.pop()


@pytest.mark.nightly
@pytest.mark.slow
def test_where_nothing_failed_nothing_is_made_anew(tmp_path, whole, endpoint, capsys):
    recipe, out = write_recipe(tmp_path / "recipe.py", whole, endpoint), tmp_path / "work"
    run(recipe, out)
    made = {path: path.stat().st_mtime_ns for path in out.glob("*.jsonl")}
    run(recipe, out, retry_failed=True)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert "no row failed in an earlier run" in capsys.readouterr().out


class Moody(BaseHTTPRequestHandler):
    """An endpoint that is out of order for every second image until it is repaired, and counts what it is asked."""

    asked: ClassVar[list[int]] = []
    broken = True

    def do_POST(self) -> None:
        self.asked.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
        broken = self.broken and len(self.asked) % 2
        text = b'{"error": "out of order"}' if broken else self._answer()
        self.send_response(400 if broken else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _answer(self) -> bytes:
        content = f"A clip of {self.asked[-1]} bytes, by answer {len(self.asked)}."
        return b'{"choices": [{"message": {"content": "' + content.encode() + b'"}, "finish_reason": "stop"}]}'

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def moody():
    kind = type("Fresh", (Moody,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kind, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.nightly
@pytest.mark.slow
def test_captions_that_did_not_come_are_asked_for_again_with_those_of_new_clips(folder, whole, tmp_path, moody):
    server, url = moody
    recipe, out = write_recipe(tmp_path / "recipe.py", folder, url), tmp_path / "work"
    run(recipe, out)
    first, failed = table(out), dropped(out, "caption")
    assert len(first) == len(failed) == 2  # of the four clips that there are
    server.broken = False
    server.asked.clear()
    arrive(folder, whole)
    run(recipe, out, retry_failed=True)
    second = table(out)
    assert len(server.asked) == len(second) - len(first)
    assert all(row in second for row in first)
    assert set(failed) < {Path(row["path"]).name for row in second}
    assert dropped(out, "caption") == {}


def dying(recipe: Path, out: Path, again: str, place: str) -> None:
    """Run a chain that is killed with -9 when it is about to do something for the first time."""
    divide_rows, score_rows, move = stages.divide_rows, parts.score_rows, Path.replace

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def divide(kept: Path, *others) -> None:
        if f"-{place}-" in kept.name:
            die()
        divide_rows(kept, *others)

    def replace(path: Path, target: Path) -> Path:
        if path.name.endswith(".parts" if place == "away" else ".fresh") and place in ("away", "in place"):
            die()
        if place == "held" and target.name == carry.TABLE:
            die()
        return move(path, target)

    def score(scorers, paths, block):
        if place == f"looking {next(iter(scorers))}":
            os.kill(os.getppid(), signal.SIGKILL)
            die()
        return score_rows(scorers, paths, block)

    stages.divide_rows, parts.score_rows, Path.replace = divide, score, replace  # type: ignore[method-assign]
    run(recipe, out, 1, retry_failed=again == "failed")


PLACES = [
    *("held", "looking probe", "probe", "unique", "away", "in place"),
    *("looking detect", "detect", "cut", "score", "caption"),
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("going_on", ["none", "failed"])
def test_killed_anywhere_it_goes_on_and_ends_with_the_same_table(recipe, folder, whole, tmp_path, going_on):
    out = tmp_path / "work"
    run(recipe, out)
    made = clips(out)
    arrive(folder, whole)
    again = "failed"
    for place in PLACES:
        process = get_context("fork").Process(target=forked, args=(dying, recipe, out, again, place))
        process.start()
        process.join(90)
        assert process.exitcode == -signal.SIGKILL, place
        again = going_on if place != "held" else "failed"
    run(recipe, out)
    assert {name: time for name, time in clips(out).items() if name in made} == made
    restored(folder, whole)
    run(recipe, tmp_path / "fresh")
    assert (out / "train.csv").read_bytes() == (tmp_path / "fresh" / "train.csv").read_bytes()
    assert not [path for path in out.iterdir() if path.name.endswith((".fresh", ".outdated"))]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_mended_file_that_is_an_earlier_copy_takes_the_place_of_a_later_one(recipe, folder, whole, tmp_path):
    out = tmp_path / "work"
    run(recipe, out)
    for name in ("b_good", "d_good", "a_late"):
        shutil.copyfile(whole / "b_good.mp4", folder / f"{name}.mp4")
    run(recipe, out, retry_failed=True)  # what d_good was is known, and that it has changed is nobody's concern
    assert [Path(row["source"]).name[0] for row in table(out)] == ["a", "a", "d", "d"]
    assert dropped(out, "unique") == {"b_good.mp4": "same digest as an earlier row"}


@pytest.mark.slow
def test_under_torchrun_it_is_refused_and_changes_nothing(recipe, folder, whole, tmp_path):
    out = tmp_path / "work"
    run(recipe, out)
    before = {path: path.read_bytes() for path in out.glob("*.jsonl")}
    with pytest.raises(UserError, match=r"--retry-failed.*--num-workers"):
        run(recipe, out, rank=0, world=2, retry_failed=True)
    assert {path: path.read_bytes() for path in out.glob("*.jsonl")} == before


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_retry_that_was_killed_is_not_mixed_up_by_torchrun(recipe, folder, whole, tmp_path):
    out = tmp_path / "work"
    run(recipe, out)
    arrive(folder, whole)
    process = get_context("fork").Process(target=forked, args=(dying, recipe, out, "failed", "in place"))
    process.start()
    process.join(90)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(UserError, match="run it without, with --num-workers"):
        run(recipe, out, rank=0, world=2)
    run(recipe, out)
    assert len({row["source"] for row in table(out)}) == 4
