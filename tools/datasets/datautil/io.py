"""Whole tables out, and cells as numbers. Tables are read by `opensora.datasets.table.files`."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd

from opensora.datasets.table.files import collection_paused, is_numeric, strings, table_format
from opensora.utils.errors import UserError
from tools.datasets.stream import INTEGERS, MISSING_WORDS, NUMBERS, WRITERS, naming, renamed


def write_frames(frames: Sequence[pd.DataFrame], targets: Sequence[Path]) -> None:
    """Write all tables, or none: they get their names only when the last one is complete.

    Raises:
        UserError: the format cannot hold a value.
    """
    with ExitStack() as stack, collection_paused():
        partials = [stack.enter_context(renamed(target)) for target in targets]
        for frame, target, partial in zip(frames, targets, partials, strict=True):
            kind = table_format(target)
            block = {}
            for name in frame.columns:
                if kind == "csv":
                    block[name] = strings(frame[name]).tolist()
                else:
                    column = known_numbers(frame[name])
                    values = zip(column.astype(object).tolist(), column.isna(), strict=True)
                    block[name] = [None if missing else value for value, missing in values]
            with naming(target):
                WRITERS[kind](partial, list(frame.columns), [block])


def to_numbers(column: pd.Series, what: str) -> np.ndarray:
    """A column as float64, NaN where a cell is empty; `what` names it in messages.

    Raises:
        UserError: a cell holds something else.
    """
    if is_numeric(column):
        return column.to_numpy(np.float64, na_value=np.nan)
    numbers = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    rows = np.flatnonzero(np.isnan(numbers))
    for row, cell in zip(rows, column.to_numpy(object)[rows], strict=True):
        if str(cell).strip().lower() not in MISSING_WORDS:
            raise UserError(f"{what}: {cell!r} in row {row + 1} is not a number; mend it, or leave the cell empty.")
    return numbers


def known_numbers(column: pd.Series) -> pd.Series:
    """A column of `NUMBERS` as numbers, where all its cells are; others as they are."""
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
