"""IDDPM: training loss and sampling of discrete-time diffusion (Ho et al. 2020; Nichol & Dhariwal 2021).

As in DiT and Open-Sora, with these additions and deviations:
- v-prediction (Salimans & Ho 2022) and DDIM (Song et al. 2021) next to the ancestral sampler;
- training always visits all `diffusion_steps`; `num_sampling_steps` and `timestep_respacing` are for sampling only;
- noise comes from one generator per sample, so a sample does not depend on its batch;
- kept frames leave the sampler bit-identical, and an edit takes `round(mask * steps)` steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from opensora.registry import SCHEDULERS
from opensora.schedulers.guidance import Condition, Denoiser, guidance_from_config
from opensora.schedulers.iddpm.gaussian import (
    LEARNED,
    eps_from_x_0,
    model_log_variance,
    posterior_mean,
    predicted_x_0,
    prediction_target,
    prior_term,
    q_sample,
    vlb_term,
)
from opensora.schedulers.iddpm.options import resolve_options, spaced_timesteps
from opensora.schedulers.noise_schedule import Coefficients, named_schedule
from opensora.schedulers.sampling import Denoise, Sampler, Solver, Time, timestep_of
from opensora.schedulers.timesteps import Choice, build_sampling, build_weights
from opensora.schedulers.training import (
    at_least_fp32,
    check_draws,
    draw_noise,
    frame_mean,
    keep_conditioning_frames,
    predict,
)
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like


class BitsPerDim(NamedTuple):
    """A bound on the negative log likelihood, in bits per dimension, and its parts (Ho eq. 5).

    Columns are the sampler's timesteps, ascending.
    """

    total: Tensor  # [B]
    prior: Tensor  # [B]: of x_T
    vlb: Tensor  # [B, num_timesteps]; at timestep 0 the likelihood of x_0
    x_0_mse: Tensor  # [B, num_timesteps]
    mse: Tensor  # [B, num_timesteps]: of the noise


@SCHEDULERS.register_module("iddpm")
class IDDPM(Sampler):
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
        guidance: Mapping[str, Any] | None = None,
        timestep_sampling: Choice | None = None,
        loss_weighting: Choice | None = None,
        *,
        rescale_timesteps: bool = False,
        learn_sigma: bool | None = None,
        predict_xstart: bool | None = None,
        sigma_small: bool | None = None,
        use_kl: bool | None = None,
        rescale_learned_sigmas: bool | None = None,
        faster: bool | None = None,
    ) -> None:
        """Args:
        num_sampling_steps: N timesteps, evenly spaced, first and last included; None: all.
        timestep_respacing: instead of it: "N", "a,b,c" (counts in equal sections) or "ddimN" (integer stride).
        noise_schedule: "linear", "squaredcos_cap_v2" (also "cosine"), "scaled_linear", "quad", "warmup10", "warmup50",
            "const" or "jsd".
        prediction: what the model predicts: "eps" (default), "x0", "v" or "previous_x" (the mean of x_{t-1}).
        variance: of an ancestral step: "learned_range" (default) or "learned" (the log variance itself), for which the
            model returns 2C channels; "fixed_small" (the posterior's) or "fixed_large" (beta).
        loss: "mse" (default; plus the VLB with a detached mean when the variance is learned), "rescaled_mse" (the VLB
            times diffusion_steps / 1000), "kl" (the VLB alone) or "rescaled_kl" (times diffusion_steps).
        sampler: "ancestral" or "ddim"; `eta` is DDIM's: 0 deterministic, 1 as noisy as DDPM.
        clip_x0: clamp each predicted x_0 to [-clip_x0, clip_x0] while sampling: 1.0 suits pixels; None, no clamp, latents.
        cfg_scale, cfg_channel, guidance: see `opensora.schedulers.guidance.Guidance`.
        timestep_sampling: "uniform" (default), "logit-normal", "speedit", "speed" or "loss-second-moment", or
            dict(type=NAME, option=...); see opensora/schedulers/timesteps.py.
        loss_weighting: of the MSE: "none", "p2", "min-snr" or "speed", or dict(type=NAME, option=...); by default that
            of the timestep sampling: "speedit" brings "p2", "speed" brings "speed".
        rescale_timesteps: condition the model on t * 1000 / diffusion_steps.
        learn_sigma, predict_xstart, sigma_small, use_kl, rescale_learned_sigmas, faster: older spellings of
            `variance`, `prediction`, `loss` and (faster=True) timestep_sampling="speedit"; an error where they
            contradict those.
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
        if not 0 <= eta <= 1:
            raise UserError(f"scheduler.eta={eta}: use 0 (deterministic) to 1 (as noisy as DDPM).")
        if eta and sampler != "ddim":
            raise UserError(f"scheduler.eta={eta} has no effect on the {sampler!r} sampler; set sampler='ddim'.")
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
        respacing = timestep_respacing if num_sampling_steps is None else num_sampling_steps
        self.timesteps = spaced_timesteps(diffusion_steps, None if respacing is None else str(respacing))
        self.sampling_schedule = self.schedule.respaced(self.timesteps)
        self.time_scale = 1000 / diffusion_steps if rescale_timesteps else None
        abar = self.schedule.table["alphas_cumprod"]
        if self.prediction == "eps" and abar[-1] == 0:
            raise UserError(
                f"scheduler.prediction='eps' with noise_schedule={noise_schedule!r}, which ends in pure noise: there the "
                "noise has nothing of x_0. Use prediction='v' or 'x0'."
            )
        if self.prediction == "previous_x" and len(self.timesteps) < diffusion_steps:
            raise UserError(
                "scheduler.prediction='previous_x' predicts one training timestep back, so that none can be left out: "
                "drop num_sampling_steps and timestep_respacing, or predict 'eps', 'x0' or 'v'."
            )
        if self.loss in ("kl", "rescaled_kl"):  # a loss without an MSE has nothing to weigh
            if loss_weighting not in (None, "none"):
                raise UserError(
                    f"scheduler.loss_weighting={loss_weighting!r} weighs the MSE, which loss={self.loss!r} has not."
                )
            loss_weighting = "none"
        sampling = _sampling_choice(timestep_sampling, faster=faster)
        self.timestep_sampling = build_sampling(sampling, abar)
        self.loss_weights = build_weights(loss_weighting, sampling, abar, self.prediction)

    @property
    def num_sampling_steps(self) -> int:
        """Denoiser calls (guided or not) per sample."""
        return len(self.timesteps)

    @property
    def model_times(self) -> Sequence[Time]:
        """What the model is conditioned on at each of `timesteps`."""
        return self.timesteps if self.time_scale is None else [t * self.time_scale for t in self.timesteps]

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

        A timestep sampling that learns from losses does so here, where t is drawn and gradients are on.
        """
        check_draws(generators, t, noise)
        x0 = at_least_fp32(x0)
        drawn = t is None
        if t is None:
            assert generators is not None, "checked above"
            t = self.timestep_sampling.draw(generators, x0.device)
        noise = draw_noise(x0, noise, generators)
        c = self.schedule.gather(t, x0.ndim)
        mask = None if mask is None else mask.bool()
        x_t = keep_conditioning_frames(q_sample(x0, noise, c), x0, mask)
        timestep = t if self.time_scale is None else t.to(x0.dtype) * self.time_scale
        prediction, raw_variance = self.split(predict(model, x_t, timestep, cond, mask), x0.shape[1])
        if self.loss in ("kl", "rescaled_kl"):
            x_0 = predicted_x_0(self.prediction, prediction, x_t, c)
            loss = self._vlb(raw_variance, x_0, x0, x_t, t, c)
            loss = loss * self.diffusion_steps if self.loss == "rescaled_kl" else loss
        else:
            loss = (prediction_target(self.prediction, x0, noise, c) - prediction) ** 2
            if self.loss_weights is not None:
                loss = loss * self.loss_weights(t).reshape(-1, *[1] * (loss.ndim - 1))
            if self.variance in LEARNED:  # the mean is detached: only the variance learns from the VLB (Nichol eq. 16)
                x_0 = predicted_x_0(self.prediction, prediction.detach(), x_t, c)
                vlb = self._vlb(raw_variance, x_0, x0, x_t, t, c)
                loss = loss + (vlb * (self.diffusion_steps / 1000) if self.loss == "rescaled_mse" else vlb)
        losses = frame_mean(loss, mask)
        return self.timestep_sampling.corrected(t, losses) if drawn else losses

    def split(self, output: Tensor, num_channels: int) -> tuple[Tensor, Tensor | None]:
        """[B, C or 2C, T, H, W] -> the prediction [B, C, T, H, W], and the variance channels alike if it is learned.

        Raises:
            UserError: the number of channels is not what `variance` asks for.
        """
        learned = self.variance in LEARNED
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
        prediction, *raw_variance = output.chunk(2, dim=1) if learned else (output,)
        return prediction, raw_variance[0] if learned else None

    def _vlb(
        self, raw_variance: Tensor | None, x_0_of_model: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor, c: Coefficients
    ) -> Tensor:
        mean = posterior_mean(x_0_of_model, x_t, c)
        log_variance = model_log_variance(self.variance, raw_variance, mean, c)
        true = posterior_mean(x_0, x_t, c), model_log_variance("fixed_small", None, mean, c)
        return vlb_term(x_0, true, (mean, log_variance), t)

    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> Solver:
        """The ancestral or the DDIM sampler; without noise (DDIM with eta = 0) it needs no generators."""
        noisy = self.sampler == "ancestral" or self.eta > 0
        if noisy and generators is None and self.num_sampling_steps > 1:
            raise ValueError(f"the {self.sampler} sampler draws noise: pass one generator per sample.")
        return _Run(self, generators)

    @torch.no_grad()
    def encode(
        self,
        model: Denoiser,
        x0: Tensor,
        cond: Condition,
        *,
        null: Condition | None = None,
        guidance_scale: float = 1.0,
        progress: bool = False,
    ) -> Tensor:
        """The noise z [B, C, T, H, W] from which DDIM with eta = 0 samples x0: its steps in reverse (Song, eq. 14).

        Each step takes the prediction at its start, so that the more steps there are, the closer
        `sample(model, encode(model, x0, cond), cond, guidance_scale=1)` is to x0.
        """
        x = at_least_fp32(x0)
        guidance = self.guidance._replace(scale=guidance_scale)
        for i in tqdm(range(len(self.timesteps) - 1), disable=not progress):
            here, there = self.sampling_schedule.at(i), self.sampling_schedule.at(i + 1)
            guided = guidance.wrap(model, null, i, (i + 1) / len(self.timesteps))
            output = predict(guided, x, timestep_of(self.model_times[i], x), cond, None)
            x_0 = predicted_x_0(self.prediction, self.split(output, x.shape[1])[0], x, here)
            x = q_sample(x_0, eps_from_x_0(x_0, x, here), there)
        return x

    @torch.no_grad()
    def bits_per_dim(
        self,
        model: Denoiser,
        x0: Tensor,
        cond: Condition,
        *,
        generators: Sequence[torch.Generator],
        progress: bool = False,
    ) -> BitsPerDim:
        """The variational bound on -log2 p(x0) over the sampler's timesteps, per dimension; x0 [B, C, T, H, W].

        The likelihood of x_0 counts 8-bit pixels in [-1, 1]; for latents the sum only compares models.
        """
        x0 = at_least_fp32(x0)
        schedule, terms = self.sampling_schedule, []
        for i in tqdm(reversed(range(len(self.timesteps))), total=len(self.timesteps), disable=not progress):
            c, noise = schedule.at(i), randn_like(x0, generators)
            x_t = q_sample(x0, noise, c)
            output = predict(model, x_t, timestep_of(self.model_times[i], x_t), cond, None)
            prediction, raw_variance = self.split(output, x0.shape[1])
            x_0 = predicted_x_0(self.prediction, prediction, x_t, c)
            if self.clip_x0 is not None:
                x_0 = x_0.clamp(-self.clip_x0, self.clip_x0)
            step = torch.full((len(x0),), i, device=x0.device)
            parts = (
                self._vlb(raw_variance, x_0, x0, x_t, step, c),
                (x_0 - x0) ** 2,
                (eps_from_x_0(x_0, x_t, c) - noise) ** 2,
            )
            terms.append(torch.stack([frame_mean(part, None) for part in parts]))  # [3, B]
        vlb, x_0_mse, mse = torch.stack(terms[::-1], dim=2)  # each [B, num_timesteps]
        prior = frame_mean(prior_term(x0, schedule.at(schedule.num_timesteps - 1)), None)
        return BitsPerDim(vlb.sum(dim=1) + prior, prior, vlb, x_0_mse, mse)


class _Run:
    """One run of the ancestral or the DDIM sampler, from the last timestep of a respaced schedule to the first."""

    def __init__(self, scheduler: IDDPM, generators: Sequence[torch.Generator] | None) -> None:
        self.scheduler, self.generators = scheduler, generators
        self.timesteps = scheduler.model_times[::-1]
        num_steps = len(self.timesteps)
        # by steps, not by abar: a mask of 0.3 edits in three of ten steps, as in the reference
        self.levels = [(num_steps - index) / num_steps for index in range(num_steps)]

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        return q_sample(x_0, noise, self._coefficients(index))

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x_{t-1} by Ho et al. 2020, algorithm 2, or Song et al. 2021, eq. 12 and 16, and x_0; the last draws nothing."""
        s, c = self.scheduler, self._coefficients(index)
        prediction, raw_variance = s.split(denoise(x, self.timesteps[index]), x.shape[1])
        x_0 = predicted_x_0(s.prediction, prediction, x, c)
        if s.clip_x0 is not None:
            x_0 = x_0.clamp(-s.clip_x0, s.clip_x0)
        is_last = index == len(self.timesteps) - 1
        if s.sampler == "ancestral":
            mean = posterior_mean(x_0, x, c)
            log_variance = model_log_variance(s.variance, raw_variance, x, c)
            if not is_last:
                mean = torch.addcmul(mean, torch.exp(0.5 * log_variance), randn_like(mean, self.generators))
            return mean, x_0
        abar, abar_prev = float(c.alphas_cumprod), float(c.alphas_cumprod_prev)
        sigma = s.eta * math.sqrt((1 - abar_prev) / (1 - abar) * (1 - abar / abar_prev))
        # eps is taken from x_0, so that a clamped x_0 is felt in both
        direction = math.sqrt(max(1 - abar_prev - sigma**2, 0.0)) * eps_from_x_0(x_0, x, c)
        mean = torch.add(direction, x_0, alpha=math.sqrt(abar_prev))
        if s.eta > 0 and not is_last:
            mean.add_(randn_like(mean, self.generators), alpha=sigma)
        return mean, x_0

    def _coefficients(self, index: int) -> Coefficients:
        return self.scheduler.sampling_schedule.at(len(self.timesteps) - 1 - index)


SCHEDULERS.register_variant("iddpm-speed", IDDPM, faster=True)


def _sampling_choice(choice: Choice | None, *, faster: bool | None) -> Choice:
    """`timestep_sampling`, or where it is not set what SpeeDiT's and Open-Sora's `faster` stands for."""
    if choice is None:
        return "speedit" if faster else "uniform"
    if faster is False and choice != "uniform":
        raise UserError(f"scheduler: faster=False and timestep_sampling={choice!r} contradict each other; drop faster.")
    if faster and choice in ("uniform", {"type": "uniform"}):
        raise UserError("scheduler: faster=True and timestep_sampling='uniform' contradict each other; drop one.")
    return choice
