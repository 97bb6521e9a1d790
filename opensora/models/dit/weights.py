"""Weights for DiT: what other files call things, what may differ, and the way to diffusers.

Recognised by content: the official .pt (2-D patch kernels, stored position table), our own checkpoints and Open-Sora's
(3-D kernels), and diffusers' `DiTTransformer2DModel`, which holds the timestep's MLP and the classes once per block. DiT
and Latte have the same names: of our own files, the model type that they are written with tells which it is.
"""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from opensora.models.key_map import Rule, layer, tensor, to_ours, to_theirs
from opensora.models.layers.blocks import AdaLNZeroBlock
from opensora.models.layers.embedders import LabelEmbedder
from opensora.models.loading import Conversion, grow_patches, pick
from opensora.models.settings import tokens_of
from opensora.registry import MODELS
from opensora.utils.errors import UserError

if TYPE_CHECKING:
    from opensora.models.dit.dit import DiT

RECOMPUTED = dict.fromkeys(
    ("pos_embed", "pos_embed_spatial", "pos_embed_temporal", "temp_embed", "pos_embed.pos_embed"),
    "recomputed for every size",
)
PATCHES = "x_embedder.proj.weight"
FINAL = ("final_layer.linear.weight", "final_layer.linear.bias")
CLASSES = "y_embedder.embedding_table.weight"
TEXT = "y_embedder.y_proj.fc1.weight"
DIFFUSERS_CONDITION = ".norm1.emb."


def convert(state: Mapping[str, Tensor], model: nn.Module, source_type: str | None = None) -> Conversion:
    """A released state dict -> a DiT's.

    Args:
        state: what was read.
        model: a DiT.
        source_type: the `model.type` that the file says it is of; None = it does not say.

    Raises:
        UserError: the weights are Latte's, or a text model's where the model takes classes.
    """
    evidence = "they hold 'temp_embed'" if "temp_embed" in state else f"they say that they are of {source_type!r}"
    if "temp_embed" in state or axes_of(source_type) not in (None, model.axes):
        raise UserError(
            f"these are weights of Latte ({evidence}), not of DiT, whose blocks all attend to everything: use a model type "
            "'Latte-...'."
        )
    result = read(state)
    grow_in_time(result, model)
    fit_condition(result, model)
    return result


def axes_of(model_type: str | None) -> tuple[str, ...] | None:
    """What the blocks of a registered DiT or Latte attend over, in turn; None = it is neither."""
    if model_type not in MODELS.choices():  # first: what a header says may be anything, and `get` would import it
        return None
    return getattr(inspect.unwrap(MODELS.get(model_type)), "axes", None)


def read(state: Mapping[str, Tensor]) -> Conversion:
    """Any of the known files, in our names; patches and condition are still those of the file."""
    if any(DIFFUSERS_CONDITION in name for name in state):
        state, result_format = to_ours(rules(_depth(state)), state), "DiT, diffusers"
    else:
        official = PATCHES in state and state[PATCHES].ndim == 4
        result_format = "DiT, official" if official else "DiT"
    tensors, dropped = pick(state, RECOMPUTED)
    return Conversion(tensors, result_format, dropped=dropped)


def grow_in_time(conversion: Conversion, model: nn.Module) -> None:
    """Make a patch of one frame one of the model's number of frames.

    The kernel sees the frames' mean, and the final layer gives every frame of a patch the same: a still video becomes
    what the image became.
    """
    tensors, own = conversion.tensors, model.state_dict()
    if PATCHES not in tensors:
        return  # a strict load reports it
    kernel, num_frames = tensors[PATCHES], own[PATCHES].shape[2]
    if kernel.ndim == 5 and (kernel.shape[2] != 1 or num_frames == 1):
        return
    tensors[PATCHES] = grow_patches(kernel.reshape(*kernel.shape[:2], *kernel.shape[-2:]), num_frames)
    conversion.converted[PATCHES] = (
        "2-D patch kernel made 3-D" if num_frames == 1 else f"patch kernel of one frame spread over {num_frames}"
    )
    for name in FINAL if num_frames > 1 else ():
        if name in tensors:
            # the frame is the slowest axis of a token's output
            tensors[name] = tensors[name].repeat(num_frames, *[1] * (tensors[name].ndim - 1))
            conversion.converted[name] = f"output of one frame repeated for {num_frames}"


def fit_condition(conversion: Conversion, model: nn.Module) -> None:
    """Settle what happens to the file's class table or caption embedder in a model of another condition.

    Raises:
        UserError: the model takes classes, the file text.
    """
    tensors = conversion.tensors
    embedder = model.y_embedder
    if isinstance(embedder, LabelEmbedder):
        if TEXT in tensors:
            raise UserError(
                "the weights are those of a text model (they hold 'y_embedder.y_proj'), but the model takes classes: "
                "set condition='text'."
            )
        _fit_classes(conversion, embedder)
    elif embedder is None:
        why = "the model is unconditional"
        conversion.dropped |= {name: why for name in list(tensors) if name.startswith("y_embedder.")}
        conversion.tensors = {name: value for name, value in tensors.items() if not name.startswith("y_embedder.")}
    elif CLASSES in tensors:
        drop_classes(conversion, model, "the file has classes, the model takes text")


def drop_classes(conversion: Conversion, model: nn.Module, why: str) -> None:
    """Leave the file's class table out, and the model's condition embedder at its initial values."""
    if conversion.tensors.pop(CLASSES, None) is not None:
        conversion.dropped[CLASSES] = why
        conversion.initial |= {name: why for name in model.state_dict() if name.startswith("y_embedder.")}


def _fit_classes(conversion: Conversion, embedder: LabelEmbedder) -> None:
    """Classes of another number are other classes: not one row is kept."""
    if CLASSES not in conversion.tensors:
        return
    table, rows = conversion.tensors[CLASSES], embedder.embedding_table.num_embeddings
    if len(table) == rows:
        return
    if len(table) == embedder.num_classes + 1:
        conversion.tensors[CLASSES] = table[:-1]
        conversion.converted[CLASSES] = "the last row, 'no class', left out (class_dropout_prob=0)"
        return
    del conversion.tensors[CLASSES]
    why = f"the file's table has {len(table)} rows, the model's {rows}: other classes, learnt anew"
    conversion.dropped[CLASSES] = why
    conversion.initial[CLASSES] = why


def to_diffusers(model: "DiT", *, sample_size: int = 32) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A class-conditional DiT as diffusers' `DiTTransformer2DModel`.

    diffusers computes the timestep's sinusoid with frequencies 10000^(-k / 127) where DiT, and all its weights, have
    10000^(-k / 128): but for that (`time_proj.downscale_freq_shift` of its blocks, 1 where DiT's is 0) the outputs are
    equal.

    Args:
        model: patches of one frame, square; classes with a row for "no class"; mlp_ratio 4.
        sample_size: rows, and columns, of the latent; diffusers' positions are for one size.

    Returns:
        The constructor's arguments, and the state dict.

    Raises:
        UserError: the model has what that format cannot hold, all of which is named; or `sample_size` is no multiple of
            the patch.
    """
    if problems := _not_in_diffusers(model):
        raise UserError(f"diffusers' DiTTransformer2DModel cannot hold this model: {'; '.join(problems)}.")
    tokens_of(sample_size, model.patch_size[1])
    num_heads = cast(AdaLNZeroBlock, model.blocks[0]).attn.num_heads
    config = {
        "num_attention_heads": num_heads,
        "attention_head_dim": model.hidden_size // num_heads,
        "in_channels": model.in_channels,
        "out_channels": model.out_channels,
        "num_layers": len(model.blocks),
        "sample_size": sample_size,
        "patch_size": model.patch_size[1],
        "num_embeds_ada_norm": cast(LabelEmbedder, model.y_embedder).num_classes,
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
    }
    state = to_theirs(rules(len(model.blocks)), model.state_dict())
    # safetensors stores no tensor under two names
    return config, {name: value.clone() if DIFFUSERS_CONDITION in name else value for name, value in state.items()}


def rules(depth: int) -> list[Rule]:
    """Our names <-> diffusers', for a DiT of `depth` blocks."""

    def in_all_blocks(name: str) -> list[str]:
        return [f"transformer_blocks.{i}.norm1.emb.{name}" for i in range(depth)]

    result = [
        *layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
        *layer("t_embedder.mlp.0", *in_all_blocks("timestep_embedder.linear_1"), kind="copies"),
        *layer("t_embedder.mlp.2", *in_all_blocks("timestep_embedder.linear_2"), kind="copies"),
        tensor(CLASSES, *in_all_blocks("class_embedder.embedding_table.weight"), kind="copies"),
        *layer("final_layer.adaLN_modulation.1", "proj_out_1"),
        *layer("final_layer.linear", "proj_out_2"),
    ]
    for i in range(depth):
        ours, theirs = f"blocks.{i}", f"transformer_blocks.{i}"
        result += [
            *layer(f"{ours}.adaLN_modulation.1", f"{theirs}.norm1.linear"),
            *layer(f"{ours}.attn.qkv", *(f"{theirs}.attn1.to_{x}" for x in "qkv"), kind="stack"),
            *layer(f"{ours}.attn.proj", f"{theirs}.attn1.to_out.0"),
            *layer(f"{ours}.mlp.fc1", f"{theirs}.ff.net.0.proj"),
            *layer(f"{ours}.mlp.fc2", f"{theirs}.ff.net.2"),
        ]
    return result


def _depth(state: Mapping[str, Tensor]) -> int:
    numbers = [int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks.")]
    return max(numbers) + 1


def _not_in_diffusers(model: "DiT") -> list[str]:
    pt, ph, pw = model.patch_size
    fc1 = cast(AdaLNZeroBlock, model.blocks[0]).mlp.fc1
    classes = model.y_embedder if isinstance(model.y_embedder, LabelEmbedder) else None
    problems = {
        f"condition={model.condition!r} (it takes classes only)": classes is None,
        "class_dropout_prob=0 (its table has a row for 'no class')": classes is not None and not classes.with_null,
        f"patches of {pt} frames (it makes images)": pt != 1,
        f"patches of {ph}x{pw} (its are square)": ph != pw,
        "factorised attention (Latte)": model.axes != ("all",),
        "mlp_ratio other than 4": fc1.out_features != 4 * model.hidden_size,
    }
    return [problem for problem, true in problems.items() if true]
