"""Weights for STDiT, STDiT2 and STDiT3: what other files call things, and what may differ.

Recognised by content: our own checkpoints and Open-Sora's .pth (the same names), and PixArt's, from which each starts:
STDiT and STDiT2 (Open-Sora 1.0 and 1.1) from PixArt-alpha, STDiT3 (1.2) from PixArt-Sigma, whose blocks are its spatial
ones. STDiT2 also starts from STDiT.
"""

import warnings
from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.loading import Conversion

NORMS = (".q_norm.", ".k_norm.")
NEW_IN_2 = (".scale_shift_table_temporal", "t_block_temp.", "fl_embedder.", "fps_embedder.")
SIZES = ("csize_embedder.", "ar_embedder.")


def convert_stdit(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT's."""
    result = Conversion(dict(state), "STDiT")
    if not any(".attn_temp." in name for name in state):
        result.format = "PixArt-alpha"
        result.may_miss(model, "PixArt has no temporal attention", ".attn_temp.")
    result.fit_shapes(model)
    return result


def convert_stdit2(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT2's; a warning where Open-Sora 1.1 needs another `norm_order`."""
    result = Conversion(dict(state), "STDiT2")
    if not any(".attn_temp." in name for name in state):
        result.format = "PixArt-alpha"
        result.may_miss(model, "PixArt has no temporal branch", ".attn_temp.", *NEW_IN_2)
        result.may_miss(model, "PixArt does not normalise queries and keys", ".attn.q_norm.", ".attn.k_norm.")
        if not any(name.startswith(SIZES) for name in state):
            result.may_miss(model, "these weights know no sizes", *SIZES)
    elif not any(".scale_shift_table_temporal" in name for name in state):
        result.format = "STDiT"
        result.may_miss(model, "STDiT has no such part", *NEW_IN_2, *SIZES, *NORMS)
    result.fit_shapes(model)
    # no tensor shows the order; saved rotary frequencies show that the file is Open-Sora's
    if "rope.freqs" in state and getattr(model, "norm_order", None) == "norm_then_rope":
        warnings.warn(
            "the weights are Open-Sora's, whose release 1.1 turns queries and keys before it normalises them: "
            "set norm_order='rope_then_norm' in the model's config for it.",
            stacklevel=2,
        )
    return result


def convert_stdit3(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT3's."""
    result = Conversion(dict(state), "STDiT3")
    # LatteT2V has `blocks` too, and temporal ones: as it is, a strict load refuses it
    if any(name.startswith("blocks.") for name in state) and not any("temporal_blocks." in name for name in state):
        result.format = "PixArt-Sigma"
        result.tensors = {f"spatial_{k}" if k.startswith("blocks.") else k: v for k, v in state.items()}
        result.may_miss(model, "PixArt does not normalise queries and keys", *NORMS)
        result.may_miss(model, "PixArt has no temporal blocks", "temporal_blocks.")
        result.may_miss(model, "PixArt knows no frame rate", "fps_embedder.")
    result.fit_shapes(model)
    return result
