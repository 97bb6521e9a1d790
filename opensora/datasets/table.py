"""The table of a dataset: one clip a row, in a CSV or parquet file with the columns `path` and, usually, `text`.

Captions are kept to the letter: "NA", "None" and "" are captions too.
"""

import csv
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from opensora.datasets.read_video import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MAX_CHECKED_FILES = 100_000
SHOWN_ROWS = 5
UNKNOWN = 0  # in `num_frames`


@dataclass(frozen=True)
class Table:
    """A table that was read and checked. Row numbers count from 0; messages count from 1, below the header."""

    source: Path
    folder: Path
    rows: pd.DataFrame  # `path` and the text columns, as strings
    text_columns: tuple[str, ...]
    num_frames: np.ndarray  # [N] int64, UNKNOWN where the table does not say

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        """The path as the table gives it."""
        return str(self.rows["path"].iat[row])

    def path(self, row: int) -> Path:
        """Where the file is."""
        return self.folder / self.name(row)

    def captions(self, row: int) -> list[str]:
        """The captions of a row that are not empty; one empty caption if none is left."""
        captions = [str(self.rows[column].iat[row]) for column in self.text_columns]
        return [caption for caption in captions if caption] or [""]

    def where(self, row: int) -> str:
        """A row, as messages name it."""
        return f"{self.source}, row {row + 1}"

    def fingerprint(self) -> str:
        """A hash of paths as given, captions and lengths; not of the folder, so that data may move."""
        digest = hashlib.blake2b(repr(self.text_columns).encode(), digest_size=16)
        for column in ("path", *self.text_columns):
            for value in self.rows[column]:
                data = value.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        digest.update(self.num_frames.tobytes())
        return digest.hexdigest()


def read_table(
    data_path: str | Path,
    root: str | Path | None = None,
    text_columns: Sequence[str] = ("text",),
    *,
    check_files: bool = True,
) -> Table:
    """Read a CSV or parquet table; its paths are relative to `root`, or to the table's own folder.

    `check_files`: see that all of them exist.

    Raises:
        UserError: the table, a column or a file is missing, or a row is malformed.
    """
    source = Path(data_path)
    if not source.is_file():
        names = [path.name for path in source.parent.glob("*")] if source.parent.is_dir() else []
        raise UserError(f"data_path: {source} does not exist.{did_you_mean(source.name, names)}")
    readers = {".csv": _read_csv, ".parquet": _read_parquet}
    if source.suffix.lower() not in readers:
        raise UserError(f"data_path: {source} is neither a .csv nor a .parquet file; convert it to one of them.")
    frame = readers[source.suffix.lower()](source)
    _check_columns(source, frame, ("path", *text_columns))
    if not len(frame):
        raise UserError(f"{source} has a header but no rows; add one row for each clip.")
    if root is not None and not Path(root).is_dir():
        raise UserError(f"root: {root} is no folder; it is what the paths in {source} are relative to.")
    rows = pd.DataFrame({name: _strings(frame[name]) for name in dict.fromkeys(("path", *text_columns))})
    folder = Path(root) if root is not None else source.parent
    table = Table(source, folder, rows, tuple(text_columns), _read_num_frames(source, frame))
    _check_extensions(table)
    if check_files:
        _check_files(table)
    return table


def list_rows(rows: Iterable[int], total: int) -> str:
    """`3, 8 and 12 more` for row numbers counted from 0."""
    shown = [str(row + 1) for row in islice(rows, SHOWN_ROWS)]
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def complain_about_rows(table: Table, rows: Sequence[int], problem: str, remedy: str) -> UserError:
    """An error that names the first few of the rows and their files."""
    lines = [f"  row {row + 1}: {table.path(row)}" for row in rows[:SHOWN_ROWS]]
    if len(rows) > SHOWN_ROWS:
        lines.append(f"  and {len(rows) - SHOWN_ROWS} more")
    return UserError("\n".join([f"{table.source}: {len(rows)} of {len(table)} rows {problem}:", *lines, remedy]))


# ---------------------------------------------------------------------------------------------------- reading


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


def _read_parquet(source: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(source)
    except ImportError as error:
        raise UserError(f"{source}: parquet needs pyarrow; pip install pyarrow, or use a CSV.") from error
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(f"{source} is no readable parquet file: {error}") from error


def _check_columns(source: Path, frame: pd.DataFrame, needed: Sequence[str]) -> None:
    columns = [str(column) for column in frame.columns]
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise UserError(f"{source} has more than one column {twice[0]!r}; rename one.")
    for name in needed:
        if name in columns:
            continue
        message = f"{source} has no column {name!r}; its columns are: {', '.join(columns)}."
        if any(Path(column).suffix.lower() in VIDEO_EXTENSIONS + IMAGE_EXTENSIONS for column in columns):
            raise UserError(f"{message} The first line looks like data: put the header `path,text` above it.")
        message += did_you_mean(name.lower(), [column for column in columns if column != "path"])
        if name != "path":
            message += " Which columns hold captions is set with dataset.text_columns."
        raise UserError(message)


def _strings(column: pd.Series) -> pd.Series:
    """A column as strings; a missing value of a parquet file is an empty string."""
    return column.astype(object).where(column.notna(), "").astype(str)


def _read_num_frames(source: Path, frame: pd.DataFrame) -> np.ndarray:
    if "num_frames" not in frame.columns:
        return np.full(len(frame), UNKNOWN, np.int64)
    column: Any = frame["num_frames"]
    text = _strings(column)
    numbers = pd.to_numeric(text.where(text != "", str(UNKNOWN)), errors="coerce").to_numpy(np.float64, na_value=np.nan)
    stated = (text != "").to_numpy()
    wrong = np.flatnonzero(~((numbers == np.floor(numbers)) & (numbers < 2**53) & ((numbers >= 1) | ~stated)))
    if len(wrong):
        raise UserError(
            f"{source}: num_frames={text.iat[wrong[0]]!r} in row {wrong[0] + 1} is no number of frames (rows "
            f"{list_rows(map(int, wrong), len(wrong))}); write a whole number from 1, or leave the cell empty."
        )
    return numbers.astype(np.int64)


def _check_extensions(table: Table) -> None:
    suffixes = table.rows["path"].map(lambda name: Path(name).suffix.lower())
    if len(rows := np.flatnonzero(~suffixes.isin(VIDEO_EXTENSIONS + IMAGE_EXTENSIONS))):
        known = " ".join(VIDEO_EXTENSIONS + IMAGE_EXTENSIONS)
        raise complain_about_rows(table, rows.tolist(), "have no known extension", f"Known are {known}.")


def _check_files(table: Table) -> None:
    if len(table) > MAX_CHECKED_FILES:
        logger.info(
            "%s: whether the files exist is not checked at start, for %d rows are too many.", table.source, len(table)
        )
        return
    if missing := [row for row in range(len(table)) if not table.path(row).is_file()]:
        remedy = (
            f"Paths are relative to {table.folder.resolve()}; if the files lie elsewhere, set root (--root FOLDER)."
        )
        raise complain_about_rows(table, missing, "name a file that does not exist", remedy)
