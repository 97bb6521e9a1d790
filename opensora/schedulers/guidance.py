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

CHOICES = {"schedule": ("constant", "linear", "power-cosine", "oscillating", "stages"), "batching": ("joint", "split")}


class Guidance(NamedTuple):
    """How strongly, where and when samples are guided. Made by `guidance_from_config`, which checks it.

    Attributes:
        scale: 1 is the conditional model, 0 the unconditional one, above 1 guided.
        channels: how many of the C prediction channels are guided; None: all.
        schedule: "constant"; "linear": from 1 at the noisy end to `scale` at the clean end; "power-cosine" (MDT, Gao et
            al. 2023): the same, by (1 - cos(pi (1 - t)^power)) / 2; "oscillating" (Open-Sora 1.3): from step
            `oscillation_start` on, every odd step has scale 1; "stages" (Wan 2.2): `low_scale` at noise levels below `boundary`.
        interval: the noise levels, as parts of the training time, at which there is guidance at all.
        rescale: 0 leaves the guided prediction, 1 gives it the standard deviation of the conditional one.
        batching: "joint" runs both predictions as one batch; "split" runs two, in less memory, with the same result.
    """

    scale: float = 4.0
    channels: int | None = None
    schedule: str = "constant"
    power: float = 4.0
    oscillation_start: int = 10
    boundary: float = 0.875
    low_scale: float = 3.0
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
        if self.schedule == "stages":
            return self.scale if level >= self.boundary else self.low_scale
        ramp = 1.0
        if self.schedule == "linear":
            ramp = 1 - level
        elif self.schedule == "power-cosine":
            ramp = (1 - math.cos(math.pi * (1 - level) ** self.power)) / 2
        return 1 + (self.scale - 1) * ramp if ramp != 1 else self.scale

    def check_effect(self, levels: Sequence[float]) -> None:
        """Raise a UserError if there is a scale, and none of the steps at these noise levels is guided."""
        if self.scale != 1 and all(self.scale_at(index, level) == 1 for index, level in enumerate(levels)):
            shown = ", ".join(f"{level:.3g}" for level in levels)
            raise UserError(
                f"cfg_scale={self.scale:g} has no effect: no step is guided with scheduler.guidance interval={self.interval} "
                f"and schedule={self.schedule!r}; the steps are at noise levels {shown}. Change these options, or set cfg_scale=1."
            )


def guidance_from_config(scale: float, channels: int | None, options: Mapping[str, Any] | None) -> Guidance:
    """A `Guidance` of the scheduler's `cfg_scale`, `cfg_channel` and `guidance=dict(...)`.

    Raises:
        UserError: an option is unknown, out of range, or has no effect with the others.
    """
    options, known = dict(options or {}), Guidance._fields[2:]
    if unknown := [name for name in options if name not in known]:
        hint = did_you_mean(unknown[0], list(known))
        raise UserError(f"scheduler.guidance has no {unknown[0]!r}.{hint} It has: {', '.join(known)}.")
    guidance = Guidance(scale, channels, **options)
    schedule, power, start, boundary, low_scale, interval, rescale, _ = guidance[2:]
    for name, choices in CHOICES.items():
        if getattr(guidance, name) not in choices:
            raise UserError(f"scheduler.guidance.{name}={options[name]!r} is not one of {', '.join(choices)}.")
    for name, owner in (
        ("power", "power-cosine"),
        ("oscillation_start", "oscillating"),
        ("boundary", "stages"),
        ("low_scale", "stages"),
    ):
        if name in options and schedule != owner:
            raise UserError(
                f"scheduler.guidance.{name}={options[name]!r} has no effect with schedule={schedule!r}; set "
                f"schedule={owner!r}, or drop it."
            )
    if not all(isinstance(value, int | float) for value in (power, start, boundary, low_scale, rescale)) or not (
        power > 0 and start >= 0 and 0 <= rescale <= 1 and 0 < boundary < 1
    ):
        raise UserError(
            f"scheduler.guidance: power={power!r} must be a number above 0, oscillation_start={start!r} one of at least 0, "
            f"rescale={rescale!r} one in [0, 1], boundary={boundary!r} one in (0, 1), low_scale={low_scale!r} a number."
        )
    is_pair = isinstance(interval, list | tuple) and [type(v) in (int, float) for v in interval] == [True, True]
    if not is_pair or not 0 <= interval[0] < interval[1] <= 1:
        raise UserError(
            f"scheduler.guidance.interval={interval!r}: expected (low, high) with 0 <= low < high <= 1, parts of the "
            "training time; 1 is pure noise."
        )
    if channels is not None and channels < 1:
        raise UserError(f"cfg_channel={channels}: guide at least 1 channel, or all with cfg_channel=None.")
    if options and scale == 1:
        logger.warning(
            "scheduler.cfg_scale=1 is no guidance: scheduler.guidance (%s) has an effect only where a call sets another scale.",
            ", ".join(options),
        )
    return guidance._replace(interval=(float(interval[0]), float(interval[1])))


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
    if null is None or scale == 1:
        return model
    cache = {} if cache is None else cache

    def in_one_batch(key: str, cond: Tensor | None, uncond: Tensor | None) -> Tensor | None:
        if cond is None or uncond is None:
            return None
        if key not in cache or cache[key][0] is not cond or cache[key][1] is not uncond:
            cache[key] = (cond, uncond, torch.cat([cond, uncond]))
        return cache[key][2]

    def guided(x: Tensor, timestep: Tensor, **cond: Tensor | None) -> Tensor:
        num_guided = x.shape[1] if channels is None else channels
        if num_guided > x.shape[1]:
            raise UserError(f"cfg_channel={channels}, but x has {x.shape[1]} channels; None guides all of them.")
        cond, uncond = _both_conditions(cond, null, len(x))
        if batching == "split":
            with_cond, without = model(x, timestep, **cond), model(x, timestep, **uncond)
        else:
            joint = {key: in_one_batch(key, cond[key], uncond[key]) for key in cond}
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
    if all(side.get("y") is not None and side["y"].ndim > 1 for side in sides):
        lengths = [side["y"].shape[-2] for side in sides]
        masks = [side.get("mask") for side in sides]
        if lengths[0] != lengths[1] and masks[1] is masks[0]:
            masks[1] = None  # the other text's
        if lengths[0] != lengths[1] or (masks[0] is None) != (masks[1] is None):
            for side, mask, length in zip(sides, masks, lengths, strict=True):
                y, missing = side["y"], max(lengths) - length
                if mask is None:
                    mask = torch.ones(len(y), length, dtype=torch.bool, device=y.device)
                if mask.shape[-1] != length:
                    raise ValueError(
                        f"mask: shape {tuple(mask.shape)} for a text of {length} tokens, expected [B, {length}]."
                    )
                side["y"] = torch.nn.functional.pad(y, (0, 0, 0, missing))  # [B, 1, L, D]
                side["mask"] = torch.nn.functional.pad(mask, (0, missing))  # [B, L]
    for key in sides[0]:
        shapes = [None if side[key] is None else tuple(side[key].shape) for side in sides]
        if (shapes[0] is None) != (shapes[1] is None) or any(
            shape is not None and shape[:1] != (batch,) for shape in shapes
        ):
            raise ValueError(
                f"{key}: the condition has shape {shapes[0]}, the null condition {shapes[1]}; expected [{batch}, ...] or "
                "None for both."
            )
    return sides
