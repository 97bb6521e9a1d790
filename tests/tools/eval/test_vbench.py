"""VBench's lists, names and totals."""

import json
import sys

import pytest
import torch

from opensora.inference.manifest import sidecar, write_samples
from opensora.inference.prompts import load_prompts
from opensora.utils.errors import UserError
from tools.eval.vbench import DIMENSIONS, main, read_info, read_scores, totals

INFO = [
    {"prompt_en": "a laptop, frozen in time", "dimension": ["temporal_flickering"]},
    {"prompt_en": "a person is surfing", "dimension": ["human_action"]},
    {"prompt_en": "a dog, running", "dimension": ["subject_consistency", "dynamic_degree"]},
    {"prompt_en": "a dog, running", "dimension": ["motion_smoothness"]},
]
CONFIG = {"seed": 1, "image_size": (16, 16), "num_frames": 2, "fps": 8}


@pytest.fixture
def info(tmp_path):
    path = tmp_path / "VBench_full_info.json"
    path.write_text(json.dumps(INFO))
    return path


@pytest.fixture
def run(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vbench", *map(str, arguments)])
        main()

    return run


def make_samples(folder, prompts, count, extension=".mp4"):
    video = torch.zeros(3, 2, 16, 16)
    for index, prompt in enumerate(prompts):
        for k in range(count):
            record = sidecar(
                CONFIG, prompt=prompt, prompt_index=index, sample_index=k, save_fps=8, checkpoint=None, made_with={}
            )
            write_samples([video], [folder / f"sample_{index}-{k}"], [record], device="cpu", save_format=extension[1:])


def test_prompts_become_lists_by_the_number_of_samples(info, tmp_path, run, capsys):
    prompts = read_info(info)
    assert [(p.text, p.samples) for p in prompts] == [
        ("a laptop, frozen in time", 25),
        ("a person is surfing", 5),
        ("a dog, running", 5),
    ]
    assert prompts[2].dimensions == ("subject_consistency", "dynamic_degree", "motion_smoothness")
    run("prompts", info, "--out", tmp_path / "lists")
    printed = capsys.readouterr().out
    assert f"--prompt-path {tmp_path / 'lists' / 'prompts-25.csv'} --num-sample 25" in printed
    assert [p.text for p in read_info(info, ["human_action"])] == ["a person is surfing"]
    # what our own reader makes of them
    assert [str(p) for p in load_prompts(None, tmp_path / "lists" / "prompts-5.csv")] == ["a person is surfing", "a dog, running"]  # fmt: skip


def test_samples_get_the_names_that_vbench_looks_for(info, tmp_path, run):
    make_samples(tmp_path / "five", ["a person is surfing", "a dog, running", "not asked for"], 5)
    out = tmp_path / "videos"
    arguments = ["layout", tmp_path / "five", "--info", info, "--out", out]
    run(*arguments, "--dimension", "human_action", "dynamic_degree")
    names = [f"{text}-{k}.mp4" for text in ("a dog, running", "a person is surfing") for k in range(5)]
    assert sorted(path.name for path in out.iterdir()) == names
    record = json.loads((tmp_path / "videos.json").read_text())
    assert len(record["settings"]["samples"]) == 10
    assert record["settings"]["samples"][3]["k"] == 3
    run(*arguments, "--dimension", "human_action", "dynamic_degree")  # again: nothing changes

    with pytest.raises(SystemExit, match="2"):  # the laptop's 25 are not there
        run(*arguments)
    (out / names[0]).unlink()
    (out / names[0]).write_text("another file")
    with pytest.raises(SystemExit, match="2"):
        run(*arguments, "--dimension", "dynamic_degree")
    assert (out / names[0]).read_text() == "another file"


def test_samples_made_with_scores_are_those_of_their_prompt(info, tmp_path, run, capsys):
    make_samples(tmp_path / "five", ["a person is surfing aesthetic score: 6.5. motion score: 5.0."], 5)
    arguments = ["--info", info, "--out", tmp_path / "o", "--dimension", "human_action"]
    run("layout", tmp_path / "five", *arguments)
    assert [path.name for path in sorted((tmp_path / "o").iterdir())] == [
        f"a person is surfing-{k}.mp4" for k in range(5)
    ]
    make_samples(tmp_path / "webm", ["a person is surfing"], 5, ".webm")
    with pytest.raises(SystemExit, match="2"):
        run("layout", tmp_path / "webm", *arguments)
    assert "samples are .webm files; VBench takes mp4" in capsys.readouterr().err


def test_missing_samples_are_told(info, tmp_path, run, capsys):
    make_samples(tmp_path / "four", ["a person is surfing"], 4)
    with pytest.raises(SystemExit, match="2"):
        run("layout", tmp_path / "four", "--info", info, "--out", tmp_path / "o", "--dimension", "human_action")
    assert "1 of 5 samples are missing, such as number 4 of 'a person is surfing'" in capsys.readouterr().err


def test_two_samples_for_one_video_are_refused(info, tmp_path, run, capsys):
    """The last folder's won, and nothing said so."""
    make_samples(tmp_path / "old", ["a person is surfing"], 5)
    make_samples(tmp_path / "new", ["a person is surfing aesthetic score: 6.5."], 5)
    arguments = ["--info", info, "--out", tmp_path / "o", "--dimension", "human_action"]
    with pytest.raises(SystemExit, match="2"):
        run("layout", tmp_path / "old", tmp_path / "new", *arguments)
    message = capsys.readouterr().err
    assert (
        f"{tmp_path / 'old' / 'sample_0-0.mp4'} and {tmp_path / 'new' / 'sample_0-0.mp4'} are both number 0" in message
    )
    assert not (tmp_path / "o").exists()
    run("layout", tmp_path / "old", tmp_path / "old", *arguments)  # one folder named twice is still one
    assert len(list((tmp_path / "o").iterdir())) == 5


def test_folders_with_dots_have_records_of_their_own(info, tmp_path, run, monkeypatch, capsys):
    make_samples(tmp_path / "five", ["a person is surfing"], 5)
    arguments = ["layout", tmp_path / "five", "--info", info, "--dimension", "human_action", "--out"]
    for name in ("v1.0", "v1.1"):
        run(*arguments, tmp_path / name)
        assert (tmp_path / f"{name}.json").is_file()
    assert not (tmp_path / "v1.json").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(*arguments, ".")
    (tmp_path / "here" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "here" / "below")
    (tmp_path / "here.json").unlink()
    run(*arguments, "..")
    assert (tmp_path / "here.json").is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        run(*arguments, tmp_path / "file")
    assert "no files can be written there" in capsys.readouterr().err


def test_a_prompt_that_is_no_file_name(tmp_path, run, capsys):
    info = tmp_path / "info.json"
    info.write_text(json.dumps([{"prompt_en": "either/or", "dimension": ["scene"]}]))
    make_samples(tmp_path / "s", ["either/or"], 5)
    with pytest.raises(SystemExit, match="2"):
        run("layout", tmp_path / "s", "--info", info, "--out", tmp_path / "o")
    assert "cannot be one" in capsys.readouterr().err


def test_totals_are_those_of_the_leaderboard():
    lowest = {name: d.lowest for name, d in DIMENSIONS.items()}
    highest = {name: d.highest for name, d in DIMENSIONS.items()}
    assert totals(lowest) == pytest.approx({"quality": 0, "semantic": 0, "total": 0})
    assert totals(highest) == pytest.approx({"quality": 1, "semantic": 1, "total": 1})
    # one dimension of half weight among 6.5, and quality is 4 of 5 parts
    assert totals(lowest | {"dynamic_degree": 1.0})["total"] == pytest.approx(0.5 / 6.5 * 4 / 5)
    assert totals(lowest | {"scene": 0.8222})["total"] == pytest.approx(1 / 9 / 5)
    assert totals({"scene": 0.5}) == {}


def test_scores_are_read_from_vbenchs_files(tmp_path, run, capsys):
    results = tmp_path / "results"
    results.mkdir()
    (results / "a_eval_results.json").write_text(
        json.dumps({"scene": [0.5, [{"video_path": "x"}]], "color": [0.9, []]})
    )
    (results / "b_eval_results.json").write_text(json.dumps({"subject consistency": [0.97, []]}))
    (results / "a_full_info.json").write_text(json.dumps(INFO))  # VBench leaves these next to them
    assert read_scores(results) == {"scene": 0.5, "color": 0.9, "subject_consistency": 0.97}
    run("import", results, "--out", tmp_path / "scores.json")
    printed = capsys.readouterr().out
    assert "97.00 %" in printed
    assert "no total: not measured are background_consistency" in printed
    assert json.loads((tmp_path / "scores.json").read_text())["scores"]["scene"] == 0.5
    (results / "c.json").write_text(json.dumps({"scene": [0.6, []]}))
    with pytest.raises(UserError, match="in another file"):
        read_scores(results)
    with pytest.raises(UserError, match="no results"):
        read_scores(results / "a_full_info.json")


@pytest.mark.parametrize("value", [[], [None], [[0.5]]])
def test_a_result_without_a_score_is_told(tmp_path, value):
    path = tmp_path / "a_eval_results.json"
    path.write_text(json.dumps({"scene": value}))
    with pytest.raises(UserError, match=r"a_eval_results.json: scene does not begin with a score"):
        read_scores(path)


def test_other_files_and_unknown_dimensions(info, tmp_path):
    with pytest.raises(UserError, match=r"unknown. Choices: subject_consistency"):
        read_info(info, ["beauty"])
    with pytest.raises(UserError, match="no prompts of color"):
        read_info(info, ["color"])
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="no list of VBench"):
        read_info(tmp_path / "x.json")
