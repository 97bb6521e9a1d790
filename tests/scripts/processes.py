"""Processes that run scripts/train.py, to be signalled, killed and waited for."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from opensora.checkpoint.load import complete_checkpoints
from tests.conftest import PRELOADED, begin_rank, free_ports
from tests.scripts.conftest import run_scripts


@contextmanager
def processes(size: int, config: Path, outputs: Path, *options: str) -> Iterator[list[BaseProcess]]:
    """`size` processes of one group that run scripts/train.py, each the leader of a session: a signal can reach it and its workers alone."""
    run = [*free_ports(1), str(config), f"--outputs={outputs}", *options]
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=_lead, args=(rank, size, run, dict(os.environ))) for rank in range(size)]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def _lead(rank: int, size: int, run: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    begin_rank(rank, run_scripts, (size, [run]), environment)


def finish(started: list[BaseProcess], timeout_s: float = 400) -> None:
    """Wait for all; each must end well. Its last lines is in the test's output."""
    for process in started:
        process.join(timeout_s)
        assert process.exitcode == 0


def wait_for(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def last_step(outputs: Path) -> int:
    return int(complete_checkpoints(outputs / "run")[-1].name.rpartition("step")[2])
