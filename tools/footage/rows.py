"""Tables as streams of rows: one row, or some thousand, in memory at a time."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from opensora.utils.errors import UserError
from tools.datasets.stream import Block, columns_of, read_blocks, renamed, write_blocks

Row = dict[str, Any]
BLOCK = 4096


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


def has_rows(source: Path) -> bool:
    """Whether a table has any."""
    return bool(source.stat().st_size) and bool(columns_of(source)) and next(read_rows(source), None) is not None
