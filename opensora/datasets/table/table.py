"""The table of a dataset: one clip a row, in a CSV, JSONL or parquet file with the columns `path` and, usually, `text`.

Captions are kept to the letter: "NA", "None" and "" are captions too. A row is kept or left out as a whole, and what is left
out is counted by reason. Columns are arrow and numpy arrays, which worker processes share, and are checked as a whole: ten
million rows take half a minute (docs/explanation/benchmarks/table.md).
"""

import hashlib
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from opensora.datasets.table.files import SHOWN_ROWS, cell_texts, collection_paused, list_rows, read_blocks
from opensora.datasets.table.folder import PATH_COLUMNS, TEXT_COLUMNS, folder_block
from opensora.datasets.video.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

MAX_CHECKED_FILES = 100_000
SAMPLE_OF_FILES = 1_000  # that are looked for where a table has more rows than that
MISSING = "name a file that does not exist"
UNKNOWN = 0  # in `num_frames`, `height` and `width`
WRONG = -1  # in a column of numbers that is not checked yet: the cell holds something else
OK = "ok"  # in the column `status` of tools/datasets and tools/scoring; anything else says what is wrong with the file
EXTENSIONS = (*VIDEO_EXTENSIONS, *IMAGE_EXTENSIONS)
NUMBERS = {
    "num_frames": ("number of frames", "a whole number from 1"),
    "height": ("height in pixels", "a whole number from 1"),
    "width": ("width in pixels", "a whole number from 1"),
    "fps": ("rate", "a number above 0, such as 23.976"),
    "flow": ("score", "a number from 0"),
}
TEXT_ERRORS = "surrogateescape"  # file names need not be UTF-8: Python has such bytes as surrogates


class TextColumn:
    """[N] strings that worker processes share; `data` is an arrow array of their UTF-8 (`large_binary`).

    A forked worker shares its parent's memory until one of them writes to it, and reading a Python string writes: its reference
    count changes. Arrow's buffers are only read; a Python string is made when somebody asks for one.
    """

    def __init__(self, data: pa.ChunkedArray) -> None:
        self.data = data

    @classmethod
    def of(cls, texts: Iterable[str]) -> "TextColumn":
        """The same texts."""
        return cls(pa.chunked_array([encode(list(texts))]))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> str:
        return self.data[row].as_py().decode("utf-8", TEXT_ERRORS)

    def __iter__(self) -> Iterator[str]:
        return (text.decode("utf-8", TEXT_ERRORS) for chunk in self.data.chunks for text in chunk.to_pylist())

    def tolist(self) -> list[str]:
        """All texts as Python strings."""
        return list(self)

    def only(self, kept: np.ndarray) -> "TextColumn":
        """The texts where `kept` [N] bool is True."""
        return TextColumn(self.data.filter(pa.array(kept)))

    def matches(self, pattern: str) -> np.ndarray:
        """[N] bool, whether a regular expression (RE2) is found in the text."""
        return np.asarray(pc.match_substring_regex(self.data, pattern), bool)


def encode(texts: Sequence[str] | pa.Array) -> pa.Array:
    """Python strings, or an arrow array of them, as UTF-8 in an arrow array; a null is ""."""
    if isinstance(texts, pa.Array):
        return texts.fill_null("").cast(pa.large_string()).cast(pa.large_binary())
    return pa.array([text.encode("utf-8", TEXT_ERRORS) for text in texts], pa.large_binary())


@dataclass(frozen=True)
class Table:
    """A table that was read and checked. Row numbers count from 0; messages count from 1, below the header."""

    source: Path
    folder: Path
    rows: Mapping[str, TextColumn]  # `path` and the text columns
    text_columns: tuple[str, ...]
    num_frames: np.ndarray  # [N] int64, UNKNOWN where the table does not say; so for `height` and `width`
    height: np.ndarray
    width: np.ndarray
    fps: np.ndarray  # [N] float64, NaN where the table does not say
    numbers: np.ndarray  # [N] int64, the rows' numbers in the file; not 0 ... N - 1 where rows were left out
    flow: np.ndarray | None = (
        None  # [N] float64, the optical-flow score, NaN in empty cells; None without such a column
    )
    left_out: Mapping[str, int] = field(default_factory=dict)  # why rows of the file are not here, and how many

    def __len__(self) -> int:
        return len(self.numbers)

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
        """`flow`, if the table has that column."""
        return {} if self.flow is None else {"flow": float(self.flow[row])}

    def without_flow(self) -> list[int]:
        """The rows whose optical-flow score is not known."""
        return list(range(len(self))) if self.flow is None else np.flatnonzero(np.isnan(self.flow)).tolist()

    def where(self, row: int) -> str:
        """A row, as messages name it."""
        return f"{self.source}, row {int(self.numbers[row]) + 1}"

    def without(self, rows: Sequence[int] | np.ndarray, reason: str) -> "Table":
        """The table but for some rows, which are counted under `reason`."""
        kept = np.ones(len(self), bool)
        kept[np.asarray(rows, np.int64)] = False
        arrays = {name: values[kept] for name in (*NUMBERS, "numbers") if (values := getattr(self, name)) is not None}
        return replace(
            self,
            rows={name: column.only(kept) for name, column in self.rows.items()},
            left_out={**self.left_out, reason: self.left_out.get(reason, 0) + int(np.sum(~kept))},
            **arrays,
        )

    def fingerprint(self) -> str:
        """A hash of paths as given, captions and lengths; not of the folder, so that data may move."""
        digest = hashlib.blake2b(repr(self.text_columns).encode(), digest_size=16)
        for texts in (chunk for name in ("path", *self.text_columns) for chunk in self.rows[name].data.chunks):
            # each text after its length in 8 bytes, little-endian
            lengths = pa.py_buffer(pc.binary_length(texts).to_numpy().astype("<i8"))
            offsets = pa.py_buffer(8 * np.arange(len(texts) + 1))
            prefixes = pa.Array.from_buffers(pa.large_binary(), len(texts), [None, offsets, lengths])
            nothing = pa.scalar(b"", pa.large_binary())
            digest.update(b"".join(pc.binary_join_element_wise(prefixes, texts, nothing).to_pylist()))
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
    """Read a CSV, JSONL or parquet table, or a folder of videos and images with captions as one (see `folder.py`).

    Args:
        root: what the paths of a table are relative to; None: the table's own folder.
        check_files: See that all files exist; of a very long table, that a sample of them does.
        max_bad_share: Rows that name no file, or say that theirs is broken (`status`, or `num_frames` 0), are left out up to
            this share of the table, and counted by reason. 0: the first kind that is found is an error.
        columns_option: The dataset's option that names `text_columns`, for messages.

    Raises:
        UserError: the table or a column is missing, it is malformed, or has more bad rows than allowed.
    """
    source = Path(data_path)
    if root is not None and source.is_dir():
        raise UserError(f"root={root} has no effect: {source} is a folder, whose files are taken; leave root out.")
    with collection_paused():
        texts, numbers, total = _read(source, ("path", *text_columns), columns_option)
    if root is not None and not Path(root).is_dir():
        raise UserError(f"root: {root} is no folder; it is what the paths in {source} are relative to.")
    folder = Path(root) if root is not None else source if source.is_dir() else source.parent
    columns = {name: texts[name] for name in ("path", *text_columns)}
    table = Table(source, folder, columns, tuple(text_columns), **numbers, numbers=np.arange(total))

    def leave_out(rows: np.ndarray, reason: str, error: Callable[[], UserError]) -> None:
        nonlocal table
        if not len(rows):
            return
        if total - len(table) + len(rows) > max_bad_share * total:
            limit = f"\nThese are more than max_bad_share={max_bad_share:g} of all rows." if max_bad_share else ""
            raise UserError(f"{error()}{limit}")
        shown = ", ".join(map(table.name, rows[:SHOWN_ROWS].tolist()))
        more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
        logger.warning("%s: %d of %d rows are left out: %s (%s%s).", source, len(rows), total, reason, shown, more)
        table = table.without(rows, reason)

    def leave_out_files(rows: Sequence[int] | np.ndarray, what: str, remedy: str) -> None:
        rows = np.asarray(rows, np.int64)
        leave_out(rows, f"they {what}", lambda: complain_about_rows(table, rows, what, remedy))

    if table.flow is not None and (wrong := np.flatnonzero(table.flow < 0)).size:
        raise _wrong_numbers("flow", table, wrong)
    unknown = np.flatnonzero(~has_extension(table.rows["path"], EXTENSIONS))
    leave_out_files(unknown, "have no known extension", f"Known are {' '.join(EXTENSIONS)}.")
    urls = np.flatnonzero(table.rows["path"].matches(r"^(https?|s3|gs|ftp)://"))
    leave_out_files(urls, "name a URL", "Download the files first, and name them as they lie on disk.")
    status = texts.get("status")
    if status is not None and status.matches(f"^{OK}$").any():  # else it is somebody else's column
        odd = np.flatnonzero(~status.matches(f"^({OK})?$")[table.numbers])
        first = status[int(table.numbers[odd[0]])] if len(odd) else ""
        remedy = f"python -m tools.datasets.datautil {shlex.quote(str(source))} --remove-broken leaves such rows out."
        leave_out_files(odd, f"have a status that is not {OK!r}", f"The first says {first!r}. {remedy}")
    for name in ("num_frames", "height", "width", "fps"):
        wrong = np.flatnonzero(getattr(table, name) < 0)
        leave_out(wrong, f"{name} is 0 or no {NUMBERS[name][0]}", partial(_wrong_numbers, name, table, wrong))
    if check_files:
        remedy = f"Paths are relative to {folder.resolve()}; if the files lie elsewhere, set root (--root FOLDER)."
        leave_out_files(_missing_files(table, max_bad_share, remedy), MISSING, remedy)
    return table


def complain_about_rows(table: Table, rows: Sequence[int] | np.ndarray, problem: str, remedy: str) -> UserError:
    """An error that names the first few of the rows and their files."""
    lines = [f"  row {int(table.numbers[row]) + 1}: {table.path(row)}" for row in rows[:SHOWN_ROWS]]
    if len(rows) > SHOWN_ROWS:
        lines.append(f"  and {len(rows) - SHOWN_ROWS} more")
    return UserError("\n".join([f"{table.source}: {len(rows)} of {len(table)} rows {problem}:", *lines, remedy]))


def has_extension(paths: TextColumn, extensions: Sequence[str]) -> np.ndarray:
    """[N] bool, whether a path's `Path.suffix.lower()` is one of them, for all paths at once."""
    names = "|".join(extension.removeprefix(".") for extension in extensions)
    return paths.matches(rf"(?i)[^/]\.({names})(/\.?)*$")


def _read(source: Path, wanted: Sequence[str], option: str) -> tuple[dict[str, TextColumn], dict[str, Any], int]:
    """The columns of text and of numbers, and how many rows they have; `flow` and `status` where the file has them."""
    texts: dict[str, list[pa.Array]] = {name: [] for name in (*wanted, "status")}
    numbers: dict[str, list[np.ndarray]] = {name: [] for name in NUMBERS}
    names: dict[str, None] = {}
    total = 0
    is_folder = source.is_dir()
    blocks = (
        [folder_block(source, with_captions=len(wanted) > 1)] if is_folder else read_blocks(source, (*texts, *numbers))
    )
    for size, block in blocks:
        names |= dict.fromkeys(block)
        if not size:  # a header: no need to read on where a column is missing
            _check_columns(source, names, wanted, option)
            continue
        for name in filter(block.__contains__, texts):
            cells = block[name]
            if name in wanted and isinstance(cells, list) and not {list, dict, bytes}.isdisjoint(map(type, cells)):
                row = next(row for row, cell in enumerate(cells, total + 1) if isinstance(cell, list | dict | bytes))
                what = "bytes, not text; cast the column to strings"
                if not isinstance(cells[row - total - 1], bytes):
                    what = "not one value; give each caption a column of its own"
                raise UserError(f"{source}, row {row}: {name!r} is {what}.")
            if total and not texts[name]:  # a column that begins late
                texts[name].append(encode([""] * total))
            texts[name].append(encode(cells if isinstance(cells, pa.Array) else cell_texts(cells)))
        for name, parts in numbers.items():
            parts.append(_parse(name, block.get(name), size))
        total += size
    _check_columns(source, names, wanted, option)
    if not total:
        raise UserError(f"{source} has a header but no rows; add one row for each clip.")
    columns = {name: TextColumn(pa.chunked_array(texts[name])) for name in texts if name in names}
    stated = [name for name in NUMBERS if name in names or name != "flow"]
    return columns, {name: np.concatenate(numbers.pop(name)) for name in stated}, total


def _check_columns(source: Path, columns: Iterable[str], needed: Sequence[str], option: str) -> None:
    if not columns:
        raise UserError(
            f'{source} is empty; add one line for each clip, such as {{"path": "a.mp4", "text": "a lake"}}.'
        )
    for name in needed:
        if name in columns:
            continue
        message = f"{source} has no column {name!r}; its columns are: {', '.join(columns)}."
        if any(Path(column).suffix.lower() in EXTENSIONS for column in columns):
            raise UserError(f"{message} The first line looks like data: put the header `path,text` above it.")
        others = [column for column in columns if column != "path"]
        known = PATH_COLUMNS if name == "path" else TEXT_COLUMNS
        # what others call it, else a name like it
        near = [column for column in others if column.lower() in known] or get_close_matches(name, others, n=1)
        if name == "path":
            raise UserError(
                message + (f" Rename {near[0]!r} to 'path'." if near else " Add one with the files' paths.")
            )
        if option == "label_column":
            raise UserError(f"{message} The one with the labels is set with dataset.label_column.")
        column = shlex.quote(near[0]) if near else "COLUMN"
        hint = f" Its captions seem to be in {near[0]!r}:" if near else " Name the one with the captions:"
        raise UserError(f"{message}{hint} --dataset.{option} {column}; or '()' to train without captions.")


def _parse(name: str, cells: Any, size: int) -> np.ndarray:
    """[size] float64 for rates and scores, else int64. Empty cells are NaN or UNKNOWN, cells that hold something else WRONG."""
    is_whole = name not in ("fps", "flow")
    empty = np.array(UNKNOWN if is_whole else np.nan)
    if cells is None:
        return np.broadcast_to(empty, size)
    # A value is parsed once, for few of them differ; and as text, for to_numeric reads "" as NaN but True as 1.
    codes, values = pd.factorize(cells if isinstance(cells, np.ndarray) else np.array(cell_texts(cells), object))
    texts = np.array([*cell_texts(values), ""], object)  # the last is that of code -1, which is NaN
    numbers = np.asarray(pd.to_numeric(texts, errors="coerce"), np.float64)
    if name == "flow":
        good = (numbers >= 0) & (numbers < np.inf)
    else:
        good = (numbers > 0) & (numbers < 2**53) & ((not is_whole) | (numbers == np.floor(numbers)))
    return np.where(good, numbers, np.where(texts == "", empty, WRONG)).astype(empty.dtype)[codes]


def _wrong_numbers(name: str, table: Table, rows: np.ndarray) -> UserError:
    """The error for cells that hold no such number; what the first says is looked up in the file."""
    what, example = NUMBERS[name]
    numbers = table.numbers[rows].tolist()
    start, text = 0, ""
    for size, block in read_blocks(table.source, (name,)):
        if start <= numbers[0] < start + size:
            text = cell_texts(block[name])[numbers[0] - start]
            break
        start += size
    return UserError(
        f"{table.source}: {name}={text!r} in row {numbers[0] + 1} is no {what} (rows {list_rows(numbers, len(numbers))}); "
        f"write {example}, or leave the cell empty."
    )


def _missing_files(table: Table, max_share: float, remedy: str) -> list[int]:
    """The rows whose file is not there. Of a table that is too long to look for every file, a sample must be there, but for
    the share that may be bad."""
    is_long = len(table) > MAX_CHECKED_FILES
    candidates: Iterable[int] = range(len(table))
    if is_long:
        candidates = np.linspace(0, len(table) - 1, SAMPLE_OF_FILES).astype(np.int64).tolist()
    rows = []
    for row in candidates:
        try:
            is_there = table.path(row).is_file()
        except OSError:  # a name that no file system takes, or a mount that is away
            is_there = False
        if not is_there:
            rows.append(row)
    if not is_long:
        return rows
    if len(rows) > max_share * SAMPLE_OF_FILES:
        error = complain_about_rows(table, rows, MISSING, remedy)
        raise UserError(f"of {SAMPLE_OF_FILES} files that were looked for, {len(rows)} are not there. {error}")
    logger.info(
        "%s: %d rows are too many to look for every file at start; of %d that were looked for, %d are missing.",
        table.source, len(table), SAMPLE_OF_FILES, len(rows),
    )  # fmt: skip
    return []
