"""The chain: a folder with a duplicate and a broken file becomes a table that trains, whatever kills it on the way."""

import csv
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import opensora.models  # noqa: F401  (registers)
from opensora.datasets.buckets.sampler import BucketBatchSampler
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.utils.errors import UserError
from tests.forks import forked
from tests.tools.footage.joined import join
from tools.datasets import doctor
from tools.footage import stages
from tools.footage.__main__ import run
from tools.footage.recipe import read_recipe
from tools.footage.rows import read_rows, write_rows
from tools.scoring import parts


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


@pytest.mark.slow
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

    dataset = VariableVideoTextDataset(str(out / "train.csv"), {"96px": {16: (1.0, 2)}})
    sampler = BucketBatchSampler(dataset, seed=0)
    batches = itertools.islice(iter(sampler), sampler.batches_in(0))  # it has no end
    items = [dataset[key] for batch in batches for key in batch.keys]
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


WRITING = ("find", "probe", "unique", "detect", "cut", "score", "filter", "caption", "table")
FIRST_SCORER = {"probe": "probe", "detect": "detect", "cut": "cut", "score": "static"}  # of stages of several batches


def chain(
    recipe: Path, out: Path, log: Path, dies_writing: str = "", dies_looking: str = "", rank: int = 0, world: int = 1
):
    """Run a chain, in a process of its own, that notes each look at a file and is killed with -9 at a place.

    Args:
        dies_writing: a stage, of whose tables one row is written.
        dies_looking: a stage, of whose files some have been looked at.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    divide_rows, score_rows = stages.divide_rows, parts.score_rows

    def divide(kept: Path, dropped: Path, decided) -> None:
        def until_killed():
            for pair in decided:
                yield pair
                if f"-{dies_writing}-" in kept.name:
                    os.kill(os.getpid(), signal.SIGKILL)

        divide_rows(kept, dropped, until_killed())

    def look(scorers, paths, block):
        kind = next(iter(scorers))
        if kind == dies_looking and f"{kind} " in log.read_text():
            os.kill(os.getppid(), signal.SIGKILL)  # the chain; this one, its worker, has to end by itself
            time.sleep(60)
        lines = score_rows(scorers, paths, block)
        with log.open("a") as file:
            file.writelines(f"{kind} {path}\n" for path in paths)
        return lines

    stages.divide_rows, parts.score_rows = divide, look
    run(recipe, out, 1, rank, world)


def in_a_process(*args: object, **settings: object) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=forked, args=(chain, *args), kwargs=settings)
    process.start()
    return process


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_at_every_stage_it_ends_with_the_same_table_and_does_nothing_twice(recipe, tmp_path):
    whole, out, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    log.touch()
    run(recipe, whole)
    for kind in WRITING:
        looking = FIRST_SCORER.get(kind)
        deaths = [{"dies_looking": looking}] * 2 * bool(looking)  # of what is looked at, nothing is blamed
        for death in [*deaths, {"dies_writing": kind}]:
            done = {path: path.stat().st_mtime_ns for path in out.glob("[0-9]*.jsonl")}
            killed = in_a_process(recipe, out, log, **death)
            killed.join(60)
            assert killed.exitcode == -signal.SIGKILL, death
            assert {path: path.stat().st_mtime_ns for path in done} == done, f"a table was made anew before {death}"
    last = in_a_process(recipe, out, log)
    last.join(60)
    assert last.exitcode == 0
    assert (out / "train.csv").read_bytes() == (whole / "train.csv").read_bytes()
    assert clips_in(out) == clips_in(whole)
    assert [path.name for path in out.glob(".*")] == [".train.csv.written"]
    looks = Counter(log.read_text().splitlines())
    assert set(looks.values()) == {1}
    # of the four files two get to cutting, of their five clips four to a caption
    assert Counter(line.split()[0] for line in looks) == {"probe": 4, "detect": 2, "cut": 2, "static": 5, "caption": 4}


def clips_in(work: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in work.glob("*-cut-*.clips/*")}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_share_the_rows_and_leave_the_same_table(recipe, tmp_path):
    run(recipe, tmp_path / "one")
    ranks = [in_a_process(recipe, tmp_path / "two", tmp_path / f"log{rank}", rank=rank, world=2) for rank in range(2)]
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    assert (tmp_path / "two" / "train.csv").read_bytes() == (tmp_path / "one" / "train.csv").read_bytes()
    shares = [set((tmp_path / f"log{rank}").read_text().splitlines()) for rank in range(2)]
    assert all(len(share) > 4 for share in shares)
    assert not shares[0] & shares[1]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_under_torchrun(recipe, tmp_path, run_ranks):
    run(recipe, tmp_path / "one")
    run_ranks("tools/footage/__main__.py", recipe, "--out", tmp_path / "two")
    assert (tmp_path / "two" / "train.csv").read_bytes() == (tmp_path / "one" / "train.csv").read_bytes()


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


def test_settings_of_late_stages_are_wrong_before_the_first_one_works(tmp_path, folder):
    path = tmp_path / "r.yaml"
    path.write_text(
        f"stages:\n- {{type: find, folder: {folder}}}\n- {{type: cut, maxseconds: 20}}\n- {{type: filter, flowmn: 3}}\n"
        "- {type: score, scorers: {flwo: {}}}\n- {type: caption, model: x, frame: 3}\n"
    )
    message = r"stage 2 \(cut\): 'maxseconds' is unknown. Did you mean 'max_seconds'.*stage 3 \(filter\): 'flowmn'.*'flwo' is no.*frame"
    with pytest.raises(UserError, match=message):
        run(path, tmp_path / "work")
    assert not (tmp_path / "work").exists()


CELLS = {  # of a column in each format, in the rows a to e
    "csv": ["0.9", "0.2", "", "1", "0"],
    "jsonl": [0.9, 0.2, None, True, 0],
    "parquet": [0.9, 0.2, None, 1.0, 0.0],
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ("my_score_min: 0.5", "ad"),
        ("my_score_max: 0.5", "be"),
        ("equals: {my_score: 0}", "e"),
        ("equals: {my_score: 1}", "d"),
        ("equals: {my_score: true}", "d"),
        ("equals: {my_score: false}", "e"),
        ("equals: {my_score: 0.9}", "a"),
        ("equals: {my_score: '0.9'}", "a"),
        ("equals: {my_score: null}", "c"),
        ("empty: [my_score]", "c"),
    ],
)
def test_a_filter_sees_the_same_in_all_formats(tmp_path, kind, setting, kept):
    table = tmp_path / f"t.{kind}"
    rows = [{"path": name, "my_score": cell} for name, cell in zip("abcde", CELLS[kind], strict=True)]
    if kind == "jsonl":
        del rows[2]["my_score"]  # a row that lacks the column has an empty cell
    write_rows(table, rows)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"stages:\n- {{type: read, table: {table}}}\n- {{type: filter, {setting}}}\n")
    done = run(recipe, tmp_path / "out")
    assert "".join(Path(row["path"]).name for row in read_rows(done[-1].kept)) == kept


def test_a_filter_by_truth_reads_the_words_of_a_csv_and_by_number_no_others(tmp_path):
    table, recipe = tmp_path / "t.csv", tmp_path / "r.yaml"
    table.write_text("path,good,start\na,True,\nb,False,\nc,perhaps,\n")
    recipe.write_text(f"stages:\n- {{type: read, table: {table}}}\n- {{type: filter, equals: {{good: true}}}}\n")
    assert [Path(row["path"]).name for row in read_rows(run(recipe, tmp_path / "out")[-1].kept)] == ["a"]
    recipe.write_text(f"stages:\n- {{type: read, table: {table}}}\n- {{type: filter, good_min: 1}}\n")
    with pytest.raises(UserError, match="good holds 'perhaps', which is not a number"):
        run(recipe, tmp_path / "out")


def test_a_stage_that_leaves_nothing_says_so(tmp_path, folder):
    path = tmp_path / "r.yaml"
    path.write_text(f"stages:\n- {{type: find, folder: {folder}}}\n- {{type: probe}}\n- {{type: filter, fmin: 1000}}\n")
    with pytest.raises(UserError, match="leaves no row"):
        run(path, tmp_path / "out")
    assert "num_frames &lt; 1000" in (tmp_path / "out" / "report.html").read_text()
