"""Weights for PixArt: what other files call things, and what may differ.

Recognised by content: our own checkpoints and PixArt's .pth (the same names, its patch kernel 2-D), and the transformer
of diffusers (`PixArtTransformer2DModel`). diffusers does not store the table of "no text", `y_embedding`, and encodes an
empty prompt instead, as sampling from such weights does here; whoever needs the table keeps a checkpoint in our format.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from opensora.models.key_map import (
    diffusers_config,
    diffusers_depth,
    patches_along,
    pixart_rules,
    refuse_unmet,
    to_ours,
    to_theirs,
)
from opensora.models.loading import NO_NULL_TEXT, NULL_TEXT, Conversion
from opensora.utils.errors import UserError

if TYPE_CHECKING:
    from opensora.models.pixart.pixart import PixArt

SIZE_EMBEDDERS = ("csize_embedder", "ar_embedder")


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> that of a PixArt, PixArtMS or PixArtSigma.

    Raises:
        UserError: the file is of another kind of PixArt; the message names the kind.
    """
    result = Conversion(dict(state), "PixArt")
    if "adaln_single.linear.weight" in state:
        result.format = "PixArt, diffusers"
        result.tensors = to_ours(pixart_rules(diffusers_depth(state)), state)
        result.initial[NULL_TEXT] = NO_NULL_TEXT
    result.fit_shapes(model)

    own = model.state_dict()
    in_file = any(name.startswith(SIZE_EMBEDDERS) for name in result.tensors)
    in_model = [name for name in own if name.startswith(SIZE_EMBEDDERS)]
    if in_file and not in_model:
        raise UserError(
            f"the weights have micro-conditions (csize_embedder, ar_embedder), which {type(model).__name__} does not: set "
            'model.type to "PixArtMS-XL/2".'
        )
    for name in [] if in_file else in_model:  # PixArtMS may start without them: the output is then the same
        if ".mlp.2." in name:
            result.tensors[name] = own[name].new_zeros(own[name].shape)
            result.converted[name] = "the file has no micro-conditions: zero, so that they start by adding nothing"
        else:
            result.initial[name] = "the file has no micro-conditions"

    compressed, own_compressed = (
        {int(name.split(".")[1]) for name in names if ".attn.sr." in name} for names in (result.tensors, own)
    )
    if compressed and compressed != own_compressed:
        layers = tuple(sorted(compressed))
        raise UserError(
            f'the weights compress keys in blocks {layers}: set model.kv_compress="conv" and '
            f"model.kv_compress_layers={layers}."
        )
    if not compressed:  # it may be added: it starts as the mean, as in PixArt-Sigma's own fine-tuning
        result.may_miss(model, "the file does not compress keys", ".attn.sr.", ".attn.norm.")
    return result


def to_diffusers(model: "PixArt", *, sample_size: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `config.json` and the state dict of the same model in diffusers, a `PixArtTransformer2DModel`.

    Its positions are `i / interpolation_scale * base / length` with `base = sample_size // patch`, a whole number. Ours
    are the same where `model.base_size` is set: any range is that of a whole base and a matching scale. A model
    without it agrees at one size, squares of `sample_size`.

    Args:
        model: for images, that is without temporal positions. Its table of "no text" is left out.
        sample_size: the side of the latent at which a model without `base_size` shall agree; None = that of a model
            with positions from 0 to 32.

    Raises:
        UserError: diffusers cannot express this model, or `sample_size` is no multiple of the patch.
    """
    pt, ph, pw = model.patch_size
    needed = {
        "no_temporal_pos_emb=True, as it makes images": model.no_temporal_pos_emb,
        f"square patches of one frame, not {model.patch_size}": pt == 1 and ph == pw,
        f"no compressed keys (kv_compress={model.kv_compress!r})": model.kv_compress is None,
        "qk_norm=False": not model.qk_norm,
        "mlp_ratio=4": model.mlp_ratio == 4,
    }
    refuse_unmet("PixArtTransformer2DModel", needed)
    scale, base = model.space_scale, model.base_size
    if sample_size is None:
        tokens = max(1, round(32 * scale if base is None else base))
        scale = scale if base is None else tokens * scale / base
    elif base is None:
        tokens = patches_along(sample_size, ph)
    else:
        raise UserError("sample_size: this model's positions do not depend on it, as base_size is set. Leave it out.")
    config = diffusers_config(
        model,
        "PixArtTransformer2DModel",
        tokens * ph,
        interpolation_scale=int(scale) if scale == int(scale) else scale,
        use_additional_conditions=any(name.startswith(SIZE_EMBEDDERS) for name in model.state_dict()),
    )
    state = to_theirs(pixart_rules(len(model.blocks)), model.state_dict())
    del state["caption_projection.y_embedding"]
    return config, state
