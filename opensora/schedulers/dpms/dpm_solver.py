"""DPM-Solver: fast sampling of a model that IDDPM trained (Lu et al. 2022a, arXiv:2206.00927; 2022b, arXiv:2211.01095).

Deviations from the authors' code, each with a test:
- the third-order multistep update weighs the second derivative in full; theirs (and diffusers') counts it half, which
  leaves a solver of second order;
- a schedule that ends in almost pure noise (the cosine) is entered at its last timestep with lambda >= -5.1; the model is
  always told the true timestep;
- frame masks work as in every scheduler here; noise (of the SDE solver) comes from one generator per sample.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from opensora.registry import SCHEDULERS
from opensora.schedulers.dpms.grid import SKIP_TYPES, rounded
from opensora.schedulers.dpms.history import History
from opensora.schedulers.dpms.options import check_choices, check_together, lowers_the_last_orders, thresholds
from opensora.schedulers.dpms.plan import Solver, Step, block_orders, blocks, multistep, singlestep
from opensora.schedulers.dpms.predictions import to_eps, to_x_0
from opensora.schedulers.dpms.process import CLEAN, Level, VariancePreserving
from opensora.schedulers.dpms.thresholding import dynamic_thresholding
from opensora.schedulers.dpms.updates import first_order
from opensora.schedulers.frame_mask import FrameMask, per_frame
from opensora.schedulers.guidance import Condition, Denoiser, classifier_free_guidance
from opensora.schedulers.noise_schedule import named_schedule
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like


class SamplingStep(NamedTuple):
    index: int
    num_steps: int
    timestep: float
    x: Tensor
    x_0: Tensor


@SCHEDULERS.register_module("dpm-solver")
class DPMSolver:
    """DPM-Solver and DPM-Solver++. The defaults are the authors' advice for guided sampling, and the reference's choice."""

    def __init__(  # noqa: PLR0913 - one name for each choice of the two papers
        self,
        num_sampling_steps: int = 20,
        algorithm_type: str = "dpmsolver++",
        method: str = "multistep",
        order: int = 2,
        solver_type: str = "dpmsolver",
        skip_type: str = "time_uniform",
        lower_order_final: str = "few_steps",
        final: str = "sigma_min",
        timesteps: str = "fractional",
        noise_schedule: str = "linear",
        diffusion_steps: int = 1000,
        min_half_log_snr: float = -5.1,
        prediction: str = "eps",
        thresholding: str = "none",
        thresholding_ratio: float | None = None,
        thresholding_max: float | None = None,
        cfg_scale: float = 4.0,
        cfg_channel: int | None = None,
    ) -> None:
        """Args:
        num_sampling_steps: calls of the denoiser (guided or not), whatever the method and order.
        algorithm_type: "dpmsolver" interpolates the predicted noise, "dpmsolver++" the predicted x_0, which is stable under
            large guidance; "sde-dpmsolver++" draws new noise at every step.
        method, order: "multistep" reuses earlier predictions; "singlestep" takes blocks of `order` calls. order 1 is DDIM,
            2 is for guided, 3 for unguided sampling.
        solver_type: "dpmsolver" or "taylor", which differ in a coefficient of the second order (of the third, singlestep);
            diffusers calls them "midpoint" and "heun".
        skip_type: equal steps of the time ("time_uniform"), of its root ("time_quadratic"), of half the log SNR ("logSNR"), or
            of sigma^(1/7) ("karras").
        lower_order_final: the last steps take lower orders, which is more stable: with "few_steps" (below 15), "always", "never".
        final: "sigma_min" ends at timestep 0, where sigma is 0.01; "zero" puts the end of the last step at x_0 (diffusers'
            default); "denoise_to_zero" calls the model once more at timestep 0 and returns its x_0.
        timesteps: "fractional", or "integer": rounded, as diffusers' schedulers do.
        noise_schedule, diffusion_steps, prediction: those of the training: "linear" or "squaredcos_cap_v2"; "eps", "x0" or "v".
        min_half_log_snr: sampling starts at the last timestep with lambda = log(alpha / sigma) of at least this.
        thresholding: "none", or "dynamic" (Saharia et al. 2022; for pixels only): keep x_0 within +-`thresholding_max` (1),
            shrinking a sample whose |x_0| is larger in more than 1 - `thresholding_ratio` (0.995) of its places.
        cfg_scale, cfg_channel: default guidance scale, and how many channels it guides (None: all).
        """
        chosen: dict[str, str | int] = {
            "algorithm_type": algorithm_type,
            "method": method,
            "order": order,
            "solver_type": solver_type,
            "skip_type": skip_type,
            "lower_order_final": lower_order_final,
            "final": final,
            "timesteps": timesteps,
            "prediction": prediction,
            "thresholding": thresholding,
        }
        check_choices(chosen)
        check_together(chosen, num_sampling_steps, diffusion_steps)
        self.prediction, self.algorithm_type = prediction, algorithm_type
        self.thresholding = thresholds(thresholding, thresholding_ratio, thresholding_max)
        self.cfg_scale, self.cfg_channel = cfg_scale, cfg_channel
        self.diffusion_steps = diffusion_steps
        process = VariancePreserving(named_schedule(noise_schedule, diffusion_steps).table["alphas_cumprod"])
        first = process.level(process.noisiest(min_half_log_snr))
        self.plan = _plan(chosen, process, first, num_sampling_steps)

    @property
    def num_sampling_steps(self) -> int:
        """Denoiser calls (guided or not) per sample; one more than asked for with final="denoise_to_zero"."""
        return len(self.plan)

    def training_losses(self, model: Denoiser, x0: Tensor, cond: Condition, **_: object) -> Tensor:
        """Always a UserError: this scheduler samples only."""
        raise UserError(
            "scheduler.type='dpm-solver' has no training loss of its own: it samples models that 'iddpm' trains. Train with "
            "scheduler=dict(type='iddpm', ...) and keep 'dpm-solver' for inference."
        )

    def sample(self, model: Denoiser, z: Tensor, cond: Condition, *, progress: bool = False, **options: Any) -> Tensor:
        """x_0 [B, C, T, H, W], fp32 (fp64 for a fp64 z), from the noise z; arguments as in `sample_steps`."""
        x = z
        for step in tqdm(
            self.sample_steps(model, z, cond, **options), total=self.num_sampling_steps, disable=not progress
        ):
            x = step.x
        return x

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
        """One item a step, made when asked for.

        Args:
            model: called as `model(x, timestep, **cond)`, with `x_mask` [B, T] when there is a mask. Returns C channels, or 2C,
                of which the second half (a learned variance) is dropped.
            cond, null: the condition, and the entries of it that differ for the unconditional pass; without `null`
                or with a scale of 1 there is no guidance, and the batch is not doubled.
            mask: [B, T]: see `FrameMask`. A frame that is edited starts without history, so with the first order.
            guidance_scale: overrides `cfg_scale`.
            generators: one per sample, for the noise of "sde-dpmsolver++" and of edited frames.
        """
        if self.algorithm_type == "sde-dpmsolver++" and generators is None:
            raise ValueError(
                "algorithm_type='sde-dpmsolver++' draws noise at every step: pass one generator per sample."
            )
        scale = self.cfg_scale if guidance_scale is None else guidance_scale
        guided = classifier_free_guidance(model, null, scale, self.cfg_channel)
        return self._steps(guided, z.to(torch.promote_types(z.dtype, torch.float32)), cond, mask, generators)

    @torch.no_grad()
    def _steps(
        self,
        model: Denoiser,
        x: Tensor,
        cond: Condition,
        mask: Tensor | None,
        generators: Sequence[torch.Generator] | None,
    ) -> Iterator[SamplingStep]:
        frames = None if mask is None else self._frame_mask(mask, x, generators)
        edits = mask is not None and mask.is_floating_point()  # frames may start late, each with its own history
        history = History()
        for index, step in enumerate(self.plan):
            active = None
            if frames is not None:
                x, active = frames.noise_entering(x, index), frames.active(index)
            output = self._predict(model, x, step.level, cond, active)
            x_0, m = self._x_0_and_m(output, x, step.level)
            history.append(x, m, active if edits else None)
            noise = randn_like(x, generators) if step.updates[-1].noise else None
            x_next = history.apply(step.updates, noise)
            x = x_next if active is None else torch.where(per_frame(active), x_next, x)
            yield SamplingStep(index, len(self.plan), step.level.timestep, x, x_0)

    def _predict(self, model: Denoiser, x: Tensor, level: Level, cond: Condition, x_mask: Tensor | None) -> Tensor:
        given = {} if x_mask is None else {"x_mask": x_mask}
        t = torch.full((len(x),), level.timestep, device=x.device, dtype=x.dtype)
        output = model(x, t, **cond, **given).to(x.dtype)
        num_channels = x.shape[1]
        if output.shape[1] not in (num_channels, 2 * num_channels):
            raise UserError(
                f"dpm-solver: the model returned {output.shape[1]} channels for {num_channels}-channel latents, expected "
                f"{num_channels}, or {2 * num_channels} with a learned variance."
            )
        return output[:, :num_channels]

    def _x_0_and_m(self, output: Tensor, x: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        """The predicted x_0, and what the algorithm interpolates: x_0 itself, or eps."""
        x_0 = to_x_0(self.prediction, level)(x, output)
        if self.thresholding is not None:
            x_0 = dynamic_thresholding(x_0, *self.thresholding)
        if self.algorithm_type != "dpmsolver":
            return x_0, x_0
        if self.thresholding is not None:  # eps follows the x_0 that was changed
            return x_0, to_eps("x0", level)(x, x_0)
        return x_0, to_eps(self.prediction, level)(x, output)

    def _frame_mask(self, mask: Tensor, z: Tensor, generators: Sequence[torch.Generator] | None) -> FrameMask:
        def noised(x_0: Tensor, noise: Tensor, index: int) -> Tensor:
            level = self.plan[index].level
            return level.alpha * x_0 + level.sigma * noise

        levels = [(step.level.timestep + 1) / self.diffusion_steps for step in self.plan]
        return FrameMask(mask, levels, z, generators, noised)


def _plan(chosen: dict[str, str | int], process: VariancePreserving, first: Level, num_steps: int) -> list[Step]:
    solver = Solver(str(chosen["algorithm_type"]), int(chosen["order"]), chosen["solver_type"] == "dpmsolver")
    grid, last = SKIP_TYPES[str(chosen["skip_type"])], process.level(0)
    lower, ends_clean = lowers_the_last_orders(chosen, num_steps), chosen["final"] == "zero"
    levels = grid(process, first, last, num_steps)
    if chosen["timesteps"] == "integer":
        levels = rounded(process, levels)
    end = [CLEAN] if ends_clean else levels[-1:]
    if chosen["method"] == "multistep":
        steps = multistep(solver, [*levels[:-1], *end], lower_order_final=lower)
    else:
        orders = block_orders(num_steps, solver.order, lower_order_final=lower, ends_clean=ends_clean)
        if chosen["skip_type"] == "logSNR":  # blocks of equal size, whatever their order, as in the authors' code
            outer = grid(process, first, last, len(orders))
            inner = [grid(process, *ends, order) for ends, order in zip(pairwise(outer), orders, strict=True)]
            levels = [*(level for block in inner for level in block[:-1]), outer[-1]]
        steps = singlestep(solver, blocks([*levels[:-1], *end], orders))
    if chosen["final"] == "denoise_to_zero":
        steps.append(Step(last, (first_order(solver.algorithm, last, CLEAN),)))
    return steps
