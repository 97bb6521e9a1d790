"""Weights for STDiT2: what other files call things, and what may differ.

Recognised by content: our own checkpoints and Open-Sora 1.1's (the same names); PixArt-alpha's .pth, from which
Open-Sora 1.1 starts, with or without its embedding of sizes; and STDiT's, Open-Sora 1.0.
"""

import warnings
from collections.abc import Mapping

from torch import Tensor, nn

from opensora.models.loading import Conversion, fit_shapes, pick
from opensora.models.stdit.weights import RECOMPUTED as TABLES

ROTATION = "rope.freqs"
RECOMPUTED = {**TABLES, **dict.fromkeys((ROTATION, "pos_embed.inv_freq"), "recomputed for every size")}
NORMS = (".q_norm.", ".k_norm.")
NEW = (".scale_shift_table_temporal", "t_block_temp.", "fl_embedder.", "fps_embedder.")
SIZES = ("csize_embedder.", "ar_embedder.")


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT2's."""
    tensors, dropped = pick(state, RECOMPUTED)
    result = Conversion(tensors, "STDiT2", dropped=dropped)
    if any(".attn_temp." in name for name in tensors):
        if not any(".scale_shift_table_temporal" in name for name in tensors):
            result.format = "STDiT"
            _may_miss(result, model, "STDiT has no such part", *NEW, *SIZES, *NORMS)
    else:
        result.format = "PixArt-alpha"
        _may_miss(result, model, "PixArt has no temporal branch", ".attn_temp.", *NEW)
        _may_miss(result, model, "PixArt does not normalise queries and keys", ".attn.q_norm.", ".attn.k_norm.")
        if not any(name.startswith(SIZES) for name in tensors):
            _may_miss(result, model, "these weights know no sizes", *SIZES)
    fit_shapes(result, model)
    _warn_of_order(state, model)
    return result


def _may_miss(result: Conversion, model: nn.Module, why: str, *parts: str) -> None:
    names = [name for name in model.state_dict() if any(part in name for part in parts)]
    result.initial.update(dict.fromkeys(names, why))


def _warn_of_order(state: Mapping[str, Tensor], model: nn.Module) -> None:
    # no tensor tells the order; saved rotary frequencies tell that the file is Open-Sora's
    if ROTATION in state and getattr(model, "norm_order", None) == "norm_then_rope":
        warnings.warn(
            "the weights are Open-Sora's, whose release 1.1 turns queries and keys before it normalises them: "
            "set norm_order='rope_then_norm' in the model's config for it.",
            stacklevel=2,
        )
