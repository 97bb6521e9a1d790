"""Training and sampling of NOVA (Deng et al. 2024, arXiv:2412.14169), sections 3.3 and 3.4.

The model sees a few patches of each frame and all of the frames before it in training; every other patch is noised on its own and the
model predicts the velocity eps - x_0 of each (rectified flow, a timestep for each patch). Sampling makes a video frame by frame,
a frame in a few steps of more and more patches in a random order, and each patch out of noise.

Sampling has the schedules of NOVA's own pipelines: the counts of patches, the noise levels, guidance and its renormalisation.
Deviations: the noise of a patch is that of the pipeline's latent, so that a video depends on its own seed alone; patches may be
made at a temperature, as in MAR (Li et al. 2024, arXiv:2406.11838, section 3.2), whose sampler adds noise at every step and scales
that. Here an ODE is solved, and what is scaled is the noise it starts from.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.guidance import Condition
from opensora.schedulers.nova.sampling import Plan, Scales, generate
from opensora.schedulers.sampling import SamplingStep, Scheduler
from opensora.schedulers.training import at_least_fp32, generators_to_draw
from opensora.utils.errors import UserError

LOSSES = ("all", "first", "later")


@SCHEDULERS.register_module("nova")
class MaskedAutoregression(Scheduler):
    """Frame by frame, patches in random order, each by flow matching."""

    def __init__(  # noqa: PLR0913 - the choices that NOVA's pipelines offer
        self,
        num_sampling_steps: int = 64,
        num_diffusion_steps: int = 25,
        cfg_scale: float = 5.0,
        min_cfg_scale: float | None = None,
        guidance_trunc: float = 0.0,
        guidance_renorm: float = 1.0,
        image_guidance_scale: float = 0.0,
        spatiotemporal_guidance_scale: float = 0.0,
        skip_layers: Sequence[int] = (),
        temperature: float = 1.0,
        shift: float = 1.0,
        loss_repeat: int = 4,
        losses: str = "all",
        min_mask_ratio: float = 0.7,
        num_timesteps: int = 1000,
    ) -> None:
        """Args:
        num_sampling_steps: steps in which the patches of a frame appear, along a cosine; 128 for the best images. Of those
            in which no patch would appear, there are none.
        num_diffusion_steps: steps from noise to a patch; 100 for the best images.
        cfg_scale, min_cfg_scale: guidance rises linearly, in step k of n by k/n of the way from `min_cfg_scale`, to
            `cfg_scale` in the last step of a frame; None: constant.
        guidance_trunc: timesteps, of `num_timesteps`, below which there is no guidance.
        guidance_renorm: the least factor by which what guidance by text gives is shrunk to the length of the conditional
            prediction; 1: never.
        image_guidance_scale: how far to go away from what is predicted without text and without the frames before; 1: the
            frames before count as they do by default; 0: off, which is the same.
        spatiotemporal_guidance_scale: how far to go away from what the image encoder predicts without `skip_layers`.
        skip_layers: indices of blocks of the image encoder.
        temperature: factor of the noise that a patch is made from, from 0 to 2; below 1 patches are likelier ones and vary
            less, at 0 they depend on their order alone.
        shift: of the noise levels, in training and sampling; above 1 there are more noisy ones.
        loss_repeat: noise draws for each patch.
        losses: "all" (the sum of both), "first" frames (images from text) or "later" frames (videos from an image).
        min_mask_ratio: the least share of a frame's patches that is hidden in training; 1 is the likeliest.
        num_timesteps: T; the model is conditioned on sigma T.
        """
        self.scales = Scales(
            cfg_scale, min_cfg_scale, guidance_trunc / max(num_timesteps, 1), guidance_renorm, image_guidance_scale,
            spatiotemporal_guidance_scale, tuple(skip_layers),
        )  # fmt: skip
        limits = (
            ("num_sampling_steps", num_sampling_steps, num_sampling_steps >= 1, "at least 1"),
            ("num_diffusion_steps", num_diffusion_steps, num_diffusion_steps >= 1, "at least 1"),
            ("loss_repeat", loss_repeat, loss_repeat >= 1, "at least 1"),
            ("num_timesteps", num_timesteps, num_timesteps >= 1, "at least 1"),
            ("losses", losses, losses in LOSSES, f"one of {', '.join(LOSSES)}"),
            ("guidance_trunc", guidance_trunc, 0 <= guidance_trunc <= num_timesteps, "from 0 to num_timesteps"),
            ("guidance_renorm", guidance_renorm, 0 <= guidance_renorm <= 1, "from 0 to 1"),
            ("skip_layers", skip_layers, all(index >= 0 for index in skip_layers), "indices of blocks, from 0"),
            ("temperature", temperature, 0 <= temperature <= 2, "from 0 (one result for every noise) to 2"),
            ("min_mask_ratio", min_mask_ratio, 0 < min_mask_ratio < 1, "in (0, 1)"),
            ("shift", shift, shift > 0, "above 0"),
        )
        for name, value, valid, expected in limits:
            if not valid:
                raise UserError(f"scheduler.{name}={value!r} is not {expected}.")
        if bool(spatiotemporal_guidance_scale) != bool(self.scales.skip):
            raise UserError(
                f"scheduler.spatiotemporal_guidance_scale={spatiotemporal_guidance_scale} and skip_layers={self.scales.skip} "
                "have an effect only together: set both, or neither."
            )
        self.num_sampling_steps, self.num_diffusion_steps = num_sampling_steps, num_diffusion_steps
        self.temperature, self.shift, self.loss_repeat, self.losses = temperature, shift, loss_repeat, losses
        self.min_mask_ratio, self.num_timesteps = min_mask_ratio, num_timesteps

    @property
    def cfg_scale(self) -> float:
        """The guidance scale where a call of `sample` sets none."""
        return self.scales.scale

    def needs_null(self, guidance_scale: float | None = None) -> bool:
        """Whether `sample` needs `null`: also without guidance by text there may be guidance by the frames before."""
        return self._scales(guidance_scale).needs_null

    def training_losses(
        self,
        model: object,
        x0: Tensor,
        cond: Condition,
        *,
        mask: Tensor | None = None,
        t: Tensor | None = None,
        noise: Tensor | None = None,
        visible: Tensor | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Tensor:
        """The loss of each sample [B] fp32: its mean over hidden patches of the first frame, plus that of the later ones.

        Args:
            model: a NOVA, or an engine's wrapper of one.
            x0: [B, C, T, H, W], scaled latents.
            cond: the model's conditions.
            mask: [B, T] bool; False frames are conditioning, and out of the loss.
            t: [B, R, T, N] in (0, T], of each patch; R is `loss_repeat`.
            noise: [B, R, C, T, H, W].
            visible: [B, T, V] int64, the patches that are shown. Like t and noise, drawn when None.
            generators: one for each sample. The share of hidden patches is one for the whole batch, of the first sample's.

        Raises:
            UserError: there are no later frames, and the losses are of those alone.
        """
        rngs, nova, x0 = generators_to_draw(generators, t, noise, visible), _unwrap_nova(model), at_least_fp32(x0)
        T, H, W = nova.check_size(x0.shape[2:])
        if self.losses == "later" and T == 1:
            raise UserError(
                "scheduler.losses='later' leaves nothing to learn from a video of one latent frame, which is its first. Train with "
                "losses='all' or 'first', or from longer videos (num_frames, and in a bucket_config no bucket of images)."
            )
        p = nova.image_patch
        N = H * W // p**2
        if visible is None:
            visible = self._draw_visible(rngs, T, N, x0.device)
        if t is None:
            t = self._draw_times(rngs, (self.loss_repeat, T, N), x0.device)
        if noise is None:
            shape = (self.loss_repeat, *x0.shape[1:])
            noise = torch.stack([torch.randn(shape, generator=g, device=g.device) for g in rngs]).to(x0)
        sigma = patches_to_cells(t.to(x0.dtype) / self.num_timesteps, (H, W), p)[:, :, None]  # [B, R, 1, T, H, W]
        clean = x0[:, None]
        noisy = (1 - sigma) * clean + sigma * noise
        velocity = model(x0, t, noisy=noisy, visible=visible, **cond).to(x0.dtype)  # type: ignore[operator]
        hidden = torch.ones(len(x0), T, N, device=x0.device).scatter(2, visible, 0.0)
        weight = patches_to_cells(hidden, (H, W), p)  # [B, T, H, W]
        errors = (((velocity - (noise - clean)) ** 2).mean(dim=(1, 2)) * weight).sum(dim=(2, 3))  # [B, T]
        losses = errors / weight.sum(dim=(2, 3)).clamp(min=1)
        learnt = torch.ones_like(losses) if mask is None else mask.to(losses)
        first = losses[:, 0] * learnt[:, 0]
        later = (losses * learnt)[:, 1:].sum(1) / learnt[:, 1:].sum(1).clamp(min=1)
        return {"all": first + later, "first": first, "later": later}[self.losses].float()

    def sample_steps(
        self,
        model: object,
        z: Tensor,
        cond: Condition,
        *,
        null: Condition | None = None,
        mask: Tensor | None = None,
        guidance_scale: float | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Iterator[SamplingStep]:
        """The steps one by one: after each, more patches of one frame are there.

        Under autocast the weights are in its dtype until the steps are exhausted or closed.

        Args:
            model: a NOVA.
            z: [B, C, T, H, W]: the noise that each patch is made from; a conditioning frame itself.
            cond, null: the condition, and the entries of it that differ without text.
            mask: [B, T]; False (0) frames are conditioning, such as the first one of a video from an image. They come first.
            guidance_scale: overrides `cfg_scale`.
            generators: one for each sample, for the order of its patches, which all its frames share.

        Raises:
            UserError: a frame is to be edited, or conditions earlier ones; or `skip_layers` names no block.
        """
        if generators is None:
            raise ValueError("the order of the patches is random: pass one generator per sample.")
        nova, z = _unwrap_nova(model), at_least_fp32(z)
        T, H, W = nova.check_size(z.shape[2:])
        N, num_blocks = H * W // nova.image_patch**2, len(nova.image_encoder.blocks)
        scales = self._scales(guidance_scale)
        if beyond := [index for index in scales.skip if index >= num_blocks]:
            raise UserError(
                f"scheduler.skip_layers={scales.skip}: the image encoder has blocks 0 to {num_blocks - 1}, and no {beyond[0]}."
            )
        keep = torch.zeros(len(z), T, dtype=torch.bool)
        if mask is not None:
            if ((mask != 0) & (mask != 1)).any():
                raise UserError(
                    "the scheduler 'nova' generates a frame or keeps it; an edit ratio between 0 and 1 has no meaning here. Use 0 "
                    "or 1 in mask_strategy."
                )
            keep = mask == 0
            if (~keep[:, :-1] & keep[:, 1:]).any():
                raise UserError(
                    "the scheduler 'nova' generates frame after frame, and none of them sees a later one: a conditioning frame "
                    "after a generated one would have no effect on it. Condition on the first frames (--image, --extend), and "
                    "leave out --last-image and later frames in mask_strategy."
                )
        order = torch.stack([torch.randperm(N, generator=g, device=g.device) for g in generators]).to(z.device)
        known = known_patches(self.num_sampling_steps, N)
        plan = Plan(order, known, self.noise_levels(), self.num_timesteps, self.temperature, scales)
        return generate(nova, z, cond, null, keep.to(z.device), plan)

    def noise_levels(self) -> list[float]:
        """Before each step of a patch, and 0 at its end: evenly from the first to the last level of training, then shifted.

        As published, and in diffusers: the last level of training, 1 / T, is shifted twice.
        """
        steps, last = self.num_diffusion_steps, self._shifted(1 / self.num_timesteps)
        return [*(self._shifted(1 + (last - 1) * i / max(steps - 1, 1)) for i in range(steps)), 0.0]

    def _scales(self, guidance_scale: float | None) -> Scales:
        return self.scales if guidance_scale is None else self.scales._replace(scale=guidance_scale)

    def _shifted(self, sigma: Any) -> Any:
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)

    def _draw_visible(
        self, generators: Sequence[torch.Generator], num_frames: int, num_patches: int, device: torch.device
    ) -> Tensor:
        """[B, T, V] int64. The hidden share is a normal variable of mean 1 and deviation 0.25, truncated to [min, 1]."""
        first = generators[0]
        if first.device.type != "cpu":  # the share is a size: the host would wait for all work of the GPU
            first = torch.Generator().manual_seed(first.initial_seed())
        low, high = (math.erf((edge - 1) / 0.25 / math.sqrt(2)) for edge in (self.min_mask_ratio, 1.0))
        u = low + (high - low) * torch.rand(1, generator=first, dtype=torch.float64)
        ratio = float(1 + 0.25 * math.sqrt(2) * torch.erfinv(u))
        count = num_patches - max(1, math.ceil(num_patches * ratio))
        ranks = [torch.rand(num_frames, num_patches, generator=g, device=g.device) for g in generators]
        return torch.stack(ranks).argsort(dim=2)[..., :count].to(device)

    def _draw_times(
        self, generators: Sequence[torch.Generator], shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """[B, R, T, N] fp32, logit-normal (Esser et al. 2024), one of `num_timesteps` levels from 1 to T, shifted."""
        draws = torch.stack([torch.randn(shape, generator=g, device=g.device) for g in generators]).to(device)
        sigma = ((draws.sigmoid() * self.num_timesteps).floor() + 1).clamp(max=self.num_timesteps) / self.num_timesteps
        return self._shifted(sigma) * self.num_timesteps


def known_patches(num_steps: int, num_patches: int) -> list[int]:
    """How many patches are there before each step and at the end, `[0, ..., num_patches]`, along 1 - cos; none twice."""
    hidden = {round(num_patches * math.cos(math.pi / 2 * k / num_steps)) for k in range(num_steps + 1)}
    return sorted(num_patches - count for count in hidden)


def _unwrap_nova(model: Any) -> Any:
    """The NOVA (`opensora.models.nova.nova`) in an engine's wrappers, whose methods are called one by one.

    Raises:
        UserError: it is a denoiser of entire videos.
    """
    inner = model
    while not hasattr(inner, "next_condition"):
        if not hasattr(inner, "module"):
            raise UserError(
                f"the scheduler 'nova' trains and samples patch by patch, which {type(model).__name__} cannot: use a NOVA "
                "model, or another scheduler."
            )
        inner = inner.module
    return inner


def patches_to_cells(values: Tensor, size: tuple[int, int], patch: int) -> Tensor:
    """A value for each patch `[..., N]` -> for each latent cell `[..., H, W]`."""
    grid = values.unflatten(-1, (size[0] // patch, size[1] // patch))
    return torch.repeat_interleave(torch.repeat_interleave(grid, patch, dim=-1), patch, dim=-2)
