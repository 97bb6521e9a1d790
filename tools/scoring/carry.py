"""Reuses the scores of a table for another table that has most of its rows.

The chain (`tools.footage`) tries again what failed in one of its stages, so the tables of later stages get more rows, or another
copy of a file. A row's scores depend on the cells that scorers read, `Job.needed`, so its line holds in the new table too; only
rows with other cells, and those that failed, are scored. For that the old table is held in the folder of its parts.
"""

import functools
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from opensora.utils.errors import UserError
from tools.datasets.stream import Block, read_blocks
from tools.eval.record import file_hash
from tools.scoring.job import Job, fingerprint, record, recorded
from tools.scoring.parts import Line, Part, lines_so_far

TABLE = "table.jsonl"  # in the folder of the parts
UNTRIED: Line = {"errors": {}}  # a row that is still to be scored


def hold_table(parts: Path, table: Path) -> None:
    """Move a table to the folder of its parts, if they are of it."""
    _settle(parts)
    found = recorded(parts)
    if found is not None and table.is_file() and file_hash(table) == found["table"]:
        table.replace(parts / TABLE)


def carry_over(job: Job, world: int = 1) -> None:
    """Where a job's parts are of another table, which is held in their folder, make them parts of the job's own table.

    Other parts stay as they are; `tools.scoring.job.run` refuses them.

    Args:
        job: what is to be done.
        world: processes that are at it.

    Raises:
        UserError: there are several, of which none is the first.
    """
    if world == 1:
        _settle(job.parts)
    found, wanted, held = recorded(job.parts), fingerprint(job), job.parts / TABLE
    differ_by_table = found is not None and found != wanted == {**found, "table": wanted["table"]}
    is_held = differ_by_table and found is not None and held.is_file() and file_hash(held) == found["table"]
    if not (is_held or _unsettled(job.parts)):
        return
    if world > 1:
        raise UserError(
            f"{job.parts}: a run with --retry-failed was not completed, which does not work under torchrun; run it without, "
            "with --num-workers N."
        )
    fresh = _fresh(job.parts)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    rows, carried = _write(job, held, fresh)
    record(fresh, wanted)  # the last: where it is, all is there
    job.parts.replace(_outdated(job.parts))
    _settle(job.parts)
    print(f"{carried} rows keep their scores, {rows - carried} are to be scored", flush=True)


def _settle(parts: Path) -> None:
    """Replace old parts by new ones, also after a run that was killed at it."""
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
    # keys of the rows that did not fail, and their numbers in the held table: 16 bytes a row
    keys, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for part, block in enumerate(read_blocks(held, job.part_rows, job.needed())):
        lines = lines_so_far(Part(job.parts, part))
        succeeded = np.array([row for row, line in lines.items() if "errors" not in line], np.int64)
        keys.append(_keys(block)[succeeded])
        numbers.append(succeeded + part * job.part_rows)
    known, first = np.unique(np.concatenate(keys), return_index=True)
    row_of_known = np.concatenate(numbers)[first]

    lines_of = functools.lru_cache(maxsize=1)(lambda part: lines_so_far(Part(job.parts, part)))
    rows = carried = 0
    for part, block in enumerate(read_blocks(job.table, job.part_rows, job.needed())):
        with Part(fresh, part).before.open("w", encoding="utf-8") as file:
            wanted = _keys(block)
            old_rows = np.full(len(wanted), -1)
            if len(known):
                nearest = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
                old_rows = np.where(known[nearest] == wanted, row_of_known[nearest], -1)
            for row in old_rows.tolist():
                line = UNTRIED if row < 0 else lines_of(row // job.part_rows)[row % job.part_rows]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                rows, carried = rows + 1, carried + (row >= 0)
    return rows, carried


def _keys(block: Block) -> np.ndarray:
    """[N] uint64: a hash of each row's cells."""
    rows = zip(*block.values(), strict=True)
    raw = b"".join(hashlib.blake2b(json.dumps(cells).encode(), digest_size=8).digest() for cells in rows)
    return np.frombuffer(raw, np.uint64)
