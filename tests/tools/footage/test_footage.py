"""The chain: a folder with a duplicate and a broken file becomes a table that trains, whatever kills it on the way."""

import csv
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import av
import numpy as np
import pytest

import opensora.models  # noqa: F401  (registers)
from opensora.datasets.bucket_sampler import BucketBatchSampler
from opensora.datasets.read_video import read_frames
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.utils.errors import UserError
from tools.datasets import doctor
from tools.footage import stages
from tools.footage.__main__ import run
from tools.footage.recipe import read_recipe
from tools.footage.rows import read_rows, write_rows

CLIPS = Path(__file__).parents[3] / "assets" / "clips"
ROOT = CLIPS.parents[1]
SOURCES = ROOT / "data" / "sources"


def join(path: Path, names: list[str]) -> None:
    """A long video of shipped clips, 24 frames of each; of one with a * the first frame, 24 times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "10", "preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = 144, 176, "yuv420p"
        for name in names:
            frames = read_frames(CLIPS / f"{name.rstrip('*')}.mp4", 0, 24).numpy()
            for frame in frames[:1].repeat(24, 0) if name.endswith("*") else frames:
                crop = np.ascontiguousarray(frame[:144, :176])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(crop, format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two videos of three and two scenes, a copy of one, half of one, and a file that is no video."""
    folder = tmp_path_factory.mktemp("videos")
    join(folder / "a.mp4", ["white_dog", "city_teal", "rabbit_stands*"])
    join(folder / "deep" / "a.mp4", ["pink_clouds", "meadow_run"])
    (folder / "z_copy.mp4").write_bytes((folder / "a.mp4").read_bytes())
    data = (folder / "a.mp4").read_bytes()
    (folder / "broken.mp4").write_bytes(data[: len(data) // 2])
    (folder / "notes.txt").write_text("hello")
    return folder


class Answers(BaseHTTPRequestHandler):
    """An endpoint that has one thing to say of each picture."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        text = f"A clip of {len(body)} bytes.".encode()
        reply = b'{"choices": [{"message": {"content": "' + text + b'"}, "finish_reason": "stop"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.fixture
def recipe(tmp_path, folder, endpoint) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(f"""
stages = [
    dict(type="find", folder={str(folder)!r}),
    dict(type="probe", part_rows=2),
    dict(type="unique"),
    dict(type="detect", detector="content"),
    dict(type="cut", min_seconds=0.5, shorter_side=96, part_rows=1),
    dict(type="score", scorers=dict(static=dict(), sharpness=dict()), part_rows=2),
    dict(type="filter", fmin=16, static_max=0.5),
    dict(type="caption", model="m", endpoint={endpoint!r}, frames=1, retries=0),
    dict(type="table", output="train.csv"),
]
""")
    return path


def reasons(out: Path, kind: str) -> list[str]:
    return [row["reason"] for row in read_rows(next(out.glob(f"*-{kind}-*.dropped.jsonl")))]


def test_the_whole_way_to_training(recipe, folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "work"
    run(recipe, out)
    with (out / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(Path(r["source"]).relative_to(folder).as_posix(), r["start_frame"], r["end_frame"]) for r in rows] == [
        ("a.mp4", "0", "24"), ("a.mp4", "24", "48"), ("deep/a.mp4", "0", "24"), ("deep/a.mp4", "24", "48"),
    ]  # fmt: skip
    assert reasons(out, "find") == ["1 .txt files"]
    assert len(reasons(out, "probe")) == 1
    assert "broken.mp4" in reasons(out, "probe")[0]
    assert reasons(out, "unique") == ["same digest as an earlier row"]
    assert reasons(out, "filter") == ["static > 0.5"]  # what does not move
    assert all(row["text"].startswith("A clip of") for row in rows)
    report = (out / "report.html").read_text()
    assert report.count("data:image/jpeg") > 8
    assert "static &gt; 0.5" in report
    assert (out / "samples.png").is_file()

    dataset = VariableVideoTextDataset(str(out / "train.csv"), {"96px": {16: (1.0, 2)}})
    sampler = BucketBatchSampler(dataset, seed=0)
    batches = itertools.islice(iter(sampler), sampler.batches_in(0))  # it has no end
    items = [dataset[key] for batch in batches for key in batch]
    assert len(items) == 4
    assert {tuple(item["video"].shape[:2]) for item in items} == {(3, 16)}
    config = tmp_path / "config.py"
    config.write_text(
        '"""Toy."""\ndataset = dict(type="VariableVideoTextDataset")\nbucket_config = {"96px": {16: (1.0, 2)}}\n'
        'model = dict(type="STDiT2-XL/2")\nvae = dict(type="VideoAutoencoderKL")\ntext_encoder = dict(type="t5")\n'
        'scheduler = dict(type="iddpm")\n'
    )
    monkeypatch.setattr(sys, "argv", ["doctor", str(config), f"--data-path={out / 'train.csv'}"])
    with pytest.raises(SystemExit) as exit_:
        doctor.main()
    assert exit_.value.code == 0, capsys.readouterr().out


class Killed(BaseException):
    """What no code of ours catches."""


def test_killed_at_every_writing_it_ends_with_the_same_table(recipe, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    run(recipe, whole)

    def die(*_: object) -> None:
        raise Killed

    for deaths in range(9):
        done = {path: path.stat().st_mtime_ns for path in out.glob("*") if path.suffix == ".jsonl"}
        with monkeypatch.context() as patch:
            patch.setattr(stages, "divide_rows", die)
            with pytest.raises(Killed):
                run(recipe, out)
        assert all(path.stat().st_mtime_ns == time_ for path, time_ in done.items()), f"work was redone at {deaths}"
        _run_one_more_stage(recipe, out)
    run(recipe, out)
    assert (out / "train.csv").read_text() == (whole / "train.csv").read_text()


def _run_one_more_stage(recipe: Path, out: Path) -> None:
    work, before = None, out / "nothing"
    for stage in read_recipe(recipe, stages.STAGES):
        work = stages.Work(out, stage, before)
        if not work.kept.is_file():
            stages.STAGES[stage.type](work, **stage.settings)
            return
        before = work.kept


@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_from_outside_and_on_two_processes(recipe, tmp_path, run_script):
    whole, out, both = tmp_path / "whole", tmp_path / "killed", tmp_path / "both"
    run(recipe, whole)
    command = [sys.executable, "-m", "tools.footage", str(recipe), "--out", str(out)]
    for _ in range(4):  # wherever it is by then
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        seen = next((line for line in process.stdout if "done before" not in line), "")
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert seen
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (out / "train.csv").read_text() == (whole / "train.csv").read_text()
    done = run_script("tools/footage/__main__.py", recipe, "--out", both, num_processes=2)
    assert done.code == 0, done.stderr
    assert (both / "train.csv").read_text() == (whole / "train.csv").read_text()


def test_a_changed_recipe_keeps_what_is_before_the_change(recipe):
    first = [stage.name for stage in read_recipe(recipe, stages.STAGES)]
    recipe.write_text(recipe.read_text().replace("fmin=16", "fmin=17"))
    second = [stage.name for stage in read_recipe(recipe, stages.STAGES)]
    assert first[:6] == second[:6]
    assert not set(first[6:]) & set(second[6:])


def test_recipes_report_all_that_is_wrong(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("stages:\n- type: probe\n  part_row: 3\n- type: cutt\n")
    with pytest.raises(UserError, match=r"part_row.*Did you mean.*cutt.*first stage finds files"):
        read_recipe(path, stages.STAGES)


def test_a_stage_that_leaves_nothing_says_so(tmp_path, folder):
    path = tmp_path / "r.yaml"
    path.write_text(f"stages:\n- {{type: find, folder: {folder}}}\n- {{type: probe}}\n- {{type: filter, fmin: 1000}}\n")
    with pytest.raises(UserError, match="leaves no row"):
        run(path, tmp_path / "out")
    assert "num_frames &lt; 1000" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.skipif(not SOURCES.is_dir(), reason="needs data/sources: python -m tools.datasets.fetch_sources")
@pytest.mark.slow
def test_real_long_clips(tmp_path):
    names = [next(iter(sorted(SOURCES.rglob(name))), None) for name in ("bikes.mp4", "vtest.avi", "trailer_bbb.mp4")]
    if None in names:
        pytest.skip(f"bikes, vtest or trailer_bbb is not in {SOURCES}")
    write_rows(tmp_path / "t.csv", [{"path": str(name)} for name in names])
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"stages:\n- {{type: read, table: {tmp_path / 't.csv'}}}\n- {{type: probe}}\n- {{type: detect, detector: content}}\n"
        "- {type: cut, min_seconds: 0.3, max_seconds: 100, shorter_side: 96}\n- {type: table, output: c.csv}\n"
    )
    run(recipe, tmp_path / "w")
    rows = list(read_rows(tmp_path / "w" / "c.csv"))
    bikes = [int(row["start_frame"]) for row in rows if "bikes" in row["source"]]
    assert bikes == pytest.approx([0, 30, 76, 137, 187, 242], abs=1)
    assert sum("vtest" in row["source"] for row in rows) == 1
    kept = sum(int(row["end_frame"]) - int(row["start_frame"]) for row in rows)
    lost = sum(row["end"] - row["start"] for row in read_rows(next((tmp_path / "w").glob("*-cut-*.dropped.jsonl"))))
    assert kept + round(24 * lost) == pytest.approx(250 + 795 + 1323, abs=1)
