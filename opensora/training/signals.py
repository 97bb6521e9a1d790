"""SIGTERM and SIGUSR1 end a training after the running optimizer step, in all processes after the same one.

Schedulers of clusters send them before they take a machine away. A signal may reach one process only, or each at another
moment, so after every step all processes ask each other whether one of them was told to stop. It may also reach a process
twice: some schedulers signal every process of a job, and a launcher among them hands on what it got. So what comes within
`SAME_REQUEST_S` is a copy of the same request, and only a SIGTERM that comes later means: now.

    with StopSignals(world) as stop:
        for batch in stop.until(batches):
            ...                                   # a step
            if due(...) or stop.agreed(): save

SIGINT is left alone: Ctrl-C ends the program at once, the first as well as the second, with nothing saved.
"""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from opensora.acceleration.distributed import World, host_group

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_S = 5.0  # copies are milliseconds apart; somebody who loses patience takes longer


class StopSignals:
    """Notes the signals while it is entered, and restores what they did before.

    Before the training itself begins, and on a SIGTERM that comes more than `SAME_REQUEST_S` after the first, a signal
    ends the process at once. A process that was told to stop is expected to end: copies that come after the exit are
    ignored, and what the signals did before is not restored.

    Attributes:
        stopping: True once the processes agreed to stop.
        reason: the signal's name, in all processes.
    """

    def __init__(self, world: World) -> None:
        self.stopping, self.reason = False, ""
        self._told: set[int] = set()
        self._begun, self._process = False, os.getpid()
        self._before: dict[int, Any] = {}
        self._patience = _Patience()
        # on GPUs NCCL would make the host wait for the device in every step
        self._group = host_group(world, world.timeout)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # nobody else may
            self._patience.listen()
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._before:
            return
        self._patience.close()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if number in self._told else handler)
        if signal.SIGTERM not in self._told:
            self._patience.cancel()
            return
        self._patience.begin()
        if self._patience.over:  # it may have been before SIG_IGN was set
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until `agreed` said that it is time to stop; a generator of them is closed then, such as a watchdog's."""
        self._begun = True
        try:
            for item in items:
                yield item
                if self.stopping:
                    break
        finally:
            if isinstance(items, Generator):
                items.close()

    def agreed(self) -> bool:
        """Whether any process was told to stop; all of them must ask, after each step. The same answer for all."""
        number = torch.tensor(max(self._told, default=0))
        if self._group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        if number:
            self._told.add(int(number))
            self.stopping, self.reason = True, signal.Signals(int(number)).name
        return self.stopping

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child, which has this handler too, and the socket
            return
        if not self._begun:
            raise SystemExit(128 + number)  # as the shell says that a signal ended a program
        self._told.add(number)
        if number == signal.SIGTERM:
            self._patience.begin()


class _Patience(threading.Thread):
    """Lets SIGTERM end the process, as it does by default, `SAME_REQUEST_S` after the first one.

    A handler written in Python runs in the main thread alone, and not while that waits in a collective call: the very
    time when somebody sends SIGTERM, and sends it again. So Python's handler in C writes the signal's number to a socket, at
    once, and this thread reads it there; later it has the system's own handler put back, past Python's.

    Attributes:
        over: True when that is about to be done, or is.
    """

    def __init__(self) -> None:
        super().__init__(name="patience after SIGTERM", daemon=True)
        self.over = False
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)  # so it has to be, for a handler
        self._before = -1

    def listen(self) -> None:
        """From now on hear of signals."""
        self.start()
        self._before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        _LISTENING.add(self)

    def close(self) -> None:
        """Hear of no more signals."""
        _LISTENING.discard(self)
        signal.set_wakeup_fd(self._before)

    def begin(self) -> None:
        """The first SIGTERM has come, or a further one, which changes nothing."""
        with suppress(BlockingIOError):  # so many are waiting that one more says nothing
            self._mouth.send(bytes([signal.SIGTERM]))

    def cancel(self) -> None:
        """None has come, and none will be noted."""
        self._mouth.send(bytes([0]))
        self.join()

    def run(self) -> None:
        """Wait for the first call, and then for the time."""
        while (heard := self._ear.recv(1)[0]) != signal.SIGTERM:
            if heard == 0:
                return
        time.sleep(SAME_REQUEST_S)
        self.over = True
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(signal.SIGTERM), ctypes.c_void_p(signal.SIG_DFL))


_LISTENING: set[_Patience] = set()


def _hear_nothing_in_a_child() -> None:
    """Else what ends a data worker would be taken for a signal to this process, through the socket that both have."""
    if _LISTENING:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_hear_nothing_in_a_child)
