"""A function of each row, on many processes, in order; a row that kills its process costs that row alone.

Decoders are C code that a damaged file may crash. `Pool.map` would then lose everything.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from opensora.utils.logging import progress_bar

Item = TypeVar("Item")
Value = TypeVar("Value")

CHUNK = 64  # rows in one message between processes
AHEAD = 2  # messages under way for each process


def default_workers() -> int:
    """As many processes as this one may use cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_rows(
    function: Callable[[Item], Value],
    items: Sequence[Item],
    *,
    workers: int,
    label: str,
    crashed: Callable[[Item], Value] | None = None,
) -> list[Value]:
    """`[function(item) for item in items]`, with a progress bar.

    Args:
        function: defined at the top of a module; raises nothing that is to be survived.
        workers: processes; 1 = this one.
        label: of the progress bar.
        crashed: the value for an item whose process died; None = such a death is an error.
    """
    results: list[Value] = []
    with progress_bar(total=len(items), desc=label, unit="row", delay=1) as bar:
        if workers <= 1 or len(items) <= 1:
            for item in items:
                results.append(function(item))
                bar.update()
            return results
        size = max(1, min(CHUNK, -(-len(items) // workers)))
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        for values in _run(function, chunks, min(workers, len(chunks)), crashed):
            results += values
            bar.update(len(values))
    return results


def _run(
    function: Callable[[Item], Value],
    chunks: Sequence[Sequence[Item]],
    workers: int,
    crashed: Callable[[Item], Value] | None,
) -> Iterator[list[Value]]:
    """The results of the chunks in order. When a process dies, what was under way is done again row by row."""
    position = 0
    while position < len(chunks):
        with _pool(workers) as pool:
            waiting: list[Future[list[Value]]] = []
            try:
                for start in range(position, len(chunks)):
                    waiting.append(pool.submit(_each, function, chunks[start]))
                    if len(waiting) >= AHEAD * workers:
                        yield waiting[0].result()
                        waiting.pop(0)
                        position += 1
                while waiting:
                    yield waiting[0].result()
                    waiting.pop(0)
                    position += 1
                return
            except BrokenProcessPool:
                if crashed is None:
                    raise
        for chunk in chunks[position : position + AHEAD * workers]:
            yield _one_by_one(function, chunk, crashed)
            position += 1


def _one_by_one(
    function: Callable[[Item], Value], items: Sequence[Item], crashed: Callable[[Item], Value]
) -> list[Value]:
    values: list[Value] = []
    while len(values) < len(items):
        with _pool(1) as pool:
            try:
                for item in items[len(values) :]:
                    values.append(pool.submit(function, item).result())
            except BrokenProcessPool:
                values.append(crashed(items[len(values)]))
    return values


def _each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [function(item) for item in items]


def _pool(workers: int) -> ProcessPoolExecutor:
    # forked: spawned processes import everything again, which takes longer than most tables
    # what was garbage here is not theirs to collect: it may own threads, which they do not have
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"), initializer=gc.freeze)
