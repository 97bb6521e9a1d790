"""What a model computes with that no tensor's shape shows, and what a file says of it.

The number of heads, the range of positions and the like change no name and no shape, so weights load into a model that
differs in them and computes something else. Files that tell them: checkpoints of ours (manifest), files of `tools.convert`
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
from opensora.models.denoiser import Denoiser
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
NOT_COMPUTED_WITH = {
    "from_pretrained",
    "input_size",
    "enable_flash_attn",
    "enable_flashattn",
    "enable_layernorm_kernel",
}
# what a constructor raises for the arguments of another version of it
OF_ANOTHER_VERSION = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Written(NamedTuple):
    """What a file says of the model that it is of.

    Args:
        where: what says it, such as "header".
        families: names of the model's classes, without those that all denoisers share.
        values: argument of our constructors -> value.
        words: argument -> how the file puts it, where it is otherwise.
    """

    where: str
    families: frozenset[str]
    values: Mapping[str, Any]
    words: Mapping[str, str]


def written_settings(path: str | Path, file: Path | None) -> Written | None:
    """What the source of weights says of its model; None = nothing.

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
    beside = file.parent / "config.json"
    return _of_config(_parse(beside.read_text(encoding="utf-8", errors="replace"))) if beside.is_file() else None


def refuse_other_heads(written: Written, model: nn.Module, path: str | Path) -> None:
    """See that the model has as many heads as the file's.

    Raises:
        UserError: it has not.
    """
    theirs, own = written.values.get(HEADS), settings_of(model).get(HEADS)
    if None in (theirs, own) or theirs == own:
        return
    raise UserError(
        f"{path}: its {written.where} says {written.words.get(HEADS, f'{HEADS}={theirs}')}, the model has {HEADS}={own}. "
        f"No tensor's shape shows that, but attention would compute something else: set model.{HEADS}={theirs}."
    )


def other_settings(written: Written, model: nn.Module, path: str | Path) -> str:
    """What else makes the model compute something else than the file's, with what to set; empty = nothing."""
    theirs, own = written.values, settings_of(model)
    related = not written.families.isdisjoint(families_of(model))
    names = _differing_range(theirs, own, related)
    if related:
        names += [name for name in SETTINGS if name in theirs and name in own and not _same(theirs[name], own[name])]
    if not names:
        return ""
    said = {name: f" ({words})" for name, words in written.words.items()}
    lines = [
        f"  {name}: the file's {_text(theirs[name])}{said.get(name, '')}, the model's {_text(own[name])}"
        for name in names
    ]
    to_set = ", ".join(f"model.{name}={_text(theirs[name])}" for name in names)
    return "\n".join(
        [
            f"{path}: by its {written.where} the file's model computes with other settings, which no tensor shows.",
            *lines,
            f"To compute what it did, set {to_set}. To train on at another size or length they may differ.",
        ]
    )


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Those that the model has, by their argument's name."""
    found = {name: getattr(model, name) for name in (*RANGE, *SETTINGS) if hasattr(model, name)}
    of_layers: dict[str, set[Any]] = {
        HEADS: {layer.num_heads for layer in model.modules() if isinstance(getattr(layer, HEADS, None), int)},
        # only along time are there rotary positions, and an order to choose
        "norm_order": {
            layer.norm_order for layer in model.modules() if isinstance(layer, Attention) and layer.axis == "time"
        },
    }
    return found | {name: next(iter(values)) for name, values in of_layers.items() if len(values) == 1}


def families_of(model: nn.Module) -> frozenset[str]:
    """The names of its classes, without those that all denoisers share."""
    return frozenset(cls.__name__ for cls in type(model).__mro__ if cls not in Denoiser.__mro__)


def tokens_of(sample_size: int, patch: int) -> int:
    """Tokens along the side of the latent that a model of diffusers is for, which divides without a remainder.

    Raises:
        UserError: there is one.
    """
    if sample_size < patch or sample_size % patch:
        raise UserError(f"sample_size={sample_size} must be a multiple of the patch, {patch}.")
    return sample_size // patch


def _of_component(where: str, component: Any) -> Written | None:
    """A config's model: that model is built without memory for its numbers, so that its constructor settles what it means.

    One that cannot be built here, such as one of the user's own, still tells its heads.
    """
    if not isinstance(component, Mapping):
        return None
    if _takes_heads(component.get("type")):
        try:
            with torch.device("meta"):
                model = MODELS.build({key: value for key, value in component.items() if key not in NOT_COMPUTED_WITH})
        except OF_ANOTHER_VERSION:
            pass
        else:
            return Written(where, families_of(model), settings_of(model), {})
    elif component.get("type") in MODELS.choices():
        return None
    return _heads_alone(where, component, HEADS)


def _takes_heads(name: Any) -> bool:
    """Whether a registered part has heads to choose, which no text encoder and no VAE has."""
    return name in MODELS.choices() and HEADS in inspect.signature(MODELS.get(name)).parameters


def _of_config(config: Any) -> Written | None:
    """A `config.json`, if it is that of a denoiser."""
    if not isinstance(config, Mapping):
        return None
    if str(config.get("_class_name")) in OF_DIFFUSERS:
        return _of_diffusers(config)
    # Open-Sora's on the hub. What they leave out is not what our constructors take for it
    return _heads_alone("config.json", config, HEADS) if _takes_heads(config.get("model_type")) else None


def _of_diffusers(config: Mapping[str, Any]) -> Written | None:
    family, always = OF_DIFFUSERS[config["_class_name"]]
    written = _heads_alone("config.json", config, "num_attention_heads")
    values, words = (dict(written.values), dict(written.words)) if written else ({}, {})
    side, patch, scale = (config.get(name) for name in ("sample_size", "patch_size", "interpolation_scale"))
    if family != "DiT" and _is_count(side) and _is_count(patch):
        words |= dict.fromkeys(RANGE, f"sample_size={side}, interpolation_scale={scale}")
        values |= {"base_size": side // patch, "space_scale": scale if _is_scale(scale) else max(side // 64, 1)}
    return Written("config.json", frozenset({family}), values | always, words)


def _heads_alone(where: str, config: Mapping[str, Any], key: str) -> Written | None:
    heads = config.get(key)
    return Written(where, frozenset(), {HEADS: heads}, {HEADS: f"{key}={heads}"}) if _is_count(heads) else None


def _differing_range(theirs: Mapping[str, Any], own: Mapping[str, Any], related: bool) -> list[str]:  # noqa: FBT001
    """Of RANGE, what makes positions differ. Two ranges compare whatever the architectures, else only related ones do."""
    shared = [name for name in RANGE if name in theirs and name in own]
    if len(shared) == len(RANGE):
        if None not in (theirs["base_size"], own["base_size"]):
            one, other = (values["base_size"] / values["space_scale"] for values in (theirs, own))
            return [] if _same(one, other) else shared
        shared.remove("base_size")  # positions that count, and a range that is the same for squares of one size
    return [name for name in shared if related and not _same(theirs[name], own[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-6)
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # JSON has no tuples


def _text(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else repr(value)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_scale(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and value > 0


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
