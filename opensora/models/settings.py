"""What a model computes with that no tensor's shape shows, and what a file states about it.

The number of heads, the range of positions and the like change no name and no shape, so weights load into a model that
differs in them and computes something else. Files that state them: checkpoints of ours (manifest), files of `tools.convert`
and `tools.export_weights` (header), and folders of diffusers, and of Open-Sora on the hub (`config.json`).
"""

import inspect
import json
from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from safetensors import safe_open
from torch import nn

from opensora.checkpoint.load import open_checkpoint
from opensora.checkpoint.weight_files import kind_of
from opensora.models.layers.attention import Attention
from opensora.registry import MODELS
from opensora.utils.errors import UserError

HEADS = "num_heads"
RANGE = ("base_size", "space_scale")  # positions go from 0 to base_size / space_scale, where there is a base_size
SETTINGS = ("time_scale", "input_sq_size", "positions", "no_temporal_pos_emb", "norm_order", "kv_compress", "mode")
OF_DIFFUSERS: dict[str, tuple[str, dict[str, Any]]] = {  # class -> ours, and what it always computes with
    "PixArtTransformer2DModel": ("PixArt", {"no_temporal_pos_emb": True}),
    "LatteTransformer3DModel": ("LatteT2V", {"no_temporal_pos_emb": False, "time_scale": 1.0}),
    "DiTTransformer2DModel": ("DiT", {}),
}
WITHOUT_EFFECT = {
    "from_pretrained",
    "input_size",
    "enable_flash_attn",
    "enable_flashattn",
    "enable_layernorm_kernel",
}
# what a constructor raises for the arguments of another version of it
OF_ANOTHER_VERSION = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Written(NamedTuple):
    """What a file states about its model.

    Args:
        where: what states it, such as "header".
        families: names of the model's registered classes.
        values: argument of our constructors -> value.
    """

    where: str
    families: frozenset[str]
    values: Mapping[str, Any]


def written_settings(path: str | Path, file: Path | None) -> Written | None:
    """What the source of weights states about its model; None = nothing.

    Args:
        path: what was loaded.
        file: the file, or the index of shards, that holds it; None = a checkpoint of ours.
    """
    if file is None:
        config = open_checkpoint(Path(path).expanduser()).manifest.get("config")
        return _of_component("manifest", config.get("model") if isinstance(config, Mapping) else None)
    if kind_of(file) == "safetensors":
        with safe_open(file, "pt") as opened:
            header = (opened.metadata() or {}).get("config", "")
        if written := _of_component("header", _parse(header)):
            return written
    near = file.parent / "config.json"
    return _of_config(_parse(near.read_text(encoding="utf-8", errors="replace"))) if near.is_file() else None


def compare_settings(written: Written, model: nn.Module, path: str | Path) -> str:
    """A warning where the model computes something else than the file's, with what to set; empty = it does not.

    Raises:
        UserError: it has another number of heads.
    """
    theirs, own = written.values, settings_of(model)
    if HEADS in theirs and HEADS in own and theirs[HEADS] != own[HEADS]:
        raise UserError(
            f"{path}: its {written.where} says {theirs[HEADS]} attention heads, the model has {HEADS}={own[HEADS]}. No "
            f"tensor's shape shows that, but attention would compute something else: set model.{HEADS}={theirs[HEADS]}."
        )
    shared = [name for name in (*RANGE, *SETTINGS) if name in theirs and name in own]
    differing = [name for name in shared if not _same(theirs[name], own[name])]
    related = not written.families.isdisjoint(families_of(model))
    if not related:
        differing = []
    if set(RANGE) <= set(shared):  # two ranges compare whatever the architectures
        if None not in (theirs["base_size"], own["base_size"]):
            one, other = (values["base_size"] / values["space_scale"] for values in (theirs, own))
            differing = [*(() if _same(one, other) else RANGE), *(name for name in differing if name not in RANGE)]
        else:  # positions that count, and a range that is the same for squares of one size
            differing = [name for name in differing if name != "base_size"]
    if not differing:
        return ""
    lines = [f"  {name}: the file's {_text(theirs[name])}, the model's {_text(own[name])}" for name in differing]
    to_set = ", ".join(f"model.{name}={_text(theirs[name])}" for name in differing)
    return "\n".join(
        [
            f"{path}: according to its {written.where} the file's model has other settings, which no tensor shows.",
            *lines,
            f"To compute what it did, set {to_set}. To train on at another size or length they may differ.",
        ]
    )


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Those that the model has, by their argument's name."""
    found = {name: getattr(model, name) for name in (*RANGE, *SETTINGS) if hasattr(model, name)}
    layers = list(model.modules())
    heads = {layer.num_heads for layer in layers if isinstance(getattr(layer, HEADS, None), int)}
    # only along time are there rotary positions, and an order to choose
    orders = {layer.norm_order for layer in layers if isinstance(layer, Attention) and layer.axis == "time"}
    return found | {name: next(iter(v)) for name, v in ((HEADS, heads), ("norm_order", orders)) if len(v) == 1}


def families_of(model: nn.Module) -> frozenset[str]:
    """The names of those of its classes that are registered, so without the bases that denoisers share."""
    return frozenset(cls.__name__ for cls in type(model).__mro__ if cls in MODELS.module_dict.values())


def _of_component(where: str, component: Any) -> Written | None:
    """A config's model: it is built on the meta device, so that its constructor settles what the arguments mean.

    One that cannot be built here, such as one of the user's own, still states its heads.
    """
    if not isinstance(component, Mapping):
        return None
    if (name := component.get("type")) in MODELS.choices():
        if not _takes_heads(name):
            return None
        try:
            with torch.device("meta"):
                model = MODELS.build({key: value for key, value in component.items() if key not in WITHOUT_EFFECT})
        except OF_ANOTHER_VERSION:
            pass
        else:
            return Written(where, families_of(model), settings_of(model))
    heads = _heads(component, HEADS)
    return Written(where, frozenset(), heads) if heads else None


def _of_config(config: Any) -> Written | None:
    """A `config.json`, if it is that of a denoiser: of diffusers, or of Open-Sora on the hub."""
    if not isinstance(config, Mapping):
        return None
    if (name := str(config.get("_class_name"))) not in OF_DIFFUSERS:
        # what Open-Sora's leave out is not what our constructors take for it
        known = config.get("model_type") in MODELS.choices() and _takes_heads(config["model_type"])
        heads = _heads(config, HEADS) if known else {}
        return Written("config.json", frozenset(), heads) if heads else None
    family, always = OF_DIFFUSERS[name]
    values = _heads(config, "num_attention_heads") | always
    side, patch, scale = (config.get(key) for key in ("sample_size", "patch_size", "interpolation_scale"))
    if family != "DiT" and _is_count(side) and _is_count(patch):
        is_scale = isinstance(scale, int | float) and scale > 0
        values |= {"base_size": side // patch, "space_scale": scale if is_scale else max(side // 64, 1)}
    return Written("config.json", frozenset({family}), values)


def _takes_heads(name: str) -> bool:
    """Whether a registered model has heads to choose, which no text encoder and no VAE has."""
    return HEADS in inspect.signature(MODELS.get(name)).parameters


def _heads(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {HEADS: config[key]} if _is_count(config.get(key)) else {}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-6)
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))  # JSON has no tuples
    return bool(one == other)


def _text(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else repr(value)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
