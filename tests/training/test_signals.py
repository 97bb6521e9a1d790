"""A signal ends a training after its step; before the training, and when it comes again later, it ends the process."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

from opensora.acceleration.distributed import World
from opensora.checkpoint.load import latest_checkpoint
from opensora.config.schema import LoopConfig
from opensora.training import signals
from opensora.training.run import RunState
from opensora.training.saver import Saver
from opensora.training.signals import SIGNALS, StopSignals
from tests.forks import forked

WORLD = World(0, 1, torch.device("cpu"))
CONTEXT = get_context("fork")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A process that got a signal ignores copies of the signal to its end; pytest's continues."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@contextmanager
def started(target: Callable[..., None], *args: object) -> Iterator[ForkProcess]:
    process = CONTEXT.Process(target=forked, args=(target, *args))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_running_step_is_the_last(number):
    done = []
    with StopSignals(WORLD) as stop:
        for item in stop.until(range(10)):
            if item == 3:
                os.kill(os.getpid(), number)
            done.append(item)
            stop.agreed()
    assert done == [0, 1, 2, 3]
    assert (stop.stopping, stop.reason) == (True, "Ctrl-C" if number == signal.SIGINT else number.name)


def test_without_a_signal_nothing_changes():
    before, threads = [signal.getsignal(n) for n in SIGNALS], threading.active_count()
    with StopSignals(WORLD) as stop:
        assert [item for item in stop.until(range(3)) if not stop.agreed()] == [0, 1, 2]
    assert not stop.stopping
    assert stop.reason == ""
    assert [signal.getsignal(n) for n in SIGNALS] == before
    assert threading.active_count() == threads


@pytest.mark.nightly
@pytest.mark.slow
def test_before_the_training_begins_there_is_nothing_to_save():
    with StopSignals(WORLD), pytest.raises(SystemExit) as exit_:
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_.value.code == 143


# ---------------------------------------------------------------------------------- copies of one request, and later ones
def wait_for(file: Path) -> None:
    """Until the other process has made it; an Event of multiprocessing waits for ever for a process that is dead."""
    end = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < end, f"{file.name} did not come"
        time.sleep(0.005)


def train_and_save(folder: Path, phase: str) -> None:
    """The first signal finds a step, the second one comes in `phase`."""

    def perhaps(here: str) -> None:
        if here == phase:
            (folder / "reached").touch()
            wait_for(folder / "second sent")

    with StopSignals(WORLD) as stop:
        saver = Saver(folder / "run", WORLD, LoopConfig(), {"model": "toy"})
        for step in stop.until(count(1)):
            (folder / "stepping").touch()
            wait_for(folder / "first sent")
            perhaps("step")
            if stop.agreed():
                saver.save(RunState("d", 1, step=step), {"model": {"w": torch.ones(4)}})
        perhaps("save")
        saver.wait()
    perhaps("end")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", ["step", "save", "end"])
def test_a_copy_of_the_signal_changes_nothing(tmp_path, phase, number):
    """A launcher hands on what the scheduler sent to all processes; steps, and the saving, may take less time than that."""
    (tmp_path / "run").mkdir()
    with started(train_and_save, tmp_path, phase) as process:
        wait_for(tmp_path / "stepping")
        os.kill(process.pid, number)
        (tmp_path / "first sent").touch()
        wait_for(tmp_path / "reached")
        time.sleep(0.05)
        os.kill(process.pid, number)
        (tmp_path / "second sent").touch()
        process.join(60)
        assert process.exitcode == 0
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "epoch0-global_step1"


def hang(folder: Path, where: str) -> None:
    signals.SAME_REQUEST_S = signals.SAME_INTERRUPT_S = 0.5
    with StopSignals(WORLD) as stop:
        for _ in stop.until(range(1), folder / "run"):
            (folder / "stepping").touch()
            wait_for(folder / "first sent")
            if where == "in a step":
                time.sleep(60)
            if where == "in a call that does not come back":  # handlers that are written in Python have to wait for it
                hashlib.pbkdf2_hmac("sha256", b"", b"", 2**30)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a step", "in a call that does not come back", "after the end"])
def test_a_sigterm_that_comes_later_ends_the_process_at_once(tmp_path, where):
    with started(hang, tmp_path, where) as process:
        wait_for(tmp_path / "stepping")
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(process.pid, number)
            time.sleep(0.05)
        (tmp_path / "first sent").touch()
        process.join(1)
        assert process.exitcode is None
        os.kill(process.pid, signal.SIGTERM)
        process.join(10)
        assert process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize("where", ["in a step", "in a call that does not come back"])
def test_a_second_ctrl_c_ends_the_process_at_once_and_names_the_checkpoint(tmp_path, where, capfd):
    (tmp_path / "run").mkdir()
    saver = Saver(tmp_path / "run", WORLD, LoopConfig(), {"model": "toy"})
    saver.save(RunState("d", 1, step=7), {"model": {"w": torch.ones(4)}})
    saver.wait()
    with started(hang, tmp_path, where) as process:
        wait_for(tmp_path / "stepping")
        for _ in range(2):  # the terminal's, and a launcher's copy
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.05)
        (tmp_path / "first sent").touch()
        process.join(0.7)
        assert process.exitcode is None
        os.kill(process.pid, signal.SIGINT)
        process.join(10)
        assert process.exitcode == 130
    error = capfd.readouterr().err
    assert error.count("Ctrl-C: finishing this step") == 1
    assert f"last checkpoint: {tmp_path / 'run' / 'epoch0-global_step7'}" in error


def hang_in_a_call(folder: Path) -> None:
    signals.SAME_REQUEST_S = 0.5
    with StopSignals(WORLD) as stop:
        for _ in stop.until(range(1)):
            (folder / "stepping").touch()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**30)


@pytest.mark.slow
def test_also_where_the_first_one_comes_within_a_call_that_does_not_come_back(tmp_path):
    """A collective call that another process never joins: no handler that is written in Python runs in it."""
    with started(hang_in_a_call, tmp_path) as process:
        wait_for(tmp_path / "stepping")
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        process.join(1)
        assert process.exitcode is None
        os.kill(process.pid, signal.SIGTERM)
        process.join(10)
        assert process.exitcode == -signal.SIGTERM


def test_what_ends_a_child_is_no_signal_to_its_parent(monkeypatch):
    """A loader ends its workers so; they have the parent's handlers, and its socket."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.01)
    with StopSignals(WORLD) as stop:
        list(stop.until(range(1)))
        if (child := os.fork()) == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.2)  # it has to have begun
        os.kill(child, signal.SIGTERM)
        time.sleep(0.2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not stop._timer.over  # as it would be by now, had it heard of a SIGTERM
        assert not stop.agreed()


def signalled_by_another(rank: int, world_size: int, tmp_path: Path) -> None:
    with StopSignals(World(rank, world_size, torch.device("cpu"))) as stop:
        for step in stop.until(count(1)):
            if (rank, step) == (0, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            stop.agreed()
    assert (step, stop.reason) == (3, "SIGTERM")
    os.kill(os.getpid(), signal.SIGTERM)  # as late as this on rank 1, which had none
    time.sleep(0.05)
    (tmp_path / f"{rank}").touch()


@pytest.mark.multiprocess
def test_a_signal_that_is_late_on_one_process(spawn, tmp_path):
    spawn(signalled_by_another, 2, tmp_path)
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
