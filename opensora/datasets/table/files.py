"""CSV, JSONL and parquet files: all columns, every cell to the letter.

Text is Python strings in columns of type object, "" where there is none. What a CSV says stays text until somebody wants
numbers, so that "0.50" or "007" come out as they came in. A column of numbers of a typed format is a column of numbers.
What training needs of a table is read by `opensora.datasets.table.table`, block by block; tables are written by tools/datasets.
"""

import csv
import gc
import json
import logging
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.folders import parse_json

logger = logging.getLogger(__name__)

FORMATS = ("csv", "jsonl", "parquet")
SHOWN_ROWS = 5  # of those that a message is about
EXACT = 2**53  # whole numbers up to it are float64s as well
BLOCK = 4096  # rows at a time: what was parsed is still in the processor's cache when it is used
Block = tuple[int, dict[str, Any]]  # how many rows, and the cells of each column


class UnwritableError(UserError):
    """A format does not hold a value; who writes the file adds its name."""


def read_frame(source: Path) -> pd.DataFrame:
    """All rows and columns of a table file; a `UserError` where it is missing, damaged, of an unknown format, or has a column twice."""
    columns: dict[str, Any] = {}
    count = 0
    if source.suffix.lower() == ".parquet" and source.is_file():
        with _readable(source):
            frame = pd.read_parquet(source, dtype_backend="numpy_nullable")
        named = any(name is not None for name in frame.index.names)
        frame = frame.reset_index(drop=not named)  # pandas writes a named index as a column
        names, count = [str(name) for name in frame.columns], len(frame)
        _refuse_repeats(source, names)
        for i, name in enumerate(names):
            column = frame.iloc[:, i]
            if is_numeric(column):
                is_float = pd.api.types.is_float_dtype(column.dtype)
                columns[name] = column.to_numpy(np.float64, na_value=np.nan) if is_float else column
            else:
                try:
                    values = column.to_numpy(object)
                except pa.ArrowException as error:
                    raise UserError(
                        f"{source}: column {name!r} holds bytes that are not UTF-8 text; write the file anew."
                    ) from error
                cells = [None if cell is pd.NA or cell is pd.NaT else cell for cell in values]
                columns[name] = _typed([cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in cells])
    else:
        with collection_paused():
            for size, block in read_blocks(source):
                for name, cells in block.items():
                    columns.setdefault(name, [None] * count).extend(cells)
                count += size
        columns = {name: _typed(cells) for name, cells in columns.items()}
    frame = pd.DataFrame({name: as_objects(column) for name, column in columns.items()}, index=pd.RangeIndex(count))
    frame.columns = pd.Index(columns, dtype=object)
    return frame


def read_blocks(source: Path, columns: Collection[str] | None = None) -> Iterator[Block]:
    """A table in blocks of rows, as read; of a parquet file only `columns`, where they are given.

    The first block of a CSV or parquet file has no rows, and all columns. A block of a JSONL file has the columns that occurred so
    far; None is in the cells of those that an object lacks. Cells are a sequence of Python's values; in a parquet file an arrow
    array of strings, or a numpy array of numbers. Raises as `read_frame`.
    """
    if source.is_dir():
        raise UserError(
            f"{source} is a folder; a table with one row for each of its files is needed: "
            f"python -m tools.datasets.convert video {shlex.quote(str(source))} --output clips.csv"
        )
    if not source.is_file():
        raise _missing(source, str(source))
    kind = table_format(source)
    with _readable(source):
        if kind == "parquet":
            yield from _parquet_blocks(source, columns)
            return
        with source.open(encoding="utf-8-sig", newline="" if kind == "csv" else None) as file:
            yield from (_csv_blocks if kind == "csv" else _jsonl_blocks)(source, file)


def check_exist(**paths: str | Path | None) -> None:
    """Raise a `UserError` where a file or folder, given by the name of its config field, is not there; None are none."""
    for field, path in paths.items():
        if path is not None and not Path(path).exists():
            raise _missing(Path(path), f"{field}={path}")


def _missing(source: Path, what: str) -> UserError:
    if source.is_symlink():
        return UserError(f"{what} is a link to {os.readlink(source)}, where there is no file; make the link anew.")  # noqa: PTH115
    if source.exists():
        return UserError(f"{what} is a pipe or a device, not a regular file.")
    names = [path.name for path in source.parent.glob("*")] if source.parent.is_dir() else []
    return UserError(f"{what} does not exist.{did_you_mean(source.name, names)}")


def table_format(path: Path) -> str:
    """`csv`, `jsonl` or `parquet`, by the file's extension."""
    name = path.suffix.lower().removeprefix(".")
    if name not in FORMATS:
        raise UserError(f"{path}: {path.suffix or 'no extension'} is no table; known are .csv, .jsonl and .parquet.")
    return name


def is_numeric(column: pd.Series) -> bool:
    """Whether a column holds numbers, not text that may look like them."""
    return pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_bool_dtype(column.dtype)


def integer_type(least: int, most: int) -> Literal["Int64", "UInt64"] | None:
    """What keeps whole numbers from `least` to `most` as they are; None = nothing that pandas has."""
    if least >= -(2**63) and most < 2**63:
        return "Int64"
    return "UInt64" if least >= 0 and most < 2**64 else None


def strings(column: pd.Series) -> pd.Series:
    """A column as Python strings, "" where a value is missing; whole numbers have no decimal point."""
    return pd.Series(cell_texts(column.array), index=column.index, dtype=object)


def as_objects(values: Any) -> Any:
    """A column of Python objects where pandas would make its own kind of strings of them; others as they are."""
    if isinstance(values, pd.Series) and isinstance(values.dtype, pd.StringDtype):
        return values.astype(object)
    if isinstance(values, list) or (isinstance(values, np.ndarray) and values.dtype == object):
        return pd.Series(values, dtype=object)
    return values


def list_rows(rows: Iterable[int], total: int) -> str:
    """`3, 8 and 12 more` for row numbers counted from 0."""
    shown = [str(row + 1) for row in islice(rows, SHOWN_ROWS)]
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


@contextmanager
def collection_paused() -> Iterator[None]:
    """No search for circular garbage, which tables have none of: it triples the time of reading one."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def cell_texts(values: Any) -> Sequence[str]:
    """`cell_text` of each, unless all are text already."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return values if set(map(type, values)) <= {str} else [cell_text(value) for value in values]


def cell_text(value: Any) -> str:
    """A value as text, such that equal values give equal text."""
    if isinstance(value, str):
        return value
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float | np.floating):
        return repr(float(value)).removesuffix(".0")
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bytes):
        raise UnwritableError(
            "a column of bytes cannot be written as text; drop it with --drop-columns, or write parquet."
        )
    return str(value)


# ---------------------------------------------------------------------------------------------------- reading


def _csv_blocks(source: Path, file: Iterable[str]) -> Iterator[Block]:
    """With Python's reader: pandas' and arrow's take text behind a closing quote (docs/explanation/benchmarks/table.md)."""
    csv.field_size_limit(1 << 30)  # captions may be long
    file = iter(file)
    first = next(file, "")
    delimiter = (
        "," if "," in first else next((mark for mark in ";\t" if mark in first), ",")
    )  # spreadsheets write these
    if delimiter != ",":
        logger.info("%s: its columns are separated by %s.", source, "semicolons" if delimiter == ";" else "tabs")
    lines = csv.reader(chain([first], file), strict=True, delimiter=delimiter)
    header = next(lines, [])
    if not header:
        raise UserError(f"{source} is empty; its first line is the header `path,text`.")
    _refuse_repeats(source, header)
    yield 0, dict.fromkeys(header, ())
    filled, count = filter(None, lines), 0
    while rows := list(islice(filled, BLOCK)):
        if set(map(len, rows)) != {len(header)}:
            bad = [row for row, cells in enumerate(rows) if len(cells) != len(header)]
            raise UserError(
                f"{source}: the header has {len(header)} columns, but row {count + bad[0] + 1} has {len(rows[bad[0]])} cells "
                f"(rows {list_rows((count + row for row in bad), len(bad))}). "
                'Put a caption that holds a comma in "double quotes".'
            )
        yield len(rows), dict(zip(header, zip(*rows, strict=True), strict=True))
        count += len(rows)


def _jsonl_blocks(source: Path, file: Iterable[str]) -> Iterator[Block]:
    names: dict[str, None] = {}
    records = _json_records(source, file)
    while block := list(islice(records, BLOCK)):
        names |= dict.fromkeys(name for record in block for name in record)
        yield len(block), {name: [record.get(name) for record in block] for name in names}


def _json_records(source: Path, file: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one a line; a `UserError` where a line is none, has a name twice, or half of a character."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise UserError(
                f"{source}, line {number}: no valid JSON ({error}); each line is an object of its own."
            ) from error
        if not isinstance(record, dict):
            raise UserError(f'{source}, line {number}: not an object, such as {{"path": "a.mp4", "text": "a lake"}}.')
        # an escape can be a surrogate without its other half, as where a text was truncated in the middle of an emoji
        for name, value in record.items() if "\\u" in line else ():
            try:
                json.dumps({name: value}, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{source}, line {number}: {name!a} has half of a character, {error.object[error.start]!a}, which is no text; "
                    "was it cut in the middle of an emoji? Remove it."
                ) from error
        yield record


def _refuse_repeats(source: Path, columns: Sequence[str]) -> None:
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise UserError(f"{source} has more than one column {twice[0]!r}; rename one.")


def _parquet_blocks(source: Path, columns: Collection[str] | None) -> Iterator[Block]:
    file = pq.ParquetFile(source)
    names = [name for name in file.schema_arrow.names if not name.startswith("__index_level_")]  # pandas' row numbers
    _refuse_repeats(source, names)
    yield 0, dict.fromkeys(names, ())
    wanted = [name for name in names if columns is None or name in columns]
    # in one thread: all processes of a machine read the table at once
    for batch in file.iter_batches(1 << 16, columns=wanted, use_threads=False):
        block: dict[str, Any] = {}
        for name, cells in zip(batch.schema.names, batch.columns, strict=True):
            if types.is_string(cells.type) or types.is_large_string(cells.type):
                cells.validate(full=True)  # that it is UTF-8
                block[name] = cells
            elif types.is_integer(cells.type) or types.is_floating(cells.type):
                block[name] = cells.to_pandas(integer_object_nulls=True).to_numpy()
            else:
                block[name] = cells.to_pylist()
        yield len(batch), block


@contextmanager
def _readable(source: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error}); save it as UTF-8.") from error
    except csv.Error as error:
        quotes = "is a quote left open, or not doubled inside quotes?"
        raise UserError(f"{source} is no valid CSV ({error}); {quotes}") from error
    except (OSError, ValueError, pa.ArrowException) as error:  # nearly all of pyarrow's derive from the first two
        raise UserError(f"{source} is no readable {table_format(source)} file: {error}") from error


def _typed(values: list[Any]) -> Any:
    """The values of a column with the narrowest type that keeps them."""
    kinds = set(map(type, values))
    kinds.discard(type(None))
    whole = [value for value in values if type(value) is int] if int in kinds else [0]
    least, most = min(whole), max(whole)
    if kinds == {int} and (kind := integer_type(least, most)):
        return pd.array(values, dtype=kind)
    if kinds == {float} or (kinds == {int, float} and least >= -EXACT and most <= EXACT):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = ["" if value is None else value for value in values] if kinds <= {str} else values
    return column
