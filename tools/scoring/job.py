"""Score a whole table: parts of it on many processes or machines, then one merged table.

The parts lie in the folder `OUT.parts`, which every process reads and writes. Part k is done by process k mod n, under torchrun
by rank; the process that finds all parts complete merges them, in the order of the table. So the result is the same for any
number of processes, and a run that was killed resumes where it stopped, with the same number or another one.
"""

import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from opensora.datasets.table.files import table_format
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar
from tools.datasets.stream import Block, columns_of, count_rows, read_blocks, renamed, write_blocks
from tools.eval.record import file_hash
from tools.scoring.parts import Advanced, Part, note_death, read_part, reopen, score_part
from tools.scoring.registry import Comparing, Scorer, all_columns

STATUS = "status"  # "ok" or what is wrong with the file, as `--info` writes it and `--remove-broken` reads it
RECORD = "job.json"  # in the folder of the parts
NO_PROGRESS = 20  # deaths of processes in a row without a row scored in between: it is not the files


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
        table: to be scored.
        out: the table to write: the rows and columns of `table`, and those of the scorers.
        scorers: by name.
        folder: what relative paths are relative to.
        batch_size: files that a scorer gets at a time.
        part_rows: rows of a part.
        retry_failed: score the rows that failed in an earlier run again.
        title: of the bar that shows how far it is.
    """

    table: Path
    out: Path
    scorers: Mapping[str, Scorer]
    folder: Path
    batch_size: int = 16
    part_rows: int = 512
    retry_failed: bool = False
    title: str = "scoring"

    @property
    def parts(self) -> Path:
        """The folder of the parts."""
        return parts_of(self.out)

    def added(self) -> list[str]:
        """The columns that the scorers add."""
        return [column for chosen in self.scorers.values() for column in all_columns(chosen)]

    def needed(self) -> list[str]:
        """The columns that the scorers read."""
        return list(dict.fromkeys(["path", *(column for chosen in self.scorers.values() for column in chosen.needs)]))


def parts_of(out: Path) -> Path:
    """The folder of the parts of a table that is to be written."""
    return out.with_name(f"{out.name}.parts")


def run(job: Job, workers: int = 1) -> Path:
    """Do what is left of a job and merge.

    Args:
        job: what is to be done.
        workers: processes; 0 = this one, which nobody starts again when a file crashes its decoder. Under torchrun it has no
            effect: each rank does its share, in a process that it watches over.

    Raises:
        UserError: the table, a scorer or its weights are not as they must be, or another job's parts are in the way.
    """
    prepare(job)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    total = count_rows(job.table)
    if job.retry_failed:  # before any process is at work: one that is started again must not open what it has just done
        if world > 1:
            raise UserError("--retry-failed does not work under torchrun; run it without, with --num-workers N.")
        print(f"{sum(map(reopen, all_parts(job, total)))} rows that failed are tried again", flush=True)
    with progress_bar(total=total, desc=job.title, unit="row", disable=rank > 0) as bar:
        if world > 1:
            _supervise(job, [Share(rank, world, int(os.environ.get("LOCAL_RANK", 0)))], bar)
        elif workers:
            _supervise(job, [Share(number, workers, number) for number in range(workers)], bar)
        else:
            run_share(job, 0, 1, lambda rows, _: bar.update(rows) and None)
    if all(part.done.is_file() for part in all_parts(job, total)):
        merge(job, total)
    return job.out


def prepare(job: Job) -> None:
    """Check the table, and that the parts that are there belong to this job.

    Raises:
        UserError: they do not, or a column is missing or would be there twice.
    """
    there = columns_of(job.table)
    for column in job.needed():
        if column not in there:
            raise UserError(f"{job.table} has no column {column!r}, which is needed. It has: {', '.join(there)}.")
    if twice := [column for column in job.added() if column in there]:
        raise UserError(
            f"{job.table} has a column {twice[0]!r} already; leave that scorer out, or drop the column first: "
            f"python -m tools.datasets.datautil {job.table} --drop-columns {twice[0]}"
        )
    job.parts.mkdir(parents=True, exist_ok=True)
    wanted, found = fingerprint(job), recorded(job.parts)
    if found is None:
        record(job.parts, wanted)
        found = recorded(job.parts) or {}  # which another process may have written
    if found != wanted:
        changed = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        raise UserError(
            f"{job.parts} holds parts of another run (other {', '.join(changed)}); remove that folder to begin anew, or "
            f"name another output."
        )


def run_share(job: Job, rank: int, world: int, advanced: Advanced) -> None:
    """Complete the parts rank, rank + world, ..., those that are not."""
    for number, block in enumerate(read_blocks(job.table, job.part_rows, job.needed())):
        part = Part(job.parts, number)
        if number % world == rank:
            if part.done.is_file():
                advanced(len(block["path"]), 0)
            else:
                files = [job.folder / str(name) for name in block["path"]]
                score_part(part, block, files, job.scorers, job.batch_size, advanced)


def all_parts(job: Job, rows: int) -> list[Part]:
    """The parts of a table of that many rows."""
    return [Part(job.parts, number) for number in range(-(-rows // job.part_rows))]


def merge(job: Job, rows: int) -> None:
    """Write the table with the columns of the parts, and print what could not be scored.

    Raises:
        UserError: parquet cannot hold a column; the rows are in a JSONL file next to it then.
    """
    whole_columns = compared(job, rows)
    columns = columns_of(job.table)
    failed: dict[str, int] = {}

    def blocks() -> Iterator[Block]:
        for number, block in enumerate(read_blocks(job.table, job.part_rows)):
            lines = list(read_part(Part(job.parts, number)))
            start = number * job.part_rows
            for name in job.added():
                whole = whole_columns.get(name)
                block[name] = whole[start : start + len(lines)] if whole else [line.get(name) for line in lines]
            before, block[STATUS] = block.get(STATUS, ["ok"] * len(lines)), []
            for status, line in zip(before, lines, strict=True):
                errors = line.get("errors", {})
                for name in errors:
                    failed[name] = failed.get(name, 0) + 1
                is_ok = status in ("ok", "", None)  # else the table's own status stays
                block[STATUS].append(next(iter(errors.values()), "ok") if is_ok else status)
            yield block

    names = [*columns, *([] if STATUS in columns else [STATUS]), *job.added()]
    try:
        write_blocks(job.out, names, blocks())
    except UserError as error:
        if table_format(job.out) != "parquet":
            raise
        instead = job.out.with_name(f"{job.out.name}.jsonl")
        write_blocks(instead, names, blocks())
        raise UserError(f"{error} All rows with their scores are in {instead}.") from error
    print(f"{job.out}: {rows} rows; new columns: {', '.join(job.added())}")
    for name, count in failed.items():
        print(f"  {name}: {count} files could not be read, or gave nothing; the reason is in the column {STATUS}")


def compared(job: Job, rows: int) -> dict[str, list[Any]]:
    """The columns of scorers that compare all rows."""
    columns: dict[str, list[Any]] = {}
    for chosen in job.scorers.values():
        if isinstance(chosen, Comparing):
            cells: dict[str, Iterable[Any]] = {name: _Scored(all_parts(job, rows), name) for name in chosen.columns}
            columns |= chosen.compare({**cells, "path": _Paths(job.table)})
    return columns


class _Scored(NamedTuple):
    """A column that a scorer has written, read anew each time: a large table's rows do not fit into memory."""

    parts: Sequence[Part]
    column: str

    def __iter__(self) -> Iterator[Any]:
        return (line.get(self.column) for part in self.parts for line in read_part(part))


class _Paths(NamedTuple):
    """The paths of a table, likewise."""

    table: Path

    def __iter__(self) -> Iterator[Any]:
        return (name for block in read_blocks(self.table, 1 << 14, ["path"]) for name in block["path"])


def recorded(parts: Path) -> dict[str, Any] | None:
    """The `fingerprint` of the job that the parts in a folder are of; None where there are none."""
    path = parts / RECORD
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    _forget_speed(found["scorers"])  # an older version wrote more of it
    return found


def record(parts: Path, of: dict[str, Any]) -> None:
    """Write down the `fingerprint` of the job that the parts in a folder are of."""
    with renamed(parts / RECORD) as partial:
        partial.write_text(json.dumps(of, indent=1))


def fingerprint(job: Job) -> dict[str, Any]:
    """What parts depend on: no settings of speed alone, or of how a server is reached."""
    settings = {name: dataclasses.asdict(chosen) for name, chosen in job.scorers.items()}  # type: ignore[call-overload]
    _forget_speed(settings)
    made_of = {"table": file_hash(job.table), "folder": str(job.folder.resolve()), "scorers": settings}
    found: dict[str, Any] = json.loads(json.dumps({**made_of, "part_rows": job.part_rows}))  # tuples become lists
    return found


def _forget_speed(settings: Mapping[str, dict[str, Any]]) -> None:
    for of_scorer in settings.values():
        for name in ("device", "timeout_s", "key_env"):
            of_scorer.pop(name, None)


# ---------------------------------------------------------------------------------------------------- processes


class Share(NamedTuple):
    """What one process does: the parts rank, rank + world, ..., on which GPU of its machine."""

    rank: int
    world: int
    gpu: int


def _on_gpu(job: Job) -> bool:
    return any(str(getattr(chosen, "device", "cpu")).startswith("cuda") for chosen in job.scorers.values())


def _supervise(job: Job, shares: Sequence[Share], bar: Any) -> None:
    """Run a process for each share until all have ended well; one that dies is started again."""
    # a forked process cannot use a GPU, a spawned one imports everything again
    context: Any = multiprocessing.get_context("spawn" if _on_gpu(job) else "fork")
    counters = context.Value("q", 0), context.Value("q", 0)  # rows behind, rows scored

    def start(share: Share) -> BaseProcess:
        process: BaseProcess = context.Process(target=_work, args=(job, share, counters), daemon=True)
        process.start()
        return process

    running = {share: start(share) for share in shares}
    deaths, before = 0, 0
    try:
        while running:
            time.sleep(0.05)
            bar.update(min(counters[0].value, bar.total) - bar.n)
            for share, process in list(running.items()):
                if process.exitcode is None:
                    continue
                del running[share]
                if process.exitcode == 0:
                    continue
                scored = counters[1].value
                deaths, before = (deaths + 1 if scored == before else 1), scored
                if process.exitcode > 0 or deaths > NO_PROGRESS:
                    raise UserError(f"process {share.rank} ended with code {process.exitcode}; its error is above.")
                note_death(job.parts, process.pid or 0)
                running[share] = start(share)
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _work(job: Job, share: Share, counters: Any) -> None:
    gc.freeze()  # garbage of the forked process may own threads, which are not here

    def advanced(behind: int, scored: int) -> None:
        for counter, rows in zip(counters, (behind, scored), strict=True):
            with counter.get_lock():
                counter.value += rows

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if _on_gpu(job):
            import torch

            torch.cuda.set_device(share.gpu % torch.cuda.device_count())
        run_share(job, share.rank, share.world, advanced)
    except UserError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        sys.exit(2)


def _end_with_parent() -> None:
    """A process that is killed cannot end its children; they would continue, and keep the next run from their parts."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it runs in a child"
    wait([parent.sentinel])
    os._exit(1)
