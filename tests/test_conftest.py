"""The shared fixtures do what they promise: a failure in a process or a script is seen."""

import contextlib
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests import conftest


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


@pytest.mark.parametrize(("cpu_s", "ci"), [(0.3, "true"), (0.3, ""), (0.0, "true")])
def test_a_slow_test_that_is_not_marked_fails_in_ci_and_warns_elsewhere(request, monkeypatch, cpu_s, ci):
    with monkeypatch.context() as shorter:  # not when pytest's own hook looks at this test
        shorter.setattr(conftest, "SLOW_CPU_S", 0.02)
        shorter.setenv("CI", ci)
        call = conftest.pytest_runtest_call(request.node)
        next(call)
        end = time.process_time() + cpu_s
        while time.process_time() < end:
            pass
        if cpu_s == 0:
            outcome = contextlib.nullcontext()
        elif ci:
            outcome = pytest.raises(pytest.fail.Exception, match="mark it `slow`")
        else:
            outcome = pytest.warns(pytest.PytestWarning, match="mark it `slow`")
        with outcome:
            next(call, None)
