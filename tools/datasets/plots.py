"""Distributions of a table's columns, as SVG to put into a page; no more than 4 bytes a cell are held."""

import html
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

BINS, WIDTH, HEIGHT = 24, 320, 110
SKIPPED = ("path", "id", "source", "scene", "start", "start_frame", "end_frame", "end", "phash", "digest")


class Figures:
    """Collects the numbers in rows, by column; a column in which a cell holds other text is no column of numbers."""

    def __init__(self) -> None:
        self._cells: dict[str, array[float]] = {}
        self._text: set[str] = set()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row's numbers; seconds are made of num_frames and fps."""
        for name, value in row.items():
            if name in SKIPPED or name in self._text or value is None or value == "":
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                self._text.add(name)
                self._cells.pop(name, None)
                continue
            self._cells.setdefault(name, array("f")).append(number)

    def numbers(self) -> dict[str, np.ndarray]:
        """[N] float32 without NaN for each column."""
        found = {name: np.frombuffer(cells, np.float32) for name, cells in self._cells.items()}
        return {name: values[np.isfinite(values)] for name, values in found.items()}


def svg_histogram(name: str, values: np.ndarray) -> str:
    """A histogram of at least one number, with the least, median and largest below it."""
    low, middle, high = (float(x) for x in np.quantile(values, (0, 0.5, 1)))
    counts, _ = np.histogram(values, BINS, (low, high if high > low else low + 1))
    bars = []
    for i, count in enumerate(counts):
        tall = HEIGHT * 0.6 * count / counts.max()
        bars.append(
            f'<rect x="{i * WIDTH / BINS:.1f}" y="{HEIGHT * 0.78 - tall:.1f}" width="{WIDTH / BINS - 1:.1f}" '
            f'height="{tall:.1f}" fill="#4878a8"/>'
        )
    words = f"least {_short(low)}, median {_short(middle)}, largest {_short(high)}, {len(values)} rows"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">'
        f'<text x="0" y="12" font-size="13">{html.escape(name)}</text>{"".join(bars)}'
        f'<text x="0" y="{HEIGHT - 6}" font-size="11">{words}</text></svg>'
    )


def _short(number: float) -> str:
    return f"{number:.0f}" if 1e4 <= abs(number) < 1e9 else f"{number:.5g}"


def svg_bars(name: str, counts: Mapping[str, int]) -> str:
    """A bar for each of at least one word."""
    largest, line = max(1, *counts.values()), 17
    rows = []
    for i, (word, count) in enumerate(counts.items(), start=1):
        wide, y = WIDTH * count / largest, 8 + line * i
        rows.append(
            f'<text x="0" y="{y + 12}" font-size="11">{html.escape(word)}</text>'
            f'<rect x="220" y="{y}" width="{wide:.1f}" height="{line - 3}" fill="#4878a8"/>'
            f'<text x="{224 + wide:.1f}" y="{y + 12}" font-size="11">{count}</text>'
        )
    return (
        f'<svg width="{WIDTH + 300}" height="{20 + line * (len(counts) + 1)}" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="sans-serif"><text x="0" y="12" font-size="13">{html.escape(name)}</text>{"".join(rows)}</svg>'
    )
