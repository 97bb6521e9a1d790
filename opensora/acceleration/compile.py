"""Compilation of a model, block by block: all blocks of a kind share one compiled program."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def compile_blocks(
    blocks: Iterable[nn.Module], *, varying_sizes: bool = False, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """`torch.compile` each block in place, without graph breaks; state-dict names stay as they are.

    Args:
        blocks: of a denoiser, see `Denoiser.transformer_blocks`.
        varying_sizes: the data have many sizes. One program then serves all lengths and sizes, and a second one
            images, where the time axis is 1. Otherwise the first size gets a program of its own, which is faster.
        backend: see `torch.compile`.
    """
    for block in blocks:
        block.compile(fullgraph=True, dynamic=True if varying_sizes else None, backend=backend)
