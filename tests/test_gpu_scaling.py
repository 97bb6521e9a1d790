"""On four GPUs, or eight, over NCCL: every layout of data and sequence parallelism trains as one process, and resumes others' runs.

python -m pytest -m gpu -s tests/test_gpu_scaling.py

What they do is in tests/acceleration/test_scaling_layouts.py, which does the same over gloo. -s shows how far each layout is
from one process, and where each process is shortly before its time is over.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from tests.acceleration.scaling_layouts import Case, one_process_goes_on, run_rank, write_expected
from tests.conftest import join_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TIMEOUT_S = 120
CASES = [
    Case("layouts", 2, 2),
    Case("resume", 2, 2),
    Case("colossalai", 2, 2),
    Case("layouts", 4, 1),
    Case("layouts", 1, 4),
    Case("layouts", 2, 4),
    Case("layouts", 4, 2),
    Case("resume", 2, 4),
    Case("colossalai", 2, 4),
    Case("colossalai", 4, 2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaling")
    write_expected(path, torch.device("cuda", 0))
    return path


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_train_as_one_process(case, request):
    if torch.cuda.device_count() < case.size:
        pytest.skip(f"needs {case.size} GPUs")
    if case.kind == "colossalai" and importlib.util.find_spec("colossalai") is None:
        pytest.skip("needs ColossalAI: docs/how-to/speed.md says how to install it")
    folder = request.getfixturevalue("folder")  # after the skips: it takes a GPU
    context = torch.multiprocessing.spawn(run_rank, (case, folder, "cuda"), nprocs=case.size, join=False)
    join_ranks(context, str(case), TIMEOUT_S)
    if case.kind == "resume":
        one_process_goes_on(case, folder, torch.device("cuda", 0))
