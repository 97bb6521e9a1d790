"""IDDPM: training loss and sampling of discrete-time diffusion (Ho et al. 2020; Nichol & Dhariwal 2021).

As in DiT and Open-Sora, with these additions and deviations:
- v-prediction (Salimans & Ho 2022) and DDIM (Song et al. 2021) next to the ancestral sampler;
- training always visits all `diffusion_steps`; `num_sampling_steps` and `timestep_respacing` are for sampling only;
- noise comes from one generator per sample, so a sample does not depend on its batch;
- kept frames leave the sampler bit-identical, and an edit takes `round(mask * steps)` steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.guidance import Condition, Denoiser, guidance_from_config
from opensora.schedulers.iddpm.gaussian import (
    add_scaled,
    model_log_variance,
    posterior_mean,
    predicted_x_0,
    prediction_target,
    q_sample,
    vlb_term,
)
from opensora.schedulers.noise_schedule import named_schedule, spaced_timesteps
from opensora.schedulers.sampling import Denoise, Sampler, Solver, Time
from opensora.schedulers.timesteps import Choice, build_sampling, build_weights
from opensora.schedulers.training import (
    at_least_fp32,
    frame_mean,
    generators_to_draw,
    keep_conditioning_frames,
    predict,
)
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

CHOICES = {
    "prediction": ("eps", "x0", "v"),
    "variance": ("learned_range", "fixed_large", "fixed_small"),
    "loss": ("mse", "rescaled_mse", "kl", "rescaled_kl"),
    "sampler": ("ancestral", "ddim"),
}


@SCHEDULERS.register_module("iddpm")
class IDDPM(Sampler):
    """Improved denoising diffusion. The defaults are the reference's: eps, learned range, MSE + VLB."""

    def __init__(  # noqa: PLR0913 - one name for each choice of the papers
        self,
        num_sampling_steps: int | None = None,
        timestep_respacing: str | None = None,
        noise_schedule: str = "linear",
        prediction: str = "eps",
        variance: str = "learned_range",
        loss: str = "mse",
        diffusion_steps: int = 1000,
        sampler: str = "ancestral",
        eta: float = 0.0,
        clip_x0: float | None = None,
        cfg_scale: float = 4.0,
        cfg_channel: int | None = None,
        guidance: Mapping[str, Any] | None = None,
        timestep_sampling: Choice = "uniform",
        loss_weighting: Choice | None = None,
        *,
        rescale_timesteps: bool = False,
    ) -> None:
        """Args:
        num_sampling_steps: N timesteps, evenly spaced, first and last included; None: all.
        timestep_respacing: instead of it: "N", "a,b,c" (counts in equal sections) or "ddimN" (integer stride).
        noise_schedule: see `opensora.schedulers.noise_schedule.named_schedule`.
        prediction: what the model predicts: "eps", "x0" or "v".
        variance: of an ancestral step: "learned_range", for which the model returns 2C channels; "fixed_small" (the
            posterior's) or "fixed_large" (beta).
        loss: "mse" (plus the VLB with a detached mean when the variance is learned), "rescaled_mse" (the VLB times
            diffusion_steps / 1000), "kl" (the VLB alone) or "rescaled_kl" (times diffusion_steps).
        sampler: "ancestral" or "ddim"; `eta` is DDIM's: 0 deterministic, 1 as noisy as DDPM.
        clip_x0: clamp each predicted x_0 to [-clip_x0, clip_x0] while sampling: 1.0 suits pixels; None, no clamp, latents.
        cfg_scale, cfg_channel, guidance: see `opensora.schedulers.guidance.Guidance`.
        timestep_sampling: "uniform", "logit-normal", "speedit" or "speed", or dict(type=NAME, option=...); see opensora/schedulers/timesteps.py.
        loss_weighting: of the MSE: "none", "p2", "min-snr" or "speed", or dict(type=NAME, option=...); by default that
            of the timestep sampling: "speedit" brings "p2", "speed" brings "speed".
        rescale_timesteps: condition the model on t * 1000 / diffusion_steps.
        """
        self.prediction, self.variance, self.loss, self.sampler = prediction, variance, loss, sampler
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"scheduler.{name}={getattr(self, name)!r} is not one of {', '.join(choices)}.")
        if loss == "rescaled_mse" and variance != "learned_range":
            raise UserError(
                f"scheduler.loss='rescaled_mse' rescales the loss of a learned variance, but variance={variance!r} is fixed; "
                "use loss='mse'."
            )
        if not 0 <= eta <= 1 or (eta and sampler != "ddim"):
            raise UserError(
                f"scheduler.eta={eta} with sampler={sampler!r}: use 0 (deterministic) to 1 (as noisy as DDPM), with sampler='ddim' only."
            )
        if clip_x0 is not None and clip_x0 <= 0:
            raise UserError(f"scheduler.clip_x0={clip_x0} must be positive; None does not clamp.")
        if num_sampling_steps is not None and timestep_respacing:
            raise UserError(
                f"scheduler: num_sampling_steps={num_sampling_steps} and timestep_respacing={timestep_respacing!r} set the "
                "same thing twice; keep one of them."
            )
        self.eta, self.clip_x0 = eta, clip_x0
        self.guidance = guidance_from_config(cfg_scale, cfg_channel, guidance)
        self.diffusion_steps = diffusion_steps
        self.schedule = named_schedule(noise_schedule, diffusion_steps)
        respacing = timestep_respacing if num_sampling_steps is None else str(num_sampling_steps)
        self.timesteps = spaced_timesteps(diffusion_steps, respacing)
        self.sampling_schedule = self.schedule.respaced(self.timesteps)
        self.time_scale = 1000 / diffusion_steps if rescale_timesteps else None
        abar = self.schedule.table["alphas_cumprod"]
        if loss in ("kl", "rescaled_kl"):
            if loss_weighting not in (None, "none"):
                raise UserError(
                    f"scheduler.loss_weighting={loss_weighting!r} weighs the MSE, which loss={loss!r} does not have."
                )
            loss_weighting = "none"
        self.timestep_sampling = build_sampling(timestep_sampling, abar)
        self.loss_weights = build_weights(loss_weighting, timestep_sampling, abar, prediction)

    @property
    def num_sampling_steps(self) -> int:
        """Denoiser calls (guided or not) per sample."""
        return len(self.timesteps)

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
            model: called as `model(x_t, t, **cond)`, with `x_mask=mask` when there is a mask.
            x0: [B, C, T, H, W], scaled latents.
            mask: [B, T] bool. False frames are conditioning: they stay clean in x_t and out of the loss, which is the
                mean over the True frames (0 when there is none).
            t: [B] int64 in [0, diffusion_steps). Like `noise` (x0's shape), drawn when None.
            generators: one per sample: t is drawn first, then the noise.
        """
        x0, rngs = at_least_fp32(x0), generators_to_draw(generators, t, noise)
        t = self.timestep_sampling.draw(rngs, x0.device) if t is None else t
        noise = randn_like(x0, rngs) if noise is None else noise.to(x0.dtype)
        c = self.schedule.gather(t, x0.ndim)
        mask = None if mask is None else mask.bool()
        x_t = keep_conditioning_frames(q_sample(x0, noise, c), x0, mask)
        timestep = t if self.time_scale is None else t.to(x0.dtype) * self.time_scale
        prediction, raw_variance = self.split(predict(model, x_t, timestep, cond, mask), x0.shape[1])

        def vlb(prediction: Tensor) -> Tensor:
            mean = posterior_mean(predicted_x_0(self.prediction, prediction, x_t, c), x_t, c)
            log_variance = model_log_variance(self.variance, raw_variance, mean, c)
            true = posterior_mean(x0, x_t, c), model_log_variance("fixed_small", None, mean, c)
            return vlb_term(x0, true, (mean, log_variance), t)

        if self.loss == "kl":
            loss = vlb(prediction)
        elif self.loss == "rescaled_kl":
            loss = vlb(prediction) * self.diffusion_steps
        else:
            loss = (prediction_target(self.prediction, x0, noise, c) - prediction) ** 2
            if self.loss_weights is not None:
                loss = loss * self.loss_weights(t).reshape(-1, *[1] * (loss.ndim - 1))
            if (
                self.variance == "learned_range"
            ):  # the mean is detached: only the variance learns from the VLB (Nichol eq. 16)
                bound = vlb(prediction.detach())
                loss = loss + (bound * (self.diffusion_steps / 1000) if self.loss == "rescaled_mse" else bound)
        return frame_mean(loss, mask)

    def split(self, output: Tensor, num_channels: int) -> tuple[Tensor, Tensor | None]:
        """[B, C or 2C, T, H, W] -> the prediction [B, C, T, H, W], and the variance channels alike if it is learned.

        Raises:
            UserError: the number of channels is not what `variance` asks for.
        """
        learned = self.variance == "learned_range"
        expected = 2 * num_channels if learned else num_channels
        if output.shape[1] != expected:
            remedy = (
                "True, or scheduler.variance to 'fixed_small' or 'fixed_large'"
                if learned
                else "False, or scheduler.variance='learned_range'"
            )
            raise UserError(
                f"scheduler.variance={self.variance!r}, but the model returned {output.shape[1]} channels for "
                f"{num_channels}-channel latents instead of {expected}: set model.pred_sigma={remedy}."
            )
        if not learned:
            return output, None
        prediction, raw_variance = output.chunk(2, dim=1)
        return prediction, raw_variance

    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> Solver:
        """The ancestral or the DDIM sampler; without noise (DDIM with eta = 0) it needs no generators."""
        noisy = self.sampler == "ancestral" or self.eta > 0
        if noisy and generators is None and self.num_sampling_steps > 1:
            raise ValueError(f"the {self.sampler} sampler draws noise: pass one generator per sample.")
        return _Run(self, generators)


class _Run:
    """One run of the ancestral or the DDIM sampler, from the last timestep of a respaced schedule to the first."""

    def __init__(self, scheduler: IDDPM, generators: Sequence[torch.Generator] | None) -> None:
        self.scheduler, self.generators = scheduler, generators
        scale, num_steps = scheduler.time_scale, len(scheduler.timesteps)
        self.timesteps: list[Time] = [t if scale is None else t * scale for t in reversed(scheduler.timesteps)]
        # by steps, not by abar: a mask of 0.3 edits in three of ten steps, as in the reference
        self.levels = [(num_steps - index) / num_steps for index in range(num_steps)]
        self.coefficients = [scheduler.sampling_schedule.at(i) for i in reversed(range(num_steps))]

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        return q_sample(x_0, noise, self.coefficients[index])

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x_{t-1} by Ho et al. 2020, algorithm 2, or Song et al. 2021, eq. 12 and 16, and x_0; the last draws nothing."""
        s, c = self.scheduler, self.coefficients[index]
        prediction, raw_variance = s.split(denoise(x, self.timesteps[index]), x.shape[1])
        x_0 = predicted_x_0(s.prediction, prediction, x, c)
        if s.clip_x0 is not None:
            x_0 = x_0.clamp(-s.clip_x0, s.clip_x0)
        is_last = index == len(self.timesteps) - 1
        if s.sampler == "ancestral":
            mean = posterior_mean(x_0, x, c)
            if not is_last:
                log_variance = model_log_variance(s.variance, raw_variance, x, c)
                mean = torch.addcmul(mean, torch.exp(0.5 * log_variance), randn_like(mean, self.generators))
            return mean, x_0
        abar, abar_prev = float(c.alphas_cumprod), float(c.alphas_cumprod_prev)
        sigma = s.eta * math.sqrt((1 - abar_prev) / (1 - abar) * (1 - abar / abar_prev))
        # eps is taken from x_0, so that a clamped x_0 is felt in both
        eps = add_scaled(x, -c.sqrt_alphas_cumprod, x_0) / c.sqrt_one_minus_alphas_cumprod
        mean = torch.add(math.sqrt(max(1 - abar_prev - sigma**2, 0.0)) * eps, x_0, alpha=math.sqrt(abar_prev))
        if s.eta > 0 and not is_last:
            mean.add_(randn_like(mean, self.generators), alpha=sigma)
        return mean, x_0


SCHEDULERS.register_variant("iddpm-speed", IDDPM, timestep_sampling="speedit")
