"""Compilation block by block: all of a kind share one program. For OneDiff's interface see `opensora.acceleration.compiler`."""

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)
RECOMPILE_LIMIT = 256
"""Programs of a function. At PyTorch's own limit of 8 a full graph is an error, and Inductor's kernels alone may need four: lengths that 8
divides or not, short or long ones; times dtypes and kinds of blocks."""


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
        # imported here, as that takes a second which a run without it does not need
        from torch._inductor import config

        from opensora.acceleration.compile.graph_passes import DROP_ROUND_TRIPS

        if not config.post_grad_custom_pre_pass:  # a user's own pass stays; older PyTorch (2.6, 2.8) ignores ours
            arguments["options"] = {"post_grad_custom_pre_pass": DROP_ROUND_TRIPS}
    logger.info("compile: the first step compiles the blocks, which takes minutes")
    for block in blocks:
        block.compile(fullgraph=True, **arguments)


def allow_many_programs() -> dict[str, int]:
    """`RECOMPILE_LIMIT` as an argument of `torch.compile`; PyTorch up to 2.11 has a limit for the whole process, which is raised."""
    if knows("recompile_limit"):
        return {"recompile_limit": RECOMPILE_LIMIT}
    dynamo = torch._dynamo.config
    dynamo.cache_size_limit = max(dynamo.cache_size_limit, RECOMPILE_LIMIT)
    return {}


def knows(argument: str) -> bool:
    """Whether this PyTorch's `torch.compile` takes the argument."""
    return argument in inspect.signature(torch.compile).parameters


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks that share one program, by our `transformer_blocks()` or by diffusers' attributes; [] where there are none."""
    blocks = getattr(module, "transformer_blocks", None)
    if inspect.ismethod(blocks):
        return list(blocks())
    if names := getattr(module, "_repeated_blocks", None):
        return [one for one in module.modules() if type(one).__name__ in names]
    return list(blocks) if isinstance(blocks, nn.ModuleList) else []


def is_ours(module: nn.Module) -> bool:
    """Whether it is a denoiser of ours, whose blocks compile without graph breaks."""
    return inspect.ismethod(getattr(module, "transformer_blocks", None))
