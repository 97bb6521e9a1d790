"""A step cache from a config's `step_cache=dict(type=..., ...)`, with every mistake in it named."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from opensora.acceleration.step_cache.pab import KINDS, PAB, PRESETS, PABOptions, Skips, layers_of
from opensora.acceleration.step_cache.steps import StepCache
from opensora.acceleration.step_cache.teacache import TeaCache
from opensora.utils.errors import UserError

OPTIONS = {"pab": ("preset", "ranges", "thresholds", "mlp"), "teacache": ("threshold",)}
THRESHOLD = 0.1


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
    _refuse_without_hooks(kind, model)
    if unknown := [name for name in options if name not in OPTIONS[kind]]:
        raise UserError(f"step_cache has no {unknown[0]!r}; with type={kind!r} it has {', '.join(OPTIONS[kind])}.")
    if kind == "teacache":
        return TeaCache(_threshold(options.get("threshold", THRESHOLD)), groups)
    return PAB(pab_options(options, model))


def pab_options(options: Mapping[str, Any], model: nn.Module) -> PABOptions:
    """A preset, with what `options` says differently; see `build_step_cache`."""
    name = options.get("preset", preset_for(model))
    if name not in PRESETS:
        raise UserError(f"step_cache.preset={name!r} is not one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    ranges = options.get("ranges", preset.ranges)
    if not _numbers(ranges, 3) or min(ranges) < 1 or any(n != int(n) for n in ranges):
        raise UserError(f"step_cache.ranges={ranges!r}: expected three whole numbers from 1, for {', '.join(KINDS)}.")
    if "mlp" in options:
        _refuse_other_blocks(_skips(options["mlp"]), model)
    return PABOptions(
        (int(ranges[0]), int(ranges[1]), int(ranges[2])),
        _pairs(options.get("thresholds", preset.thresholds)),
        _skips(options.get("mlp", preset.mlp)),
    )


def preset_for(model: nn.Module) -> str:
    """The preset of a model's family, by the name of its class."""
    name = type(model).__name__
    if name.startswith("Latte"):
        return "latte"
    return "opensora" if name.startswith("STDiT") else "cogvideox"


def _threshold(value: Any) -> float:
    if not isinstance(value, int | float) or value < 0:
        raise UserError(f"step_cache.threshold={value!r}: expected a number from 0; 0 computes every step.")
    return float(value)


def _pairs(value: Any) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    pairs = [value] * 3 if _numbers(value, 2) else value
    if not isinstance(pairs, list | tuple) or len(pairs) != 3 or not all(_numbers(pair, 2) for pair in pairs):
        raise UserError(
            f"step_cache.thresholds={value!r}: expected (low, high), timesteps from 0 to 1000, or three such pairs for "
            f"{', '.join(KINDS)}."
        )
    first, second, third = ((float(low), float(high)) for low, high in pairs)
    return first, second, third


def _skips(value: Any) -> Skips:
    try:
        return {int(t): (tuple(int(n) for n in blocks), int(skip)) for t, (blocks, skip) in dict(value).items()}
    except (TypeError, ValueError):
        raise UserError(
            f"step_cache.mlp={value!r}: expected {{timestep: (numbers of blocks, steps to skip), ...}}, such as "
            "{676: ((0, 1, 2), 2)}."
        ) from None


def _refuse_without_hooks(kind: str, model: nn.Module) -> None:
    """Blocks must have the parts, by the names, that the blocks of this package have."""
    for block in model.transformer_blocks():  # type: ignore[operator]
        if kind == "pab":
            missing = (
                None
                if hasattr(getattr(block, "attn", None), "axis")
                else "`attn`, a self-attention of opensora.models.layers"
            )
        else:
            modulated = hasattr(block, "scale_shift_table") or hasattr(block, "adaLN_modulation")
            missing = (
                None
                if modulated and hasattr(block, "norm1")
                else "`norm1` and `scale_shift_table` or `adaLN_modulation`"
            )
        if missing:
            raise UserError(
                f"step_cache.type={kind!r}: the blocks of a {type(model).__name__} have no {missing}. Leave the step cache out."
            )


def _refuse_other_blocks(skips: Skips, model: nn.Module) -> None:
    """A preset may name more blocks than a small model has; what is written for one may not."""
    blocks = {number for kind, number, _ in layers_of(model.transformer_blocks()) if kind.startswith("mlp")}  # type: ignore[operator]
    for timestep, (numbers, _) in skips.items():
        if other := sorted(set(numbers) - blocks):
            raise UserError(
                f"step_cache.mlp: timestep {timestep} names block {other[0]}, and the blocks of a {type(model).__name__} are 0 to {max(blocks)}."
            )


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and all(isinstance(n, int | float) for n in value)
