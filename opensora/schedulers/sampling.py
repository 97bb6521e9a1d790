"""The one loop of all samplers: guidance, frame masks, dtype, progress. An algorithm supplies a `Solver`.

The loop never waits for the device: whatever depends on a step is a Python float known before sampling starts, which
reaches the device as an argument of a kernel, and masks act through `torch.where`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.contracts import Solver
from opensora.schedulers.frame_mask import FrameMask, expand_frames
from opensora.schedulers.guidance import Condition, ConditionCache, Denoiser, Guidance, classifier_free_guidance
from opensora.schedulers.training import at_least_fp32, predict
from opensora.utils.logging import progress_bar

Time = int | float
Denoise = Callable[[Tensor, Time], Tensor]  # (x, timestep) -> the model's output, guided, [B, C or 2C, T, H, W]


class SamplingStep(NamedTuple):
    """What a caller sees after each step."""

    index: int  # type: ignore[assignment]  # 0 is the first step, num_steps - 1 the last; hides tuple.index
    num_steps: int
    timestep: Tensor  # [B]: what the model was conditioned on
    x: Tensor  # [B, C, T, H, W] after the step
    x_0: Tensor  # the prediction of the end, for previews


class Scheduler:
    """What every scheduler has; docs/architecture.md describes the `training_losses` of those that train."""

    sample_steps: Callable[..., Iterator[SamplingStep]]

    def sample(self, model: Any, z: Tensor, cond: Condition, *, progress: bool = False, **options: Any) -> Tensor:
        """x_0 [B, C, T, H, W], fp32, from the initial noise z of that shape: the end of `sample_steps`.

        Args:
            progress: show a bar.
            options: those of `sample_steps`.
        """
        steps: Any = self.sample_steps(model, z, cond, **options)
        x = z
        with closing(steps), progress_bar(desc="sampling", unit="step", disable=not progress) as bar:
            for step in steps:
                bar.total = step.num_steps
                bar.update()
                x = step.x
        return x


class Sampler(Scheduler, ABC):
    """A scheduler whose samples go through the loop of this file."""

    guidance: Guidance

    @abstractmethod
    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> Solver:
        """The solver of one run; raises a ValueError when it draws noise and there are no generators."""

    @property
    def cfg_scale(self) -> float:
        """The guidance scale where a call of `sample` sets none."""
        return self.guidance.scale

    @property
    def cfg_channel(self) -> int | None:
        """How many channels are guided; None: all."""
        return self.guidance.channels

    def sample_steps(
        self,
        model: Denoiser,
        z: Tensor,
        cond: Condition,
        *,
        null: Condition | None = None,
        mask: Tensor | None = None,
        guidance_scale: float | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Iterator[SamplingStep]:
        """The steps one by one, each computed when asked for: show progress, preview `x_0`, stop early.

        Args:
            model: called as `model(x, timestep, **cond)`, with `x_mask=` [B, T] when there is a mask.
            z: [B, C, T, H, W] noise; fp64 is sampled in fp64, everything else in fp32.
            cond, null: the condition, and the entries of it that differ for the unconditional pass (a negative prompt
                is such a `y` with its own `mask`); without `null` or with a scale of 1 there is no guidance.
            mask: [B, T]; 1 or True generates a frame from the noise in z. At 0 or False z holds a conditioning frame, which
                comes back bit for bit. Between them z holds a reference that is edited from that noise level on.
            guidance_scale: overrides `cfg_scale`.
            generators: one per sample, for the noise of the steps and of edits; a deterministic sampler needs none.

        Raises:
            UserError: there is a scale, and no step at which it has an effect.
        """
        x = at_least_fp32(z)
        solver = self.solver(x, generators)
        guidance = self.guidance if guidance_scale is None else self.guidance._replace(scale=guidance_scale)
        if null is not None:
            guidance.check_effect(solver.levels)
        frames = None if mask is None else FrameMask(mask, solver.levels, x, generators, solver.noised)
        return _steps(solver, guidance, model, x, cond, null, frames)


@torch.no_grad()
def _steps(
    solver: Solver,
    guidance: Guidance,
    model: Denoiser,
    x: Tensor,
    cond: Condition,
    null: Condition | None,
    frames: FrameMask | None,
) -> Iterator[SamplingStep]:
    cache: ConditionCache = {}
    for index, (time, level) in enumerate(zip(solver.timesteps, solver.levels, strict=True)):
        active = denoised = None  # [B, T], and the same [B, 1, T, 1, 1] where some frames are kept
        if frames is not None:
            x, active = frames.noise_entering(x, index), frames.active(index)
            denoised = None if frames.all_denoised[index] else expand_frames(active)
        timestep = _timestep_of(time, x)
        guided = classifier_free_guidance(
            model,
            null,
            guidance.scale_at(index, level),
            guidance.channels,
            rescale=guidance.rescale,
            batching=guidance.batching,
            cache=cache,
        )

        def denoise(x_t: Tensor, t: Time) -> Tensor:
            if denoised is not None and x_t is not x:  # noqa: B023 - called within this step only
                x_t = torch.where(denoised, x_t, x)  # noqa: B023
            return predict(guided, x_t, timestep if t == time else _timestep_of(t, x_t), cond, active)  # noqa: B023

        # frames that are all denoised from the first step on have one history: a solver need not keep track of them
        after, x_0 = solver.step(denoise, x, index, None if frames is None or frames.all_denoised[0] else active)
        if denoised is not None:
            after, x_0 = torch.where(denoised, after, x), torch.where(denoised, x_0, x)
        x = after
        yield SamplingStep(index, len(solver.timesteps), timestep, x, x_0)


def _timestep_of(time: Time, x: Tensor) -> Tensor:
    """[B]: int64, or x's dtype, never less than fp32."""
    dtype = torch.int64 if isinstance(time, int) else x.dtype
    return torch.full((len(x),), time, device=x.device, dtype=dtype)
