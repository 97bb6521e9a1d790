"""Operations that keep rows by their numbers, their kind of file, or one row of several that are alike."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from opensora.datasets.video.files import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from opensora.utils.errors import UserError
from tools.datasets.datautil.operations import OPERATIONS, Operation, Result, Run, TableState, keep, operation
from tools.datasets.datautil.paths import file_keys

LIMITS = {
    "f": ("num_frames", "frames"),
    "h": ("height", "height in pixels"),
    "w": ("width", "width in pixels"),
    "hw": ("resolution", "height x width"),
    "ar": ("aspect_ratio", "height / width"),
    "fps": ("fps", "frames per second; rows without it, as images are, stay"),
    "fs": ("filesize", "size of the file in MiB"),
    "len": ("text_len", "tokens of the caption"),
    "aes": ("aes", "aesthetic score"),
    "match": ("match", "agreement of caption and image"),
    "flow": ("flow", "amount of motion"),
    "ocr": ("ocr", "words in the image"),
    "ocrarea": ("ocr_area", "share of the image that words cover"),
    "sharp": ("sharpness", "variance of the Laplacian"),
    "black": ("black", "share of black frames"),
    "static": ("static", "share of the clip in which nothing moves"),
}
"""Prefix of `--PREFIXmin N` and `--PREFIXmax N`, the column, and what it is."""


def number(text: str) -> float:
    """A limit: any number but NaN, with which nothing compares."""
    value = float(text)
    if value != value:
        raise ValueError(text)
    return value


def _limit(column: str, side: str, *, keep_missing: bool) -> Run:
    def run(table: TableState, limit: float) -> Result:
        numbers = table.numbers(column)
        missing = np.isnan(numbers)
        with np.errstate(invalid="ignore"):
            beyond = numbers < limit if side == "min" else numbers > limit
        sign = "<" if side == "min" else ">"
        kept = ~beyond & (keep_missing | ~missing)
        return keep(table, kept, [(f"with {column} {sign} {limit:g}", beyond), (f"without {column}", missing)])

    return run


for _prefix, (_column, _meaning) in LIMITS.items():
    for _side, _word in (("min", "least"), ("max", "largest")):
        OPERATIONS[f"{_prefix}{_side}"] = Operation(
            f"{_prefix}{_side}",
            _limit(_column, _side, keep_missing=_column == "fps"),  # as Open-Sora's --fpsmax
            f"{_word} {_column} ({_meaning})",
            f"{_prefix}{_side}{{}}",
            {"type": number, "metavar": "N"},
            "filters by number",
        )

FILES = "filters by file"


def _keep_extensions(table: TableState, extensions: tuple[str, ...]) -> Result:
    names = table.text("path").str.rsplit("/", n=1).str[-1]
    suffixes = names.str.extract(r"(?s)^.+(\.[^.]+)$", expand=False).fillna("").str.lower()
    kept = suffixes.isin(extensions).to_numpy()
    others = suffixes[~kept].value_counts().index
    return keep(table, kept, [(f"are {name or 'files without extension'}", suffixes == name) for name in others])


@operation("img-only", "img", group=FILES)
def img_only(table: TableState, _: Any) -> Result:
    """keep images, by extension"""
    return _keep_extensions(table, IMAGE_EXTENSIONS)


@operation("vid-only", "vid", group=FILES)
def vid_only(table: TableState, _: Any) -> Result:
    """keep videos, by extension"""
    return _keep_extensions(table, VIDEO_EXTENSIONS)


@operation("extensions", "{}", group=FILES, nargs="+", metavar=".EXT")
def extensions(table: TableState, names: list[str]) -> Result:
    """keep these extensions (.mp4 .webm)"""
    return _keep_extensions(table, tuple(f".{name.lower().lstrip('.')}" for name in names))


@operation("path-subset", "{}", group=FILES, metavar="TEXT")
def path_subset(table: TableState, part: str) -> Result:
    """keep rows whose path holds TEXT"""
    kept = table.text("path").str.contains(part, regex=False).to_numpy(bool)
    return keep(table, kept, [(f"without {part!r} in the path", ~kept)])


@operation("remove-duplicates", "nodup", group=FILES)
def remove_duplicates(table: TableState, _: Any) -> Result:
    """drop rows that repeat an earlier one, by the column duplicate_of"""
    repeats = (table.text("duplicate_of") != "").to_numpy(bool)
    return keep(table, ~repeats, [("that repeat another clip", repeats)])


@operation("remove-empty-path", "nopath", group=FILES)
def remove_empty_path(table: TableState, _: Any) -> Result:
    """drop rows without a path"""
    empty = (table.text("path").str.strip() == "").to_numpy(bool)
    return keep(table, ~empty, [("without a path", empty)])


@operation("remove-broken", "ok", group=FILES)
def remove_broken(table: TableState, _: Any) -> Result:
    """drop rows whose status (of --info) is not ok"""
    broken = (table.text("status") != "ok").to_numpy(bool)
    return keep(table, ~broken, [("with a status that is not ok", broken)])


ALIKE = "one of several alike (the first stays)"


def _first_of(table: TableState, values: pd.Series, what: str) -> Result:
    again = (values.duplicated() & (values != "")).to_numpy()  # an empty cell says nothing
    return keep(table, ~again, [(f"with a {what} that came before", again)])


@operation("dedupe", "unique_{}", group=ALIKE, metavar="COLUMN")
def dedupe(table: TableState, column: str) -> Result:
    """keep the first row of each value of COLUMN, as text; rows without one stay"""
    return _first_of(table, table.text(column), column)


@operation("remove-path-duplication", "uniquepath", group=ALIKE)
def remove_path_duplication(table: TableState, _: Any) -> Result:
    """keep the first row of each file, however its path is written"""
    return _first_of(table, file_keys(table.text("path"), table.folder), "file")


@operation("remove-text-duplication", "uniquetext", group=ALIKE)
def remove_text_duplication(table: TableState, _: Any) -> Result:
    """keep the first row of each caption; rows without one stay"""
    return _first_of(table, table.text("text"), "caption")


ORDER = "order and number of rows"


@operation("sort", "sort_{}", group=ORDER, metavar="COLUMN")
def sort(table: TableState, column: str) -> Result:
    """largest first; rows without a value last"""
    return _sorted(table, column, largest_first=True)


@operation("sort-ascending", "sort_{}", group=ORDER, metavar="COLUMN")
def sort_ascending(table: TableState, column: str) -> Result:
    """smallest first; rows without a value last"""
    return _sorted(table, column, largest_first=False)


def _sorted(table: TableState, column: str, *, largest_first: bool) -> Result:
    try:
        numbers = table.numbers(column)
    except UserError:
        if column not in table.frame.columns:
            raise
        cells = table.text(column).tolist()
        present = [row for row, cell in enumerate(cells) if cell]
        order = sorted(present, key=cells.__getitem__, reverse=largest_first)
        order += [row for row, cell in enumerate(cells) if not cell]
        note = "sorted as text"
    else:
        order = np.argsort(-numbers if largest_first else numbers, kind="stable").tolist()  # NaN is last either way
        note = "sorted as numbers"
    return _taken(table, np.array(order, np.int64), note=note)


@operation("shuffle", "shuffled", group=ORDER)
def shuffle(table: TableState, _: Any) -> Result:
    """random order, a function of --seed"""
    return _taken(table, np.random.default_rng(table.seed).permutation(len(table)))


@operation("head", "head{}", group=ORDER, type=int, metavar="N")
def head(table: TableState, count: int) -> Result:
    """keep the first N rows"""
    later = np.arange(len(table)) >= _count(count)
    return keep(table, ~later, [(f"after the first {count}", later)])


@operation("sample", "sample{}", group=ORDER, type=int, metavar="N")
def sample(table: TableState, count: int) -> Result:
    """keep N random rows in their order, a function of --seed"""
    kept = np.zeros(len(table), bool)
    kept[np.random.default_rng(table.seed).permutation(len(table))[: _count(count)]] = True
    return keep(table, kept, [("not drawn", ~kept)])


def _count(count: int) -> int:
    if count < 1:
        raise UserError("the number of rows must be at least 1.")
    return count


def _taken(table: TableState, order: np.ndarray, note: str = "") -> Result:
    return Result(replace(table, frame=table.frame.take(order).reset_index(drop=True)), note=note)
