"""SIGTERM and SIGUSR1 end a training after the running optimizer step, in all processes after the same one.

Cluster schedulers send them before they take a machine away. A signal may reach one process only, or each at another
moment, so after every step the processes agree whether one of them got it. It may also reach a process twice: some
schedulers signal every process of a job, and a launcher among them forwards the signal. So what comes within
`SAME_REQUEST_S` is a copy of the same request, and only a SIGTERM that comes later ends the process at once.

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
    """Notes the signals while it is entered, and restores the handlers of before.

    Before the training itself begins, and on a SIGTERM that comes more than `SAME_REQUEST_S` after the first, a signal
    ends the process at once. A process that got one is expected to end: copies that come after the exit are ignored, and
    that signal's handler is not restored.

    Attributes:
        stopping: True once the processes agreed to stop.
        reason: the signal's name, in all processes.
    """

    def __init__(self, world: World) -> None:
        self.stopping, self.reason = False, ""
        self._received: set[int] = set()
        self._begun, self._process = False, os.getpid()
        self._handlers: dict[int, Any] = {}
        self._timer = _SigtermTimer()
        # on GPUs NCCL would make the host wait for the device in every step
        self._group = host_group(world, world.timeout)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            self._timer.listen()
            self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handlers:
            return
        self._timer.close()
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if number in self._received else handler)
        if signal.SIGTERM not in self._received:
            self._timer.send(0)
            self._timer.join()
            return
        self._timer.send(signal.SIGTERM)
        if self._timer.over:  # it may have been before SIG_IGN was set
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until `agreed` was True; a generator of them is closed then, such as a watchdog's."""
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
        """Whether any process got a signal, the same answer in all; all of them must call it after each step."""
        number = torch.tensor(max(self._received, default=0))
        if self._group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        if number:
            self._received.add(int(number))
            self.stopping, self.reason = True, signal.Signals(int(number)).name
        return self.stopping

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child, which has this handler too, and the socket
            return
        if not self._begun:
            raise SystemExit(128 + number)  # a shell's exit code for a program that a signal ended
        self._received.add(number)
        if number == signal.SIGTERM:
            self._timer.send(number)


class _SigtermTimer(threading.Thread):
    """Lets SIGTERM end the process, as it does by default, `SAME_REQUEST_S` after the first one.

    A handler written in Python runs in the main thread alone, and not while that waits in a collective call: the very
    time when somebody sends SIGTERM, and sends it again. So Python's handler in C writes the signal's number to a socket, at
    once, and this thread reads it there; later it restores the system's own handler, past Python's.

    Attributes:
        over: True when that is about to be done, or is.
    """

    def __init__(self) -> None:
        super().__init__(name="SIGTERM timer", daemon=True)
        self.over = False
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)  # as `set_wakeup_fd` requires
        self._before = -1

    def listen(self) -> None:
        self.start()
        self._before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        _LISTENING.add(self)

    def close(self) -> None:
        _LISTENING.discard(self)
        signal.set_wakeup_fd(self._before)

    def send(self, number: int) -> None:
        """Start the time, as the first SIGTERM does; 0 ends the thread instead."""
        with suppress(BlockingIOError):  # the socket is full of signals
            self._sender.send(bytes([number]))

    def run(self) -> None:
        """Wait for the first SIGTERM, and then for the time."""
        while (number := self._receiver.recv(1)[0]) != signal.SIGTERM:
            if number == 0:
                return
        time.sleep(SAME_REQUEST_S)
        self.over = True
        ctypes.pythonapi.PyOS_setsig(ctypes.c_int(signal.SIGTERM), ctypes.c_void_p(signal.SIG_DFL))


_LISTENING: set[_SigtermTimer] = set()


# else a signal that ends a data worker would be read as this process' own, through the socket that both have
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if _LISTENING else None)
