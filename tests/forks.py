"""What tests run in a process that is forked from pytest's."""

import gc
from collections.abc import Callable
from typing import Any


def forked(target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call it. Garbage of earlier tests is left alone: the end of a process group waits for threads that are not here."""
    gc.freeze()
    target(*args, **kwargs)
