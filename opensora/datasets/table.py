"""The table of a dataset: one clip a row, in a CSV, JSONL or parquet file with the columns `path` and, usually, `text`.

Captions are kept to the letter: "NA", "None" and "" are captions too. A row is kept or left out as a whole, and what is left
out is counted by reason. Nothing that stays is an object for each row, so that worker processes share it (`text_column.py`).
"""

import hashlib
import logging
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from opensora.datasets.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from opensora.datasets.table_files import SHOWN_ROWS, list_rows, read_frame, strings
from opensora.datasets.text_column import TextColumn
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MAX_CHECKED_FILES = 100_000
SAMPLE_OF_FILES = 1_000  # that are looked for where a table has more rows than that
UNKNOWN = 0  # in `num_frames`, `height` and `width`
OK = "ok"  # in the column `status` of tools/datasets and tools/scoring; anything else says what is wrong with the file
URL = re.compile(r"(https?|s3|gs|ftp)://")


def _unset() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Table:
    """A table that was read and checked. Row numbers count from 0; messages count from 1, below the header.

    Attributes:
        rows: `path` and the text columns.
        num_frames, height, width: [N] int64, UNKNOWN where the table does not say.
        fps: [N] float64, NaN where the table does not say.
        flow: [N] float64, the optical-flow score, NaN where the cell is empty; None where the table has no such column.
        numbers: [N] int64, the rows' numbers in the file; they differ from 0 ... N - 1 where rows were left out.
        left_out: Why rows of the file are not here, and how many.
    """

    source: Path
    folder: Path
    rows: Mapping[str, TextColumn]
    text_columns: tuple[str, ...]
    num_frames: np.ndarray
    height: np.ndarray = field(default_factory=_unset)
    width: np.ndarray = field(default_factory=_unset)
    fps: np.ndarray = field(default_factory=_unset)
    numbers: np.ndarray = field(default_factory=_unset)
    left_out: dict[str, int] = field(default_factory=dict)
    flow: np.ndarray | None = None

    def __post_init__(self) -> None:
        unknown = np.full(len(self), UNKNOWN, np.int64)
        nothing = {
            "height": unknown,
            "width": unknown,
            "fps": np.full(len(self), np.nan),
            "numbers": np.arange(len(self)),
        }
        for name, value in nothing.items():
            if len(getattr(self, name)) != len(self):
                object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.rows["path"])

    def name(self, row: int) -> str:
        """The path as the table gives it."""
        return self.rows["path"][row]

    def path(self, row: int) -> Path:
        """Where the file is."""
        return self.folder / self.name(row)

    def captions(self, row: int) -> list[str]:
        """The captions of a row that are not empty; one empty caption if none is left."""
        captions = [self.rows[column][row] for column in self.text_columns]
        return [caption for caption in captions if caption] or [""]

    def scores(self, row: int) -> dict[str, float]:
        """What the table says of a row's video beside its size: `flow`, if it has that column."""
        return {} if self.flow is None else {"flow": float(self.flow[row])}

    def without_flow(self) -> list[int]:
        """The rows of which the table does not say how much moves."""
        return list(range(len(self))) if self.flow is None else np.flatnonzero(np.isnan(self.flow)).tolist()

    def where(self, row: int) -> str:
        """A row, as messages name it."""
        return f"{self.source}, row {int(self.numbers[row]) + 1}"

    def without(self, rows: Sequence[int] | np.ndarray, reason: str) -> "Table":
        """The table but for some rows, which are counted under `reason`."""
        kept = np.ones(len(self), bool)
        kept[np.asarray(rows, np.int64)] = False
        texts = {name: column.only(kept) for name, column in self.rows.items()}
        return Table(
            self.source, self.folder, texts, self.text_columns, self.num_frames[kept],
            self.height[kept], self.width[kept], self.fps[kept], self.numbers[kept],
            {**self.left_out, reason: self.left_out.get(reason, 0) + int(np.sum(~kept))},
            None if self.flow is None else self.flow[kept],
        )  # fmt: skip

    def fingerprint(self) -> str:
        """A hash of paths as given, captions and lengths; not of the folder, so that data may move."""
        digest = hashlib.blake2b(repr(self.text_columns).encode(), digest_size=16)
        for column in ("path", *self.text_columns):
            texts = self.rows[column]
            for row in range(len(texts)):
                data = texts.encoded(row)
                digest.update(len(data).to_bytes(8, "little") + data)
        digest.update(self.num_frames.tobytes())
        if self.flow is not None:
            digest.update(self.flow.tobytes())
        return digest.hexdigest()


def read_table(
    data_path: str | Path,
    root: str | Path | None = None,
    text_columns: Sequence[str] = ("text",),
    *,
    check_files: bool = True,
    max_bad_share: float = 0.0,
    columns_option: str = "text_columns",
) -> Table:
    """Read a CSV, JSONL or parquet table; its paths are relative to `root`, or to the table's own folder.

    Args:
        check_files: See that all files exist; of a very long table, that a sample of them does.
        max_bad_share: Rows that name no file, or say that theirs is broken (`status`, or `num_frames` 0), are left out up to
            this share of the table, and counted in the log and in `left_out`. 0: the first kind that is found is an error.
        columns_option: The dataset's option that names `text_columns`, for messages.

    Raises:
        UserError: the table or a column is missing, it is malformed, or has more bad rows than allowed.
    """
    source = Path(data_path)
    frame = read_frame(source)
    _check_columns(source, frame, ("path", *text_columns), columns_option)
    if not len(frame):
        raise UserError(f"{source} has a header but no rows; add one row for each clip.")
    if root is not None and not Path(root).is_dir():
        raise UserError(f"root: {root} is no folder; it is what the paths in {source} are relative to.")
    rows = {name: _text(source, frame[name]) for name in dict.fromkeys(("path", *text_columns))}
    columns = {name: _read_numbers(frame, name) for name in NUMBERS}
    folder = Path(root) if root is not None else source.parent
    values: dict[str, Any] = {name: columns[name].values for name in NUMBERS}
    table = Table(source, folder, rows, tuple(text_columns), **values, flow=_read_flow(source, frame))
    stated_broken = _Status.of(frame).bad_rows
    for check in (_bad_extensions, _urls, stated_broken, *(columns[name].bad_rows for name in NUMBERS)):
        table = _leave_out(table, check(table), len(frame), max_bad_share)
    if check_files and len(table) <= MAX_CHECKED_FILES:
        table = _leave_out(table, _missing_files(table, np.arange(len(table))), len(frame), max_bad_share)
    elif check_files:
        _look_for_some(table, max_bad_share)
    return table


@dataclass(frozen=True)
class BadRows:
    """Rows of one fault."""

    rows: np.ndarray
    reason: str  # "5 rows are left out: " ...
    error: Callable[[], UserError]


def _leave_out(table: Table, bad: BadRows, total: int, max_share: float) -> Table:
    if not len(bad.rows):
        return table
    so_far = total - len(table) + len(bad.rows)
    if so_far > max_share * total:
        error = bad.error()
        limit = f"\nThese are more than max_bad_share={max_share:g} of all rows." if max_share else ""
        raise UserError(f"{error}{limit}")
    shown = ", ".join(table.name(row) for row in bad.rows[:SHOWN_ROWS].tolist())
    more = f" and {len(bad.rows) - SHOWN_ROWS} more" if len(bad.rows) > SHOWN_ROWS else ""
    logger.warning(
        "%s: %d of %d rows are left out: %s (%s%s).", table.source, len(bad.rows), total, bad.reason, shown, more
    )
    return table.without(bad.rows, bad.reason)


def complain_about_rows(table: Table, rows: Sequence[int], problem: str, remedy: str) -> UserError:
    """An error that names the first few of the rows and their files."""
    lines = [f"  row {int(table.numbers[row]) + 1}: {table.path(row)}" for row in rows[:SHOWN_ROWS]]
    if len(rows) > SHOWN_ROWS:
        lines.append(f"  and {len(rows) - SHOWN_ROWS} more")
    return UserError("\n".join([f"{table.source}: {len(rows)} of {len(table)} rows {problem}:", *lines, remedy]))


# ---------------------------------------------------------------------------------------------------- reading


def _check_columns(source: Path, frame: pd.DataFrame, needed: Sequence[str], option: str) -> None:
    columns = list(frame.columns)
    if not columns:
        raise UserError(
            f'{source} is empty; add one line for each clip, such as {{"path": "a.mp4", "text": "a lake"}}.'
        )
    for name in needed:
        if name in columns:
            continue
        message = f"{source} has no column {name!r}; its columns are: {', '.join(columns)}."
        if any(Path(column).suffix.lower() in VIDEO_EXTENSIONS + IMAGE_EXTENSIONS for column in columns):
            raise UserError(f"{message} The first line looks like data: put the header `path,text` above it.")
        message += did_you_mean(name.lower(), [column for column in columns if column != "path"])
        if name != "path":
            message += f" Which it is, is set with dataset.{option}."
        raise UserError(message)


def _text(source: Path, column: pd.Series) -> TextColumn:
    """A column of text, "" where a value is missing."""
    nested = column.map(lambda value: isinstance(value, list | dict)) if column.dtype == object else []
    for row in np.flatnonzero(nested)[:1]:
        raise UserError(
            f"{source}, row {row + 1}: {column.name!r} is not one value; give each caption a column of its own."
        )
    return TextColumn.of(strings(column))


class _Status(NamedTuple):
    """What the tools found wrong with files when they read them: `ok`, or why a file could not be used."""

    text: np.ndarray | None  # [N] as the table has it

    @classmethod
    def of(cls, frame: pd.DataFrame) -> "_Status":
        """The tools' column; one of that name where no row says `ok` is somebody else's ("success"), and tells nothing."""
        text = strings(frame["status"]).to_numpy() if "status" in frame.columns else None
        return cls(None if text is None or not (text == OK).any() else text)

    def bad_rows(self, table: Table) -> BadRows:
        """Rows that say what is wrong with their file."""
        if self.text is None:
            return BadRows(np.empty(0, np.int64), "", UserError)
        text = self.text[table.numbers]
        rows = np.flatnonzero((text != OK) & (text != ""))
        what = f"have a status that is not {OK!r}"
        return BadRows(rows, f"they {what}", lambda: self._error(table, rows, what, str(text[rows[0]])))

    def _error(self, table: Table, rows: np.ndarray, what: str, first: str) -> UserError:
        remedy = (
            f"python -m tools.datasets.datautil {shlex.quote(str(table.source))} --remove-broken leaves such rows out."
        )
        return complain_about_rows(table, rows.tolist(), what, f"The first says {first!r}. {remedy}")


class _Column(NamedTuple):
    """A column of numbers, and what is wrong in it."""

    name: str
    values: np.ndarray  # [N], 0 or NaN where there is none
    text: pd.Series | None  # as the table has it

    def bad_rows(self, table: Table) -> BadRows:
        """Rows that hold something else than a number above 0, or nothing."""
        if self.text is None:
            return BadRows(np.empty(0, np.int64), "", UserError)
        text = self.text.to_numpy()[table.numbers]
        values = self.values[table.numbers]
        rows = np.flatnonzero((text != "") & ~(values > 0))
        what, example = NUMBERS[self.name]
        return BadRows(rows, f"{self.name} is 0 or no {what}", lambda: self._error(table, text, rows, what, example))

    def _error(self, table: Table, text: np.ndarray, rows: np.ndarray, what: str, example: str) -> UserError:
        numbers = table.numbers[rows]
        return UserError(
            f"{table.source}: {self.name}={text[rows[0]]!r} in row {numbers[0] + 1} is no {what} (rows "
            f"{list_rows(map(int, numbers), len(numbers))}); write {example}, or leave the cell empty."
        )


NUMBERS = {
    "num_frames": ("number of frames", "a whole number from 1"),
    "height": ("height in pixels", "a whole number from 1"),
    "width": ("width in pixels", "a whole number from 1"),
    "fps": ("rate", "a number above 0, such as 23.976"),
}


def _read_numbers(frame: pd.DataFrame, name: str) -> _Column:
    """int64, or float64 for `fps`; what is no such number is 0, and told from an empty cell by its text."""
    whole = name != "fps"
    if name not in frame.columns:
        return _Column(name, np.full(len(frame), UNKNOWN if whole else np.nan, np.int64 if whole else np.float64), None)
    text = strings(frame[name])
    # to_numeric alone reads "" as NaN but "True" as 1
    numbers = pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    good = np.isfinite(numbers) & (numbers > 0) & (numbers < 2**53)
    if not whole:
        return _Column(name, np.where(good, numbers, np.where(text == "", np.nan, 0.0)), text)
    good &= numbers == np.floor(numbers)
    return _Column(name, np.where(good, numbers, UNKNOWN).astype(np.int64), text)


def _read_flow(source: Path, frame: pd.DataFrame) -> np.ndarray | None:
    if "flow" not in frame.columns:
        return None
    text = strings(frame["flow"])
    flow = pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    wrong = np.flatnonzero((text != "") & ~((flow >= 0) & (flow < np.inf)))
    if len(wrong):
        raise UserError(
            f"{source}: flow={text.iat[wrong[0]]!r} in row {wrong[0] + 1} is no score (rows "
            f"{list_rows(map(int, wrong), len(wrong))}); write a number from 0, or leave the cell empty."
        )
    return flow


def _bad_extensions(table: Table) -> BadRows:
    extensions = VIDEO_EXTENSIONS + IMAGE_EXTENSIONS
    rows = _rows_where(table, lambda name: Path(name).suffix.lower() not in extensions)
    known = " ".join(extensions)
    what = "have no known extension"
    return BadRows(rows, f"they {what}", lambda: complain_about_rows(table, rows.tolist(), what, f"Known are {known}."))


def _urls(table: Table) -> BadRows:
    rows = _rows_where(table, lambda name: URL.match(name) is not None)
    remedy = "Download the files first, and name them as they lie on disk."
    return BadRows(rows, "they name a URL", lambda: complain_about_rows(table, rows.tolist(), "name a URL", remedy))


def _rows_where(table: Table, is_so: Callable[[str], bool]) -> np.ndarray:
    """Numbers of the rows whose path is so."""
    return np.array([row for row, name in enumerate(table.rows["path"]) if is_so(name)], np.int64)


def _missing_files(table: Table, candidates: np.ndarray) -> BadRows:
    rows = np.array([row for row in candidates.tolist() if not _is_file(table.path(row))], np.int64)
    what = "name a file that does not exist"
    remedy = f"Paths are relative to {table.folder.resolve()}; if the files lie elsewhere, set root (--root FOLDER)."
    return BadRows(rows, f"they {what}", lambda: complain_about_rows(table, rows.tolist(), what, remedy))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file system takes, or a mount that is away
        return False


def _look_for_some(table: Table, max_share: float) -> None:
    """Of a table that is too long to look for every file: a sample must be there, but for the share that may be bad."""
    candidates = np.unique(np.linspace(0, len(table) - 1, SAMPLE_OF_FILES).astype(np.int64))
    missing = _missing_files(table, candidates)
    if len(missing.rows) > max_share * len(candidates):
        raise UserError(
            f"of {len(candidates)} files that were looked for, {len(missing.rows)} are not there. {missing.error()}"
        )
    logger.info(
        "%s: %d rows are too many to look for every file at start; of %d that were looked for, %d are missing.",
        table.source, len(table), len(candidates), len(missing.rows),
    )  # fmt: skip
