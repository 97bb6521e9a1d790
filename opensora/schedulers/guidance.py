"""Classifier-free guidance (Ho & Salimans 2022) as a wrapper of the denoiser, so that no sampler knows about it.

With limits to an interval of noise levels (Kynkaanniemi et al. 2024), scales that change while sampling, and the
rescaling of Lin et al. 2024 (section 3.4).
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)
Denoiser = Callable[..., Tensor]  # model(x, timestep, **cond) -> [B, C or 2C, T, H, W]
Condition = Mapping[str, Tensor | None]
Joined = dict[str, tuple[Tensor, Tensor, Tensor]]  # of an entry: with the condition, without, and both in one batch

SCHEDULES = ("constant", "linear", "power-cosine", "oscillating")
BATCHING = ("joint", "split")
OPTIONS = ("schedule", "power", "oscillation_start", "interval", "rescale", "batching")


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
        """See that some step is guided, where there is a scale.

        Raises:
            UserError: none is; says at which noise levels the steps are.
        """
        if self.scale == 1 or any(self.scale_at(index, level) != 1 for index, level in enumerate(levels)):
            return
        shown = ", ".join(f"{level:.3g}" for level in levels)
        raise UserError(
            f"cfg_scale={self.scale:g} has no effect: no step is guided with scheduler.guidance interval={self.interval} and "
            f"schedule={self.schedule!r}; the steps are at noise levels {shown}. Change these options, or set cfg_scale=1."
        )

    def wrap(
        self, model: Denoiser, null: Condition | None, index: int, level: float, joined: Joined | None = None
    ) -> Denoiser:
        """The denoiser of one step; `joined` as in `classifier_free_guidance`."""
        return classifier_free_guidance(
            model,
            null,
            self.scale_at(index, level),
            self.channels,
            rescale=self.rescale,
            batching=self.batching,
            joined=joined,
        )


def guidance_from_config(scale: float, channels: int | None, options: Mapping[str, Any] | None) -> Guidance:
    """A `Guidance` of the scheduler's `cfg_scale`, `cfg_channel` and `guidance=dict(...)`.

    Raises:
        UserError: an option is unknown, out of range, or has no effect with the others.
    """
    options = dict(options or {})
    for name in options:
        if name not in OPTIONS:
            raise UserError(
                f"scheduler.guidance has no {name!r}.{did_you_mean(name, list(OPTIONS))} It has: {', '.join(OPTIONS)}."
            )
    schedule = options.get("schedule", "constant")
    for name, value, names in (
        ("schedule", schedule, SCHEDULES),
        ("batching", options.get("batching", "joint"), BATCHING),
    ):
        if value not in names:
            raise UserError(f"scheduler.guidance.{name}={value!r} is not one of {', '.join(names)}.")
    for name, owner in (("power", "power-cosine"), ("oscillation_start", "oscillating")):
        if name in options and schedule != owner:
            raise UserError(
                f"scheduler.guidance.{name}={options[name]!r} has no effect with schedule={schedule!r}; "
                f"set schedule={owner!r}, or drop it."
            )
    if "interval" in options:
        options["interval"] = _interval(options["interval"])
    guidance = Guidance(scale, channels, **options)
    _check_numbers(guidance)
    if options and scale == 1:
        logger.warning(
            "scheduler.cfg_scale=1 is no guidance: scheduler.guidance (%s) has an effect only where a call sets another scale.",
            ", ".join(options),
        )
    return guidance


def _interval(value: Any) -> tuple[float, float]:
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, int | float) for part in value)
    if not pair or not 0 <= value[0] < value[1] <= 1:
        raise UserError(
            f"scheduler.guidance.interval={value!r}: expected (low, high) with 0 <= low < high <= 1, parts of the "
            "training time; 1 is pure noise."
        )
    return float(value[0]), float(value[1])


def _check_numbers(guidance: Guidance) -> None:
    _check_channels(guidance.channels)
    for name in ("rescale", "power", "oscillation_start"):
        if not isinstance(value := getattr(guidance, name), int | float):
            raise UserError(f"scheduler.guidance.{name}={value!r}: expected a number.")
    if not 0 <= guidance.rescale <= 1:
        raise UserError(f"scheduler.guidance.rescale={guidance.rescale} is not in [0, 1].")
    if guidance.power <= 0 or guidance.oscillation_start < 0:
        raise UserError("scheduler.guidance: power is above 0, and oscillation_start at least 0.")


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
    joined: Joined | None = None,
) -> Denoiser:
    """A denoiser with the model's call signature that returns `null + scale * (cond - null)`.

    One call of the model on the doubled batch [cond; null], or two calls. Only the first `channels` of the C
    prediction channels are guided (None: all C, where C is the number of channels of x; 3 reproduces DiT's published
    numbers). All other output channels - a prediction beyond `channels`, the learned variance - are those of the
    conditional half.

    Args:
        null: the entries of the condition that the unconditional half replaces, such as `{"y": null_y}`; entries that
            are not in it are repeated. A negative prompt is `{"y": y, "mask": mask}` of its own length. None, like a
            scale of 1, returns the model itself: no doubled batch.
        scale: 1 is the conditional model, 0 the unconditional one.
        rescale, batching: see `Guidance`.
        joined: what the steps of a run hand on, so that entries that stay the same are put in one batch once; {} at
            the first.

    The condition is given by keyword; each entry is None or a tensor [B, ...].
    """
    _check_channels(channels)
    if null is None or scale == 1:
        return model
    run = _two_calls if batching == "split" else partial(_one_call, {} if joined is None else joined)

    def guided(x: Tensor, timestep: Tensor, **cond: Tensor | None) -> Tensor:
        num_guided = x.shape[1] if channels is None else channels
        if num_guided > x.shape[1]:
            raise UserError(f"cfg_channel={channels}, but x has {x.shape[1]} channels; None guides all of them.")
        with_cond, without = run(model, x, timestep, *_both_conditions(cond, null, len(x)))
        start, goal = without[:, :num_guided], with_cond[:, :num_guided]
        combined = torch.add(start, goal - start, alpha=scale)
        if rescale:
            combined = _rescaled(combined, goal, rescale, cond.get("x_mask"))
        rest = with_cond[:, num_guided:]
        return torch.cat([combined, rest], dim=1) if rest.shape[1] else combined

    return guided


def _one_call(
    joined: Joined, model: Denoiser, x: Tensor, timestep: Tensor, cond: Condition, null: Condition
) -> tuple[Tensor, Tensor]:
    both = {key: _cat(joined, key, value, null[key]) for key, value in cond.items()}
    with_cond, without = model(torch.cat([x, x]), torch.cat([timestep, timestep]), **both).chunk(2)
    return with_cond, without  # each [B, C or 2C, T, H, W]


def _two_calls(model: Denoiser, x: Tensor, timestep: Tensor, cond: Condition, null: Condition) -> tuple[Tensor, Tensor]:
    return model(x, timestep, **cond), model(x, timestep, **null)


def _cat(joined: Joined, key: str, cond: Tensor | None, null: Tensor | None) -> Tensor | None:
    if cond is None or null is None:
        return None
    known = joined.get(key)
    if known is None or known[0] is not cond or known[1] is not null:
        known = joined[key] = (cond, null, torch.cat([cond, null]))
    return known[2]


def _rescaled(guided: Tensor, cond: Tensor, part: float, x_mask: Tensor | None) -> Tensor:
    """Lin et al. 2024, eq. 15 and 16, with the deviation of each sample over the frames that move."""
    factor = _std(cond, x_mask) / _std(guided, x_mask).clamp(min=torch.finfo(guided.dtype).tiny)
    return guided * (part * factor + (1 - part))


def _std(x: Tensor, x_mask: Tensor | None) -> Tensor:
    """[B, 1, 1, 1, 1] from [B, C, T, H, W]."""
    dims = tuple(range(1, x.ndim))
    if x_mask is None:
        return x.std(dim=dims, keepdim=True, correction=0)
    weight = x_mask[:, None, :, None, None].to(x)
    count = (weight.sum(dim=dims, keepdim=True) * (x[0].numel() // x_mask.shape[1])).clamp(min=1)
    mean = (x * weight).sum(dim=dims, keepdim=True) / count
    return (((x - mean) ** 2 * weight).sum(dim=dims, keepdim=True) / count).sqrt()


def _both_conditions(cond: Condition, null: Condition, batch: int) -> tuple[Condition, Condition]:
    """The condition and the complete null condition, entry by entry of one shape."""
    if stray := sorted(null.keys() - cond.keys() - {"mask"}):
        raise ValueError(f"the null condition has {stray}, which the condition lacks; it has {sorted(cond)}.")
    cond, null = dict(cond), {**cond, **null}
    y, null_y = cond.get("y"), null.get("y")
    if y is not None and null_y is not None and y.ndim > 1 and null_y.ndim > 1:
        masks = [cond.get("mask"), null.get("mask")]
        if null_y.shape[-2] != y.shape[-2] and masks[1] is masks[0]:
            masks[1] = None  # the other text's
        _align_text([cond, null], [y, null_y], masks)
    for key in cond:
        _check_entries(key, cond[key], null[key], batch)
    return cond, null


def _align_text(sides: list[dict[str, Tensor | None]], texts: list[Tensor], masks: list[Tensor | None]) -> None:
    """Give both texts the longer one's length, with masks; a mask that only one of them has becomes ones."""
    lengths = [y.shape[-2] for y in texts]
    if lengths[0] == lengths[1] and (masks[0] is None) == (masks[1] is None):
        return
    for side, y, mask, length in zip(sides, texts, masks, lengths, strict=True):
        if mask is None:
            mask = torch.ones(len(y), length, dtype=torch.bool, device=y.device)
        if mask.shape[-1] != length:
            raise ValueError(f"mask: shape {tuple(mask.shape)} for a text of {length} tokens, expected [B, {length}].")
        missing = max(lengths) - length
        side["y"] = torch.nn.functional.pad(y, (0, 0, 0, missing))  # [B, 1, L, D]
        side["mask"] = torch.nn.functional.pad(mask, (0, missing))  # [B, L]


def _check_entries(key: str, cond: Tensor | None, null: Tensor | None, batch: int) -> None:
    if cond is None and null is None:
        return
    if cond is None or null is None:
        raise ValueError(f"{key}: one of the condition and the null condition is None, the other is not.")
    for name, value in (("condition", cond), ("null condition", null)):
        if value.ndim == 0 or len(value) != batch:
            raise ValueError(f"{key}: the {name} has shape {tuple(value.shape)}, expected [{batch}, ...].")
