"""Tables for one test, and the command line of datautil run inside the test's process."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from opensora.datasets.table.files import read_frame
from tools.datasets.datautil.operations import TableState, apply


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[..., Path]:
    """`write_table([{"path": ...}, ...], name="t.csv")` -> the path of a CSV."""

    def write(rows: Sequence[dict[str, object]], name: str = "t.csv") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


@pytest.fixture
def datautil() -> Callable[..., pd.DataFrame]:
    """`datautil(table, "--fmin", 3, output=path)` -> the table that was written."""
    from tools.datasets.datautil.__main__ import run

    def call(*argv: object, output: Path) -> pd.DataFrame:
        run([*map(str, argv), "--output", str(output)])
        return read_frame(output)

    return call


@pytest.fixture
def do() -> Callable[..., tuple[TableState, list[str]]]:
    """`do(frame, ("fmin", 3.0), ..., folder=...)` -> the table afterwards and the lines reported."""
    import tools.datasets.datautil.__main__  # noqa: F401  (operations register themselves)

    def call(
        frame: Any, *steps: tuple[str, Any], folder: Path = Path(), **settings: Any
    ) -> tuple[TableState, list[str]]:
        lines: list[str] = []
        frame = frame if isinstance(frame, pd.DataFrame) else pd.DataFrame(frame, dtype=object)
        return apply(TableState(frame, folder, **settings), steps, lines.append), lines

    return call
