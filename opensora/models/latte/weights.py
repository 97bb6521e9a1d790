"""Weights for Latte: what other files call things, and what may differ.

Recognised by content: the official class-conditional and unconditional .pt (DiT's names and `temp_embed`), our own
checkpoints and Open-Sora's (3-D patch kernels), and DiT's image weights, official or diffusers', from which Latte is
trained: block i becomes block i, so that half of the blocks that saw images become temporal. Our own DiT and Latte have the
same names and shapes; the model type that our files are written with tells them apart.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.dit.weights import PATCHES, axes_of, drop_classes, fit_condition, grow_in_time, read
from opensora.models.loading import Conversion


def convert(state: Mapping[str, Tensor], model: nn.Module, source_type: str | None = None) -> Conversion:
    """A released state dict -> a Latte's.

    Args:
        state: what was read.
        model: a Latte.
        source_type: the `model.type` that the file says it is of; None = it does not say.

    Raises:
        UserError: the weights are a text model's where the model takes classes.
    """
    result = read(state)
    if "temp_embed" in state:
        result.format = "Latte, official"
    elif PATCHES in state and state[PATCHES].ndim == 5 and axes_of(source_type) in (None, model.axes):
        result.format = "Latte"
    else:
        result.format = f"{result.format}; every second block becomes temporal"
        drop_classes(result, model, "the classes are those of DiT's images")
    grow_in_time(result, model)
    fit_condition(result, model)
    return result
