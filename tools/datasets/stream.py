"""Tables of any length, block by block: only some thousand rows are in memory at a time.

A block is a column of values for each name. What a CSV says stays text, as in `opensora.datasets.table.files`, whose readers
hold the whole table; numbers come from JSONL and parquet, and are written where the column's name says that it holds some.
"""

import csv
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from opensora.datasets.table.files import cell_text, json_records, list_rows, table_format
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from tools.datasets.datautil.io import INTEGERS, MISSING_WORDS, NUMBERS

Block = dict[str, list[Any]]


def columns_of(source: Path) -> list[str]:
    """The names of a table's columns; of JSONL, every name that an object in it has.

    Raises:
        UserError: it is missing or damaged, or has a column twice.
    """
    if not source.is_file():
        names = [path.name for path in source.parent.glob("*")] if source.parent.is_dir() else []
        raise UserError(f"{source} does not exist.{did_you_mean(source.name, names)}")
    names = _NAMES[table_format(source)](source)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{source} has more than one column {twice[0]!r}; rename one.")
    return names


def read_blocks(source: Path, rows: int, columns: Sequence[str] | None = None) -> Iterator[Block]:
    """The table, `rows` rows at a time, in order; of `columns` only, where they are named.

    Raises:
        UserError: it is missing or damaged, or lacks a column.
    """
    there = columns_of(source)
    wanted = there if columns is None else list(columns)
    for name in wanted:
        if name not in there:
            raise UserError(
                f"{source} has no column {name!r}.{did_you_mean(name, there)} The columns are: {', '.join(there)}."
            )
    yield from _READERS[table_format(source)](source, rows, wanted)


def count_rows(source: Path) -> int:
    """How many rows a table has.

    Raises:
        UserError: it is missing or damaged.
    """
    names = columns_of(source)
    return sum(len(block[names[0]]) for block in read_blocks(source, 1 << 14, names[:1])) if names else 0


def write_blocks(target: Path, columns: Sequence[str], blocks: Iterable[Block]) -> int:
    """Write a table; it gets its name when it is complete. Returns the number of rows.

    Raises:
        UserError: the format cannot hold a value.
    """
    kind = table_format(target)
    with renamed(target) as partial:
        return _WRITERS[kind](partial, list(columns), blocks)


@contextmanager
def renamed(target: Path) -> Iterator[Path]:
    """A file to write to, which takes its name when the block ends well and vanishes when it does not.

    Raises:
        UserError: what was to be written is no text.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(target)
    except UnicodeEncodeError as error:  # readers refuse it; rows made by a program may have it
        half = error.object[error.start]
        raise UserError(f"{target}: a cell holds {half!a}, half of a character, which is no text.") from error
    finally:
        partial.unlink(missing_ok=True)


def number_of(name: str, value: Any) -> Any:
    """A cell of a column that holds numbers by its name as a number, None where it is empty; others as they are."""
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
        ValueError: it is no number.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING_WORDS):
        return None
    if isinstance(value, list | dict):
        raise ValueError("a list or an object is no number")
    words = {"true": 1.0, "false": 0.0}  # how CSV holds the booleans of the other formats
    number = words.get(value.strip().lower()) if isinstance(value, str) else None
    found = float(value) if number is None else number
    return None if math.isnan(found) else found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---------------------------------------------------------------------------------------------------- reading


def _csv_names(source: Path) -> list[str]:
    with source.open(newline="", encoding="utf-8-sig") as file, _text_of(source):
        header = next(csv.reader(file, strict=True), [])
    if not header:
        raise UserError(f"{source} is empty; its first line is the header `path,text`.")
    return header


def _csv_blocks(source: Path, rows: int, columns: Sequence[str]) -> Iterator[Block]:
    csv.field_size_limit(1 << 30)  # captions may be long
    with source.open(newline="", encoding="utf-8-sig") as file, _text_of(source):
        lines = csv.reader(file, strict=True)
        header = next(lines)
        places = [header.index(name) for name in columns]
        filled = filter(None, lines)
        count = 0
        while block := list(islice(filled, rows)):
            if bad := [count + i for i, cells in enumerate(block) if len(cells) != len(header)]:
                raise UserError(
                    f"{source}: the header has {len(header)} columns, but rows {list_rows(bad, len(bad))} have others."
                )
            yield {name: [cells[place] for cells in block] for name, place in zip(columns, places, strict=True)}
            count += len(block)


def _jsonl_names(source: Path) -> list[str]:
    names: dict[str, None] = {}
    for record in _records(source):
        names.update(dict.fromkeys(record))
    return list(names)


def _jsonl_blocks(source: Path, rows: int, columns: Sequence[str]) -> Iterator[Block]:
    records = _records(source)
    while block := list(islice(records, rows)):
        yield {name: [record.get(name) for record in block] for name in columns}


def _records(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(encoding="utf-8-sig") as file, _text_of(source):
        yield from json_records(source, file)


def _parquet_names(source: Path) -> list[str]:
    return [str(name) for name in _parquet(source).schema_arrow.names]


def _parquet_blocks(source: Path, rows: int, columns: Sequence[str]) -> Iterator[Block]:
    rest: Block = {name: [] for name in columns}
    for batch in _parquet(source).iter_batches(rows, columns=list(columns)):  # it ends a batch with a row group
        with _text_of(source):
            cells = batch.to_pydict()
        for name, values in cells.items():
            rest[name] += values
        while rest and len(rest[columns[0]]) >= rows:
            yield {name: values[:rows] for name, values in rest.items()}
            rest = {name: values[rows:] for name, values in rest.items()}
    if rest and rest[columns[0]]:
        yield rest


def _parquet(source: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{source}: parquet needs pyarrow; pip install pyarrow, or use a CSV.") from error
    try:
        return pyarrow.parquet.ParquetFile(source)
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(f"{source} is no readable parquet file: {error}") from error


@contextmanager
def _text_of(source: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error}); save it as UTF-8.") from error
    except csv.Error as error:
        raise UserError(f"{source} is no valid CSV ({error}); is a quote left open?") from error


_NAMES: dict[str, Callable[[Path], list[str]]] = {
    "csv": _csv_names,
    "jsonl": _jsonl_names,
    "parquet": _parquet_names,
}
_READERS: dict[str, Callable[[Path, int, Sequence[str]], Iterator[Block]]] = {
    "csv": _csv_blocks,
    "jsonl": _jsonl_blocks,
    "parquet": _parquet_blocks,
}


# ---------------------------------------------------------------------------------------------------- writing


def _write_csv(target: Path, columns: list[str], blocks: Iterable[Block]) -> int:
    count = 0
    with target.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(columns)
        for block in blocks:
            cells = [[cell_text(value) for value in block[name]] for name in columns]
            # some versions of Python write a lone carriage return bare, and read it as the end of the row
            returns = any("\r" in cell for column in cells for cell in column)
            quoting = csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL
            writer = csv.writer(file, lineterminator="\n", quoting=quoting)  # type: ignore[arg-type]
            writer.writerows(zip(*cells, strict=True))
            count += len(cells[0])
    return count


def _write_jsonl(target: Path, columns: list[str], blocks: Iterable[Block]) -> int:
    count = 0
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for block in blocks:
            for cells in zip(*(block[name] for name in columns), strict=True):
                row = {name: number_of(name, cell) for name, cell in zip(columns, cells, strict=True)}
                file.write(json.dumps(row, ensure_ascii=False, default=cell_text) + "\n")
                count += 1
    return count


def _write_parquet(target: Path, columns: list[str], blocks: Iterable[Block]) -> int:
    """Columns have the type that their first block that is not all empty shows; a later one that does not fit is an error."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        raise UserError(f"{target.name}: parquet needs pyarrow; pip install pyarrow, or write a CSV.") from error
    count, types, writer = 0, dict[str, Any](), None
    held: list[dict[str, Any]] = []  # until every column has shown a type
    try:
        for block in blocks:
            arrays = {name: _array(pyarrow, name, block[name], types) for name in columns}
            count += len(block[columns[0]])
            held.append(arrays)
            if writer is None and len(types) < len(columns) and count < HELD_ROWS:
                continue
            writer = writer or ParquetWriter(target, _schema(pyarrow, columns, types))
            while held:
                _append(pyarrow, writer, held.pop(0))
        writer = writer or ParquetWriter(target, _schema(pyarrow, columns, types))
        while held:
            _append(pyarrow, writer, held.pop(0))
    except (TypeError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(
            f"a column cannot be written as parquet ({error}); write JSONL, which takes mixed types."
        ) from error
    finally:
        if writer is not None:
            writer.close()
    return count


HELD_ROWS = 1 << 20  # a column that is empty for so long is taken for text


def _array(pyarrow: Any, name: str, values: list[Any], types: dict[str, Any]) -> Any:
    """A column as an arrow array of the type that it has shown before; its own where it is the first."""
    cells = [number_of(name, value) for value in values]
    if name in types:
        if pyarrow.types.is_integer(types[name]):  # arrow would cut 10.5 to 10
            _refuse_fractions(name, cells)
        return _typed_array(pyarrow, name, cells, types[name])
    try:
        array = pyarrow.array(cells)
    except OverflowError:  # hashes take all 64 bits
        array = _typed_array(pyarrow, name, cells, pyarrow.uint64())
    if array.type != pyarrow.null():
        whole = pyarrow.types.is_integer(array.type) and name not in INTEGERS
        types[name] = pyarrow.float64() if whole and name in NUMBERS else array.type
    return array


def _typed_array(pyarrow: Any, name: str, cells: Sequence[Any], kind: Any) -> Any:
    try:
        return pyarrow.array(cells, kind)
    except OverflowError as error:
        raise ValueError(f"column {name!r} has whole numbers of which {kind} does not hold all") from error


def _refuse_fractions(name: str, cells: Sequence[Any]) -> None:
    for cell in cells:
        if isinstance(cell, float) and not cell.is_integer():
            raise ValueError(f"column {name!r} begins with whole numbers, and has {cell} later")


def _schema(pyarrow: Any, columns: Sequence[str], types: Mapping[str, Any]) -> Any:
    return pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in columns])


def _append(pyarrow: Any, writer: Any, arrays: Mapping[str, Any]) -> None:
    schema = writer.schema
    writer.write_table(pyarrow.table([arrays[name].cast(schema.field(name).type) for name in schema.names], schema))


_WRITERS: dict[str, Callable[[Path, list[str], Iterable[Block]], int]] = {
    "csv": _write_csv,
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
}
