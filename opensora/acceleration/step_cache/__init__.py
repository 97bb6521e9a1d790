"""Reuse between sampling steps: neighbouring steps compute nearly the same, so some of it is kept instead of recomputed.

    cache = build_step_cache({"type": "pab"}, model)
    cache.install(model.transformer_blocks())
    with cache.sampling(timesteps):
        for index in range(len(timesteps)):
            cache.step(index)       # then the step's calls of the model

`pab` keeps the outputs of attention and MLP layers, `teacache` skips all blocks of a step. Both are put around a model's
blocks from outside, change its results slightly, and do nothing outside `sampling`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from opensora.acceleration.step_cache.pab import KINDS, PAB, PRESETS, PABOptions, layers_of
from opensora.acceleration.step_cache.steps import StepCache
from opensora.acceleration.step_cache.teacache import TeaCache
from opensora.config.schema import coerce
from opensora.utils.errors import UserError

__all__ = ["StepCache", "build_step_cache"]

Pair = tuple[float, float]
OPTIONS: dict[str, dict[str, Any]] = {
    "pab": {
        "preset": str,
        "ranges": tuple[int, int, int],
        "thresholds": Pair | tuple[Pair, Pair, Pair],
        "mlp": dict[int, tuple[list[int], int]],
    },
    "teacache": {"threshold": float},
}
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
        UserError: an unknown type or option, a value out of range, or blocks without the layers that it caches.
    """
    if config is None:
        return None
    kind = config.get("type")
    if kind not in OPTIONS:
        raise UserError(f"step_cache.type={kind!r} is not one of {', '.join(OPTIONS)}.")
    for block in model.transformer_blocks():  # type: ignore[operator]
        modulated = hasattr(block, "scale_shift_table") or hasattr(block, "adaLN_modulation")
        if kind == "pab" and not hasattr(getattr(block, "attn", getattr(block, "attn1", None)), "axis"):
            missing = "`attn`, a self-attention of opensora.models.layers"
        elif kind == "teacache" and not (modulated and hasattr(block, "norm1")):
            missing = "`norm1` and `scale_shift_table` or `adaLN_modulation`"
        else:
            continue
        raise UserError(
            f"step_cache.type={kind!r}: the blocks of a {type(model).__name__} have no {missing}. Leave the step cache out."
        )
    if kind == "teacache" and getattr(model, "net_2", None) is not None:  # it skips from the first to the last block
        raise UserError(
            "step_cache.type='teacache' is for one network, and this model has two experts; 'pab' works on both."
        )
    options = {name: value for name, value in config.items() if name != "type"}
    for name, value in options.items():
        if name not in OPTIONS[kind]:
            raise UserError(f"step_cache has no {name!r}; with type={kind!r} it has {', '.join(OPTIONS[kind])}.")
        try:
            options[name] = coerce(value, OPTIONS[kind][name])
        except TypeError as error:
            raise UserError(f"step_cache.{name}={value!r}: {error}; see docs/how-to/fast-sampling.md.") from error
    if kind == "pab":
        return PAB(_pab_options(options, model))
    threshold = options.get("threshold", THRESHOLD)
    if threshold < 0:
        raise UserError(f"step_cache.threshold={threshold!r}: expected a number from 0; 0 computes every step.")
    return TeaCache(threshold, groups)


def _pab_options(options: Mapping[str, Any], model: Any) -> PABOptions:
    """The preset of the model's family, or the one named, with the `options` that differ."""
    family = type(model).__name__
    own = "latte" if family.startswith("Latte") else "opensora" if family.startswith("STDiT") else "cogvideox"
    name = options.get("preset", own)
    if name not in PRESETS:
        raise UserError(f"step_cache.preset={name!r} is not one of {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    ranges = options.get("ranges", preset.ranges)
    if min(ranges) < 1:
        raise UserError(f"step_cache.ranges={ranges!r}: expected numbers from 1, for {', '.join(KINDS)}.")
    thresholds = options.get("thresholds", preset.thresholds)
    if not isinstance(thresholds[0], tuple):
        thresholds = (thresholds,) * 3
    if "mlp" in options:  # a preset may name more blocks than a small model has
        blocks = {number for kind, number, _ in layers_of(model.transformer_blocks()) if kind.startswith("mlp")}
        for timestep, (numbers, _) in options["mlp"].items():
            if other := sorted(set(numbers) - blocks):
                raise UserError(
                    f"step_cache.mlp: timestep {timestep} names block {other[0]}, and the blocks of a {family} are 0 to {max(blocks)}."
                )
    return PABOptions(ranges, thresholds, options.get("mlp", preset.mlp))
