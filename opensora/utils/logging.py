"""What a program says on the terminal: messages, and progress bars."""

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LINE_S = 30.0  # between two lines of a bar that no terminal shows
LINE = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")


def show_messages() -> None:
    """Show the messages of the logger "opensora" (INFO and above) on the terminal, in the main process alone.

    The lines of a `RunLog` are shown by itself.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    logger = logging.getLogger("opensora")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Terminal) for handler in logger.handlers):
        handler = _Terminal()
        handler.setFormatter(LINE)
        logger.addHandler(handler)


class _Terminal(logging.Handler):
    """Lines on stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if multiprocessing.parent_process() is None:
            tqdm.write(self.format(record), file=sys.stderr)
        else:
            # tqdm's lock is one for a process and all that it forks: a data worker that is ended while it writes would hold it for ever
            sys.stderr.write(self.format(record) + "\n")


def progress_bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A bar of tqdm on stderr, with count and time left; where that is no terminal, such as a log of CI, a line every `LINE_S` seconds.

    Args:
        iterable, options: as of `tqdm.tqdm`; `desc` says what is done, in a word or two.
    """
    if sys.stderr.isatty():
        return tqdm(iterable, **{"dynamic_ncols": True, "mininterval": 0.5, "leave": False, **options})
    state = "{desc}: {n_fmt}/{total_fmt} {unit}, {elapsed} so far, {remaining} left{postfix}"
    return tqdm(iterable, **{"bar_format": state, **options, "file": _Lines(), "mininterval": min(LINE_S, 1.0)})


class _Lines:
    """What a bar is drawn on, over and over: now and then a line of it."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def write(self, text: str) -> None:
        if text.strip() and time.monotonic() - self._last >= LINE_S:
            self._last = time.monotonic()
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()
