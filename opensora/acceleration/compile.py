"""Compilation of a model, block by block: all blocks of a kind share one compiled program."""

from collections.abc import Iterable

from torch import nn


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """`torch.compile` each block in place; state-dict names stay as they are."""
    for block in blocks:
        block.compile(fullgraph=True)
