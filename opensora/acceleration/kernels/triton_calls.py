"""How our Triton kernels are called: as operators where gradients are needed, directly where they are not.

An operator written in Python costs the host some 50 to 100 us at each call, more than its kernel takes on the device at
a sampler's sizes. Without gradients an eager model launches the kernel itself, and a compiled program contains the
launch instead of a call of the operator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def forward_pass(
    operator: Callable[..., Tensor],
    inlined: Callable[..., Tensor],
    launched: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    *others: Any,
) -> Tensor:
    """The same result by the cheapest of three ways.

    Args:
        operator: has a gradient, and knows the size of its result for tensors without content.
        inlined: made by `torch.library.triton_op`, for the compiler.
        launched: a plain function.
        tensors: the first arguments.
        others: the further ones.
    """
    if torch.is_grad_enabled():
        return operator(*tensors, *others)
    if torch.compiler.is_compiling():
        return inlined(*tensors, *others)
    if all(type(each) is Tensor or type(each) is torch.nn.Parameter for each in tensors):
        return launched(*tensors, *others)
    return operator(*tensors, *others)


def has_symbols(*tensors: Tensor) -> bool:
    """Whether a size or stride is a symbol of a program for many sizes, which constants of a kernel cannot be."""
    return any(isinstance(n, torch.SymInt) for each in tensors for n in (*each.shape, *each.stride()))
