"""A column of text that worker processes share: one buffer of UTF-8 and where each text begins.

A forked worker shares its parent's memory until one of them writes to it, and reading a Python string writes: its reference
count changes. So every worker would come to have its own copy of a table's strings, page by page. The arrays here are
only read; a Python string is made of a few bytes of them when somebody asks for one.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

BLOCK = 4096  # texts at a time: few are there in two forms, and those stay in the processor's cache
# file names need not be UTF-8: Python has such bytes as surrogates, and gets them back
ERRORS = "surrogateescape"


class TextColumn:
    """[N] strings, read by number; none can be changed.

    Args:
        data: UTF-8, [bytes] uint8.
        starts: [N] int64, where each text begins, in rising order.
        lengths: [N] int32, its bytes.
    """

    def __init__(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.data, self.starts, self.lengths = data, starts, lengths

    @classmethod
    def of(cls, texts: Iterable[str]) -> "TextColumn":
        """The same texts."""
        texts, builder = iter(texts), TextBuilder()
        while block := list(islice(texts, BLOCK)):
            builder.add(block)
        return builder.column()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> str:
        if not 0 <= row < len(self):
            raise IndexError(row)
        start = self.starts[row]
        return self.data[start : start + self.lengths[row]].tobytes().decode("utf-8", ERRORS)

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def tolist(self) -> list[str]:
        """All texts as Python strings."""
        return list(self)

    def only(self, kept: np.ndarray) -> "TextColumn":
        """The texts where `kept` [N] bool is True, over the same buffer."""
        return TextColumn(self.data, self.starts[kept], self.lengths[kept])

    def length_prefixed(self) -> Iterator[np.ndarray]:
        """Each text after its length in 8 bytes, little-endian; many texts at a time, uint8."""
        for first in range(0, len(self), BLOCK):
            starts, lengths = self.starts[first : first + BLOCK], self.lengths[first : first + BLOCK].astype("<i8")
            begins = np.cumsum(lengths) - lengths  # of the texts, one right after the other
            size = int(lengths.sum())
            if starts[-1] - starts[0] == begins[-1]:
                texts = self.data[starts[0] : starts[0] + size]
            else:  # `only` left some out
                texts = self.data[np.repeat(starts - begins, lengths) + np.arange(size)]
            prefixes = (begins + 8 * np.arange(len(lengths)))[:, None] + np.arange(8)
            out = np.empty(size + prefixes.size, np.uint8)
            is_text = np.ones(len(out), bool)
            is_text[prefixes] = False
            out[prefixes], out[is_text] = lengths.view(np.uint8).reshape(-1, 8), texts
            yield out


class TextBuilder:
    """Makes a `TextColumn` block by block, in a buffer that grows in place."""

    def __init__(self) -> None:
        self._data, self._lengths, self._count = bytearray(), [np.zeros(0, np.int32)], 0

    def add(self, cells: Any) -> None:
        """Python strings, or an arrow array of type string or large_string; a null is ""."""
        self._count += len(cells)
        if hasattr(cells, "buffers"):
            cells = cells.fill_null("")
            wide = np.dtype(np.int64 if cells.type == "large_string" else np.int32)
            _, offsets, data = cells.buffers()
            ends = np.frombuffer(offsets, wide, len(cells) + 1, cells.offset * wide.itemsize)
            self._data += memoryview(data or b"")[ends[0] : ends[-1]]
            self._lengths.append(np.diff(ends).astype(np.int32))
            return
        joined = "".join(cells)
        self._data += joined.encode("utf-8", ERRORS)
        texts = cells if joined.isascii() else [text.encode("utf-8", ERRORS) for text in cells]
        self._lengths.append(np.fromiter(map(len, texts), np.int32, len(texts)))

    def pad(self, count: int) -> None:
        """Empty texts, so that there are `count`."""
        self._lengths.append(np.zeros(count - self._count, np.int32))
        self._count = count

    def column(self) -> TextColumn:
        """All that was added."""
        lengths = np.concatenate(self._lengths)
        data = np.frombuffer(self._data or b"\0", np.uint8)  # so that it can be indexed where all texts are empty
        return TextColumn(data, np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
