"""Operations on columns, and figures about them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from opensora.datasets.table.files import is_numeric, strings
from opensora.utils.errors import UserError
from tools.datasets.datautil.io import known_numbers
from tools.datasets.datautil.operations import Result, TableState, operation

GROUP = "columns"
TRAINING = ("path", "text", "num_frames", "fps", "height", "width", "aspect_ratio", "resolution", "text_len")
COMMON = 3  # of the most frequent values shown


@operation("train-column", "train", group=GROUP)
def train_column(table: TableState, _: Any) -> Result:
    """keep the columns that training reads, drop others"""
    return _selected(table, [name for name in TRAINING if name in table.frame.columns])


@operation("keep-columns", "columns", group=GROUP, nargs="+", metavar="COLUMN")
def keep_columns(table: TableState, names: list[str]) -> Result:
    """keep these columns, in this order"""
    return _selected(table, [str(table.column(name).name) for name in dict.fromkeys(names)])


@operation("drop-columns", "dropped", group=GROUP, nargs="+", metavar="COLUMN")
def drop_columns(table: TableState, names: list[str]) -> Result:
    """drop these columns"""
    gone = {table.column(name).name for name in names}
    return _selected(table, [name for name in table.frame.columns if name not in gone])


@operation("rename-columns", "renamed", group=GROUP, nargs="+", metavar="OLD=NEW")
def rename_columns(table: TableState, pairs: list[str]) -> Result:
    """rename columns"""
    names = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not equals or not old or not new:
            raise UserError(f"{pair!r}: write OLD=NEW.")
        names[str(table.column(old).name)] = new
    frame = table.frame.rename(columns=names)
    if twice := sorted(set(frame.columns[frame.columns.duplicated()])):
        raise UserError(f"there would be two columns {twice[0]!r}; drop or rename the other first.")
    return Result(replace(table, frame=frame))


def _selected(table: TableState, names: Sequence[str]) -> Result:
    if not names:
        raise UserError("no column would be left.")
    gone = [name for name in table.frame.columns if name not in names]
    note = f"dropped columns: {', '.join(gone) or 'none'}"
    return Result(replace(table, frame=table.frame[list(names)]), note=note)


@operation("stats", "stats", group="figures", nargs="*", metavar="COLUMN")
def stats(table: TableState, names: list[str]) -> Result:
    """print figures of these columns, or of all, as the table is at this point; changes nothing"""
    columns = [table.column(name) for name in names or table.frame.columns]
    return Result(table, note="\n".join(["figures:", *(f"  {_figures(column)}" for column in columns)]))


def _figures(column: pd.Series) -> str:
    texts = strings(column)
    filled = texts[texts != ""]
    line = f"{column.name}: {len(filled)} filled, {len(texts) - len(filled)} empty, {filled.nunique()} different"
    if not len(filled):
        return line
    if column.name == "path":
        kinds = filled.str.extract(r"(?s)(\.[^./]+)$", expand=False).fillna("no extension").str.lower()
        return f"{line}; {_most_frequent(kinds)}"
    typed = known_numbers(column)
    numbers = typed.dropna().to_numpy(np.float64) if is_numeric(typed) else np.empty(0)
    if len(numbers):
        low, middle, high = np.quantile(numbers, (0, 0.5, 1))
        line += f"; least {low:.6g}, median {middle:.6g}, mean {numbers.mean():.6g}, largest {high:.6g}"
    elif filled.nunique() < len(filled):
        line += f"; {_most_frequent(filled)}"
    return line


def _most_frequent(values: pd.Series) -> str:
    counts = values.value_counts()
    shown = [f"{count} x {shortened(str(value))}" for value, count in counts.head(COMMON).items()]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def shortened(value: str, width: int = 60) -> str:
    """One line of at most `width` characters."""
    line = " ".join(value.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
