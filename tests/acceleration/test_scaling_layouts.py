"""dp x sp layouts of four and eight processes, over 6 steps: losses, gradient norms and EMA of one process, and resumes.

Here over gloo; tests/test_gpu_scaling.py runs the same over NCCL. A layout is DP x SP: so many samples at once, each of them
shared by so many processes.
"""

from pathlib import Path

import pytest
import torch

from tests.acceleration.scaling_layouts import (
    TOLERANCE,
    Case,
    Outcome,
    compare,
    one_process_goes_on,
    run_rank,
    toy,
    write_expected,
)
from tests.conftest import start_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaling")
    write_expected(path, torch.device("cpu"))
    return path


def run_on_cpus(case: Case, folder: Path, timeout_s: float = 600) -> None:
    start_ranks(run_rank, (case, folder, "cpu"), case.size, str(case), timeout_s)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("layouts", 2, 2), Case("layouts", 1, 4), Case("layouts", 2, 4), Case("layouts", 4, 2)], ids=str
)
def test_layouts_train_as_one_process(case, folder):
    run_on_cpus(case, folder)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("resume", 2, 2), Case("resume", 2, 4), Case("resume", 4, 2)], ids=str)
def test_other_layouts_go_on_with_a_checkpoint(case, folder):
    run_on_cpus(case, folder)
    one_process_goes_on(case, folder, torch.device("cpu"))


@pytest.mark.slow
def test_a_training_that_differs_is_reported(folder):
    """Gradients 1 % too large, losses that are off by a thousandth, an EMA that was never updated."""
    expected = Outcome(*torch.load(folder / "expected.pt")["fp32"])
    begin = {name: value.float() for name, value in toy().state_dict().items()}
    compare(expected, expected, TOLERANCE["fp32"], "the same")
    for wrong in (
        Outcome(expected.seen * torch.tensor([1.0, 1.01]), expected.ema),
        Outcome(expected.seen * torch.tensor([1.001, 1.0]), expected.ema),
        Outcome(expected.seen, begin),
    ):
        with pytest.raises(AssertionError, match="wrong: "):
            compare(wrong, expected, TOLERANCE["fp32"], "wrong")
