"""A step cache from a config's `step_cache=dict(type=..., ...)`, with every mistake in it named."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from opensora.acceleration.step_cache.pab import KINDS, PAB, PRESETS, PABOptions, layers_of
from opensora.acceleration.step_cache.steps import StepCache
from opensora.acceleration.step_cache.teacache import TeaCache
from opensora.config.schema import coerce
from opensora.utils.errors import UserError

OPTIONS = {"pab": ("preset", "ranges", "thresholds", "mlp"), "teacache": ("threshold",)}
THRESHOLD = 0.1
Pair = tuple[float, float]


def build_step_cache(
    config: Mapping[str, Any] | None, model: nn.Module, groups: Sequence[dist.ProcessGroup] = ()
) -> StepCache | None:
    """The step cache that a config names, not yet installed; None when it names none.

    Args:
        config: `dict(type="pab", preset=..., ranges=(2, 4, 6), thresholds=(450, 930), mlp={676: ((0, 1), 2)})`, where all
            but the type may be left out: the preset is then that of the model's family. `thresholds` is one pair for all
            kinds of attention, or a pair for each; `mlp={}` skips no MLP. Or `dict(type="teacache", threshold=0.1)`.
        model: the denoiser.
        groups: process groups that share its samples.

    Raises:
        UserError: an unknown type or option, or a value out of range.
    """
    if config is None:
        return None
    options = dict(config)
    kind = options.pop("type", None)
    if kind not in OPTIONS:
        raise UserError(f"step_cache.type={kind!r} is not one of {', '.join(OPTIONS)}.")
    _check_blocks(kind, model)
    if unknown := [name for name in options if name not in OPTIONS[kind]]:
        raise UserError(f"step_cache has no {unknown[0]!r}; with type={kind!r} it has {', '.join(OPTIONS[kind])}.")
    if kind == "pab":
        return PAB(pab_options(options, model))
    threshold = _read(options, "threshold", float, THRESHOLD)
    if threshold < 0:
        raise UserError(f"step_cache.threshold={threshold!r}: expected a number from 0; 0 computes every step.")
    return TeaCache(threshold, groups)


def pab_options(options: Mapping[str, Any], model: nn.Module) -> PABOptions:
    """A preset, with what `options` says differently; see `build_step_cache`."""
    name = options.get("preset", preset_for(model))
    if name not in PRESETS:
        raise UserError(f"step_cache.preset={name!r} is not one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    ranges = _read(options, "ranges", tuple[int, int, int], preset.ranges)
    if min(ranges) < 1:
        raise UserError(f"step_cache.ranges={ranges!r}: expected numbers from 1, for {', '.join(KINDS)}.")
    thresholds = _read(options, "thresholds", Pair | tuple[Pair, Pair, Pair], preset.thresholds)
    if not isinstance(thresholds[0], tuple):
        thresholds = (thresholds,) * 3
    mlp = _read(options, "mlp", dict[int, tuple[list[int], int]], preset.mlp)
    if "mlp" in options:  # a preset may name more blocks than a small model has
        blocks = {number for kind, number, _ in layers_of(model.transformer_blocks()) if kind.startswith("mlp")}  # type: ignore[operator]
        for timestep, (numbers, _) in mlp.items():
            if other := sorted(set(numbers) - blocks):
                raise UserError(
                    f"step_cache.mlp: timestep {timestep} names block {other[0]}, and the blocks of a {type(model).__name__} are 0 to "
                    f"{max(blocks)}."
                )
    return PABOptions(ranges, thresholds, mlp)


def preset_for(model: nn.Module) -> str:
    """The preset of a model's family, by the name of its class."""
    name = type(model).__name__
    if name.startswith("Latte"):
        return "latte"
    return "opensora" if name.startswith("STDiT") else "cogvideox"


def _read(options: Mapping[str, Any], name: str, annotation: Any, default: Any) -> Any:
    """An option as its type."""
    try:
        return coerce(options[name], annotation) if name in options else default
    except TypeError as error:
        raise UserError(f"step_cache.{name}={options[name]!r}: {error}; see docs/inference.md.") from error


def _check_blocks(kind: str, model: nn.Module) -> None:
    """Blocks must have the parts, by the names, that the blocks of this package have."""
    for block in model.transformer_blocks():  # type: ignore[operator]
        if kind == "pab":
            fits, parts = (
                hasattr(getattr(block, "attn", None), "axis"),
                "`attn`, a self-attention of opensora.models.layers",
            )
        else:
            modulated = hasattr(block, "scale_shift_table") or hasattr(block, "adaLN_modulation")
            fits = modulated and hasattr(block, "norm1")
            parts = "`norm1` and `scale_shift_table` or `adaLN_modulation`"
        if not fits:
            raise UserError(
                f"step_cache.type={kind!r}: the blocks of a {type(model).__name__} have no {parts}. Leave the step cache out."
            )
