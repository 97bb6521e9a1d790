"""The examples of the documentation run at toy size."""

import re
from pathlib import Path

import pytest

EXAMPLES = sorted(path.name for path in (Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_takes_two_steps(name, run_script):
    done = run_script(f"docs/examples/{name}", "--toy")
    assert done.code == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([0-9.]+),", done.stdout, re.MULTILINE)]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)
