"""Weights for LatteT2V: what other files call things, what may differ, and the way back to diffusers.

Recognised by content: our own checkpoints; diffusers' `LatteTransformer3DModel` (Latte-1) and the .pt files of Latte's
repository (the same names); and PixArt-alpha, in its repository's names or in diffusers', which are the spatial half.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from opensora.models.key_map import Rule, layer, tensor, to_ours, to_theirs
from opensora.models.loading import NO_NULL_TEXT, NULL_TEXT, Conversion, fit_shapes, pick
from opensora.utils.errors import UserError

if TYPE_CHECKING:  # the model's file imports this one
    from opensora.models.latte.latte_t2v import LatteT2V
    from opensora.models.layers.blocks import AdaLNSingleBlock

RECOMPUTED = dict.fromkeys(("pos_embed", "pos_embed.pos_embed", "temp_pos_embed"), "recomputed for every size")
UNUSED = {
    f"{name}.mlp.{i}.{kind}": "LatteT2V takes no size or aspect ratio"
    for name in ("csize_embedder", "ar_embedder")
    for i in (0, 2)
    for kind in ("weight", "bias")
}
DIFFUSERS_NULL_TEXT = "caption_projection.y_embedding"
NO_TEMPORAL = "PixArt has no temporal blocks; they add nothing at first, but the frames' positions are added"


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> a LatteT2V's."""
    own = model.state_dict()
    tensors, dropped = pick(state, RECOMPUTED | UNUSED)
    suffix = ""
    if "adaln_single.linear.weight" in tensors:
        suffix = ", diffusers"
        depth = sum(name.startswith("temporal_blocks.") and name.endswith(".scale_shift_table") for name in own)
        tensors = to_ours(_diffusers_rules(depth), tensors)
    result = Conversion(tensors, f"LatteT2V{suffix}", dropped=dropped)
    if not any(name.startswith("temporal_blocks.") for name in tensors):
        result.format = f"PixArt-alpha{suffix}"
        result.initial = {name: NO_TEMPORAL for name in own if name.startswith("temporal_blocks.")}
    if suffix:
        result.initial[NULL_TEXT] = NO_NULL_TEXT
    fit_shapes(result, model)
    return result


def to_diffusers(model: "LatteT2V", *, num_frames: int = 16) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A LatteT2V as diffusers' `LatteTransformer3DModel`: its config, and its state dict for a strict load.

    The table of "no text" is left out, for want of a place: diffusers' pipeline encodes an empty prompt instead.

    Args:
        model: a LatteT2V.
        num_frames: of the videos; diffusers' model takes no other number, except 1.

    Raises:
        UserError: diffusers' model cannot express this one.
    """
    sample_size = _sample_size(model)
    heads = cast("AdaLNSingleBlock", model.blocks[0]).attn.num_heads
    config = {
        "num_attention_heads": heads,
        "attention_head_dim": model.hidden_size // heads,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        "num_layers": len(model.blocks),
        "cross_attention_dim": model.hidden_size,
        "attention_bias": True,
        "sample_size": sample_size,
        "patch_size": model.patch_size[1],
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "caption_channels": model.caption_channels,
        "video_length": num_frames,
    }
    state = to_theirs(_diffusers_rules(len(model.blocks)), model.state_dict())
    return config, {name: value for name, value in state.items() if name != DIFFUSERS_NULL_TEXT}


def _sample_size(model: "LatteT2V") -> int:
    """The side of diffusers' base latent, that of the training if possible, which stands for the range of positions."""
    _, rows, columns = model.patch_size
    span = model.base_size / model.space_scale
    sides = [round(size * rows) for size in (model.base_size, span)]
    fitting = [side for side in sides if side // rows / max(side // 64, 1) == span]  # // 64 is diffusers' scale
    mlp = cast("AdaLNSingleBlock", model.blocks[0]).mlp
    needed = {
        "mode='video', as it runs the temporal blocks; for images convert with mode='video' and call it with "
        "enable_temporal_attentions=False": model.mode == "video",
        f"square patches, not {rows} x {columns}": rows == columns,
        f"another range of spatial positions than base_size / space_scale = {span:g}": bool(fitting),
        f"time_scale=1, not {model.time_scale}": model.time_scale == 1,
        "temporal positions": not model.no_temporal_pos_emb,
        "mlp_ratio=4": mlp.fc1.out_features == 4 * model.hidden_size,
    }
    if not all(needed.values()):
        unmet = "; ".join(what for what, met in needed.items() if not met)
        raise UserError(f"diffusers' LatteTransformer3DModel cannot express this model. It would need: {unmet}.")
    return fitting[0]


def _diffusers_rules(depth: int) -> list[Rule]:
    rules = [
        *layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
        *layer("t_embedder.mlp.0", "adaln_single.emb.timestep_embedder.linear_1"),
        *layer("t_embedder.mlp.2", "adaln_single.emb.timestep_embedder.linear_2"),
        *layer("t_block.1", "adaln_single.linear"),
        tensor(NULL_TEXT, DIFFUSERS_NULL_TEXT),
        *layer("y_embedder.y_proj.fc1", "caption_projection.linear_1"),
        *layer("y_embedder.y_proj.fc2", "caption_projection.linear_2"),
        *layer("final_layer.linear", "proj_out"),
        tensor("final_layer.scale_shift_table", "scale_shift_table"),
    ]
    for i in range(depth):
        spatial, theirs = f"blocks.{i}", f"transformer_blocks.{i}"
        rules += _block(spatial, theirs) + _block(f"temporal_{spatial}", f"temporal_{theirs}")
        rules += layer(f"{spatial}.cross_attn.q_linear", f"{theirs}.attn2.to_q")
        rules += layer(f"{spatial}.cross_attn.kv_linear", f"{theirs}.attn2.to_k", f"{theirs}.attn2.to_v", kind="stack")
        rules += layer(f"{spatial}.cross_attn.proj", f"{theirs}.attn2.to_out.0")
    return rules


def _block(ours: str, theirs: str) -> list[Rule]:
    """What a spatial and a temporal block have in common."""
    return [
        tensor(f"{ours}.scale_shift_table", f"{theirs}.scale_shift_table"),
        *layer(f"{ours}.attn.qkv", *(f"{theirs}.attn1.to_{part}" for part in "qkv"), kind="stack"),
        *layer(f"{ours}.attn.proj", f"{theirs}.attn1.to_out.0"),
        *layer(f"{ours}.mlp.fc1", f"{theirs}.ff.net.0.proj"),
        *layer(f"{ours}.mlp.fc2", f"{theirs}.ff.net.2"),
    ]
