"""SIGTERM, SIGUSR1 and Ctrl-C (SIGINT) end a training after the running step, in all processes after the same one.

Cluster schedulers send the first two before they take a machine away. A signal may reach one process only, or each at
another moment, so after every step the processes agree whether one of them got it. It may also reach a process twice:
some schedulers signal every process of a job, and a launcher among them forwards the signal. So what comes within
`SAME_REQUEST_S`, for Ctrl-C within `SAME_INTERRUPT_S`, is a copy of the same request, and only a SIGTERM or a Ctrl-C that
comes later ends the process at once.
"""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from opensora.acceleration.distributed import World, host_group
from opensora.checkpoint.load import latest_checkpoint
from opensora.utils.errors import INTERRUPTED

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_S = 5.0  # copies are milliseconds apart; somebody who loses patience takes longer
SAME_INTERRUPT_S = 1.0  # somebody at the keyboard does not


class StopSignals:
    """Notes the signals while it is entered, and restores the handlers of before.

    Before the training itself begins, a signal ends the process at once, as does a second SIGTERM or Ctrl-C, later than
    the copies of the first. A process that got one is expected to end: copies that come after the exit are ignored, and
    that signal's handler is not restored.

    Attributes:
        stopping: True once the processes agreed to stop.
        reason: the signal's name, in all processes.
    """

    def __init__(self, world: World) -> None:
        self.stopping, self.reason = False, ""
        self._run: Path | None = None
        self._is_main = world.is_main
        self._received: set[int] = set()
        self._begun, self._process = False, os.getpid()
        self._handlers: dict[int, Any] = {}
        self._timer = _SignalTimer(self._abandon)
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

    def until(self, items: Iterable[T], run: Path | None = None) -> Iterator[T]:
        """The items, until `agreed` was True; a generator of them is closed then, such as a watchdog's.

        `run` is the run's folder: a second Ctrl-C names its last checkpoint.
        """
        self._begun, self._run = True, run
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
            name = signal.Signals(int(number)).name
            self.stopping, self.reason = True, "Ctrl-C" if name == "SIGINT" else name
        return self.stopping

    @property
    def asked(self) -> bool:
        """Whether this process got a signal, before all agree."""
        return bool(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child, which has this handler too, and the socket
            return
        if not self._begun:
            raise SystemExit(128 + number)  # a shell's exit code for a program that a signal ended
        if number == signal.SIGINT and number not in self._received and self._is_main:
            os.write(2, b"\nCtrl-C: finishing this step, then saving a checkpoint. Press it again to end at once.\n")
        self._received.add(number)
        if number == signal.SIGTERM:
            self._timer.send(number)

    def _abandon(self) -> None:
        """End the process, whatever its threads are doing."""
        if self._is_main:
            found = None
            with suppress(Exception):  # the process ends all the same
                found = None if self._run is None else latest_checkpoint(self._run)
            os.write(2, f"\ninterrupted; last checkpoint: {found or 'there is none yet'}\n".encode())
        os._exit(INTERRUPTED)


class _SignalTimer(threading.Thread):
    """Tells a second SIGTERM or SIGINT from a copy of the first, by its time, and lets it end the process.

    A handler written in Python runs in the main thread alone, and not while that waits in a collective call: the very
    time when somebody sends a signal, and sends it again. So Python's handler in C writes the signal's number to a socket,
    at once, and this thread reads it there. `SAME_REQUEST_S` after a SIGTERM it restores the system's own handler, past
    Python's; on a second SIGINT it calls `abandon`.

    Attributes:
        over: True when SIGTERM has, or is about to have, the system's handler.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        super().__init__(name="signal timer", daemon=True)
        self.over = False
        self._abandon = abandon
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
        """Note a signal that did not come through the socket; 0 ends the thread instead."""
        with suppress(BlockingIOError):  # the socket is full of signals
            self._sender.send(bytes([number]))

    def run(self) -> None:
        first: dict[int, float] = {}
        while True:
            term = first.get(signal.SIGTERM)
            self._receiver.settimeout(
                None if term is None or self.over else max(term + SAME_REQUEST_S - time.monotonic(), 1e-3)
            )
            try:
                number = self._receiver.recv(1)[0]
            except TimeoutError:
                self.over = True
                ctypes.pythonapi.PyOS_setsig(ctypes.c_int(signal.SIGTERM), ctypes.c_void_p(signal.SIG_DFL))
                continue
            if number == 0:
                return
            since = time.monotonic() - first.setdefault(number, time.monotonic())
            if number == signal.SIGINT and since > SAME_INTERRUPT_S:
                self._abandon()


_LISTENING: set[_SignalTimer] = set()


# else a signal that ends a data worker would be read as this process' own, through the socket that both have
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1) if _LISTENING else None)
