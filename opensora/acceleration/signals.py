"""SIGTERM and SIGUSR1 end a training after the running optimizer step, in all processes after the same one.

Schedulers of clusters send them before they take a machine away. A signal may reach one process only, or each at another
moment, so after every step all processes ask each other whether one of them was told to stop.

    with StopSignals(world) as stop:
        for batch in stop.until(batches):
            ...                                   # a step
            if due(...) or stop.agreed(): save
"""

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from opensora.acceleration.distributed import World, host_group

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes the signals while it is entered, and restores what they did before.

    Before the training itself begins, and on the second SIGTERM, a signal ends the process at once.

    Attributes:
        stopping: True once the processes agreed to stop.
        reason: the signal's name, in all processes.
    """

    def __init__(self, world: World) -> None:
        self.stopping, self.reason = False, ""
        self._received = 0
        self._training = False
        self._before: dict[int, Any] = {}
        # on GPUs NCCL would make the host wait for the device in every step
        self._group = host_group(world, world.timeout)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # nobody else may
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until `agreed` said that it is time to stop."""
        self._training = True
        for item in items:
            yield item
            if self.stopping:
                break
        self._training = False

    def agreed(self) -> bool:
        """Whether any process was told to stop; all of them must ask, after each step. The same answer for all."""
        number = torch.tensor(self._received)
        if self._group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        if number:
            self.stopping, self.reason = True, signal.Signals(int(number)).name
        return self.stopping

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._training:
            raise SystemExit(128 + number)  # as the shell says that a signal ended a program
        self._received = number
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)  # the next one ends the process at once
