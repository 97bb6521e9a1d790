"""Wan's weights in diffusers', its authors' and ComfyUI's names, and where those of the two experts of 2.2's A14B are."""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from opensora.checkpoint.load import read_weights
from opensora.checkpoint.save import MANIFEST
from opensora.checkpoint.weight_files import find_weights
from opensora.models.loading import RELEASED, Conversion, stated_component
from opensora.registry import MODELS
from opensora.utils.errors import UserError

FOLDERS = {"high": "transformer", "low": "transformer_2"}
"""Of a pipeline of diffusers, by expert."""
PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # of ComfyUI's files; what has none there is no denoiser's
SCALES = (".scale_weight", ".weight_scale", ".comfy_quant", "scaled_fp8")  # of ComfyUI's fp8 files
OTHER_EXPERT = "the other expert's"
IMAGE = "condition_embedder.image_embedder."
ORIGINAL = {
    IMAGE + "norm1.": "img_emb.proj.0.",
    IMAGE + "ff.net.0.proj.": "img_emb.proj.1.",
    IMAGE + "ff.net.2.": "img_emb.proj.3.",
    IMAGE + "norm2.": "img_emb.proj.4.",
    IMAGE + "pos_embed": "img_emb.emb_pos",
    "condition_embedder.time_embedder.linear_1.": "time_embedding.0.",
    "condition_embedder.time_embedder.linear_2.": "time_embedding.2.",
    "condition_embedder.time_proj.": "time_projection.1.",
    "condition_embedder.text_embedder.linear_1.": "text_embedding.0.",
    "condition_embedder.text_embedder.linear_2.": "text_embedding.2.",
    ".attn1.": ".self_attn.",
    ".attn2.": ".cross_attn.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    ".to_out.0.": ".o.",
    ".add_k_proj.": ".k_img.",
    ".add_v_proj.": ".v_img.",
    ".norm_added_k.": ".norm_k_img.",
    ".ffn.net.0.proj.": ".ffn.0.",
    ".ffn.net.2.": ".ffn.2.",
    ".norm2.": ".norm3.",  # the one before cross-attention, and the only one with weights
    ".scale_shift_table": ".modulation",  # a block's
    "scale_shift_table": "head.modulation",
    "proj_out.": "head.head.",
}
"""Part of a name in diffusers -> its authors' and ComfyUI's, to be replaced in this order."""


def original_name(name: str) -> str:
    """A tensor's name in diffusers -> in its authors' files and ComfyUI's, without a prefix."""
    for theirs, original in ORIGINAL.items():
        name = name.replace(theirs, original)
    return name


def load_wan(model: Any, source: str | None, source_2: str | None = None, **options: Any) -> None:
    """Load a `Wan`; of a model with both experts, `source_2` has the low-noise one where `source` has not.

    `options` are those of `DiffusersDenoiser.load`.

    Raises:
        UserError: see `expert_weights` and `opensora.models.loading.load_weights`.
    """
    if source_2 is not None and (source is None or model.net_2 is None):
        raise UserError(
            "model.from_pretrained_2 is the low-noise one of two experts: it goes with from_pretrained and expert='both'."
        )
    two = (name for kind, names in RELEASED.items() if kind.endswith("-A14B") for name in names)
    if (
        source is not None
        and model.boundary is None
        and (source in two or (Path(source).expanduser() / FOLDERS["low"]).is_dir())
    ):
        raise UserError(
            f"{source} has two experts, and this model is one network: set model.type to one of Wan 2.2's A14B, or name the folder of "
            "one of them, transformer or transformer_2."
        )
    second = None
    if source is not None and model.boundary is not None:
        first = expert_weights(source, "low" if model.expert == "low" else "high")
        second = expert_weights(source_2 or source, "low") if model.expert == "both" else None
        source = first
    model.load(source, partial(convert, second=second), **options)


def expert_weights(source: str, expert: Literal["high", "low"]) -> str:
    """What of `source`, anything that `from_pretrained` takes, has the weights of one of two experts.

    Raises:
        UserError: there is nothing, or it states that it is the other expert's.
    """
    stated = None
    if not (Path(source).expanduser() / MANIFEST).is_file():
        file = find_weights(source, FOLDERS[expert])
        source, folder = str(file), file.parent
        if (folder.parent / FOLDERS["low"]).is_dir():
            stated = next((name for name, part in FOLDERS.items() if part == folder.name), None)
    stated = stated or stated_component(source).get("expert")
    if stated not in (None, "both", expert):
        raise UserError(
            f"{source} has the weights of the {stated}-noise expert, where those of the {expert}-noise one are wanted: see "
            "model.expert; for 'both' set from_pretrained to the high-noise one's and from_pretrained_2 to the low-noise one's."
        )
    return source


def convert(state: Mapping[str, Tensor], model: Any, second: str | None = None) -> Conversion:
    """Weights in diffusers', the authors' or ComfyUI's names, or our own -> a `Wan`'s.

    Args:
        second: what has the weights of the low-noise expert, of a model with both.

    Raises:
        UserError: they are not Wan's, of another size, quantised, or of one expert where both are wanted.
    """
    done = _of_one_network(state, model, "low" if model.expert == "low" else "high")
    if model.net_2 is None:
        return done
    same = second == model.from_pretrained
    if second is None or (same and not any(name.startswith("net_2.") for name in state)):
        raise UserError(
            f"{model.from_pretrained} has one network, and model.expert='both' needs two: set model.from_pretrained to the weights "
            "of the high-noise expert and model.from_pretrained_2 to those of the low-noise one."
        )
    low = _of_one_network(state if same else read_weights(second), model, "low")
    done.tensors |= {name.replace("net.", "net_2.", 1): tensor for name, tensor in low.tensors.items()}
    done.dropped = {name: why for name, why in (done.dropped | low.dropped).items() if why != OTHER_EXPERT}
    return done


def _of_one_network(state: Mapping[str, Tensor], model: Any, expert: str) -> Conversion:
    """The weights of one network, under the names of `Wan.net`."""
    if scales := [name for name in state if name.endswith(SCALES)]:
        raise UserError(
            f"{model.from_pretrained}: weights in fp8 with scales (such as {scales[0]}), which only ComfyUI reads: take the file in "
            "bf16 or fp16."
        )
    done = Conversion(dict(state), "Wan")
    if any(name.startswith("net.") for name in state):
        if any(name.startswith("net_2.") for name in state):
            done.drop(OTHER_EXPERT, "net." if expert == "low" else "net_2.")
        done.tensors = {name.replace("net_2.", "net."): tensor for name, tensor in done.tensors.items()}
    else:
        if prefix := next((prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in state)), ""):
            done.dropped = {name: "not the denoiser's" for name in state if not name.startswith(prefix)}
        tensors = {name.removeprefix(prefix): state[name] for name in state if name not in done.dropped}
        done.format = "Wan, diffusers"
        if any(".self_attn." in name for name in tensors):
            from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

            done.format = "Wan, its authors' or ComfyUI's"
            position = ORIGINAL[IMAGE + "pos_embed"]  # which diffusers leaves as it is
            tensors = convert_wan_transformer_to_diffusers(tensors)
            tensors = {IMAGE + "pos_embed" if name == position else name: value for name, value in tensors.items()}
        if not any(".attn1." in name for name in tensors):
            raise UserError(
                f"{model.from_pretrained} has no weights of Wan: they begin with {', '.join(sorted(state)[:3])}."
            )
        done.tensors = {f"net.{name}": tensor for name, tensor in tensors.items()}
    _refuse_other_sizes(done.tensors, model)
    return done


def _refuse_other_sizes(tensors: Mapping[str, Tensor], model: Any) -> None:
    found, own = sizes(tensors), sizes(model.state_dict())
    differing = {key: value for key, value in found.items() if value != own[key]}
    if not differing:
        return
    fitting = []
    for name in MODELS.choices():
        constructor = MODELS.get(name)
        if inspect.unwrap(constructor) is type(model) and constructor is not type(model):
            defaults = inspect.signature(constructor).parameters
            fitting += [name] if all(defaults[key].default == value for key, value in found.items()) else []
    advice = (
        f"These are the sizes of {' or '.join(fitting)}: set model.type={fitting[0]!r} and no sizes." if fitting else ""
    )
    raise UserError(
        f"{model.from_pretrained} does not fit this {type(model).__name__}: "
        + ", ".join(f"{key} is {value}, not {own[key]}" for key, value in differing.items())
        + f". {advice or 'No registered Wan has these sizes: set those, and model.num_heads.'}"
    )


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of `Wan` that the shapes of `Wan.net`'s tensors show; {} where one that shows them is missing."""
    shapes = {name.removeprefix("net."): tensor.shape for name, tensor in tensors.items() if name.startswith("net.")}
    try:
        hidden_size, all_channels = shapes["patch_embedding.weight"][:2]  # [D, C, 1, 2, 2]
        in_channels = shapes["proj_out.bias"][0] // 4  # of 2 x 2 cells
        return {
            "in_channels": in_channels,
            "condition_channels": all_channels - in_channels,
            "hidden_size": hidden_size,
            "depth": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
            "ffn_dim": shapes["blocks.0.ffn.net.0.proj.bias"][0],
            "caption_channels": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
            "image_dim": shapes.get(IMAGE + "norm1.weight", (None,))[0],
            "pos_embed_seq_len": shapes.get(IMAGE + "pos_embed", (None, None))[1],
        }
    except (KeyError, ValueError, IndexError):
        return {}
