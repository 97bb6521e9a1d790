"""Weights in autocast's number format for as long as sampling takes.

Autocast rounds a weight whenever it is used: it keeps what it has rounded only where gradients are asked for, and compiled blocks
never keep it. NOVA's sampling calls its head thousands of times, with few patches each time, so that rounding would be more
than half of all that the host has to launch. Layers whose matrix products autocast rounds get the same numbers here as there.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opensora.schedulers.nova.model import AutoregressiveModel
from opensora.schedulers.sampling import SamplingStep

ROUNDED = (nn.Linear, nn.Conv2d)
"""Layers that autocast computes in its format; those derived from them round as they like."""


@contextmanager
def weights_cast(model: AutoregressiveModel, device: torch.device) -> Iterator[None]:
    """Inside autocast, its number format for the fp32 weights and biases of linear and convolutional layers on `device`.

    They take half as much memory again. Weights that are elsewhere (block by block offload) or in pieces (FSDP) are left
    to autocast, and what has been replaced or moved meanwhile stays as it is. Outside autocast nothing is done.
    """
    swapped = [] if not torch.is_autocast_enabled(device.type) else _swap(model, device)
    try:
        yield
    finally:
        for parameter, wide, narrow in swapped:
            if parameter.data.data_ptr() == narrow.data_ptr():
                parameter.data = wide


def with_weights_cast(
    steps: Iterator[SamplingStep], model: AutoregressiveModel, device: torch.device
) -> Generator[SamplingStep, None, None]:
    """`steps` of sampling, all of them inside `weights_cast`: whoever stops before the last closes them."""
    with weights_cast(model, device):
        yield from steps


def _swap(model: AutoregressiveModel, device: torch.device) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """Each parameter with its weights as they were and as they are."""
    dtype = torch.get_autocast_dtype(device.type)
    layers = [module for module in model.modules() if type(module) in ROUNDED]
    unique = {id(p): p for layer in layers for p in layer.parameters(recurse=False)}  # weights may be tied
    swapped = []
    for parameter in unique.values():
        wide = parameter.data
        if type(wide) is Tensor and wide.dtype == torch.float32 and wide.device.type == device.type:
            parameter.data = narrow = wide.to(dtype)
            swapped.append((parameter, wide, narrow))
    return swapped
