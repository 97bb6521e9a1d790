"""A hang ends within its time, in every process, with stacks and a message; slow work that is announced does not."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from opensora.acceleration.distributed import World
from opensora.training import watchdog
from opensora.training.signals import StopSignals
from opensora.training.watchdog import EXIT_CODE, Watchdog, collective_timeout

HANG = """
import sys, time
from pathlib import Path
import torch
from opensora.acceleration.distributed import init_world
from opensora.training.watchdog import Watchdog, collective_timeout

def read_a_slow_disk():
    time.sleep(600)

limit_s = 3.0
world = init_world("cpu", timeout=collective_timeout(limit_s))
with Watchdog(limit_s, world) as dog:
    for step in dog.watch(range(9), Path(sys.argv[1]), about=lambda: "worker 0 was reading clip.mp4."):
        torch.distributed.all_reduce(torch.ones(1)) if world.size > 1 else None
        if step == 2 and world.rank == world.size - 1:
            read_a_slow_disk()
"""


def hang(folder: Path, *launcher: str) -> tuple[subprocess.CompletedProcess, float]:
    (folder / "hang.py").write_text(HANG)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launcher, str(folder / "hang.py"), str(folder)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    return done, time.monotonic() - begin


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_process_sleeps_and_all_say_so(tmp_path):
    done, seconds = hang(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert done.returncode != 0
    assert seconds < 100
    for rank in (0, 1):
        report = (tmp_path / f"stacks-rank{rank}.txt").read_text()
        step = 4 - rank  # process 0 waits for the other in the next one
        assert f"process {rank} of 2: step {step} of this process has taken longer than step_timeout_min=0.05" in report
        assert "worker 0 was reading clip.mp4." in report
        assert "--step-timeout-min" in report
        assert ("read_a_slow_disk" in report) == (rank == 1)
        assert ("all_reduce" in report) == (rank == 0)
        assert f"error: process {rank} of 2" in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_alone(tmp_path):
    done, _ = hang(tmp_path)
    assert done.returncode == EXIT_CODE
    assert "read_a_slow_disk" in done.stderr
    assert "read_a_slow_disk" in (tmp_path / "stacks-rank0.txt").read_text()


@pytest.fixture
def ended(monkeypatch):
    """Set when a watchdog ends its process, which it must not do to the tests."""
    ends = threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ends.set())
    return ends


def alone() -> World:
    return World(0, 1, torch.device("cpu"))


def test_steps_in_time_and_announced_slow_work(tmp_path, ended):
    with Watchdog(0.3, alone()) as dog:
        for step in dog.watch(range(4), tmp_path):
            time.sleep(0.6 if step == 0 else 0.1)  # the first step may take longer
            if step == 2:
                with dog.extended_timeout():
                    time.sleep(0.5)
        time.sleep(0.5)  # after the last step
    assert not ended.is_set()
    assert list(tmp_path.iterdir()) == []


def test_a_loader_that_hangs(tmp_path, ended):
    def batches():
        yield 1
        ended.wait(5)

    with Watchdog(0.2, alone()) as dog:
        for _ in dog.watch(batches(), tmp_path):
            pass
    assert ended.is_set()


def test_an_error_ends_the_watch(tmp_path, ended):
    dog = Watchdog(0.2, alone())
    with pytest.raises(ZeroDivisionError), dog:
        [1 / step for step in dog.watch(range(4), tmp_path)]
    time.sleep(0.4)
    assert not ended.is_set()
    assert not dog._thread.is_alive()


def test_slow_work_that_fails_gives_its_time_back(tmp_path):
    with Watchdog(1000, alone()) as dog:
        for _ in dog.watch([1], tmp_path):
            with contextlib.suppress(OSError), dog.extended_timeout():
                raise OSError("the disk is full")
            assert dog._deadline is not None
            assert dog._deadline - time.monotonic() <= 1000


def test_collective_calls_are_more_patient_than_the_watchdog():
    assert collective_timeout(60) > timedelta(hours=2)
    assert collective_timeout(3600 * 10) > timedelta(hours=40)


def test_after_a_stop_signal_the_last_checkpoint_has_all_the_time_it_needs(tmp_path):
    with StopSignals(alone()) as stop, Watchdog(1000, alone()) as dog:
        watched = dog.watch([1, 2, 3], tmp_path)  # held here, as a training loop holds it
        for _ in stop.until(watched):
            assert dog._deadline is not None
            os.kill(os.getpid(), signal.SIGUSR1)
            stop.agreed()
        assert dog._deadline is None
