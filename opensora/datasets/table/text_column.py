"""A column of text that worker processes share.

A forked worker shares its parent's memory until one of them writes to it, and reading a Python string writes: its reference
count changes. Arrow's buffers are only read; a Python string is made when somebody asks for one.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BLOCK = 4096  # texts at a time: few are there in two forms, and those stay in the processor's cache
ERRORS = "surrogateescape"  # file names need not be UTF-8: Python has such bytes as surrogates


class TextColumn:
    """[N] strings, read by number; none can be changed. `data` is an arrow array of their UTF-8 (`large_binary`)."""

    def __init__(self, data: pa.ChunkedArray) -> None:
        self.data = data

    @classmethod
    def of(cls, texts: Iterable[str]) -> "TextColumn":
        """The same texts."""
        texts, blocks = iter(texts), []
        while block := list(islice(texts, BLOCK)):
            blocks.append(encode(block))
        return cls(pa.chunked_array(blocks, pa.large_binary()))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> str:
        return self.data[row].as_py().decode("utf-8", ERRORS)

    def __iter__(self) -> Iterator[str]:
        return (text.decode("utf-8", ERRORS) for chunk in self.data.chunks for text in chunk.to_pylist())

    def tolist(self) -> list[str]:
        """All texts as Python strings."""
        return list(self)

    def only(self, kept: np.ndarray) -> "TextColumn":
        """The texts where `kept` [N] bool is True."""
        return TextColumn(self.data.filter(pa.array(kept)))

    def matches(self, pattern: str) -> np.ndarray:
        """[N] bool, whether a regular expression (RE2) is found in the text."""
        return np.asarray(pc.match_substring_regex(self.data, pattern), bool)

    def length_prefixed(self) -> Iterator[Any]:
        """Each text after its length in 8 bytes, little-endian; buffers of many texts."""
        nothing = pa.scalar(b"", pa.large_binary())
        for texts in self.data.chunks:
            lengths = pc.binary_length(texts).to_numpy().astype("<i8")
            offsets = 8 * np.arange(len(texts) + 1)
            prefixes = [None, pa.py_buffer(offsets), pa.py_buffer(lengths)]
            prefixes = pa.Array.from_buffers(pa.large_binary(), len(texts), prefixes)
            yield b"".join(pc.binary_join_element_wise(prefixes, texts, nothing).to_pylist())


def encode(texts: Sequence[str] | pa.Array) -> pa.Array:
    """Python strings, or an arrow array of them, as UTF-8 in an arrow array; a null is ""."""
    if isinstance(texts, pa.Array):
        return texts.fill_null("").cast(pa.large_string()).cast(pa.large_binary())
    return pa.array([text.encode("utf-8", ERRORS) for text in texts], pa.large_binary())
