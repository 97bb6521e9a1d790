"""The cells of a CSV, JSONL or parquet file, to the letter."""

import csv
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from opensora.utils.errors import UserError

SHOWN_ROWS = 5


def read_cells(source: Path) -> pd.DataFrame:
    """All cells of a table; of CSV they are strings, of JSONL and parquet what the file has.

    Raises:
        UserError: it is malformed, or of another kind.
    """
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if source.suffix.lower() not in readers:
        raise UserError(
            f"data_path: {source} is neither a .csv nor a .parquet nor a .jsonl file; convert it to one of them."
        )
    return readers[source.suffix.lower()](source)


def list_rows(rows: Iterable[int], total: int) -> str:
    """`3, 8 and 12 more` for row numbers counted from 0."""
    shown = [str(row + 1) for row in islice(rows, SHOWN_ROWS)]
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def _read_csv(source: Path) -> pd.DataFrame:
    """All cells as strings. pandas' own reader would move or drop the cells of a row with too many of them."""
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
        raise UserError(f"{source} is empty; its first line is the header `path,text`.")
    if bad := [i for i, cells in enumerate(rows) if len(cells) != len(header)]:
        raise UserError(
            f"{source}: the header has {len(header)} columns, but row {bad[0] + 1} has {len(rows[bad[0]])} cells (rows "
            f'{list_rows(bad, len(bad))}). Put a caption that holds a comma in "double quotes".'
        )
    return pd.DataFrame(rows, columns=header, dtype=str)


def _read_jsonl(source: Path) -> pd.DataFrame:
    """One object a line; what a line does not name is empty."""
    rows: list[dict[str, Any]] = []
    try:
        # not splitlines(), which also splits at characters that JSON leaves as they are, such as U+2028
        lines = source.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text ({error}); save it as UTF-8.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_without_repeats)
        except ValueError as error:
            raise UserError(
                f"{source}, line {number}: no valid JSON ({error}); each line is an object of its own."
            ) from error
        if not isinstance(row, dict):
            raise UserError(f'{source}, line {number}: not an object, such as {{"path": "a.mp4", "text": "a lake"}}.')
        if nested := [name for name, value in row.items() if isinstance(value, dict | list)]:
            raise UserError(
                f"{source}, line {number}: {nested[0]!r} is not one value; give each caption a name of its own."
            )
        rows.append(row)
    if not rows:
        raise UserError(
            f'{source} is empty; add one line for each clip, such as {{"path": "a.mp4", "text": "a lake"}}.'
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in names})


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _read_parquet(source: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(source)
    except ImportError as error:
        raise UserError(f"{source}: parquet needs pyarrow; pip install pyarrow, or use a CSV.") from error
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(f"{source} is no readable parquet file: {error}") from error
