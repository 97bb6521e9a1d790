"""Weights for STDiT: what other files call things, and what may differ.

Recognised by content: our own checkpoints and Open-Sora 1.0's .pth (the same names), and PixArt-alpha's .pth, from which
Open-Sora 1.0 starts: everything but the temporal attention, whose output is zero at first.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.loading import Conversion, grow_patches, pick, resize_rows

RECOMPUTED = dict.fromkeys(("pos_embed", "pos_embed_temporal"), "recomputed for every size")
NULL_TEXT = "y_embedder.y_embedding"
PATCHES = "x_embedder.proj.weight"


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT's."""
    own = model.state_dict()
    tensors, dropped = pick(state, RECOMPUTED)
    result = Conversion(tensors, "STDiT", dropped=dropped)
    if not any(".attn_temp." in name for name in tensors):
        result.format = "PixArt-alpha"
        result.initial = {name: "PixArt has no temporal attention" for name in own if ".attn_temp." in name}
    if tensors.get(PATCHES) is not None and tensors[PATCHES].ndim == 4:
        tensors[PATCHES] = grow_patches(tensors[PATCHES], own[PATCHES].shape[2])
        result.converted[PATCHES] = "2-D patch kernel made 3-D"
    rows = len(own[NULL_TEXT])
    if NULL_TEXT in tensors and len(tensors[NULL_TEXT]) != rows:
        result.converted[NULL_TEXT] = f"{len(tensors[NULL_TEXT])} rows of the no-text table made {rows}"
        tensors[NULL_TEXT] = resize_rows(tensors[NULL_TEXT], rows)
    return result
