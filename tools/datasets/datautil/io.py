"""Tables in and out: CSV, JSONL and parquet, all columns, every cell to the letter.

`opensora.datasets.table` reads what training needs of a table; here nothing may get lost on the way. Text is Python strings
in columns of type object, "" where there is none. What a CSV says stays text until an operation wants numbers, so that
"0.50" or "007" come out as they came in. A column of numbers of a typed format is a column of numbers.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

INTEGERS = ("num_frames", "height", "width", "resolution", "text_len", "ocr", "label")
FLOATS = ("aspect_ratio", "fps", "aes", "flow", "match", "filesize")
NUMBERS = (*INTEGERS, *FLOATS)
MISSING_WORDS = ("", "nan", "none", "null")  # in a column of numbers only, in any case
FORMATS = ("csv", "jsonl", "parquet")


def read_frame(source: Path) -> pd.DataFrame:
    """All rows and columns of a table file.

    Raises:
        UserError: it is missing, damaged, of an unknown format, or has a column twice.
    """
    if not source.is_file():
        names = [path.name for path in source.parent.glob("*")] if source.parent.is_dir() else []
        raise UserError(f"{source} does not exist.{did_you_mean(source.name, names)}")
    frame = _READERS[table_format(source)](source)
    columns = [str(column) for column in frame.columns]
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise UserError(f"{source} has more than one column {twice[0]!r}; rename one.")
    frame.columns = pd.Index(columns, dtype=object)
    return frame


def write_frames(frames: Sequence[pd.DataFrame], targets: Sequence[Path]) -> None:
    """Write all tables, or none: they get their names only when the last one is complete.

    Raises:
        UserError: the format cannot hold a value.
    """
    with _renamed_together(targets) as partials:
        for frame, target, partial in zip(frames, targets, partials, strict=True):
            try:
                _WRITERS[table_format(target)](frame, partial)
            except UnicodeEncodeError as error:
                raise UserError(f"{target}: a cell holds {error.object[error.start]!r}, which is no text.") from error


def table_format(path: Path) -> str:
    """`csv`, `jsonl` or `parquet`, by the file's extension."""
    name = path.suffix.lower().removeprefix(".")
    if name not in FORMATS:
        raise UserError(f"{path}: {path.suffix or 'no extension'} is no table; known are .csv, .jsonl and .parquet.")
    return name


def to_numbers(column: pd.Series, what: str) -> np.ndarray:
    """A column as float64, NaN where a cell is empty.

    Args:
        what: names the column in messages.

    Raises:
        UserError: a cell holds something else.
    """
    if is_numeric(column):
        return column.to_numpy(np.float64, na_value=np.nan)
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    for row in np.flatnonzero(np.isnan(numbers)):
        cell = column.iat[row]
        if cell is not None and str(cell).strip().lower() not in MISSING_WORDS and not isinstance(cell, float):
            raise UserError(f"{what}: {cell!r} in row {row + 1} is no number; mend it, or leave the cell empty.")
    return numbers


def is_numeric(column: pd.Series) -> bool:
    """Whether a column holds numbers, not text that may look like them."""
    return pd.api.types.is_numeric_dtype(column.dtype) and not pd.api.types.is_bool_dtype(column.dtype)


def strings(column: pd.Series) -> pd.Series:
    """A column as Python strings, "" where a value is missing; whole numbers have no decimal point."""
    cells = column.array if is_numeric(column) else column.to_numpy(object)
    return pd.Series([_cell(value) for value in cells], index=column.index, dtype=object)


# ---------------------------------------------------------------------------------------------------- reading


def _read_csv(source: Path) -> pd.DataFrame:
    """With Python's reader: pandas' own fills and drops the cells of a row that has too few or too many."""
    csv.field_size_limit(1 << 30)  # captions may be long
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True)
            header = next(lines, [])
            rows = [cells for cells in lines if cells]
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error}); save it as UTF-8.") from error
    except csv.Error as error:
        raise UserError(
            f"{source} is no valid CSV ({error}); is a quote left open, or not doubled inside quotes?"
        ) from error
    if not header:
        raise UserError(f"{source} is empty; its first line is a header such as `path,text`.")
    if bad := [row for row, cells in enumerate(rows) if len(cells) != len(header)]:
        raise UserError(
            f"{source}: the header has {len(header)} columns, but {len(bad)} rows have another number of cells; the first "
            f'is row {bad[0] + 1} with {len(rows[bad[0]])}. Put a caption that holds a comma in "double quotes".'
        )
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return _frame_of(header, [np.array(column, dtype=object) for column in columns], len(rows))


def _read_jsonl(source: Path) -> pd.DataFrame:
    """One object a line; a key that an object lacks is an empty cell."""
    records: list[dict[str, Any]] = []
    try:
        with source.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise UserError(f'{source}, line {number}: expected an object such as {{"path": "a.mp4"}}.')
                records.append(record)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}, line {number}: no valid JSON ({error.msg}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error}); save it as UTF-8.") from error
    names = list(dict.fromkeys(name for record in records for name in record))
    return _frame_of(names, [_typed([record.get(name) for record in records]) for name in names], len(records))


def _read_parquet(source: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(source, dtype_backend="numpy_nullable")
    except ImportError as error:
        raise UserError(f"{source}: parquet needs pyarrow; pip install pyarrow, or use a CSV.") from error
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(f"{source} is no readable parquet file: {error}") from error
    named = any(name is not None for name in frame.index.names)
    frame = frame.reset_index(drop=not named)  # pandas writes a named index as a column
    columns: list[Any] = [_plain(frame.iloc[:, i]) for i in range(frame.shape[1])]
    return _frame_of(list(frame.columns), columns, len(frame))


_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "csv": _read_csv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}


def _frame_of(names: Sequence[str], columns: Sequence[Any], num_rows: int) -> pd.DataFrame:
    """A table of columns whose names may repeat."""
    frame = pd.DataFrame(dict(enumerate(columns)), index=pd.RangeIndex(num_rows))
    frame.columns = pd.Index(names, dtype=object)
    return frame


def _typed(values: list[Any]) -> Any:
    """The values of a column with the narrowest type that keeps them."""
    kinds = set(map(type, values))
    kinds.discard(type(None))
    if kinds == {int} and all(abs(value) < 2**63 for value in values if value is not None):
        return pd.array(values, dtype="Int64")
    if kinds in ({float}, {int, float}):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = ["" if value is None else value for value in values] if kinds <= {str} else values
    return column


def _plain(column: pd.Series) -> Any:
    """A column as pandas read it -> numbers, or Python objects with "" for a missing text."""
    if is_numeric(column):
        if pd.api.types.is_float_dtype(column.dtype):
            return column.to_numpy(np.float64, na_value=np.nan)
        return column
    values = [None if value is pd.NA else value for value in column.to_numpy(object)]
    return _typed([value.tolist() if isinstance(value, np.ndarray) else value for value in values])


# ---------------------------------------------------------------------------------------------------- writing


def _write_csv(frame: pd.DataFrame, target: Path) -> None:
    columns = [strings(frame[name]).tolist() for name in frame.columns]
    # some versions of Python write a lone carriage return bare, and read it as the end of the row
    returns = any("\r" in cell for column in columns for cell in column)
    with target.open("w", newline="", encoding="utf-8") as file:
        quoting = csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL
        writer = csv.writer(file, lineterminator="\n", quoting=quoting)  # type: ignore[arg-type]
        writer.writerow(frame.columns)
        writer.writerows(zip(*columns, strict=True))


def _write_jsonl(frame: pd.DataFrame, target: Path) -> None:
    names = list(frame.columns)
    columns = [[_json_value(value) for value in _objects(known_numbers(frame[name]))] for name in names]
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for row in zip(*columns, strict=True):
            file.write(encode(dict(zip(names, row, strict=True))) + "\n")


def _write_parquet(frame: pd.DataFrame, target: Path) -> None:
    typed = pd.DataFrame({name: known_numbers(frame[name]) for name in frame.columns})
    try:
        typed.to_parquet(target, index=False)
    except ImportError as error:
        raise UserError(f"{target.name}: parquet needs pyarrow; pip install pyarrow, or write a CSV.") from error
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(f"a column cannot be written as parquet ({error}); write JSONL, which takes mixed types.") from error


_WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "csv": _write_csv,
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
}


def known_numbers(column: pd.Series) -> pd.Series:
    """A column that is numbers by its name as numbers, where all its cells are; others as they are."""
    if column.name not in NUMBERS or is_numeric(column):
        return column
    try:
        numbers = to_numbers(column, str(column.name))
    except UserError:
        return column
    whole = np.isnan(numbers) | ((numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53))
    if column.name in INTEGERS and whole.all():
        return pd.Series(numbers, index=column.index).astype("Int64")
    return pd.Series(numbers, index=column.index)


def _objects(column: pd.Series) -> list[Any]:
    """The values as Python has them, None where one is missing."""
    return [None if value is pd.NA or value != value else value for value in column.astype(object).tolist()]


def _cell(value: Any) -> str:
    """A value as text, such that equal values give equal text."""
    if isinstance(value, str):
        return value
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float | np.floating):
        return repr(float(value)).removesuffix(".0")
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bytes):
        raise UserError("a column of bytes cannot be written as text; drop it with --drop-columns, or write parquet.")
    return str(value)


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool | list | dict):
        return value
    return value.item() if isinstance(value, np.generic) else _cell(value)


@contextmanager
def _renamed_together(targets: Sequence[Path]) -> Iterator[list[Path]]:
    """Files to write to, which take their names when the block ends well and vanish when it does not."""
    partials = [target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}") for target in targets]
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partials
        for partial, target in zip(partials, targets, strict=True):
            partial.replace(target)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
