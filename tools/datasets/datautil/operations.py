"""What an operation on a table is, and how a list of them is carried out: in the order given, each with an account of the
rows that it drops."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from opensora.datasets.table.files import as_objects, strings
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from tools.datasets.datautil.io import to_numbers


@dataclass(frozen=True)
class TableState:
    """A table between two operations."""

    frame: pd.DataFrame  # the rows, numbered from 0
    folder: Path  # that relative paths in `path` are relative to
    root: Path | None = None  # that the paths of all tables are relative to; None = each table's own folder
    workers: int = 1  # processes that may be started
    seed: int = 42  # of everything random

    def __len__(self) -> int:
        return len(self.frame)

    def column(self, name: str) -> pd.Series:
        """A column.

        Raises:
            UserError: there is none of this name.
        """
        if name in self.frame.columns:
            return self.frame[name]
        columns = [str(column) for column in self.frame.columns]
        hint = f" {MAKERS[name]} makes it." if name in MAKERS else ""
        raise UserError(
            f"there is no column {name!r}.{did_you_mean(name, columns)}{hint} The columns are: {', '.join(columns)}."
        )

    def text(self, name: str) -> pd.Series:
        """A column as strings."""
        return strings(self.column(name))

    def numbers(self, name: str) -> np.ndarray:
        """A column as float64 [N], NaN where a cell is empty."""
        return to_numbers(self.column(name), name)

    def files(self) -> list[Path]:
        """Where the files of the rows are."""
        return [self.folder / name for name in self.text("path")]

    def with_columns(self, **columns: Any) -> "TableState":
        """The same rows with columns set or added."""
        return replace(self, frame=self.frame.assign(**{name: as_objects(values) for name, values in columns.items()}))


MAKERS = {
    **dict.fromkeys(("num_frames", "height", "width", "aspect_ratio", "resolution", "fps", "status"), "--info"),
    "filesize": "--filesize",
    "text_len": "--count-num-token",
    "id": "--path-to-id",
    "aes": "python -m tools.scoring --scorers aesthetic",
    "match": "python -m tools.scoring --scorers matching",
    "cmotion": "python -m tools.scoring --scorers camera_motion",
    **dict.fromkeys(("ocr", "ocr_area"), "python -m tools.scoring --scorers ocr"),
    **{name: f"python -m tools.scoring --scorers {name}" for name in ("black", "flow", "sharpness", "static")},
    "duplicate_of": "python -m tools.scoring --scorers duplicate",
}
"""What makes a column that operations ask for: another operation, or another tool."""


@dataclass(frozen=True)
class Result:
    """What an operation did."""

    table: TableState  # after it
    dropped: Mapping[str, int] = field(default_factory=dict)  # how many rows were left out, by reason
    note: str = ""  # for the report


Run = Callable[[TableState, Any], Result]


class Operation(NamedTuple):
    """A flag of the command line."""

    flag: str  # without the dashes
    run: Run  # gets the value of the flag, True for a flag that takes nothing
    help: str  # one line
    suffix: str  # of the name of an output that was not named, with {} for the value
    arguments: Mapping[str, Any]  # for argparse: `nargs`, `type`, `metavar`, ...
    group: str  # heading of the help


OPERATIONS: dict[str, Operation] = {}


def operation(flag: str, suffix: str, *, group: str, help: str | None = None, **arguments: Any) -> Callable[[Run], Run]:
    """Register a function as the operation `--flag`; its docstring's first line is the help unless that is given."""

    def register(run: Run) -> Run:
        if flag in OPERATIONS:
            raise TypeError(f"--{flag} is there twice")
        OPERATIONS[flag] = Operation(
            flag, run, help or (run.__doc__ or "").strip().splitlines()[0], suffix, arguments or {"nargs": 0}, group
        )
        return run

    return register


def keep(table: TableState, kept: np.ndarray, reasons: Sequence[tuple[str, np.ndarray]], note: str = "") -> Result:
    """The rows where `kept` [N] is True. A row that is dropped counts for the first reason that holds.

    Raises:
        AssertionError: a dropped row has no reason.
    """
    left = ~kept
    dropped: dict[str, int] = {}
    for reason, holds in reasons:
        if count := int((left & holds).sum()):
            dropped[reason] = dropped.get(reason, 0) + count
        left = left & ~holds
    assert not left.any(), f"{int(left.sum())} rows would vanish without a reason"
    return Result(replace(table, frame=table.frame[kept].reset_index(drop=True)), dropped, note)


def apply(table: TableState, steps: Sequence[tuple[str, Any]], report: Callable[[str], None] = print) -> TableState:
    """Carry out (flag, value) pairs in order; `report` gets one line for each.

    Raises:
        UserError: an operation is unknown or cannot be done; the message begins with its flag.
    """
    for flag, value in steps:
        if flag not in OPERATIONS:
            raise UserError(f"--{flag} is no operation.{did_you_mean(flag, list(OPERATIONS))}")
        before = len(table)
        values = value if isinstance(value, list | tuple) else [] if value is True or value is None else [value]
        line = " ".join([f"--{flag}", *(f"{v:g}" if isinstance(v, float) else str(v) for v in values)])  # as typed
        try:
            result = OPERATIONS[flag].run(table, value)
        except UserError as error:
            raise UserError(f"{line}: {error}") from error
        table = result.table
        assert before - sum(result.dropped.values()) == len(table), f"--{flag} does not account for all rows"
        line += f": {before} -> {len(table)} rows"
        if result.dropped:
            line += f" (dropped: {'; '.join(f'{count} {reason}' for reason, count in result.dropped.items())})"
        report(f"{line}; {result.note}" if result.note else line)
    return table


class Collect(argparse.Action):
    """Puts (flag, value) at the end of `namespace.steps`: argparse alone forgets the order of different flags."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        steps: list[tuple[str, Any]] = getattr(namespace, "steps", None) or []
        steps.append(((option or "").removeprefix("--"), True if values == [] and self.nargs == 0 else values))
        namespace.steps = steps
