"""Weights for PixArt: what other files call things, and what may differ.

Recognised by content: our own checkpoints and PixArt's .pth (the same names, its patch kernel 2-D), and the transformer
of diffusers (`PixArtTransformer2DModel`). diffusers has no place for the table of "no text", `y_embedding`, and encodes an
empty prompt instead, as sampling from such weights does here; whoever needs the table keeps a checkpoint in our format.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from opensora.models.key_map import Rule, layer, tensor, to_ours, to_theirs
from opensora.models.loading import NO_NULL_TEXT, NULL_TEXT, Conversion, fit_shapes, pick
from opensora.models.settings import tokens_of
from opensora.utils.errors import UserError

if TYPE_CHECKING:
    from opensora.models.pixart.pixart import PixArt

RECOMPUTED = dict.fromkeys(
    ("pos_embed", "pos_embed_temporal", "pos_embed.pos_embed"), "recomputed for every size"
)  # the last is diffusers'
SIZE_EMBEDDERS = ("csize_embedder", "ar_embedder")


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> that of a PixArt, PixArtMS or PixArtSigma.

    Raises:
        UserError: the file is of another kind of PixArt; the message names the kind.
    """
    own = model.state_dict()
    tensors, dropped = pick(state, RECOMPUTED)
    result = Conversion(tensors, "PixArt", dropped=dropped)
    if "adaln_single.linear.weight" in tensors:
        result.format = "PixArt, diffusers"
        result.tensors = to_ours(rules(_depth(tensors)), tensors)
        result.initial[NULL_TEXT] = NO_NULL_TEXT
    fit_shapes(result, model)
    _check_micro_conditions(result, own, type(model).__name__)
    _check_compression(result, own)
    return result


def to_diffusers(model: "PixArt", *, sample_size: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `config.json` and the state dict of the same model in diffusers, a `PixArtTransformer2DModel`.

    Its positions are `i / interpolation_scale * base / length` with `base = sample_size // patch`, a whole number. Ours
    are the same where `model.base_size` is set: any range is that of a whole base and a scale that goes with it. A model
    without it agrees at one size, squares of `sample_size`.

    Args:
        model: for images, that is without temporal positions. Its table of "no text" is left out.
        sample_size: the side of the latent at which a model without `base_size` shall agree; None = that of a model
            with positions from 0 to 32.

    Raises:
        UserError: diffusers cannot say this model, or `sample_size` is no multiple of the patch.
    """
    _check_expressible(model)
    patch = model.patch_size[1]
    tokens, scale = _positions(model, sample_size)
    state = to_theirs(rules(len(model.blocks)), model.state_dict())
    del state["caption_projection.y_embedding"]
    config = {
        "_class_name": "PixArtTransformer2DModel",
        "num_attention_heads": model.num_heads,
        "attention_head_dim": model.hidden_size // model.num_heads,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        "num_layers": len(model.blocks),
        "cross_attention_dim": model.hidden_size,
        "attention_bias": True,
        "sample_size": tokens * patch,
        "patch_size": patch,
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "interpolation_scale": int(scale) if scale == int(scale) else scale,
        "use_additional_conditions": any(name.startswith(SIZE_EMBEDDERS) for name in model.state_dict()),
        "caption_channels": model.caption_channels,
    }
    return config, state


def rules(depth: int) -> list[Rule]:
    """Our names and diffusers', for `depth` blocks."""
    embed = "adaln_single.emb"
    result = [
        *layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
        *layer("t_block.1", "adaln_single.linear"),
        tensor(NULL_TEXT, "caption_projection.y_embedding"),  # in diffusers' first releases
        *layer("final_layer.linear", "proj_out"),
        tensor("final_layer.scale_shift_table", "scale_shift_table"),
    ]
    for i, number in enumerate((0, 2), start=1):
        result += layer(f"t_embedder.mlp.{number}", f"{embed}.timestep_embedder.linear_{i}")
        result += layer(f"csize_embedder.mlp.{number}", f"{embed}.resolution_embedder.linear_{i}")
        result += layer(f"ar_embedder.mlp.{number}", f"{embed}.aspect_ratio_embedder.linear_{i}")
        result += layer(f"y_embedder.y_proj.fc{i}", f"caption_projection.linear_{i}")
    for i in range(depth):
        result += _block_rules(f"blocks.{i}", f"transformer_blocks.{i}")
    return result


def _block_rules(ours: str, theirs: str) -> list[Rule]:
    self_attn, cross_attn = f"{theirs}.attn1", f"{theirs}.attn2"
    return [
        tensor(f"{ours}.scale_shift_table", f"{theirs}.scale_shift_table"),
        *layer(f"{ours}.attn.qkv", *(f"{self_attn}.to_{part}" for part in "qkv"), kind="stack"),
        *layer(f"{ours}.attn.proj", f"{self_attn}.to_out.0"),
        *layer(f"{ours}.cross_attn.q_linear", f"{cross_attn}.to_q"),
        *layer(f"{ours}.cross_attn.kv_linear", f"{cross_attn}.to_k", f"{cross_attn}.to_v", kind="stack"),
        *layer(f"{ours}.cross_attn.proj", f"{cross_attn}.to_out.0"),
        *layer(f"{ours}.mlp.fc1", f"{theirs}.ff.net.0.proj"),
        *layer(f"{ours}.mlp.fc2", f"{theirs}.ff.net.2"),
    ]


def _check_micro_conditions(result: Conversion, own: Mapping[str, Tensor], model: str) -> None:
    """A file with them needs PixArtMS. PixArtMS may start without: they then add zero, so the output is the same."""
    in_file = any(name.startswith(SIZE_EMBEDDERS) for name in result.tensors)
    in_model = [name for name in own if name.startswith(SIZE_EMBEDDERS)]
    if in_file and not in_model:
        raise UserError(
            f"the weights have micro-conditions (csize_embedder, ar_embedder), which {model} does not: set "
            'model.type to "PixArtMS-XL/2".'
        )
    if in_file or not in_model:
        return
    for name in in_model:
        if ".mlp.2." in name:
            result.tensors[name] = own[name].new_zeros(own[name].shape)
            result.converted[name] = "the file has no micro-conditions: zero, so that they start by adding nothing"
        else:
            result.initial[name] = "the file has no micro-conditions"


def _check_compression(result: Conversion, own: Mapping[str, Tensor]) -> None:
    """Compression may be added to weights without: it starts as the mean, as in PixArt-Sigma's own fine-tuning."""
    in_file, in_model = _compressed(result.tensors), _compressed(own)
    if in_file and in_file != in_model:
        layers = tuple(sorted(in_file))
        raise UserError(
            f'the weights compress keys in blocks {layers}: set model.kv_compress="conv" and '
            f"model.kv_compress_layers={layers}."
        )
    if not in_file:
        parts = (".attn.sr.", ".attn.norm.")
        absent = [name for name in own if any(part in name for part in parts)]
        result.initial |= dict.fromkeys(absent, "the file does not compress keys")


def _compressed(names: Mapping[str, Tensor]) -> set[int]:
    return {int(name.split(".")[1]) for name in names if ".attn.sr." in name}


def _depth(state: Mapping[str, Tensor]) -> int:
    return 1 + max((int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks.")), default=-1)


def _positions(model: "PixArt", sample_size: int | None) -> tuple[int, float]:
    """diffusers' base, in tokens, and its scale."""
    if sample_size is not None:
        if model.base_size is not None:
            raise UserError(
                "sample_size: this model's positions do not depend on it, as base_size is set. Leave it out."
            )
        return tokens_of(sample_size, model.patch_size[1]), model.space_scale
    base = 32 * model.space_scale if model.base_size is None else model.base_size
    tokens = max(1, round(base))
    return tokens, model.space_scale if model.base_size is None else tokens * model.space_scale / base


def _check_expressible(model: "PixArt") -> None:
    pt, ph, pw = model.patch_size
    problems = {
        "temporal positions (no_temporal_pos_emb=False)": not model.no_temporal_pos_emb,
        f"patch_size={model.patch_size}": pt != 1 or ph != pw,
        f"kv_compress={model.kv_compress!r}": model.kv_compress is not None,
        "qk_norm=True": model.qk_norm,
        f"mlp_ratio={model.mlp_ratio}": model.mlp_ratio != 4,
    }
    if wrong := [what for what, is_so in problems.items() if is_so]:
        raise UserError(f"diffusers' PixArtTransformer2DModel has no {', no '.join(wrong)}.")
