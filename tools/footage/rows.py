"""Tables as streams of rows: one row, or some thousand, in memory at a time."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from opensora.datasets.table.files import table_format
from opensora.utils.errors import UserError
from tools.datasets.stream import Block, columns_of, read_blocks, renamed, write_blocks

Row = dict[str, Any]
BLOCK = 4096
LONGEST = 180  # bytes of a file's name in the names of what is made of it, which add up to 50


def read_rows(source: Path) -> Iterator[Row]:
    """The rows of a table in order; those of a file that is empty are none."""
    if source.stat().st_size == 0:
        return
    for block in read_blocks(source, BLOCK):
        names = list(block)
        for cells in zip(*block.values(), strict=True):
            yield dict(zip(names, cells, strict=True))


def write_rows(target: Path, rows: Iterable[Row], columns: list[str] | None = None) -> int:
    """Write rows as a table, which gets its name when it is complete. Returns how many there were.

    Args:
        columns: the columns and their order; None = those of the first rows. In JSONL each row may have its own.
    """
    if columns is None and target.suffix == ".jsonl":
        count = 0
        with renamed(target) as partial, partial.open("w", encoding="utf-8") as file:
            for count, row in enumerate(rows, start=1):  # noqa: B007  (it is the number of rows)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return count
    stream = iter(rows)
    first = list(itertools.islice(stream, BLOCK))
    names = columns or list(dict.fromkeys(name for row in first for name in row)) or ["path"]
    return write_blocks(target, names, _blocks(names, first, stream))


def _blocks(names: list[str], block: list[Row], rest: Iterator[Row]) -> Iterator[Block]:
    while block:
        if unknown := sorted({name for row in block for name in row} - set(names)):
            raise UserError(f"a row has a column {unknown[0]!r} that the rows before it lack; write JSONL.")
        yield {name: [row.get(name) for row in block] for name in names}
        block = list(itertools.islice(rest, BLOCK))


def divide_rows(kept: Path, dropped: Path, decided: Iterable[tuple[Row, str]]) -> None:
    """Write (row, reason) pairs to two JSONL files in one pass: those with a reason to `dropped`, with it, others to `kept`.

    `kept` gets its name last, so that where it is, both are complete.
    """
    with (
        renamed(kept) as good,
        renamed(dropped) as bad,
        good.open("w", encoding="utf-8") as ours,
        bad.open("w", encoding="utf-8") as theirs,
    ):
        for row, reason in decided:
            line = json.dumps({**row, "reason": reason} if reason else row, ensure_ascii=False)
            (theirs if reason else ours).write(line + "\n")


def refuse_existing(table: Path, targets: Iterable[Path], option: str, *, overwrite: bool = False) -> None:
    """Before anything is done: no target may be a file that somebody may still want.

    Raises:
        UserError: a target is the table itself, or of no known format, or exists without `overwrite`.
    """
    for target in targets:
        table_format(target)
        if table.exists() and target.exists() and target.samefile(table):
            raise UserError(f"{target}, an output, is the table itself; name another {option}.")
        if target.exists() and not overwrite:
            raise UserError(f"{target} exists; name another {option}.")


def shown_from(base: Path, path: Path) -> str:
    """How a table in the absolute folder `base` names a file: from there where it lies below, else as it is."""
    return str(path.relative_to(base) if path.is_relative_to(base) else path)


def shortened(stem: str) -> str:
    """A file's name such that others can be made of it: file systems take 255 bytes, which may be 60 characters."""
    return stem.encode()[:LONGEST].decode(errors="ignore")


def has_rows(source: Path) -> bool:
    """Whether a table has any."""
    return bool(source.stat().st_size) and bool(columns_of(source)) and next(read_rows(source), None) is not None
