"""A signal ends a training after its step; before the training, and when it comes again, it ends the process."""

import os
import signal
import time
from multiprocessing import get_context

import pytest
import torch

from opensora.acceleration.distributed import World
from opensora.acceleration.signals import SIGNALS, StopSignals
from tests.forks import forked

WORLD = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("number", SIGNALS)
def test_the_running_step_is_the_last(number):
    before = [signal.getsignal(n) for n in SIGNALS]
    done = []
    with StopSignals(WORLD) as stop:
        for item in stop.until(range(10)):
            if item == 3:
                os.kill(os.getpid(), number)
            done.append(item)
            stop.agreed()
    assert done == [0, 1, 2, 3]
    assert (stop.stopping, stop.reason) == (True, number.name)
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_without_a_signal_nothing_changes():
    with StopSignals(WORLD) as stop:
        assert [item for item in stop.until(range(3)) if not stop.agreed()] == [0, 1, 2]
    assert not stop.stopping
    assert stop.reason == ""


def test_before_the_training_begins_there_is_nothing_to_save():
    with StopSignals(WORLD), pytest.raises(SystemExit) as exit_:
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_.value.code == 143


def steps_for_ever(started) -> None:
    with StopSignals(WORLD) as stop:
        for _ in stop.until(range(1)):
            started.set()
            time.sleep(60)


def test_the_second_sigterm_ends_the_process_at_once():
    context = get_context("fork")
    started = context.Event()
    process = context.Process(
        target=forked,
        args=(
            steps_for_ever,
            started,
        ),
    )
    process.start()
    assert started.wait(30)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(process.pid, number)
        process.join(0.5)
        assert process.exitcode is None
    os.kill(process.pid, signal.SIGTERM)
    process.join(10)
    assert process.exitcode == -signal.SIGTERM
