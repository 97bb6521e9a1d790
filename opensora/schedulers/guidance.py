"""Classifier-free guidance (Ho & Salimans 2022) as a wrapper of the denoiser, so that no sampler knows about it.

With limits to an interval of noise levels (Kynkaanniemi et al. 2024), scales that change while sampling, and the
rescaling of Lin et al. 2024 (section 3.4).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.schedulers.frame_mask import expand_frames
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)
Denoiser = Callable[..., Tensor]  # model(x, timestep, **cond) -> [B, C or 2C, T, H, W]
Condition = Mapping[str, Tensor | None]
ConditionCache = dict[str, tuple[Tensor, Tensor, Tensor]]  # an entry with the condition, without, and both in one batch

SCHEDULES = ("constant", "linear", "power-cosine", "oscillating")
BATCHING = ("joint", "split")


class Guidance(NamedTuple):
    """How strongly, where and when samples are guided. Made by `guidance_from_config`, which checks it.

    Attributes:
        scale: 1 is the conditional model, 0 the unconditional one, above 1 guided.
        channels: how many of the C prediction channels are guided; None: all.
        schedule: "constant"; "linear": from 1 at the noisy end to `scale` at the clean end; "power-cosine" (MDT, Gao et
            al. 2023): the same, by (1 - cos(pi (1 - t)^power)) / 2; "oscillating" (Open-Sora 1.3): from step
            `oscillation_start` on, every odd step has scale 1.
        interval: the noise levels, as parts of the training time, at which there is guidance at all.
        rescale: 0 leaves the guided prediction, 1 gives it the standard deviation of the conditional one.
        batching: "joint" runs both predictions as one batch; "split" runs two, in less memory, with the same result.
    """

    scale: float = 4.0
    channels: int | None = None
    schedule: str = "constant"
    power: float = 4.0
    oscillation_start: int = 10
    interval: tuple[float, float] = (0.0, 1.0)
    rescale: float = 0.0
    batching: str = "joint"

    def scale_at(self, index: int, level: float) -> float:
        """The scale of step `index`, before which the noise level is `level` in (0, 1]; 1 outside the interval."""
        low, high = self.interval
        if not low <= level <= high:
            return 1.0
        if self.schedule == "oscillating":
            return 1.0 if index >= self.oscillation_start and index % 2 else self.scale
        ramp = 1.0
        if self.schedule == "linear":
            ramp = 1 - level
        elif self.schedule == "power-cosine":
            ramp = (1 - math.cos(math.pi * (1 - level) ** self.power)) / 2
        return 1 + (self.scale - 1) * ramp if ramp != 1 else self.scale

    def refuse_idle(self, levels: Sequence[float]) -> None:
        """Raise a UserError if there is a scale, and none of the steps at these noise levels is guided."""
        if self.scale == 1 or any(self.scale_at(index, level) != 1 for index, level in enumerate(levels)):
            return
        shown = ", ".join(f"{level:.3g}" for level in levels)
        raise UserError(
            f"cfg_scale={self.scale:g} has no effect: no step is guided with scheduler.guidance interval={self.interval} and "
            f"schedule={self.schedule!r}; the steps are at noise levels {shown}. Change these options, or set cfg_scale=1."
        )

    def wrap(
        self, model: Denoiser, null: Condition | None, index: int, level: float, cache: ConditionCache | None = None
    ) -> Denoiser:
        """The denoiser of one step; `cache` as in `classifier_free_guidance`."""
        scale = self.scale_at(index, level)
        return classifier_free_guidance(
            model, null, scale, self.channels, rescale=self.rescale, batching=self.batching, cache=cache
        )


def guidance_from_config(scale: float, channels: int | None, options: Mapping[str, Any] | None) -> Guidance:
    """A `Guidance` of the scheduler's `cfg_scale`, `cfg_channel` and `guidance=dict(...)`.

    Raises:
        UserError: an option is unknown, out of range, or has no effect with the others.
    """
    options, known = dict(options or {}), Guidance._fields[2:]
    for name in options:
        if name not in known:
            raise UserError(
                f"scheduler.guidance has no {name!r}.{did_you_mean(name, list(known))} It has: {', '.join(known)}."
            )
    guidance = Guidance(scale, channels, **options)
    for name, names in (("schedule", SCHEDULES), ("batching", BATCHING)):
        if getattr(guidance, name) not in names:
            raise UserError(f"scheduler.guidance.{name}={options[name]!r} is not one of {', '.join(names)}.")
    for name, owner in (("power", "power-cosine"), ("oscillation_start", "oscillating")):
        if name in options and guidance.schedule != owner:
            raise UserError(
                f"scheduler.guidance.{name}={options[name]!r} has no effect with schedule={guidance.schedule!r}; "
                f"set schedule={owner!r}, or drop it."
            )
    for name in ("rescale", "power", "oscillation_start"):
        if not isinstance(value := getattr(guidance, name), int | float):
            raise UserError(f"scheduler.guidance.{name}={value!r}: expected a number.")
    if not 0 <= guidance.rescale <= 1:
        raise UserError(f"scheduler.guidance.rescale={guidance.rescale} is not in [0, 1].")
    if guidance.power <= 0 or guidance.oscillation_start < 0:
        raise UserError("scheduler.guidance: power is above 0, and oscillation_start at least 0.")
    _check_channels(channels)
    if options and scale == 1:
        logger.warning(
            "scheduler.cfg_scale=1 is no guidance: scheduler.guidance (%s) has an effect only where a call sets another scale.",
            ", ".join(options),
        )
    return guidance._replace(interval=_interval(guidance.interval))


def _interval(value: Any) -> tuple[float, float]:
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
    if not pair or not 0 <= value[0] < value[1] <= 1:
        raise UserError(
            f"scheduler.guidance.interval={value!r}: expected (low, high) with 0 <= low < high <= 1, parts of the "
            "training time; 1 is pure noise."
        )
    return float(value[0]), float(value[1])


def _check_channels(channels: int | None) -> None:
    if channels is not None and channels < 1:
        raise UserError(f"cfg_channel={channels}: guide at least 1 channel, or all with cfg_channel=None.")


def classifier_free_guidance(
    model: Denoiser,
    null: Condition | None,
    scale: float,
    channels: int | None = None,
    *,
    rescale: float = 0.0,
    batching: str = "joint",
    cache: ConditionCache | None = None,
) -> Denoiser:
    """A denoiser with the model's call signature that returns `null + scale * (cond - null)`.

    Only the first `channels` of the C prediction channels are guided (None: all C, where C is the number of channels of
    x; 3 reproduces DiT's published results). All other output channels - a prediction beyond `channels`, the learned
    variance - are those of the conditional half. The condition is given by keyword; each entry is None or a tensor
    [B, ...].

    Args:
        null: the entries of the condition that the unconditional half replaces, such as `{"y": null_y}`; all others are
            repeated. A negative prompt is `{"y": y, "mask": mask}` of its own length. None, like a scale of 1, returns
            the model itself: no doubled batch.
        scale: 1 is the conditional model, 0 the unconditional one.
        rescale, batching: see `Guidance`.
        cache: {} at the first step, and passed on to the next ones: entries that stay the same are put in one batch once.
    """
    _check_channels(channels)
    if null is None or scale == 1:
        return model
    cache = {} if cache is None else cache

    def guided(x: Tensor, timestep: Tensor, **cond: Tensor | None) -> Tensor:
        num_guided = x.shape[1] if channels is None else channels
        if num_guided > x.shape[1]:
            raise UserError(f"cfg_channel={channels}, but x has {x.shape[1]} channels; None guides all of them.")
        cond, uncond = _both_conditions(cond, null, len(x))
        if batching == "split":
            with_cond, without = model(x, timestep, **cond), model(x, timestep, **uncond)
        else:
            joint = {key: _cat(cache, key, cond[key], uncond[key]) for key in cond}
            with_cond, without = model(torch.cat([x, x]), torch.cat([timestep, timestep]), **joint).chunk(2)
        start, goal = without[:, :num_guided], with_cond[:, :num_guided]
        combined = torch.add(start, goal - start, alpha=scale)
        if rescale:  # Lin et al. 2024, eq. 15 and 16
            tiny = torch.finfo(combined.dtype).tiny
            factor = _std(goal, cond.get("x_mask")) / _std(combined, cond.get("x_mask")).clamp(min=tiny)
            combined = combined * (rescale * factor + (1 - rescale))
        rest = with_cond[:, num_guided:]
        return torch.cat([combined, rest], dim=1) if rest.shape[1] else combined

    return guided


def _cat(cache: ConditionCache, key: str, cond: Tensor | None, uncond: Tensor | None) -> Tensor | None:
    if cond is None or uncond is None:
        return None
    known = cache.get(key)
    if known is None or known[0] is not cond or known[1] is not uncond:
        known = cache[key] = (cond, uncond, torch.cat([cond, uncond]))
    return known[2]


def _std(x: Tensor, x_mask: Tensor | None) -> Tensor:
    """[B, C, T, H, W] -> [B, 1, 1, 1, 1], over the denoised frames (x_mask [B, T] True)."""
    dims = tuple(range(1, x.ndim))
    if x_mask is None:
        return x.std(dim=dims, keepdim=True, correction=0)
    weight = expand_frames(x_mask).to(x)
    count = (weight.sum(dim=dims, keepdim=True) * (x[0].numel() // x_mask.shape[1])).clamp(min=1)
    mean = (x * weight).sum(dim=dims, keepdim=True) / count
    return (((x - mean) ** 2 * weight).sum(dim=dims, keepdim=True) / count).sqrt()


def _both_conditions(cond: Condition, null: Condition, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The condition and the complete null condition: the same entries, texts padded to one length with masks."""
    if stray := sorted(null.keys() - cond.keys() - {"mask"}):
        raise ValueError(f"the null condition has {stray}, which the condition lacks; it has {sorted(cond)}.")
    sides: tuple[dict[str, Any], dict[str, Any]] = dict(cond), {**cond, **null}
    texts: list[Any] = [side.get("y") for side in sides]
    masks: list[Any] = [side.get("mask") for side in sides]
    if all(y is not None and y.ndim > 1 for y in texts):
        lengths = [y.shape[-2] for y in texts]
        if lengths[0] != lengths[1] and masks[1] is masks[0]:
            masks[1] = None  # the other text's
        if lengths[0] != lengths[1] or (masks[0] is None) != (masks[1] is None):
            for side, y, mask, length in zip(sides, texts, masks, lengths, strict=True):
                if mask is None:
                    mask = torch.ones(len(y), length, dtype=torch.bool, device=y.device)
                if mask.shape[-1] != length:
                    raise ValueError(
                        f"mask: shape {tuple(mask.shape)} for a text of {length} tokens, expected [B, {length}]."
                    )
                missing = max(lengths) - length
                side["y"] = torch.nn.functional.pad(y, (0, 0, 0, missing))  # [B, 1, L, D]
                side["mask"] = torch.nn.functional.pad(mask, (0, missing))  # [B, L]
    for key in sides[0]:
        values = [side[key] for side in sides]
        if sum(value is None for value in values) == 1:
            raise ValueError(f"{key}: one of the condition and the null condition is None, the other is not.")
        for name, value in zip(("condition", "null condition"), values, strict=True):
            if value is not None and (value.ndim == 0 or len(value) != batch):
                raise ValueError(f"{key}: the {name} has shape {tuple(value.shape)}, expected [{batch}, ...].")
    return sides
