"""Threads of a CPU: how many, what limits them, and that the way in which OpenMP waits is set before torch is loaded."""

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opensora.acceleration import threads
from opensora.acceleration.threads import cpu_quota, limit_cpu_threads
from opensora.utils.logging import show_messages

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    """PyTorch has four threads, as on a machine with four cores, and the user has set none."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("environment", "quota", "expected", "line"),
    [
        ({}, None, 4, "CPU: 4 threads (OMP_NUM_THREADS sets another number)"),
        ({}, 8.0, 4, "CPU: 4 threads (OMP_NUM_THREADS sets another number)"),
        ({}, 2.5, 2, "CPU: 2 threads, limited from 4 (OMP_NUM_THREADS sets another number)"),
        ({}, 0.5, 1, "CPU: 1 threads, limited from 4 (OMP_NUM_THREADS sets another number)"),
        ({"LOCAL_WORLD_SIZE": "2"}, None, 2, "CPU: 2 threads, limited from 4 (OMP_NUM_THREADS sets another number)"),
        ({"OMP_NUM_THREADS": "4"}, 2.5, 4, "CPU: 4 threads (OMP_NUM_THREADS)"),
        ({"MKL_NUM_THREADS": "4"}, 2.5, 4, "CPU: 4 threads (MKL_NUM_THREADS)"),
    ],
)
def test_the_quota_limits_the_threads_unless_the_user_sets_them(
    monkeypatch, caplog, environment, quota, expected, line
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    with caplog.at_level("INFO"):
        limit_cpu_threads.__wrapped__()
    assert torch.get_num_threads() == expected
    assert caplog.messages == [line]


def test_the_smallest_quota_of_a_group_and_its_parents_counts(tmp_path):
    processes = tmp_path / "cgroup"
    processes.write_text("1:name=systemd:/\n0::/slice/job\n")
    (tmp_path / "slice" / "job").mkdir(parents=True)
    assert cpu_quota(tmp_path, processes) is None
    (tmp_path / "slice" / "job" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, processes) is None
    (tmp_path / "slice" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, processes) == 1.5
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert cpu_quota(tmp_path, processes) == 1.5
    assert cpu_quota(tmp_path, tmp_path / "none") == 4  # a container sees its own group as the root


def test_quotas_of_version_1(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("50000\n")
    for quota, expected in (("-1", None), ("100000", 2)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert cpu_quota(tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_wait_passively_unless_the_user_says_otherwise(given, expected):
    code = "import os, sys, opensora; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected, "False"]


@pytest.mark.parametrize("path", [*sorted((ROOT / "scripts").glob("[a-z]*.py")), ROOT / "tools" / "__init__.py"])
def test_what_is_run_imports_opensora_before_torch(path):
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = [(getattr(node, "module", None) or node.names[0].name).partition(".")[0] for node in imports]
    loads_torch = [name for name in roots if name not in sys.stdlib_module_names and name != "tqdm"]
    assert loads_torch[:1] in ([], ["opensora"])


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("1", False)])
def test_messages_are_shown_by_the_main_process(monkeypatch, capsys, rank, shown):
    monkeypatch.setenv("RANK", rank)
    logger = logging.getLogger("opensora")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    show_messages()
    logger.info("hello")
    assert ("hello" in capsys.readouterr().err) == shown
