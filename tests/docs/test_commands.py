"""Every command of README and docs names a program that exists, with options that it takes and configs that are there."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from opensora.config.resolve import Draft

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# what stands for CONFIG and the like
CONFIGS = {
    "scripts/train_vae.py": "configs/vae/train/video-small.py",
    "scripts/inference.py": "configs/opensora/inference/16x256x256.py",
    "opensora sample": "configs/opensora/inference/16x256x256.py",
    "opensora demo": "configs/opensora/inference/16x256x256.py",
    "scripts/inference_vae.py": "configs/vae/inference/video.py",
    "assets.build.start_vae": "configs/vae/train/video-small.py",
}
# what a command in a sentence, or one for a CONFIG of the reader's, may leave out
LEFT_OUT = (
    r"no config file given;.*|data_path is not set: .*|.*the following arguments are required: .*|--check: DIR has .*"
)
CONFIG_NAMES = r"(?:TRAIN_)?CONFIG|CHECKPOINT|outputs/\S*step\d+|/path/to/\S+|\S*nova\.yml"
ELSEWHERE = {"pytest", "venv", "http.server"}  # modules that are not this project's


class Command(NamedTuple):
    program: str  # a module, or the path of a script
    argv: list[str]
    text: str


class Parsed(BaseException):
    """A program has read all of its command line."""


def commands(page: Path) -> list[Command]:
    """Those in shell blocks, and those in code spans that begin with `python`, `torchrun` or `opensora`."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(?:bash|sh|shell)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if "git checkout" not in line]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += re.findall(r"`((?:python|torchrun|opensora) [^`]+)`", prose.replace("\n", " "))
    return [found for line in lines for part in re.split(r" (?:&&|\|) ", line) if (found := command(part)) is not None]


def command(line: str) -> Command | None:
    """What a line of a shell runs, if it is a program of this project."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # half of a loop, or of a text over several lines
        return None
    words = [word.strip("[]") for word in words if word != "..."]
    for i, word in enumerate(words):
        if word == "opensora" and i == 0:
            return Command(word, words[1:], line)
        if word == "-m" and words[i + 1 :]:
            return None if words[i + 1] in ELSEWHERE else Command(words[i + 1], words[i + 2 :], line)
        if word.endswith(".py") and any(re.search(r"python|torchrun", before) for before in words[:i]):
            return Command(word, words[i + 1 :], line)
    return None


def placeholders(argv: list[str], program: str) -> list[str]:
    """With files of the repository for CONFIG, a checkpoint's folder, and configs of a clone of Open-Sora; numbers for N."""
    program = " ".join([program, *argv[:1]]) if program == "opensora" else program
    config = CONFIGS.get(program, "configs/opensora/train/16x256x256.py")
    meant = {r"Open-Sora/(configs/\S+)": r"\1", CONFIG_NAMES: config, "N": "8", "my-clips|FOLDER": "assets/clips"}
    for name, value in meant.items():
        argv = [re.sub(f"^(?:{name})$", value, word) for word in argv]
    return argv


@pytest.fixture
def stops_when_parsed(monkeypatch):
    """Programs end as soon as they have read their command line: their own options by argparse, a config by `Draft`."""

    def stop(method):
        def parse(*args, **kwargs):
            method(*args, **kwargs)
            raise Parsed

        return parse

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop(argparse.ArgumentParser.parse_args))
    monkeypatch.setattr(Draft, "finish", stop(Draft.finish))
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.usefixtures("stops_when_parsed", "forget_own_parts")
@pytest.mark.parametrize("page", filter(commands, PAGES), ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore")
def test_commands_can_be_read(page, monkeypatch, capsys):
    wrong = []
    for program, argv, text in commands(page):
        if {"--deepspeed", "NAME", "PROGRAM"} & {
            program,
            *argv,
        }:  # tests/scripts/test_train_nova_guide.py has the first
            continue
        monkeypatch.setattr(sys, "argv", [program, *placeholders(argv, program)])
        capsys.readouterr()
        try:
            if program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except Parsed:
            continue
        except SystemExit as ended:
            said = capsys.readouterr().err.strip()
            if ended.code and not re.fullmatch(LEFT_OUT, said.rpartition("error: ")[2]):
                wrong.append(f"{text}\n    {said[-1000:]}")
        except (ImportError, OSError) as error:
            wrong.append(f"{text}\n    {error!r}")
    assert not wrong, "\n".join(wrong)


def test_the_commands_are_found():
    assert sum(len(commands(page)) for page in PAGES) > 150
    assert command("torchrun --nproc_per_node 8 -m tools.scoring t.parquet --out s.parquet").argv[0] == "t.parquet"
    assert command("python scripts/train.py CONFIG --lr 1  # a remark").argv == ["CONFIG", "--lr", "1"]
