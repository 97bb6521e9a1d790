"""The examples of the documentation run at toy size."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from opensora.training.lora import target_names

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("train_*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_takes_two_steps(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--toy"])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    check(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.nightly
def test_an_example_is_a_program(run_script):
    done = run_script(f"docs/examples/{EXAMPLES[0]}", "--toy")
    assert done.code == 0, done.stderr
    check(done.stdout)


@pytest.mark.usefixtures("forget_own_parts")
def test_the_model_of_the_tutorial(monkeypatch):
    """Its page's last block: a batch of two equals two batches of one. Its layers are those that LoRA finds."""
    monkeypatch.chdir(FOLDER.parents[1])
    page = (FOLDER.parent / "get-started/own-model.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(page.split("```python\n")[-1].split("```")[0], names)
    assert names["both"].abs().mean() > 0.01
    assert len(target_names(names["model"], "attention")) == 4


def check(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([0-9.]+),", printed, re.MULTILINE)]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)
