"""Putting something around a module's `forward`, from outside: no name of a parameter changes, and it can be undone."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def wrap_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replace `module.forward` by `wrap(module.forward)`; hooks and compilation of the module stay around it.

    Returns:
        A function that puts back what was there. Wrappers around wrappers are undone in reverse order.
    """
    before = module.__dict__.get("forward")  # None: the class's own
    module.forward = wrap(module.forward)

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def wrap_call(module: nn.Module, wrap: Callable[..., Any]) -> None:
    """Let what `module` computes go through `wrap(compute, *args, **kwargs)`, outside of what `module.compile` compiled."""
    if module._compiled_call_impl is None:
        wrap_forward(module, lambda forward: partial(wrap, forward))
    else:
        module._compiled_call_impl = partial(wrap, module._compiled_call_impl)
