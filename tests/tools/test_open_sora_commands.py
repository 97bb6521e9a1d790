"""Commands, options and columns of Open-Sora's tools are here, or docs/data-processing.md says why not."""

import importlib.util
import re
from pathlib import Path

import pytest

from tools.datasets.datautil.__main__ import read_arguments
from tools.footage.stages import Probe
from tools.scene_cut.scorers import SceneDetect
from tools.scoring.registry import all_columns, scorer

DOC = (Path(__file__).parents[2] / "docs" / "data-processing.md").read_text()
OPTIONS = [
    "--info",
    "--video-info",
    "--ext",
    "--relpath",
    "--abspath",
    "--path-to-id",
    "--remove-empty-path",
    "--remove-empty-caption",
    "--remove-url",
    "--lang",
    "--remove-path-duplication",
    "--remove-text-duplication",
    "--path-subset",
    "--refine-llm-caption",
    "--clean-caption",
    "--merge-cmotion",
    "--count-num-token",
    "--load-caption",
    "--append-text",
    "--score-to-text",
    "--update-text",
    "--filesize",
    "--fsmax",
    "--fmin",
    "--fmax",
    "--hwmax",
    "--aesmin",
    "--matchmin",
    "--flowmin",
    "--fpsmax",
    "--img-only",
    "--vid-only",
    "--shuffle",
    "--head",
    "--sort",
    "--sort-ascending",
    "--shard",
    "--difference",
    "--intersection",
    "--train-column",
    "--format",
    "--disable-parallel",
    "--num-workers",
    "--seed",
]
MODULES = (
    "tools.datasets.convert",
    "tools.datasets.datautil",
    "tools.scene_cut.scene_detect",
    "tools.scene_cut.cut",
    "tools.scoring",
    "tools.caption",
    "tools.datasets.transform",
    "tools.datasets.split",
    "tools.datasets.analyze",
    "tools.frame_interpolation.interpolation",
)
SCORES = {"aesthetic": "aes", "flow": "flow", "ocr": "ocr", "matching": "match", "camera_motion": "cmotion"}


@pytest.mark.parametrize("name", MODULES)
def test_commands_are_there_and_in_the_table(name):
    assert importlib.util.find_spec(name) is not None
    assert name.removeprefix("tools.") in DOC


@pytest.mark.parametrize("name", ["convert_id_to_path", "caption_llama3", "filter_panda10m"])
def test_what_was_left_out_has_a_reason(name):
    (row,) = re.findall(rf"^\| `[^|]*{name}[^|]*` \| left out \| (.+) \|$", DOC, re.MULTILINE)
    assert len(row) > 20


def test_options_of_datautil_are_there(capsys):
    with pytest.raises(SystemExit):
        read_arguments(["--help"])
    assert not set(OPTIONS) - set(re.findall(r"^  (?:-\w.*, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))


def test_columns_have_their_names():
    assert {name: all_columns(scorer(name))[0] for name in SCORES} == SCORES
    assert "timestamp" in SceneDetect("content").columns
    assert {"num_frames", "height", "width", "aspect_ratio", "resolution", "fps"} <= set(Probe().columns)
