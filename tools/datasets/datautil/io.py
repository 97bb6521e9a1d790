"""Tables out, to CSV, JSONL and parquet, and cells as numbers. Tables are read by `opensora.datasets.table.files`."""

import csv
import json
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from opensora.datasets.table.files import cell_text, collection_paused, is_numeric, strings, table_format
from opensora.utils.errors import UserError

INTEGERS = ("num_frames", "height", "width", "resolution", "text_len", "ocr", "label", "duplicate_bits")
FLOATS = (
    "aspect_ratio",
    "fps",
    "duration",
    "aes",
    "flow",
    "match",
    "filesize",
    "ocr_area",
    "sharpness",
    "black",
    "static",
)
NUMBERS = (*INTEGERS, *FLOATS)
MISSING_WORDS = ("", "nan", "none", "null")  # in a column of numbers only, in any case


def write_frames(frames: Sequence[pd.DataFrame], targets: Sequence[Path]) -> None:
    """Write all tables, or none: they get their names only when the last one is complete.

    Raises:
        UserError: the format cannot hold a value.
    """
    with _renamed_together(targets) as partials:
        for frame, target, partial in zip(frames, targets, partials, strict=True):
            try:
                with collection_paused():
                    _WRITERS[table_format(target)](frame, partial)
            except UnicodeEncodeError as error:
                raise UserError(f"{target}: a cell holds {error.object[error.start]!r}, which is no text.") from error


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
    rows = np.flatnonzero(np.isnan(numbers))
    cells = column.to_numpy(object)[rows].tolist()
    for row, cell in zip(rows, cells, strict=True) if not set(map(str, cells)) <= {"", "nan", "None"} else ():
        if str(cell).strip().lower() not in MISSING_WORDS:
            raise UserError(f"{what}: {cell!r} in row {row + 1} is no number; mend it, or leave the cell empty.")
    return numbers


# ---------------------------------------------------------------------------------------------------- writing


def _write_csv(frame: pd.DataFrame, target: Path) -> None:
    columns = [strings(frame[name]).tolist() for name in frame.columns]
    # some versions of Python write a lone carriage return bare, and read it as the end of the row
    returns = any("\r" in "".join(column) for column in columns)
    with target.open("w", newline="", encoding="utf-8") as file:
        quoting = csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL
        writer = csv.writer(file, lineterminator="\n", quoting=quoting)  # type: ignore[arg-type]
        writer.writerow(frame.columns)
        writer.writerows(zip(*columns, strict=True))


def _write_jsonl(frame: pd.DataFrame, target: Path) -> None:
    columns = [_json_cells(known_numbers(frame[name])) for name in frame.columns]
    names = [f"{encode_basestring(name)}: " for name in frame.columns]
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for row in zip(*columns, strict=True):
            file.write("{" + ", ".join(map(operator.add, names, row)) + "}\n")


def _json_cells(column: pd.Series) -> list[str]:
    """Each value of a column as JSON; null where one is missing."""
    if is_numeric(column):
        words = {"None": "null", "inf": "Infinity", "-inf": "-Infinity"}  # as Python's json reads them
        return [words.get(text, text) for text in map(repr, _objects(column))]
    encode = json.JSONEncoder(ensure_ascii=False, default=cell_text).encode
    return [encode_basestring(value) if type(value) is str else encode(value) for value in _objects(column)]


def _write_parquet(frame: pd.DataFrame, target: Path) -> None:
    typed = pd.DataFrame({name: known_numbers(frame[name]) for name in frame.columns})
    try:
        typed.to_parquet(target, index=False)
    except ImportError as error:
        raise UserError(f"{target.name}: parquet needs pyarrow; pip install pyarrow, or write a CSV.") from error
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # pyarrow's errors derive from these
        raise UserError(
            f"a column cannot be written as parquet ({error}); write JSONL, which takes mixed types."
        ) from error


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
    values = column.astype(object).tolist()
    return [None if missing else value for value, missing in zip(values, column.isna(), strict=True)]


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
