"""Rectified flow (Liu et al. 2022; Esser et al. 2024): the model predicts the velocity of straight paths.

x_tau = (1 - tau) x_0 + tau noise, and the target is v = x_0 - noise, as in Open-Sora 1.2. Deviations from it:
- the shift for large videos takes the latent's size, at any length, in training and sampling alike, and for one size of
  a batch (theirs counted 17-frame chunks, so that shorter videos had tau = 0);
- discrete timesteps are 1, ..., T instead of 0, ..., T - 1: T, pure noise, is where sampling starts;
- second-order samplers; noise from one generator per sample.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.guidance import Condition, Denoiser, guidance_from_config
from opensora.schedulers.rf.diffusers_solver import FLOW_SOLVERS, DiffusersRun
from opensora.schedulers.sampling import Denoise, Sampler, Solver, Time
from opensora.schedulers.timesteps import Choice, build_sampling, build_weights, flow_alphas_cumprod
from opensora.schedulers.training import (
    at_least_fp32,
    frame_mean,
    generators_to_draw,
    keep_conditioning_frames,
    predict,
    without_variance,
)
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

Tau = TypeVar("Tau", float, Tensor)
SAMPLERS = ("euler", "heun", "midpoint", *FLOW_SOLVERS)
TIMES = ("continuous", "discrete")
SHIFTS = ("none", "resolution", "length")


@SCHEDULERS.register_module("rflow")
class RectifiedFlow(Sampler):
    """Rectified flow. The defaults are Open-Sora 1.2's: continuous uniform time, no shift, Euler."""

    def __init__(  # noqa: PLR0913 - one name for each choice of the papers
        self,
        num_sampling_steps: int = 10,
        num_timesteps: int = 1000,
        cfg_scale: float = 4.0,
        cfg_channel: int | None = None,
        guidance: Mapping[str, Any] | None = None,
        sampler: str = "euler",
        time: str = "continuous",
        shift: str | float = "none",
        shift_base: Sequence[int] = (64, 64),
        transform_scale: float = 1.0,
        interval: Sequence[float] = (0.0, 1.0),
        timestep_sampling: Choice = "uniform",
        loss_weighting: Choice | None = None,
    ) -> None:
        """Args:
        num_sampling_steps: steps from noise to data; "heun" calls the model 2 N - 1 times, "midpoint" 2 N times.
        num_timesteps: T; the model is conditioned on tau * T.
        cfg_scale, cfg_channel, guidance: see `opensora.schedulers.guidance.Guidance`.
        sampler: "euler", or of second order "heun" or "midpoint"; diffusers' schedulers, with their own times: "unipc" and
            "dpm++", as Wan is sampled, and "flow-euler".
        time: "continuous", or "discrete": integers from 1 to T, in training and sampling.
        shift: "none", "resolution" (Open-Sora 1.2) or "length" (2.0), which depend on the latent's size, or a number
            (Stable Diffusion 3); see `shift_ratio`.
        shift_base: rows and columns of the latent whose single frame "resolution" does not shift.
        transform_scale: multiplies the ratio of the shift.
        interval: the part of the training time, after the shift, that is trained: of an expert of several. What is drawn is
            rescaled to it.
        timestep_sampling: "uniform", "logit-normal", "speedit" or "speed", or dict(type=NAME, option=...); drawn before the shift. See opensora/schedulers/timesteps.py.
        loss_weighting: "none", "p2", "min-snr" or "speed", or dict(type=NAME, option=...); by default that of the
            timestep sampling.
        """
        for field, value, names in (("sampler", sampler, SAMPLERS), ("time", time, TIMES)):
            if value not in names:
                raise UserError(f"scheduler.{field}={value!r} is not one of {', '.join(names)}.")
        if num_sampling_steps < 1 or num_timesteps < 1:
            raise UserError(
                f"scheduler: num_sampling_steps={num_sampling_steps} and num_timesteps={num_timesteps} are at least 1."
            )
        if shift not in SHIFTS and (isinstance(shift, str) or shift <= 0):
            raise UserError(f"scheduler.shift={shift!r} is not one of {', '.join(SHIFTS)}, nor a positive number.")
        if transform_scale <= 0 or (transform_scale != 1 and shift not in ("resolution", "length")):
            raise UserError(
                f"scheduler.transform_scale={transform_scale} must be positive, and has no effect with shift={shift!r}: it "
                "multiplies the ratio of 'resolution' and 'length'."
            )
        if len(shift_base) != 2 or min(shift_base) < 1:
            raise UserError(f"scheduler.shift_base={shift_base!r}: expected (rows, columns) of a latent frame.")
        if len(interval) != 2 or not 0 <= interval[0] < interval[1] <= 1:
            raise UserError(
                f"scheduler.interval={interval!r}: expected (low, high) with 0 <= low < high <= 1; 1 is noise."
            )
        self.guidance = guidance_from_config(cfg_scale, cfg_channel, guidance)
        self.num_sampling_steps, self.num_timesteps = num_sampling_steps, num_timesteps
        self.sampler, self.time = sampler, time
        self.shift, self.shift_base, self.transform_scale = shift, tuple(shift_base), transform_scale
        self.interval = tuple(interval)
        abar = flow_alphas_cumprod(num_timesteps)
        self.timestep_sampling = build_sampling(timestep_sampling, abar)
        self.loss_weights = build_weights(loss_weighting, timestep_sampling, abar, "velocity")

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

        Arguments as of `IDDPM.training_losses`, but t [B] is in [0, num_timesteps], after the shift, and of a model's 2C
        channels the second half is not used.
        """
        x0, rngs = at_least_fp32(x0), generators_to_draw(generators, t, noise)
        t = self._draw(rngs, x0) if t is None else t
        noise = randn_like(x0, rngs) if noise is None else noise.to(x0.dtype)
        tau = (t.to(x0.dtype) / self.num_timesteps).reshape(-1, *[1] * (x0.ndim - 1))
        mask = None if mask is None else mask.bool()
        x_tau = keep_conditioning_frames((1 - tau) * x0 + tau * noise, x0, mask)
        v = without_variance(predict(model, x_tau, t, cond, mask), x0.shape[1])
        losses = frame_mean((x0 - noise - v) ** 2, mask)
        if self.loss_weights is not None:
            losses = losses * self.loss_weights(self.timestep_sampling.bin(t.float() / self.num_timesteps))
        return losses

    def _draw(self, generators: Sequence[torch.Generator], x0: Tensor) -> Tensor:
        """Timesteps [B], shifted."""
        ratio, T = self._ratio(x0), self.num_timesteps
        low, high = (shifted(tau, 1 / ratio) for tau in self.interval)  # before the shift
        if self.time == "continuous":
            return shifted(low + (high - low) * self.timestep_sampling.draw_time(generators, x0.device), ratio) * T
        tau = shifted(low + (high - low) * (self.timestep_sampling.draw(generators, x0.device) + 1) / T, ratio)
        return (tau * T).round().long().clamp(1, T)

    def _ratio(self, x: Tensor) -> float:
        return shift_ratio(self.shift, x.shape[2:], self.shift_base, self.transform_scale)

    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> Solver:
        """Steps at times that suit the latent's size; deterministic, so that no generators are needed."""
        N, ratio = self.num_sampling_steps, self._ratio(z)
        if self.sampler in FLOW_SOLVERS:
            return DiffusersRun(self.sampler, N, self.num_timesteps, ratio)
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


def shift_ratio(
    shift: str | float, latent_size: Sequence[float], base_size: Sequence[float] = (64, 64), scale: float = 1.0
) -> float:
    """r, by which larger videos are trained and sampled at noisier times (Esser et al. 2024, section 5.3.2).

    Args:
        shift: a number is r itself; "none" is 1; "resolution" (Open-Sora 1.2) is sqrt(H W / base) sqrt(T); "length"
            (Open-Sora 2.0) is a line through 1 at 1024 cells a frame and 3 at 16384, times sqrt(T).
        latent_size: (T, H, W) in latent cells, so that nothing here depends on a VAE's strides.
        base_size: rows and columns of the latent frame with r = 1; (64, 64) is 512 x 512 pixels with 8 x 8 in a cell.
        scale: multiplies the ratio of "resolution" and "length".
    """
    if not isinstance(shift, str):
        return float(shift)
    T, H, W = latent_size
    if shift == "none":
        return 1.0
    if shift == "resolution":
        return math.sqrt(H * W / (base_size[0] * base_size[1])) * math.sqrt(T) * scale
    # of a latent frame: 1024 and 16384 cells are 256 and 4096 tokens of 2 x 2 cells
    line = 1.0 + (3.0 - 1.0) / (16384 - 1024) * (H * W - 1024)
    return line * math.sqrt(T) * scale


def shifted(tau: Tau, ratio: float) -> Tau:
    """tau' = r tau / (1 + (r - 1) tau), in [0, 1] like tau; 0 and 1 stay, and the order is kept."""
    return ratio * tau / (ratio * tau + (1 - tau))  # exact at both ends
