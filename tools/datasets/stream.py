"""Tables of any length, block by block: only some thousand rows are in memory at a time.

A block is a column of values for each name. Cells of a CSV stay text; numbers come from JSONL and parquet, and are written
where the column's name is one of `NUMBERS`.
"""

import csv
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opensora.datasets.table import files
from opensora.datasets.table.files import UnwritableError, cell_text, table_format
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Block = dict[str, list[Any]]
INTEGERS = ("num_frames", "height", "width", "resolution", "text_len", "ocr", "label", "duplicate_bits")
FLOATS = (
    "aspect_ratio", "fps", "duration", "aes", "flow", "match", "filesize", "ocr_area", "sharpness", "black", "static",
)  # fmt: skip
NUMBERS = (*INTEGERS, *FLOATS)
MISSING_WORDS = ("", "nan", "none", "null")  # in a column of numbers only, in any case
HELD_ROWS = 1 << 20  # a parquet column that is empty for so long is written as text


def columns_of(source: Path) -> list[str]:
    """The names of a table's columns; of JSONL, every name that an object in it has.

    Raises:
        UserError: it is missing or damaged, or has a column twice.
    """
    names: list[str] = []
    for _, block in files.read_blocks(source):
        names = list(block)
        if table_format(source) != "jsonl":
            break
    return names


def read_blocks(source: Path, rows: int, columns: Sequence[str] | None = None) -> Iterator[Block]:
    """The table, `rows` rows at a time, in order; of `columns` only, where they are named.

    Raises:
        UserError: it is missing or damaged, or lacks a column.
    """
    there = columns_of(source)
    wanted = there if columns is None else list(columns)
    if missing := [name for name in wanted if name not in there]:
        hint = did_you_mean(missing[0], there)
        raise UserError(f"{source} has no column {missing[0]!r}.{hint} The columns are: {', '.join(there)}.")
    held: Block = {name: [] for name in wanted}
    count = 0
    for size, block in files.read_blocks(source, wanted):
        for name, values in held.items():
            values += _python_values(block[name]) if name in block else [None] * size
        count, start = count + size, 0
        while count - start >= rows:
            yield {name: values[start : start + rows] for name, values in held.items()}
            start += rows
        held = {name: values[start:] for name, values in held.items()}
        count -= start
    if count:
        yield held


def _python_values(cells: Any) -> list[Any]:
    """A column as `opensora.datasets.table.files` gives it, None for what a parquet file lacks."""
    if hasattr(cells, "to_pylist"):
        return cells.to_pylist()
    if hasattr(cells, "tolist"):
        return [None if value != value else value for value in cells.tolist()]
    return list(cells)


def count_rows(source: Path) -> int:
    """How many rows a table has.

    Raises:
        UserError: it is missing or damaged.
    """
    return sum(size for size, _ in files.read_blocks(source, columns_of(source)[:1]))


def write_blocks(target: Path, columns: Sequence[str], blocks: Iterable[Block]) -> int:
    """Write a table; it gets its name when it is complete. Returns the number of rows.

    Raises:
        UserError: the format cannot hold a value.
    """
    kind = table_format(target)
    if kind != "csv":
        blocks = ({name: [number_of(name, cell) for cell in block[name]] for name in columns} for block in blocks)
    with renamed(target) as partial:
        return WRITERS[kind](partial, columns, blocks)


@contextmanager
def renamed(target: Path) -> Iterator[Path]:
    """A file to write to, which takes its name when the block ends well and vanishes when it does not.

    Raises:
        UserError: a cell is none that the format holds.
        OSError: the disk is full, for example; it names the target.
    """
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=target.suffix, dir=target.parent)
        os.close(handle)
        partial = Path(name)
        try:
            yield partial
            mask = os.umask(0)
            os.umask(mask)
            partial.chmod(0o666 & ~mask)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """Put the name of the file into errors of writing it. Half of a character, which rows made by a program may have, is refused."""
    try:
        yield
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(f"{target}: a cell holds {half!a}, half of a character, which is no text.") from error
    except UnwritableError as error:
        raise UserError(f"{target}: {error}") from error
    except OSError as error:
        if error.filename is None or Path(str(error.filename)).name.startswith(f".{target.stem}."):
            error.filename = str(target)
        raise


def number_of(name: str, value: Any) -> Any:
    """A cell of a column of `NUMBERS` as a number, None where it is empty; others as they are."""
    if name not in NUMBERS or not isinstance(value, str):
        return value
    if value.strip().lower() in MISSING_WORDS:
        return None
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if name in INTEGERS and number.is_integer() else number


def as_number(value: Any) -> float | None:
    """A cell of any column as a number, whatever format it comes from; None where it is empty or NaN.

    Raises:
        ValueError: it is not a number.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING_WORDS):
        return None
    if isinstance(value, list | dict):
        raise ValueError("a list or an object is not a number")
    words = {"true": 1.0, "false": 0.0}  # how CSV holds the booleans of the other formats
    number = words.get(value.strip().lower()) if isinstance(value, str) else None
    found = float(value) if number is None else number
    return None if math.isnan(found) else found


def _write_csv(target: Path, columns: Sequence[str], blocks: Iterable[Block]) -> int:
    count = 0
    with target.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(columns)
        for block in blocks:
            cells = [files.cell_texts(block[name]) for name in columns]
            # some versions of Python write a lone carriage return bare, and read it as the end of the row
            returns = any("\r" in cell for column in cells for cell in column)
            quoting = csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL
            writer = csv.writer(file, lineterminator="\n", quoting=quoting)  # type: ignore[arg-type]
            writer.writerows(zip(*cells, strict=True))
            count += len(cells[0])
    return count


def _write_jsonl(target: Path, columns: Sequence[str], blocks: Iterable[Block]) -> int:
    count = 0
    encode = json.JSONEncoder(ensure_ascii=False, default=cell_text).encode
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for block in blocks:
            for cells in zip(*(block[name] for name in columns), strict=True):
                file.write(encode(dict(zip(columns, cells, strict=True))) + "\n")
                count += 1
    return count


def _write_parquet(target: Path, columns: Sequence[str], blocks: Iterable[Block]) -> int:
    """Columns have the type of their first block that is not all empty; a later one that does not fit is an error."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    types: dict[str, Any] = {}
    held: list[Block] = []  # until every column has shown a type
    count, writer = 0, None
    try:
        for block in itertools.chain(blocks, [None]):
            if block is not None:
                held.append({name: _array(name, block[name], types) for name in columns})
                count += len(block[columns[0]])
                if writer is None and len(types) < len(columns) and count < HELD_ROWS:
                    continue
            if writer is None:
                writer = ParquetWriter(target, pa.schema([(name, types.get(name, pa.string())) for name in columns]))
            for arrays in held:
                typed = [arrays[name].cast(writer.schema.field(name).type) for name in columns]  # type: ignore[attr-defined]
                writer.write_table(pa.table(typed, writer.schema))
            held = []
    except (UnicodeEncodeError, UserError):  # of the blocks, which are still read
        raise
    except (TypeError, ValueError) as error:  # pyarrow's errors derive from these
        raise UnwritableError(
            f"a column cannot be written as parquet ({error}); write JSONL, which takes mixed types."
        ) from error
    finally:
        if writer is not None:
            writer.close()
    return count


def _array(name: str, cells: list[Any], types: dict[str, Any]) -> Any:
    """A column as an arrow array of the type that it has shown before; its own where it is the first."""
    import pyarrow as pa

    kind = types.get(name)
    if kind is not None and pa.types.is_integer(kind):  # arrow would cut 10.5 to 10
        for cell in cells:
            if isinstance(cell, float) and not cell.is_integer():
                raise ValueError(f"column {name!r} begins with whole numbers, and has {cell} later")
    try:
        array = pa.array(cells, kind)
    except OverflowError:
        kind = kind or pa.uint64()  # hashes take all 64 bits
        try:
            array = pa.array(cells, kind)
        except OverflowError as error:
            raise ValueError(f"column {name!r} has whole numbers of which {kind} does not hold all") from error
    if name not in types and array.type != pa.null():
        whole = pa.types.is_integer(array.type) and name not in INTEGERS
        types[name] = pa.float64() if whole and name in NUMBERS else array.type
    return array


WRITERS: dict[str, Callable[[Path, Sequence[str], Iterable[Block]], int]] = {
    "csv": _write_csv,
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
}
