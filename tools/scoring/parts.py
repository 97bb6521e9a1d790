"""One part of a table: its rows are scored batch by batch, and what is done is on disk after each.

A part is a file `part-00000012.jsonl`, one line a row; until it is complete, `part-00000012.partial`, which is resumed behind
its last whole line. Decoders are C code that a damaged file may crash: before each batch, its rows are written to
`part-00000012.trying`, so that the process that supervises this one can note there that it died. Then the batch is done again
row by row, and a row at which the process dies twice in a row gets an error instead of a score. Where all are killed from
outside nobody notes anything: one batch is lost, and no file is blamed, however often that happens.

To score again the rows that failed, `reopen` moves what there is of a part to `part-00000012.before`. Then only the rows that
failed or are not in there are scored; their lines replace the old ones when the part is complete. A part may also begin as
such a `.before`: see `tools.scoring.carry`.
"""

import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from opensora.utils.errors import UserError
from tools.datasets.stream import Block, renamed
from tools.scoring.registry import Scorer

DEATHS = 2  # at one row, after which it is given up
DIED = "the process died twice while reading it; the file crashes its decoder"
LOCK_S = 5.0  # in which a process of a run that was killed releases its part

Line = dict[str, Any]
Advanced = Callable[[int, int], None]


class Trying(NamedTuple):
    """The rows that a process is scoring: the first, how many, how often a process has died at them, and its id."""

    start: int
    rows: int
    deaths: int
    process: int


class Part(NamedTuple):
    """Where a part's files are."""

    folder: Path
    number: int

    @property
    def done(self) -> Path:
        """The complete part."""
        return self.folder / f"part-{self.number:08d}.jsonl"

    @property
    def partial(self) -> Path:
        """What there is of it."""
        return self.done.with_suffix(".partial")

    @property
    def trying(self) -> Path:
        """What is being done."""
        return self.done.with_suffix(".trying")

    @property
    def before(self) -> Path:
        """Of a part that was opened again, what it was; it counts while the part is not complete."""
        return self.done.with_suffix(".before")


def score_part(
    part: Part,
    block: Block,
    paths: Sequence[Path],
    scorers: Mapping[str, Scorer],
    batch_size: int,
    advanced: Advanced,
) -> None:
    """Complete a part.

    Args:
        part: its files.
        block: the columns that scorers need, of its rows.
        paths: the files of its rows.
        scorers: by name.
        batch_size: files that scorers get at a time.
        advanced: called with the number of rows that are done, and how many of them were scored just now.

    Raises:
        UserError: a scorer cannot work at all, or another process is at this part.
    """
    with _opened(part) as file:
        before = _lines_before(part)
        wanted = [row for row in range(len(paths)) if row >= len(before) or "errors" in before[row]]
        done = _whole_lines(file)
        advanced(len(paths) - len(wanted) + done, 0)
        died = _read_trying(part.trying)  # of a process that died; not of one that was killed with its supervisor
        if died is not None and not (died.start == done and died.deaths):
            died = None
        while done < len(wanted):
            rows, deaths = min(batch_size, len(wanted) - done), 0
            if died is not None and died.start <= done < died.start + died.rows:
                rows, deaths = 1, died.deaths if done == died.start and died.rows == 1 else 0
            given_up = deaths >= DEATHS
            if given_up:
                lines = [{"errors": dict.fromkeys(scorers, DIED)}]
            else:
                part.trying.write_text(json.dumps(Trying(done, rows, deaths, os.getpid())))
                chosen = wanted[done : done + rows]
                cells = {name: [values[row] for row in chosen] for name, values in block.items()}
                lines = score_rows(scorers, [paths[row] for row in chosen], cells)
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.flush()
            part.trying.unlink(missing_ok=True)
            done += rows
            advanced(rows, 0 if given_up else rows)
        _complete(part, before, wanted)


def _complete(part: Part, before: list[Line], wanted: Sequence[int]) -> None:
    """Give a part its name; `part.partial` holds the lines of the rows that were wanted."""
    if not part.before.is_file():
        part.partial.replace(part.done)
        return
    lines: dict[int, Line] = dict(enumerate(before))
    with part.partial.open(encoding="utf-8") as file:
        lines.update(zip(wanted, map(json.loads, file), strict=True))
    with renamed(part.done) as whole, whole.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values())
    part.before.unlink()
    part.partial.unlink()


def reopen(part: Part) -> int:
    """Have the rows of a part that failed scored again; returns how many of them there are.

    A part that was opened before and is not complete yet stays as it is.

    Raises:
        UserError: another process is at this part.
    """
    if part.done.is_file():
        there = part.done
        part.partial.unlink(missing_ok=True)  # of a process that was killed when the part was complete
    elif part.before.is_file() or not part.partial.is_file():
        return failed_in(part)
    else:
        there = part.partial
        with there.open("a+", encoding="utf-8") as file:
            _lock(file, part)
            _whole_lines(file)
    failed = sum("errors" in line for line in _lines_of(there))
    if failed:
        part.trying.unlink(missing_ok=True)
        there.replace(part.before)
    return failed


def parts_in(folder: Path) -> list[Part]:
    """The parts of which there is something in a folder, which need not be there."""
    return [Part(folder, number) for number in sorted({int(path.stem[5:]) for path in folder.glob("part-*")})]


def failed_in(part: Part) -> int:
    """How many rows of a part failed when they were last looked at."""
    return sum(bool(line.get("errors")) for line in lines_so_far(part).values())


def lines_so_far(part: Part) -> dict[int, Line]:
    """The newest line of each row that has one, of a part that is complete or not."""
    if part.done.is_file():
        return dict(enumerate(_lines_of(part.done)))
    before = _lines_before(part)
    lines = dict(enumerate(before))
    if part.partial.is_file():
        wanted = (row for row in itertools.count() if row >= len(before) or "errors" in before[row])
        text = part.partial.read_text(encoding="utf-8")
        lines.update(zip(wanted, map(json.loads, text[: text.rfind("\n") + 1].split("\n")[:-1]), strict=False))
    return lines


def _lines_before(part: Part) -> list[Line]:
    return list(_lines_of(part.before)) if part.before.is_file() else []


def read_part(part: Part) -> Iterator[Line]:
    """The lines of a complete part."""
    return _lines_of(part.done)


def _lines_of(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def score_rows(scorers: Mapping[str, Scorer], paths: Sequence[Path], block: Block) -> list[Line]:
    """For each file its columns, and under "errors" the reasons of the scorers that have none."""
    lines: list[Line] = [{} for _ in paths]
    for name, chosen in scorers.items():
        rows = chosen.score(list(paths), **{column: block[column] for column in chosen.needs})
        assert len(rows) == len(paths), f"scorer {name} gave {len(rows)} rows for {len(paths)} files"
        for line, row in zip(lines, rows, strict=True):
            line.update({column: row[column] for column in chosen.columns})
            if "error" in row:
                line.setdefault("errors", {})[name] = row["error"]
    return lines


def note_death(folder: Path, process: int) -> None:
    """Note, where a process has died by itself, at what it was."""
    for path in folder.glob("*.trying"):
        trying = _read_trying(path)
        if trying is not None and trying.process == process:
            path.write_text(json.dumps(trying._replace(deaths=trying.deaths + 1)))


def _read_trying(path: Path) -> Trying | None:
    try:
        return Trying(*json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # it died while writing that file
        return None


@contextmanager
def _opened(part: Part) -> Iterator[TextIO]:
    """The unfinished part, for this process alone. An error that is no crash leaves no trace of the batch."""
    with part.partial.open("a+", encoding="utf-8") as file:
        _lock(file, part)
        try:
            yield file
        except BaseException:
            part.trying.unlink(missing_ok=True)
            raise


def _lock(file: TextIO, part: Part) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(f"{part.partial}: another process is working on it; wait for it, or end it.") from error
        time.sleep(0.05)


def _whole_lines(file: TextIO) -> int:
    """How many lines are complete; a torn last one is cut off."""
    file.seek(0)
    text = file.read()
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        file.truncate(len(whole.encode()))
    file.seek(0, 2)
    return whole.count("\n")
