"""Weights for LatteT2V: what other files call things, what may differ, and the way back to diffusers.

Recognised by content: our own checkpoints; diffusers' `LatteTransformer3DModel` (Latte-1) and the .pt files of Latte's
repository (the same names); and PixArt-alpha, in its repository's names or in diffusers', which are the spatial half.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from opensora.models.key_map import (
    Rule,
    block,
    diffusers_config,
    diffusers_depth,
    pixart_rules,
    refuse_unmet,
    tensor,
    to_ours,
    to_theirs,
)
from opensora.models.loading import NO_NULL_TEXT, NULL_TEXT, Conversion

if TYPE_CHECKING:  # the model's file imports this one
    from opensora.models.latte.latte import LatteT2V


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> a LatteT2V's."""
    result, suffix = Conversion(dict(state), ""), ""
    if "adaln_single.linear.weight" in state:
        suffix = ", diffusers"
        result.tensors = to_ours(_rules(diffusers_depth(state)), state)
        result.initial[NULL_TEXT] = NO_NULL_TEXT
    result.format = f"LatteT2V{suffix}"
    result.drop("LatteT2V takes no size or aspect ratio", "csize_embedder.", "ar_embedder.")
    if not any(name.startswith("temporal_blocks.") for name in result.tensors):
        result.format = f"PixArt-alpha{suffix}"
        why = "PixArt has no temporal blocks; they add nothing at first, but the frames' positions are added"
        result.may_miss(model, why, "temporal_blocks.")
    result.fit_shapes(model)
    return result


def to_diffusers(model: "LatteT2V", *, num_frames: int = 16) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `config.json` and the state dict of the same model in diffusers, a `LatteTransformer3DModel`.

    The table of "no text" is left out, as diffusers has none: its pipeline encodes an empty prompt instead.

    Args:
        num_frames: of the videos; diffusers' model takes no other number, except 1.

    Raises:
        UserError: diffusers' model cannot express this one.
    """
    frames, rows, columns = model.patch_size
    span = model.base_size / model.space_scale
    # the side of diffusers' base latent, that of the training if possible, which stands for the range of positions
    sides = [round(size * rows) for size in (model.base_size, span)]
    fitting = [side for side in sides if side // rows / max(side // 64, 1) == span]  # // 64 is diffusers' scale
    needed = {
        "mode='video', as it runs the temporal blocks; for images convert with mode='video' and call it with "
        "enable_temporal_attentions=False": model.mode == "video",
        f"patches of one frame, not {frames}": frames == 1,
        f"square patches, not {rows} x {columns}": rows == columns,
        f"another range of spatial positions than base_size / space_scale = {span:g}": bool(fitting),
        f"time_scale=1, not {model.time_scale}": model.time_scale == 1,
        "temporal positions": not model.no_temporal_pos_emb,
        "mlp_ratio=4": model.mlp_ratio == 4,
    }
    refuse_unmet("LatteTransformer3DModel", needed)
    config = diffusers_config(model, "LatteTransformer3DModel", fitting[0], video_length=num_frames)
    state = to_theirs(_rules(len(model.blocks)), model.state_dict())
    del state["caption_projection.y_embedding"]
    return config, state


def _rules(depth: int) -> list[Rule]:
    rules = pixart_rules(depth)
    for i in range(depth):
        ours, theirs = f"temporal_blocks.{i}", f"temporal_transformer_blocks.{i}"
        rules += [*block(ours, theirs), tensor(f"{ours}.scale_shift_table", f"{theirs}.scale_shift_table")]
    return rules
