"""Ends a training that hangs, and writes where, instead of holding its machines until a collective call times out.

Each process watches itself: when a step takes longer than the limit, a thread writes the stacks of all threads to the run's
folder and to stderr and ends the process with exit code 124. All processes see a hang at about the same time, since they
wait for the one that is stuck; they wait a moment for each other before they end. Where Python itself is stuck, so that its
threads do not run, faulthandler's own timer, which needs none, writes the stacks to stderr and ends the process.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from opensora.acceleration.distributed import World

T = TypeVar("T")
EXIT_CODE = 124  # of timeout(1)
FIRST_STEP_FACTOR = 4  # compilation, and the first reads of everything
EXTENDED_S = 2 * 3600.0  # a validation or a checkpoint to a slow disk
GRACE_S = 5.0  # for the other processes to write theirs, before a launcher ends them
BACKSTOP_S = 60.0  # after which faulthandler's timer ends the process


def collective_timeout(limit_s: float) -> timedelta:
    """A timeout for collective calls that a watchdog with this limit never lets them reach."""
    return timedelta(seconds=max(EXTENDED_S, FIRST_STEP_FACTOR * limit_s) + 10 * BACKSTOP_S)


class Watchdog:
    """Watches the steps of this process.

    Args:
        limit_s: The longest that a step may take; the first may take 4 times as long.
    """

    def __init__(self, limit_s: float, world: World) -> None:
        self.limit_s, self.world = limit_s, world
        self.path: Path | None = None
        self.done = 0
        self._about: Callable[[], str] = str
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set(None)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def watch(self, items: Iterable[T], folder: Path, about: Callable[[], str] = str) -> Iterator[T]:
        """The same items; the time from asking for one to asking for the next is a step's.

        Args:
            folder: For `stacks-rank<r>.txt`, where it is needed.
            about: More for the message about a hang, such as what the data loader's workers are reading.
        """
        self.path, self._about = folder / f"stacks-rank{self.world.rank}.txt", about
        iterator = iter(items)
        try:
            while True:
                self._set(self.limit_s if self.done else FIRST_STEP_FACTOR * self.limit_s)
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                yield item
                self.done += 1
        finally:
            self._set(None)

    @contextlib.contextmanager
    def extended_timeout(self) -> Iterator[None]:
        """Within a step: for what takes long now and then, and has limits of its own. The step's time begins anew after it."""
        self._set(max(EXTENDED_S, self.limit_s))
        try:
            yield
        finally:  # whoever catches an error and continues is watched as before
            self._set(self.limit_s)

    def _set(self, seconds: float | None) -> None:
        with self._changed:
            self._deadline = None if seconds is None else time.monotonic() + seconds
            self._changed.notify()
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        elif sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + GRACE_S + BACKSTOP_S, file=sys.__stderr__, exit=True)

    def _run(self) -> None:
        """The thread: sleeps until the deadline, wherever it has moved meanwhile, and ends the process."""
        with self._changed:
            while not self._closed:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            else:
                return
        try:
            about = self._about()
        except Exception as error:  # noqa: BLE001  (the stacks matter more)
            about = f"(what it was doing is not known: {error})"
        message = (
            f"\nerror: process {self.world.rank} of {self.world.size}: step {self.done + 1} of this process has taken longer "
            f"than step_timeout_min={self.limit_s / 60:g} allows. {about}\n"
            f"Where every thread stands is in {self.path}. The process whose stack is not in a collective call is the one "
            "that the others wait for. If steps rightly take that long, raise --step-timeout-min.\n"
        )
        for path in (self.path, None):
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed terminal
                stream = sys.__stderr__ if path is None else path.open("w")
                if stream is not None:
                    stream.write(message)
                    stream.flush()
                    faulthandler.dump_traceback(stream, all_threads=True)
                    stream.flush()
        if self.world.size > 1:
            time.sleep(GRACE_S)
        os._exit(EXIT_CODE)
