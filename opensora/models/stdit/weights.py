"""Weights for STDiT: what other files call things, and what may differ.

Recognised by content: our own checkpoints and Open-Sora 1.0's .pth (the same names), and PixArt-alpha's .pth, from which
Open-Sora 1.0 starts: everything but the temporal attention, whose output is zero at first.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.loading import Conversion, fit_shapes, pick

RECOMPUTED = dict.fromkeys(("pos_embed", "pos_embed_temporal"), "recomputed for every size")


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT's."""
    tensors, dropped = pick(state, RECOMPUTED)
    result = Conversion(tensors, "STDiT", dropped=dropped)
    if not any(".attn_temp." in name for name in tensors):
        result.format = "PixArt-alpha"
        result.initial = {
            name: "PixArt has no temporal attention" for name in model.state_dict() if ".attn_temp." in name
        }
    fit_shapes(result, model)
    return result
