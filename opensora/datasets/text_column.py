"""A column of text that worker processes share: one buffer of UTF-8 and where each text begins.

A forked worker shares its parent's memory until one of them writes to it, and reading a Python string writes: its reference
count changes. So every worker would come to have its own copy of a table's strings, page by page. The two arrays here are
only read; a Python string is made of a few bytes of them when somebody asks for one.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

BLOCK = 65_536  # texts that are there in two forms at a time, while a column is made
# file names need not be UTF-8: Python has such bytes as surrogates, and gets them back
ERRORS = "surrogateescape"


class TextColumn:
    """[N] strings, read by number; none can be changed.

    Args:
        data: UTF-8, [bytes] uint8.
        offsets: [N + 1] int64, where each text begins, and the end of the last.
    """

    def __init__(self, data: np.ndarray, offsets: np.ndarray) -> None:
        self.data, self.offsets = data, offsets

    @classmethod
    def of(cls, texts: Iterable[str]) -> "TextColumn":
        """The same texts."""
        parts, lengths = [], [np.zeros(1, np.int64)]
        texts = iter(texts)
        while block := [text.encode("utf-8", ERRORS) for text in islice(texts, BLOCK)]:
            parts.append(b"".join(block))
            lengths.append(np.fromiter(map(len, block), np.int64, len(block)))
        return cls(np.frombuffer(b"".join(parts), np.uint8), np.cumsum(np.concatenate(lengths)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> str:
        return self.encoded(row).decode("utf-8", ERRORS)

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def encoded(self, row: int) -> bytes:
        """UTF-8 of a text."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def tolist(self) -> list[str]:
        """All texts as Python strings."""
        return list(self)

    def only(self, kept: np.ndarray) -> "TextColumn":
        """The texts where `kept` [N] bool is True."""
        lengths = np.diff(self.offsets)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[kept])])
        return TextColumn(self.data[np.repeat(kept, lengths)], offsets)
