"""What was found out of the rows of a table, for the rows of another that has most of them.

The chain (`tools.footage`) tries again what failed in one of its stages, so the tables behind it get more rows, or a copy of a
file in another place. What scorers say of a row depends on the cells that they read, `Job.needed`, so its line holds in the
new table too; only rows with other cells, and those that failed, are looked at. For that the table that parts are of is held
among them while the one in its place may become another.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from opensora.utils.errors import UserError
from tools.datasets.stream import Block, read_blocks
from tools.eval.record import file_hash
from tools.scoring.job import Job, fingerprint, record, recorded
from tools.scoring.parts import Line, Part, lines_so_far

TABLE = "table.jsonl"  # in the folder of the parts
UNTRIED: Line = {"errors": {}}  # a line of no row: whoever completes the part looks at it


def hold_table(parts: Path, table: Path) -> None:
    """Move a table from its place to the parts that are of it, if they are."""
    _settle(parts)
    found = recorded(parts)
    if found is not None and table.is_file() and file_hash(table) == found["table"]:
        table.replace(parts / TABLE)


def carry_over(job: Job, world: int = 1) -> None:
    """Where a job's parts are of another table, which is held among them, make them parts of the job's own.

    Parts with which that cannot be done stay as they are; `tools.scoring.job.run` refuses them.

    Args:
        job: what is to be done.
        world: processes that are at it.

    Raises:
        UserError: there are several, of which none is the first.
    """
    if world == 1:
        _settle(job.parts)
    if not (_unsettled(job.parts) or _of_held_table(job)):
        return
    if world > 1:
        raise UserError(
            f"{job.parts}: a run with --retry-failed was not completed, and under torchrun nobody is first to go on with it; "
            "run it without, with --num-workers N."
        )
    fresh = _fresh(job.parts)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    rows, carried = _write(job, job.parts / TABLE, fresh)
    record(fresh, fingerprint(job))  # the last: where it is, all is there
    job.parts.replace(_outdated(job.parts))
    _settle(job.parts)
    print(f"{carried} rows keep what was found out of them, {rows - carried} are looked at", flush=True)


def _of_held_table(job: Job) -> bool:
    """Whether there are parts of this job but for its table, and theirs is held."""
    found, wanted, held = recorded(job.parts), fingerprint(job), job.parts / TABLE
    if found is None or found == wanted or {**found, "table": wanted["table"]} != wanted:
        return False
    return held.is_file() and file_hash(held) == found["table"]


def _settle(parts: Path) -> None:
    """Put new parts in the place of old ones, also after a run that was killed at it."""
    if _unsettled(parts):
        _fresh(parts).replace(parts)
    shutil.rmtree(_outdated(parts), ignore_errors=True)


def _unsettled(parts: Path) -> bool:
    return not parts.is_dir() and recorded(_fresh(parts)) is not None


def _fresh(parts: Path) -> Path:
    return parts.with_name(f"{parts.name}.fresh")


def _outdated(parts: Path) -> Path:
    return parts.with_name(f"{parts.name}.outdated")


def _write(job: Job, held: Path, fresh: Path) -> tuple[int, int]:
    """The parts of the job's table, each as a `.before`; returns the number of rows, and of those that have their line."""
    known, places = _succeeded(job, held)
    lines_of = functools.lru_cache(maxsize=1)(lambda number: lines_so_far(Part(job.parts, number)))
    rows = carried = 0
    for number, block in enumerate(read_blocks(job.table, job.part_rows, job.needed())):
        with Part(fresh, number).before.open("w", encoding="utf-8") as file:
            for place in _places(known, places, _keys(block)):
                line = UNTRIED if place < 0 else lines_of(place // job.part_rows)[place % job.part_rows]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                rows, carried = rows + 1, carried + (place >= 0)
    return rows, carried


def _succeeded(job: Job, held: Path) -> tuple[np.ndarray, np.ndarray]:
    """Keys of the rows that did not fail, in order, and their places in the held table: 16 bytes a row."""
    keys, places = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for number, block in enumerate(read_blocks(held, job.part_rows, job.needed())):
        lines = lines_so_far(Part(job.parts, number))
        rows = np.array([row for row, line in lines.items() if "errors" not in line], np.int64)
        keys.append(_keys(block)[rows])
        places.append(rows + number * job.part_rows)
    known, first = np.unique(np.concatenate(keys), return_index=True)
    return known, np.concatenate(places)[first]


def _keys(block: Block) -> np.ndarray:
    """[N] uint64: a hash of each row's cells."""
    rows = zip(*block.values(), strict=True)
    raw = b"".join(hashlib.blake2b(json.dumps(cells).encode(), digest_size=8).digest() for cells in rows)
    return np.frombuffer(raw, np.uint64)


def _places(known: np.ndarray, places: np.ndarray, keys: np.ndarray) -> Iterator[int]:
    """The place of each key, -1 where it is not known."""
    if not len(known):
        return iter([-1] * len(keys))
    nearest = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return iter(np.where(known[nearest] == keys, places[nearest], -1).tolist())
