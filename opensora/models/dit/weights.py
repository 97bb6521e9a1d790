"""Weights for DiT and Latte: what other files call things, what may differ, and the way to diffusers.

Recognised by content: the official .pt (2-D patch kernels, stored position tables, of which Latte's has `temp_embed`), our
own checkpoints and Open-Sora's (3-D kernels), and diffusers' `DiTTransformer2DModel`, which holds the timestep's MLP and
the classes once per block. Latte also starts from DiT's image weights: block i becomes block i, so that half of the blocks
that saw images become temporal. DiT and Latte have the same names and shapes: of our own files, the model type that they
are written with tells which it is.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from opensora.models.key_map import (
    Rule,
    block,
    diffusers_config,
    diffusers_depth,
    layer,
    patches_along,
    refuse_unmet,
    tensor,
    to_ours,
    to_theirs,
)
from opensora.models.layers.embedders import LabelEmbedder
from opensora.models.loading import PATCHES, Conversion
from opensora.registry import MODELS
from opensora.utils.errors import UserError

if TYPE_CHECKING:
    from opensora.models.dit.dit import DiT

CLASSES = "y_embedder.embedding_table.weight"


def convert(state: Mapping[str, Tensor], model: "DiT", source_type: str | None = None) -> Conversion:
    """A released state dict -> a DiT's or a Latte's.

    Args:
        source_type: the `model.type` that the file says it is of; None = it does not say.

    Raises:
        UserError: the weights are Latte's where the model is a DiT, or a text model's where it takes classes.
    """
    axes = None
    if source_type in MODELS.choices():  # a header may say anything
        axes = getattr(inspect.unwrap(MODELS.get(source_type)), "axes", None)
    official_latte, is_latte = "temp_embed" in state, model.axes != ("all",)
    if not is_latte and (official_latte or axes not in (None, model.axes)):
        raise UserError(
            "these are weights of Latte, not of DiT, whose blocks all attend to everything: use a model type 'Latte-...'."
        )
    kernel = state.get(PATCHES)
    if any(".norm1.emb." in name for name in state):
        result = Conversion(to_ours(rules(diffusers_depth(state)), state), "DiT, diffusers")
    else:
        result = Conversion(dict(state), "DiT, official" if kernel is not None and kernel.ndim == 4 else "DiT")
    if official_latte:
        result.format = "Latte, official"
    elif is_latte and kernel is not None and kernel.ndim == 5 and axes in (None, model.axes):
        result.format = "Latte"
    elif is_latte:
        result.format = f"{result.format}; every second block becomes temporal"
        _drop_classes(result, model, "the classes are those of DiT's images")
    result.fit_shapes(model)

    embedder, table = model.y_embedder, result.tensors.get(CLASSES)
    if embedder is None:
        result.drop("the model is unconditional", "y_embedder.")
    elif not isinstance(embedder, LabelEmbedder):
        _drop_classes(result, model, "the file has classes, the model takes text")
    elif any(name.startswith("y_embedder.y_proj") for name in result.tensors):
        raise UserError("the weights are a text model's, but the model takes classes: set condition='text'.")
    elif table is not None and len(table) == embedder.num_classes + 1 and not embedder.with_null:
        result.tensors[CLASSES] = table[:-1]
        result.converted[CLASSES] = "the last row, 'no class', left out (class_dropout_prob=0)"
    elif table is not None and len(table) != (rows := embedder.embedding_table.num_embeddings):
        why = f"the file's table has {len(table)} rows, the model's {rows}: other classes, learned anew"
        _drop_classes(result, model, why)
    return result


def _drop_classes(result: Conversion, model: nn.Module, why: str) -> None:
    """Leave the file's class table out, and the model's condition embedder at its initial values."""
    if CLASSES in result.tensors:
        result.drop(why, CLASSES)
        result.may_miss(model, why, "y_embedder.")


def to_diffusers(model: "DiT", *, sample_size: int = 32) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A class-conditional DiT as diffusers' `DiTTransformer2DModel`: the content of its config.json, and the state dict.

    diffusers spaces the timestep's frequencies over 127 steps, DiT over 128: only with DiT's (`time_proj.downscale_freq_shift`
    of its blocks 0) are the outputs equal.

    Args:
        sample_size: rows, and columns, of the latent; diffusers' positions are for one size.

    Raises:
        UserError: diffusers cannot express the model; or `sample_size` is no multiple of the patch.
    """
    pt, ph, pw = model.patch_size
    classes = model.y_embedder if isinstance(model.y_embedder, LabelEmbedder) else None
    needed = {
        f"classes, not condition={model.condition!r}": classes is not None,
        "a row for 'no class', not class_dropout_prob=0": classes is None or classes.with_null,
        f"patches of one frame, not {pt}": pt == 1,
        f"square patches, not {ph} x {pw}": ph == pw,
        "attention among all tokens, not Latte's": model.axes == ("all",),
        "mlp_ratio=4": model.mlp_ratio == 4,
    }
    refuse_unmet("DiTTransformer2DModel", needed)
    patches_along(sample_size, ph)
    own = {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": classes and classes.num_classes}
    config = diffusers_config(model, "DiTTransformer2DModel", sample_size, **own)
    return config, to_theirs(rules(len(model.blocks)), model.state_dict())


def rules(depth: int) -> list[Rule]:
    """Our names <-> diffusers', for a DiT of `depth` blocks."""
    embeds = [f"transformer_blocks.{i}.norm1.emb" for i in range(depth)]
    result = [
        *layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
        *layer("t_embedder.mlp.0", *(f"{emb}.timestep_embedder.linear_1" for emb in embeds), kind="copies"),
        *layer("t_embedder.mlp.2", *(f"{emb}.timestep_embedder.linear_2" for emb in embeds), kind="copies"),
        tensor(CLASSES, *(f"{emb}.class_embedder.embedding_table.weight" for emb in embeds), kind="copies"),
        *layer("final_layer.adaLN_modulation.1", "proj_out_1"),
        *layer("final_layer.linear", "proj_out_2"),
    ]
    for i in range(depth):
        result += layer(f"blocks.{i}.adaLN_modulation.1", f"transformer_blocks.{i}.norm1.linear")
        result += block(f"blocks.{i}", f"transformer_blocks.{i}")
    return result
