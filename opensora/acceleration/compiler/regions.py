"""The repeated blocks of a denoiser: of ours, or of diffusers."""

import inspect

from torch import nn


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks of which one program serves all; [] where the module does not say which they are.

    Ours say it by `transformer_blocks()`; diffusers' by a `_repeated_blocks` with names of classes, or a list of modules
    called `transformer_blocks`.
    """
    blocks = getattr(module, "transformer_blocks", None)
    if inspect.ismethod(blocks):
        return list(blocks())
    if names := getattr(module, "_repeated_blocks", None):
        return [one for one in module.modules() if type(one).__name__ in names]
    return list(blocks) if isinstance(blocks, nn.ModuleList) else []


def is_called_by_parts(module: nn.Module) -> bool:
    """Whether its sampler calls its methods one by one, and never the module (NOVA)."""
    return hasattr(module, "next_condition")


def is_ours(module: nn.Module) -> bool:
    """Whether it is a denoiser of ours, whose blocks compile without interruption."""
    return inspect.ismethod(getattr(module, "transformer_blocks", None))
