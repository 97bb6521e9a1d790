"""IDDPM: training loss and sampling of discrete-time diffusion (Ho et al. 2020; Nichol & Dhariwal 2021).

As in DiT and Open-Sora, with these additions and deviations:
- v-prediction (Salimans & Ho 2022) and DDIM (Song et al. 2021) beside the ancestral sampler;
- training always visits all `diffusion_steps`; `num_sampling_steps` and `timestep_respacing` speak of sampling only;
- noise comes from one generator per sample, so a sample does not depend on its batch;
- kept frames leave the sampler bit-identical, and an edit takes `round(mask * steps)` steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from opensora.registry import SCHEDULERS
from opensora.schedulers.guidance import Condition, Denoiser, classifier_free_guidance
from opensora.schedulers.diffusion import (
    model_log_variance,
    posterior_mean,
    predicted_x_0,
    prediction_target,
    q_sample,
)
from opensora.schedulers.frame_mask import FrameMask, per_frame
from opensora.schedulers.iddpm.options import resolve_options
from opensora.schedulers.iddpm.respace import spaced_timesteps
from opensora.schedulers.iddpm.samplers import ancestral_step, ddim_step
from opensora.schedulers.noise_schedule import Coefficients, named_schedule
from opensora.schedulers.iddpm.vlb import vlb_term
from opensora.utils.errors import UserError
from opensora.utils.seed import randint, randn_like


class _Output(NamedTuple):
    """The model's output, split: `prediction` [B, C, T, H, W], and `variance` alike when it is learned."""

    prediction: Tensor
    variance: Tensor | None


@SCHEDULERS.register_module("iddpm")
class IDDPM:
    """Improved denoising diffusion. The defaults are the reference's: eps, learned range, MSE + VLB."""

    def __init__(  # noqa: PLR0913 - the reference's keys, and a name for each choice that they spell with booleans
        self,
        num_sampling_steps: int | None = None,
        timestep_respacing: str | None = None,
        noise_schedule: str = "linear",
        prediction: str | None = None,
        variance: str | None = None,
        loss: str | None = None,
        diffusion_steps: int = 1000,
        sampler: str = "ancestral",
        eta: float = 0.0,
        clip_x0: float | None = None,
        cfg_scale: float = 4.0,
        cfg_channel: int | None = None,
        *,
        learn_sigma: bool | None = None,
        predict_xstart: bool | None = None,
        sigma_small: bool | None = None,
        use_kl: bool | None = None,
        rescale_learned_sigmas: bool | None = None,
    ) -> None:
        """Args:
        num_sampling_steps: N timesteps, evenly spaced, first and last included; None: all.
        timestep_respacing: instead of it: "N", "a,b,c" (counts in equal sections) or "ddimN" (integer stride).
        noise_schedule: "linear" or "squaredcos_cap_v2".
        prediction: what the model predicts: "eps" (default), "x0" or "v".
        variance: of an ancestral step: "learned_range" (default; the model returns 2C channels), "fixed_small" (the
            posterior's) or "fixed_large" (beta).
        loss: "mse" (default; plus the VLB with a detached mean when the variance is learned), "rescaled_mse" (the VLB
            times diffusion_steps / 1000), "kl" (the VLB alone) or "rescaled_kl" (times diffusion_steps).
        sampler: "ancestral" or "ddim"; `eta` is DDIM's: 0 deterministic, 1 as noisy as DDPM.
        clip_x0: clamp each predicted x_0 to [-clip_x0, clip_x0] while sampling: 1.0 suits pixels; None, no clamp, latents.
        cfg_scale, cfg_channel: default guidance scale, and how many channels it guides (None: all).
        learn_sigma, predict_xstart, sigma_small, use_kl, rescale_learned_sigmas: Open-Sora's spelling of
            `variance`, `prediction` and `loss`; an error where they contradict those.
        """
        named = {"prediction": prediction, "variance": variance, "loss": loss, "sampler": sampler}
        legacy = {
            "learn_sigma": learn_sigma,
            "predict_xstart": predict_xstart,
            "sigma_small": sigma_small,
            "use_kl": use_kl,
            "rescale_learned_sigmas": rescale_learned_sigmas,
        }
        self.prediction, self.variance, self.loss, self.sampler = resolve_options(named, legacy)
        self.eta, self.clip_x0 = _checked_eta(eta, sampler), _checked_clip(clip_x0)
        self.cfg_scale, self.cfg_channel = cfg_scale, cfg_channel
        self.diffusion_steps = diffusion_steps
        self.schedule = named_schedule(noise_schedule, diffusion_steps)
        self.timesteps = spaced_timesteps(diffusion_steps, _respacing(num_sampling_steps, timestep_respacing))
        self.sampling_schedule = self.schedule.respaced(self.timesteps)

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
            mask: [B, T] bool. False frames are given: they stay clean in x_t and out of the loss, which is the mean
                over the True frames (0 when there is none).
            t: [B] int64 in [0, diffusion_steps). Like `noise` (x0's shape), drawn when not given.
            generators: one per sample: t is drawn first, then the noise.
        """
        if generators is None and (t is None or noise is None):
            raise ValueError("training_losses draws t and noise: pass one generator per sample, or both of them.")
        x0 = _at_least_fp32(x0)
        if t is None:
            assert generators is not None, "checked above"
            t = randint(self.diffusion_steps, generators, x0.device)
        noise = randn_like(x0, generators) if noise is None else noise.to(x0.dtype)
        c = self.schedule.gather(t, x0.ndim)
        x_t = q_sample(x0, noise, c)
        if mask is not None:
            mask = mask.bool()
            x_t = torch.where(per_frame(mask), x_t, x0)
        output = self._predict(model, x_t, t, cond, mask)
        return _frame_mean(self._elementwise_loss(output, x0, x_t, noise, t, c), mask)

    @torch.no_grad()
    def sample(
        self,
        model: Denoiser,
        z: Tensor,
        cond: Condition,
        *,
        null: Condition | None = None,
        mask: Tensor | None = None,
        guidance_scale: float | None = None,
        generators: Sequence[torch.Generator] | None = None,
        progress: bool = False,
    ) -> Tensor:
        """x_0 [B, C, T, H, W], fp32, from the initial noise z of that shape.

        Args:
            cond, null: the condition, and the entries of it that differ for the unconditional pass; without `null`
                or with a scale of 1 there is no guidance, and the batch is not doubled.
            mask: [B, T]; 1 or True generates a frame from the noise in z. At 0 or False z holds a given frame, which
                is returned bit for bit. Between them z holds a reference that the last `mask` of the steps edit.
            guidance_scale: overrides `cfg_scale`.
            generators: one per sample, for the noise of the steps; DDIM with eta = 0 and no float mask needs none.
        """
        x = _at_least_fp32(z)
        noisy = self.sampler == "ancestral" or self.eta > 0
        if noisy and generators is None and self.num_sampling_steps > 1:
            raise ValueError(f"the {self.sampler} sampler draws noise: pass one generator per sample.")
        scale = self.cfg_scale if guidance_scale is None else guidance_scale
        guided = classifier_free_guidance(model, null, scale, self.cfg_channel)
        frames = None if mask is None else FrameMask(mask, self.num_sampling_steps, x, generators)
        for step in tqdm(reversed(range(self.num_sampling_steps)), total=self.num_sampling_steps, disable=not progress):
            c = self.sampling_schedule.at(step)
            active = None
            if frames is not None:
                x, active = frames.noise_entering(x, step, c), frames.active(step)
            t = torch.full((len(x),), self.timesteps[step], device=x.device, dtype=torch.int64)
            output = self._predict(guided, x, t, cond, active)
            x_prev = self._reverse_step(output, x, c, generators if step > 0 else None)
            x = x_prev if active is None else torch.where(per_frame(active), x_prev, x)
        return x

    def _predict(self, model: Denoiser, x_t: Tensor, t: Tensor, cond: Condition, x_mask: Tensor | None) -> _Output:
        given = {} if x_mask is None else {"x_mask": x_mask}
        output = model(x_t, t, **cond, **given).to(x_t.dtype)
        num_channels = x_t.shape[1]
        expected = 2 * num_channels if self.variance == "learned_range" else num_channels
        if output.shape[1] != expected:
            raise UserError(_channel_message(self.variance, num_channels, output.shape[1]))
        if self.variance != "learned_range":
            return _Output(output, None)
        return _Output(*output.chunk(2, dim=1))

    def _elementwise_loss(
        self, output: _Output, x_0: Tensor, x_t: Tensor, noise: Tensor, t: Tensor, c: Coefficients
    ) -> Tensor:
        if self.loss in ("kl", "rescaled_kl"):
            vlb = self._vlb(output, x_0, x_t, t, c)
            return vlb * self.diffusion_steps if self.loss == "rescaled_kl" else vlb
        mse = (prediction_target(self.prediction, x_0, noise, c) - output.prediction) ** 2
        if self.variance != "learned_range":
            return mse
        # the mean is detached: only the variance learns from the VLB (Nichol eq. 16)
        vlb = self._vlb(output._replace(prediction=output.prediction.detach()), x_0, x_t, t, c)
        return mse + (vlb * (self.diffusion_steps / 1000) if self.loss == "rescaled_mse" else vlb)

    def _vlb(self, output: _Output, x_0: Tensor, x_t: Tensor, t: Tensor, c: Coefficients) -> Tensor:
        mean = posterior_mean(predicted_x_0(self.prediction, output.prediction, x_t, c), x_t, c)
        log_variance = model_log_variance(self.variance, output.variance, mean, c)
        true = posterior_mean(x_0, x_t, c), model_log_variance("fixed_small", None, mean, c)
        return vlb_term(x_0, true, (mean, log_variance), t)

    def _reverse_step(
        self, output: _Output, x_t: Tensor, c: Coefficients, generators: Sequence[torch.Generator] | None
    ) -> Tensor:
        x_0 = predicted_x_0(self.prediction, output.prediction, x_t, c)
        if self.clip_x0 is not None:
            x_0 = x_0.clamp(-self.clip_x0, self.clip_x0)
        if self.sampler == "ddim":
            return ddim_step(x_0, x_t, self.eta, c, generators)
        return ancestral_step(x_0, x_t, model_log_variance(self.variance, output.variance, x_t, c), c, generators)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _frame_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """[B, C, T, H, W] -> [B] fp32: the mean, over the True frames only when there is a mask [B, T]."""
    frames = x.float().mean(dim=(1, 3, 4))  # [B, T]
    if mask is None:
        return frames.mean(dim=1)
    return (frames * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def _respacing(num_sampling_steps: int | None, timestep_respacing: str | None) -> str | None:
    if num_sampling_steps is None:
        return None if timestep_respacing is None else str(timestep_respacing)
    if timestep_respacing:
        raise UserError(
            f"scheduler: num_sampling_steps={num_sampling_steps} and timestep_respacing={timestep_respacing!r} say the "
            "same thing twice; keep one of them."
        )
    return str(num_sampling_steps)


def _checked_eta(eta: float, sampler: str) -> float:
    if eta < 0:
        raise UserError(f"scheduler.eta={eta} is negative; use 0 (deterministic) to 1 (as noisy as DDPM).")
    if eta and sampler != "ddim":
        raise UserError(f"scheduler.eta={eta} has no effect on the {sampler!r} sampler; set sampler='ddim'.")
    return eta


def _checked_clip(clip_x0: float | None) -> float | None:
    if clip_x0 is not None and clip_x0 <= 0:
        raise UserError(f"scheduler.clip_x0={clip_x0} must be positive; None does not clamp.")
    return clip_x0


def _channel_message(variance: str, num_channels: int, num_returned: int) -> str:
    start = (
        f"scheduler.variance={variance!r}, but the model returned {num_returned} channels for {num_channels}-channel"
    )
    if variance == "learned_range":
        return (
            f"{start} latents instead of {2 * num_channels}: set model.pred_sigma=True, or scheduler.variance to "
            "'fixed_small' or 'fixed_large'."
        )
    return (
        f"{start} latents instead of {num_channels}: set model.pred_sigma=False, or scheduler.variance='learned_range'."
    )
