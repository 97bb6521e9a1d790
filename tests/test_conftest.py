"""The shared fixtures do what they promise: a failure in a process or a script is seen."""

from pathlib import Path

import pytest
import torch
from torch import distributed


def all_ranks_meet(rank: int, world_size: int, tmp_path: Path) -> None:
    total = torch.tensor([rank + 1])
    distributed.all_reduce(total)
    (tmp_path / f"{rank}").write_text(str(total.item()))


def last_rank_fails(rank: int, world_size: int, tmp_path: Path) -> None:
    assert rank != world_size - 1, "the last rank fails"


@pytest.mark.multiprocess
def test_spawn_forms_one_group(spawn, tmp_path):
    spawn(all_ranks_meet, 2, tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3", "3"]


@pytest.mark.multiprocess
def test_spawn_hands_on_a_failure(spawn, tmp_path):
    with pytest.raises(Exception, match="the last rank fails"):
        spawn(last_rank_fails, 2, tmp_path)


def test_run_script_returns_code_and_output(run_script, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, opensora\nprint(sys.argv[1])\nsys.exit('wrong')\n")
    assert run_script(str(script), "--flag") == (1, "--flag\n", "wrong\n")
