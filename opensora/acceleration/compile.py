"""Compilation of a model, block by block: all blocks of a kind share one compiled program."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

RECOMPILE_LIMIT = 256
"""Programs of a function. PyTorch's own limit is 8, beyond which a block that must be one graph is an error: Inductor's kernels alone may
ask for four (lengths that are multiples of 8 or not, short or long ones), times number formats and kinds of blocks."""


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
    arguments: dict[str, Any] = {"dynamic": True if varying_sizes else None, "backend": backend}
    arguments |= allow_many_programs()
    if backend == "inductor":
        arguments |= _our_pass()
    for block in blocks:
        block.compile(fullgraph=True, **arguments)


def allow_many_programs() -> dict[str, int]:
    """The argument of `torch.compile` for it; PyTorch without one (up to 2.11) has a limit for the whole process, which is raised."""
    if knows("recompile_limit"):
        return {"recompile_limit": RECOMPILE_LIMIT}
    dynamo = torch._dynamo.config
    dynamo.cache_size_limit = max(dynamo.cache_size_limit, RECOMPILE_LIMIT)
    return {}


def knows(argument: str) -> bool:
    """Whether this PyTorch's `torch.compile` takes it."""
    return argument in inspect.signature(torch.compile).parameters


def _our_pass() -> dict[str, Any]:
    """Inductor is imported here, as that takes a second which a run without it does not need."""
    from torch._inductor import config

    from opensora.acceleration.graph_passes import DROP_ROUND_TRIPS

    # a user's own pass stays; older PyTorch (2.6, 2.8) ignores ours
    return {} if config.post_grad_custom_pre_pass else {"options": {"post_grad_custom_pre_pass": DROP_ROUND_TRIPS}}
