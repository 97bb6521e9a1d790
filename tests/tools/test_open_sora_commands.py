"""Commands, options and columns of Open-Sora's tools are here, or docs/how-to/data-processing.md says why not."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import distributions
from pathlib import Path

import pytest

from opensora.datasets.table.files import read_frame
from opensora.utils.errors import UserError
from scripts import open_sora
from scripts.open_sora import COMMANDS, translated
from tools.datasets.datautil.__main__ import read_arguments
from tools.footage.stages import Probe
from tools.scene_cut.scorers import SceneDetect
from tools.scoring.registry import all_columns, scorer

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "how-to" / "data-processing.md").read_text()
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


@pytest.fixture
def table(tmp_path) -> Path:
    shutil.copy(ROOT / "assets" / "clips" / "white_dog.mp4", tmp_path)
    path = tmp_path / "meta.csv"
    path.write_text("path\nwhite_dog.mp4\n")
    return path


def run(monkeypatch, file: str, *argv: object) -> None:
    """A file as `python FILE ...` runs it."""
    monkeypatch.setattr(sys, "argv", [file, *map(str, argv)])
    runpy.run_path(str(ROOT / file), run_name="__main__")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_old_name_is_a_file_that_runs_ours_or_names_it(name, monkeypatch, capsys):
    if name.startswith("tools/"):  # also by `python -m`, which torchrun was given
        assert importlib.util.find_spec(name.removesuffix(".py").replace("/", "."))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, "--help")
    shown = capsys.readouterr()
    if " " in COMMANDS[name].command:
        assert (ended.value.code, "Instead: " in shown.err) == (2, True)
    else:
        assert COMMANDS[name].command in shown.out
        assert ended.value.code == 0


@pytest.mark.parametrize(
    ("name", "column"),
    [("tools/scoring/optical_flow/inference.py", "flow"), ("tools/caption/camera_motion_detect.py", "cmotion")],
)
def test_an_old_command_scores_a_table_under_its_old_name(name, column, table, monkeypatch, capsys):
    switches = ("--disable-parallel",) if column == "cmotion" else ("--bs", 4, "--num_workers", 0, "--skip_if_existing")
    run(monkeypatch, name, table, *switches, *(("--num-workers", 0) if column == "cmotion" else ()))
    assert read_frame(table.with_name(f"meta_{column}.csv"))[column].notna().all()
    if column == "flow":
        run(monkeypatch, name, table, *switches)
        assert "is there already" in capsys.readouterr().out


def test_a_share_of_each_bucket_is_no_split(table, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "tools/datasets/split.py", table, "-o", "subset.csv", "-c", "config.py", "-l", "1000")
    assert "datautil TABLE --sample N --output OUT" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(
    not any(dist.name == "opensora" for dist in distributions()), reason="needs the installed package: pip install -e ."
)
def test_scenes_are_found_and_cut_by_the_paths_of_the_readme(table):
    def python(*words: object) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=table.parent, env=environment)

    python(ROOT / "tools/scene_cut/scene_detect.py", table)
    scenes = table.with_name("meta_timestamp.csv")
    python(ROOT / "tools/scene_cut/cut.py", scenes, "--save_dir", "clips", "--shorter_size", 64, "--min_seconds", 0.5)
    (clip,) = read_frame(table.with_name("meta_timestamp_clips.csv"))["path"]
    assert (table.parent / clip).is_file()


def test_gpt4_captions_come_from_the_endpoint_with_the_key(table, monkeypatch):
    pytest.importorskip("openai")
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.headers["Authorization"], len(request["messages"][0]["content"]) - 1))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": "a dog runs"}}]}).encode())

        def log_message(self, *_):
            pass

    monkeypatch.setenv("OPENAI_API_KEY", "another")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        words = [table, "--key", "secret", "--prompt", "video-f3-detail-3ex", "--endpoint", url, "--num-workers", 0]
        run(monkeypatch, "tools/caption/caption_gpt4.py", *words)
        server.shutdown()
    assert seen == [("Bearer secret", 3)]
    assert list(read_frame(table.with_name("meta_caption.csv"))["text"]) == ["a dog runs"]


def test_options_of_theirs_become_ours(table, monkeypatch, capsys):
    monkeypatch.setattr(open_sora, "has_gpu", lambda: True)
    llava = translated(
        "tools/caption/caption_llava.py",
        [str(table), "--dp-size", "8", "--model-path", "liuhaotian/llava-v1.6-mistral-7b", "--prompt", "image-3ex"],
    )
    assert llava[-4:] == ["--model", "llava-hf/llava-v1.6-mistral-7b-hf", "--prompt", "image"]
    assert llava[llava.index("--device") + 1] == "cuda"
    assert "--dp-size has no effect" in capsys.readouterr().out
    with_text = translated("tools/caption/caption_llava.py", [str(table), "--prompt", "video-f1-detail-2ex-text"])
    assert with_text[-4:] == ["--prompt", "refine", "--column", "caption"]
    words = [str(table), "--num_frames", "2", "--accumulate", "1", "--set", "aesthetic.model=here", "--device", "cpu"]
    scores = translated("tools/scoring/aesthetic/inference.py", words)
    assert scores[-1] == "aesthetic.points=0.25,0.75"
    assert scores.index("aesthetic.model=here") > scores.index("aesthetic.model=openai/clip-vit-large-patch14")
    assert "cuda" not in scores
    with pytest.raises(UserError, match=r"is a folder: make a table of it first, python -m tools\.datasets\.convert"):
        translated("tools/caption/caption_llava.py", [str(table.parent), "captions.csv"])
