"""Weights for STDiT3: what other files call things, and what may differ.

Recognised by content: our own checkpoints and Open-Sora 1.2's (the same names), and PixArt-Sigma's .pth, from which
Open-Sora 1.2 starts: its blocks are the spatial ones.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.loading import Conversion, fit_shapes, pick
from opensora.models.stdit.weights2 import NORMS, RECOMPUTED

PIXART_BLOCKS = "blocks."


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT3's."""
    tensors, dropped = pick(state, RECOMPUTED)
    result = Conversion(tensors, "STDiT3", dropped=dropped)
    has_pixarts = any(name.startswith(PIXART_BLOCKS) for name in tensors)
    # LatteT2V has blocks of that name and temporal ones beside them: left as it is, a strict load refuses it
    if has_pixarts and not any(name.startswith("temporal_blocks.") for name in tensors):
        result.format = "PixArt-Sigma"
        result.tensors = {_spatial(name): tensor for name, tensor in tensors.items()}
        result.initial = {name: why for name in model.state_dict() if (why := _not_in_pixart(name))}
    fit_shapes(result, model)
    return result


def _spatial(name: str) -> str:
    return f"spatial_{name}" if name.startswith(PIXART_BLOCKS) else name


def _not_in_pixart(name: str) -> str | None:
    if name.startswith("temporal_blocks."):
        return "PixArt has no temporal blocks"
    if name.startswith("fps_embedder."):
        return "PixArt knows no frame rate"
    if any(part in name for part in NORMS):
        return "PixArt does not normalise queries and keys"
    return None
