"""Operations on columns, and figures about them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from opensora.datasets.table.files import strings
from opensora.utils.errors import UserError
from tools.datasets.datautil.io import known_numbers
from tools.datasets.datautil.operations import Result, Sheet, operation

GROUP = "columns"
TRAINING = ("path", "text", "num_frames", "fps", "height", "width", "aspect_ratio", "resolution", "text_len")
COMMON = 3  # of the most frequent values shown


@operation("train-column", "train", group=GROUP)
def train_column(sheet: Sheet, _: Any) -> Result:
    """keep the columns that training reads, drop others"""
    return _selected(sheet, [name for name in TRAINING if name in sheet.frame.columns])


@operation("keep-columns", "columns", group=GROUP, nargs="+", metavar="COLUMN")
def keep_columns(sheet: Sheet, names: list[str]) -> Result:
    """keep these columns, in this order"""
    return _selected(sheet, [str(sheet.column(name).name) for name in dict.fromkeys(names)])


@operation("drop-columns", "dropped", group=GROUP, nargs="+", metavar="COLUMN")
def drop_columns(sheet: Sheet, names: list[str]) -> Result:
    """drop these columns"""
    gone = {sheet.column(name).name for name in names}
    return _selected(sheet, [name for name in sheet.frame.columns if name not in gone])


@operation("rename-columns", "renamed", group=GROUP, nargs="+", metavar="OLD=NEW")
def rename_columns(sheet: Sheet, pairs: list[str]) -> Result:
    """rename columns"""
    names = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not equals or not old or not new:
            raise UserError(f"{pair!r}: write OLD=NEW.")
        names[str(sheet.column(old).name)] = new
    frame = sheet.frame.rename(columns=names)
    if twice := sorted(set(frame.columns[frame.columns.duplicated()])):
        raise UserError(f"there would be two columns {twice[0]!r}; drop or rename the other first.")
    return Result(replace(sheet, frame=frame))


def _selected(sheet: Sheet, names: Sequence[str]) -> Result:
    if not names:
        raise UserError("no column would be left.")
    gone = [name for name in sheet.frame.columns if name not in names]
    note = f"dropped columns: {', '.join(gone) or 'none'}"
    return Result(replace(sheet, frame=sheet.frame[list(names)]), note=note)


@operation("stats", "stats", group="figures", nargs="*", metavar="COLUMN")
def stats(sheet: Sheet, names: list[str]) -> Result:
    """print figures of these columns, or of all, as the table is at this point; changes nothing"""
    columns = [sheet.column(name) for name in names or sheet.frame.columns]
    return Result(sheet, note="\n".join(["figures:", *(f"  {_figures(column)}" for column in columns)]))


def _figures(column: pd.Series) -> str:
    texts = strings(column)
    filled = texts[texts != ""]
    line = f"{column.name}: {len(filled)} filled, {len(texts) - len(filled)} empty, {filled.nunique()} different"
    if not len(filled):
        return line
    if column.name == "path":
        kinds = filled.str.extract(r"(?s)(\.[^./]+)$", expand=False).fillna("no extension").str.lower()
        return f"{line}; {_most_frequent(kinds)}"
    if len(numbers := _numbers(column)):
        low, middle, high = np.quantile(numbers, (0, 0.5, 1))
        line += f"; least {low:.6g}, median {middle:.6g}, mean {numbers.mean():.6g}, largest {high:.6g}"
    elif filled.nunique() < len(filled):
        line += f"; {_most_frequent(filled)}"
    return line


def _numbers(column: pd.Series) -> np.ndarray:
    typed = known_numbers(column)
    if not pd.api.types.is_numeric_dtype(typed.dtype) or pd.api.types.is_bool_dtype(typed.dtype):
        return np.empty(0)
    numbers = typed.to_numpy(np.float64, na_value=np.nan)
    return numbers[~np.isnan(numbers)]


def _most_frequent(values: pd.Series) -> str:
    counts = values.value_counts()
    shown = [f"{count} x {_short(str(value))}" for value, count in counts.head(COMMON).items()]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _short(value: str, width: int = 60) -> str:
    line = " ".join(value.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
