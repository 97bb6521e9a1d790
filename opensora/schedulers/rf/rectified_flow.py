"""Rectified flow (Liu et al. 2022; Esser et al. 2024): the model predicts the velocity of straight paths.

x_tau = (1 - tau) x_0 + tau noise, and the target is v = x_0 - noise, as in Open-Sora 1.2. Deviations from it:
- the shift for large videos takes the latent's size, at any length, in training and sampling alike, and for one size of
  a batch (theirs counted 17-frame chunks, so that shorter videos had tau = 0);
- discrete timesteps are 1, ..., T instead of 0, ..., T - 1: T, pure noise, is where sampling starts;
- second-order samplers; noise from one generator per sample.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.guidance import Condition, Denoiser, guidance_from_config
from opensora.schedulers.rf.shift import check_shift, shift_ratio, shifted
from opensora.schedulers.sampling import Denoise, Sampler, Solver, Time
from opensora.schedulers.timesteps import Choice, build_sampling, build_weights, flow_alphas_cumprod
from opensora.schedulers.training import (
    at_least_fp32,
    check_draws,
    draw_noise,
    frame_mean,
    keep_conditioning_frames,
    predict,
    without_variance,
)
from opensora.utils.errors import UserError

SAMPLERS = ("euler", "heun", "midpoint")
TIMES = ("continuous", "discrete")


@SCHEDULERS.register_module("rflow")
class RectifiedFlow(Sampler):
    """Rectified flow. The defaults are Open-Sora 1.2's: continuous uniform time, no shift, Euler."""

    def __init__(  # noqa: PLR0913 - the reference's keys, and a name for each choice that they spell with booleans
        self,
        num_sampling_steps: int = 10,
        num_timesteps: int = 1000,
        cfg_scale: float = 4.0,
        cfg_channel: int | None = None,
        guidance: Mapping[str, Any] | None = None,
        sampler: str = "euler",
        time: str | None = None,
        shift: str | float | None = None,
        shift_base: Sequence[int] = (64, 64),
        transform_scale: float = 1.0,
        timestep_sampling: Choice | None = None,
        loss_weighting: Choice | None = None,
        *,
        use_discrete_timesteps: bool | None = None,
        use_timestep_transform: bool | None = None,
        sample_method: str | None = None,
        loc: float | None = None,
        scale: float | None = None,
    ) -> None:
        """Args:
        num_sampling_steps: steps from noise to data; "heun" calls the model 2 N - 1 times, "midpoint" 2 N times.
        num_timesteps: T; the model is conditioned on tau * T.
        cfg_scale, cfg_channel, guidance: see `opensora.schedulers.guidance.Guidance`.
        sampler: "euler", or of second order "heun" or "midpoint".
        time: "continuous" (default), or "discrete": integers from 1 to T, in training and sampling.
        shift: "none" (default), "resolution" (Open-Sora 1.2) or "length" (2.0), which depend on the latent's size, or a
            number (Stable Diffusion 3); see opensora/schedulers/rf/shift.py.
        shift_base: rows and columns of the latent whose single frame "resolution" does not shift.
        transform_scale: multiplies the ratio of the shift.
        timestep_sampling: "uniform" (default), "logit-normal", "speedit", "speed" or "loss-second-moment", or
            dict(type=NAME, option=...); drawn before the shift. See opensora/schedulers/timesteps.py.
        loss_weighting: "none", "p2", "min-snr" or "speed", or dict(type=NAME, option=...); by default that of the
            timestep sampling.
        use_discrete_timesteps, use_timestep_transform, sample_method with loc and scale: Open-Sora's spelling of
            time="discrete", shift="resolution" and timestep_sampling; an error where they contradict those.
        """
        if num_sampling_steps < 1 or num_timesteps < 1:
            raise UserError(
                f"scheduler: num_sampling_steps={num_sampling_steps} and num_timesteps={num_timesteps} are at least 1."
            )
        _check_name("sampler", sampler, SAMPLERS)
        self.guidance = guidance_from_config(cfg_scale, cfg_channel, guidance)
        self.num_timesteps, self.sampler = num_timesteps, sampler
        self.time = _one(
            ("time", time), ("use_discrete_timesteps", use_discrete_timesteps), {True: "discrete", False: "continuous"},
            default="continuous",
        )  # fmt: skip
        _check_name("time", self.time, TIMES)
        self.shift = _one(
            ("shift", shift), ("use_timestep_transform", use_timestep_transform), {True: "resolution", False: "none"},
            default="none",
        )  # fmt: skip
        check_shift(self.shift, transform_scale)
        if len(shift_base) != 2 or min(shift_base) < 1:
            raise UserError(f"scheduler.shift_base={shift_base!r}: expected (rows, columns) of a latent frame.")
        self.shift_base, self.transform_scale = tuple(shift_base), transform_scale
        self.num_sampling_steps = num_sampling_steps
        sampling = _sampling_choice(timestep_sampling, sample_method, loc, scale)
        abar = flow_alphas_cumprod(num_timesteps)
        self.timestep_sampling = build_sampling(sampling, abar)
        self.loss_weights = build_weights(loss_weighting, sampling, abar, "velocity")

    def training_losses(
        self,
        model: Denoiser,
        x0: Tensor,
        cond: Condition,
        *,
        mask: Tensor | None = None,
        t: Tensor | None = None,
        noise: Tensor | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Tensor:
        """The loss of each sample: [B] fp32.

        Args:
            model: called as `model(x_tau, t, **cond)`, with `x_mask=mask` when there is a mask; of 2C channels the
                second half is not used.
            x0: [B, C, T, H, W], scaled latents.
            mask: [B, T] bool. False frames are conditioning: they stay clean and out of the loss, which is the mean over
                the True frames (0 when there is none).
            t: [B] in [0, num_timesteps], after the shift. Like `noise` (x0's shape), drawn when None.
            generators: one per sample: t is drawn first, then the noise.
        """
        check_draws(generators, t, noise)
        x0 = at_least_fp32(x0)
        drawn = None
        if t is None:
            assert generators is not None, "checked above"
            drawn, t = self._draw(generators, x0)
        noise = draw_noise(x0, noise, generators)
        tau = (t.to(x0.dtype) / self.num_timesteps).reshape(-1, *[1] * (x0.ndim - 1))
        mask = None if mask is None else mask.bool()
        x_tau = keep_conditioning_frames((1 - tau) * x0 + tau * noise, x0, mask)
        v = without_variance(predict(model, x_tau, t, cond, mask), x0.shape[1])
        losses = frame_mean((x0 - noise - v) ** 2, mask)
        if self.loss_weights is not None:
            losses = losses * self.loss_weights(self.timestep_sampling.bin(t.float() / self.num_timesteps))
        return losses if drawn is None else self.timestep_sampling.corrected(drawn, losses)

    def _draw(self, generators: Sequence[torch.Generator], x0: Tensor) -> tuple[Tensor, Tensor]:
        """The drawn part of the time [B] int64, of num_timesteps, and the shifted timestep [B]."""
        sampling, ratio = self.timestep_sampling, self._ratio(x0.shape[2:])
        if self.time == "continuous":
            tau = sampling.draw_time(generators, x0.device)
            return sampling.bin(tau), shifted(tau, ratio) * self.num_timesteps
        drawn = sampling.draw(generators, x0.device)
        tau = shifted((drawn + 1) / self.num_timesteps, ratio)
        return drawn, (tau * self.num_timesteps).round().long().clamp(1, self.num_timesteps)

    def _ratio(self, latent_size: Sequence[int]) -> float:
        return shift_ratio(self.shift, latent_size, self.shift_base, self.transform_scale)

    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> Solver:
        """Steps at times that suit the latent's size; deterministic, so that no generators are needed."""
        N, ratio = self.num_sampling_steps, self._ratio(z.shape[2:])
        taus = [shifted(1 - i / N, ratio) for i in range(N)]
        if self.time == "discrete":
            times = [max(round(tau * self.num_timesteps), 1) for tau in taus]
            if any(a <= b for a, b in pairwise(times)):
                raise UserError(
                    f"scheduler.num_sampling_steps={N} with time='discrete': two steps fall on one of the "
                    f"{self.num_timesteps} timesteps (shift {ratio:.3g}); take fewer steps, or time='continuous'."
                )
            taus = [time / self.num_timesteps for time in times]
        return _Run(self, taus)


class _Run:
    """One run of the flow's ODE dx / d tau = -v from noise (tau = 1) to data (tau = 0), at falling `taus`."""

    def __init__(self, scheduler: RectifiedFlow, taus: list[float]) -> None:
        self.scheduler, self.levels = scheduler, taus
        self.timesteps = [self._time(tau) for tau in taus]

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        tau = self.levels[index]
        return (1 - tau) * x_0 + tau * noise

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x at the next time, and x_0 as predicted at the start of the step."""

        def velocity(x: Tensor, tau: float) -> Tensor:
            return without_variance(denoise(x, self._time(tau)), x.shape[1])

        tau, after = self.levels[index], [*self.levels, 0.0][index + 1]
        v = velocity(x, tau)
        x_0 = torch.add(x, v, alpha=tau)
        if self.scheduler.sampler == "midpoint":
            middle = (tau + after) / 2
            v = velocity(torch.add(x, v, alpha=tau - middle), middle)
        elif self.scheduler.sampler == "heun" and after > 0:  # at tau = 0 one Euler step keeps the order
            v = (v + velocity(torch.add(x, v, alpha=tau - after), after)) / 2
        return torch.add(x, v, alpha=tau - after), x_0

    def _time(self, tau: float) -> Time:
        time = tau * self.scheduler.num_timesteps
        return round(time) if self.scheduler.time == "discrete" else time


def _check_name(field: str, value: object, names: Sequence[str]) -> None:
    if value not in names:
        raise UserError(f"scheduler.{field}={value!r} is not one of {', '.join(names)}.")


def _one(
    named: tuple[str, Any], legacy: tuple[str, bool | None], meaning: Mapping[bool, str], *, default: str
) -> Any:  # a name, or the value of a shift
    """The choice that a name and its older boolean spelling make together."""
    (name, value), (flag, flag_value) = named, legacy
    if flag_value is None:
        return default if value is None else value
    if value is None or value == meaning[flag_value]:
        return meaning[flag_value]
    if flag_value and name == "shift" and value == "length":
        return value  # a transform, and which one
    raise UserError(
        f"scheduler: {name}={value!r} and {flag}={flag_value} contradict each other; keep {name}=... alone."
    )


def _sampling_choice(
    choice: Choice | None, sample_method: str | None, loc: float | None, scale: float | None
) -> Choice:
    """`timestep_sampling`, or Open-Sora's `sample_method` with its parameters."""
    if choice is not None and (sample_method, loc, scale) != (None, None, None):
        raise UserError(
            "scheduler.timestep_sampling sets the same as sample_method, loc and scale; keep timestep_sampling, with "
            "dict(type='logit-normal', loc=..., scale=...)."
        )
    if choice is not None:
        return choice
    method = sample_method or "uniform"
    _check_name("sample_method", method, ("uniform", "logit-normal"))
    parameters = {name: value for name, value in (("loc", loc), ("scale", scale)) if value is not None}
    if method == "uniform" and any(value != neutral for value, neutral in ((loc or 0, 0), (scale or 1, 1))):
        raise UserError(f"scheduler: {parameters} have no effect with sample_method='uniform'; use 'logit-normal'.")
    return {"type": method, **parameters} if method == "logit-normal" else method
