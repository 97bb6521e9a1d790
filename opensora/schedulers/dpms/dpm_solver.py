"""DPM-Solver: fast sampling of a model that IDDPM trained (Lu et al. 2022a, arXiv:2206.00927; 2022b, arXiv:2211.01095).

Deviations from the authors' code, each with a test:
- the third-order multistep update weighs the second derivative in full; theirs (and diffusers') counts it half, which
  leaves a solver of second order;
- a schedule that ends in almost pure noise (the cosine) is entered at its last timestep with lambda >= -5.1; the model
  is always conditioned on the true timestep;
- frame masks work as in every scheduler here; noise (of the SDE solver) comes from one generator per sample.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.dpms.levels import CLEAN, SKIP_TYPES, Level, VariancePreserving
from opensora.schedulers.dpms.updates import RATES, Step, Update, block_orders, first_order, multistep, singlestep
from opensora.schedulers.frame_mask import expand_frames
from opensora.schedulers.guidance import Condition, Denoiser, guidance_from_config
from opensora.schedulers.noise_schedule import named_schedule
from opensora.schedulers.sampling import Denoise, Sampler, Solver, Time
from opensora.schedulers.training import without_variance
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

CHOICES: dict[str, Iterable[str | int]] = {
    "algorithm_type": RATES,
    "method": ("multistep", "singlestep"),
    "order": (1, 2, 3),
    "solver_type": ("dpmsolver", "taylor"),
    "skip_type": SKIP_TYPES,
    "lower_order_final": ("few_steps", "always", "never"),
    "final": ("sigma_min", "zero", "denoise_to_zero"),
    "timesteps": ("fractional", "integer"),
    "prediction": ("eps", "x0", "v"),
    "thresholding": ("none", "dynamic"),
}


@SCHEDULERS.register_module("dpm-solver")
class DPMSolver(Sampler):
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
        guidance: Mapping[str, Any] | None = None,
        *,
        rescale_timesteps: bool = False,
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
        noise_schedule, diffusion_steps, prediction: those of the training; see `IDDPM`. "eps", "x0" or "v".
        min_half_log_snr: sampling starts at the last timestep with lambda = log(alpha / sigma) of at least this.
        thresholding: "none", or "dynamic" (for pixels only) with `thresholding_ratio` (0.995) and `thresholding_max` (1);
            see `dynamic_thresholding`.
        cfg_scale, cfg_channel, guidance: see `opensora.schedulers.guidance.Guidance`.
        rescale_timesteps: condition the model on t * 1000 / diffusion_steps, as in its training.
        """
        self.algorithm_type, self.method, self.order, self.solver_type = algorithm_type, method, order, solver_type
        self.skip_type, self.lower_order_final, self.final = skip_type, lower_order_final, final
        self.timesteps, self.prediction, self.thresholding = timesteps, prediction, thresholding
        wrong = [
            f"scheduler.{name}={getattr(self, name)!r} is not one of {', '.join(map(str, choices))}."
            for name, choices in CHOICES.items()
            if getattr(self, name) not in choices
        ]
        if wrong:
            raise UserError("\n".join(wrong))
        if num_sampling_steps < 1:
            raise UserError(f"scheduler.num_sampling_steps={num_sampling_steps}: sampling takes at least 1 step.")
        if algorithm_type == "sde-dpmsolver++" and method == "singlestep":
            raise UserError(
                "scheduler.algorithm_type='sde-dpmsolver++' draws noise at every step, which a singlestep block, going back to "
                "its first level, would throw away; use method='multistep'."
            )
        if thresholding == "none" and (thresholding_ratio is not None or thresholding_max is not None):
            raise UserError(
                "scheduler.thresholding_ratio and thresholding_max have no effect with thresholding='none'; set "
                "thresholding='dynamic', or drop them."
            )
        self.thresholding_ratio = 0.995 if thresholding_ratio is None else thresholding_ratio
        self.thresholding_max = 1.0 if thresholding_max is None else thresholding_max
        if not 0 < self.thresholding_ratio <= 1:
            raise UserError(f"scheduler.thresholding_ratio={thresholding_ratio} is a share: above 0, at most 1.")
        if self.thresholding_max <= 0:
            raise UserError(f"scheduler.thresholding_max={thresholding_max} must be positive.")
        self.guidance = guidance_from_config(cfg_scale, cfg_channel, guidance)
        self.diffusion_steps = diffusion_steps
        self.time_scale = 1000 / diffusion_steps if rescale_timesteps else None
        process = VariancePreserving(named_schedule(noise_schedule, diffusion_steps).table["alphas_cumprod"])
        self.plan = self._plan(process, process.noisiest(min_half_log_snr), num_sampling_steps)

    def _plan(self, process: VariancePreserving, first: Level, num_steps: int) -> list[Step]:
        """All updates, computed before sampling, so that the loop has nothing to compute on the host."""
        last, ends_clean = process.level(0.0), self.final == "zero"
        few_steps = num_steps < 15 or (self.method == "singlestep" and self.order == 3)  # as in the authors' code
        lower = self.lower_order_final == "always" or (self.lower_order_final == "few_steps" and few_steps)
        orders = block_orders(num_steps, self.order, lower_order_final=lower, ends_clean=ends_clean)
        levels = process.grid(self.skip_type, first, last, num_steps)
        if self.method == "singlestep" and self.skip_type == "logSNR":
            # blocks of equal size, whatever their order, as in the authors' code
            outer = process.grid("logSNR", first, last, len(orders))
            inner = [process.grid("logSNR", *ends, n) for ends, n in zip(pairwise(outer), orders, strict=True)]
            levels = [*(level for block in inner for level in block[:-1]), outer[-1]]
        if self.timesteps == "integer":  # halves to even, as diffusers' schedulers
            levels = [process.level(round(level.timestep)) for level in levels]
        visited = [*levels[:-1], CLEAN] if ends_clean else levels
        self._check_distinct(visited)
        midpoint = self.solver_type == "dpmsolver"
        if self.method == "multistep":
            steps = multistep(visited, self.algorithm_type, self.order, midpoint=midpoint, lower_order_final=lower)
        else:
            blocks = [visited[end - n : end + 1] for end, n in zip(accumulate(orders), orders, strict=True)]
            steps = singlestep(blocks, self.algorithm_type, midpoint=midpoint)
        if self.final == "denoise_to_zero":
            steps.append(Step(levels[-1], (first_order(self.algorithm_type, levels[-1], CLEAN),)))
        return steps

    def _check_distinct(self, levels: Sequence[Level]) -> None:
        """Rounded steps go nowhere near the data, or anywhere if sampling starts below the last timestep (the cosine)."""
        for a, b in pairwise(levels):
            if a.timestep == b.timestep:
                other = "" if self.skip_type == "time_uniform" else " or skip_type='time_uniform'"
                raise UserError(
                    f"scheduler.num_sampling_steps={len(levels) - 1} with timesteps='integer' and skip_type={self.skip_type!r} "
                    f"would visit timestep {a.timestep} twice: on the way from {levels[0].timestep} down there are steps shorter "
                    f"than 1. Lower num_sampling_steps, or use timesteps='fractional'{other}."
                )

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

    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> Solver:
        """A run along the plan; only "sde-dpmsolver++" needs generators."""
        if self.algorithm_type == "sde-dpmsolver++" and generators is None:
            raise ValueError(
                "algorithm_type='sde-dpmsolver++' draws noise at every step: pass one generator per sample."
            )
        return _Run(self, generators)


class _Run:
    """One sampling run: remembers the last points, the predictions there, and since when each frame is denoised."""

    def __init__(self, scheduler: DPMSolver, generators: Sequence[torch.Generator] | None) -> None:
        self.scheduler, self.plan, self.generators = scheduler, scheduler.plan, generators
        trained = [step.level.timestep for step in self.plan]
        scale = scheduler.time_scale
        self.timesteps: list[Time] = trained if scale is None else [t * scale for t in trained]
        self.levels = [(t + 1) / scheduler.diffusion_steps for t in trained]
        self.points: deque[Tensor] = deque(maxlen=3)  # newest last, up to the highest order
        self.predictions: deque[Tensor] = deque(maxlen=3)
        self.age: Tensor | None = None  # [B, T]: in how many earlier steps a frame was denoised

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        level = self.plan[index].level
        return level.alpha * x_0 + level.sigma * noise

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        s, (level, updates) = self.scheduler, self.plan[index]
        output = without_variance(denoise(x, self.timesteps[index]), x.shape[1])
        x_0, prediction = predicted_x_0(s.prediction, output, x, level), s.prediction
        if s.thresholding == "dynamic":
            output = x_0 = dynamic_thresholding(x_0, s.thresholding_ratio, s.thresholding_max)
            prediction = "x0"
        self.points.append(x)
        self.predictions.append(predicted_eps(prediction, output, x, level) if s.algorithm_type == "dpmsolver" else x_0)
        noise = randn_like(x, self.generators) if updates[-1].noise else None
        if active is not None:
            self.age = active.int() - 1 if self.age is None else self.age + active
        if self.age is None or len(updates) == 1:
            return self._apply(updates[-1], noise), x_0
        after = self._apply(updates[0], noise)
        for age, update in enumerate(updates[1:], start=1):
            after = torch.where(expand_frames(self.age >= age), self._apply(update, noise), after)
        return after, x_0

    def _apply(self, update: Update, noise: Tensor | None) -> Tensor:
        x = update.keep * self.points[-1 - update.base]
        for weight, prediction in zip(update.weights, reversed(self.predictions), strict=False):
            if weight:
                x = x.add_(prediction, alpha=weight)
        return x if noise is None else x.add_(noise, alpha=update.noise)


def predicted_x_0(prediction: str, output: Tensor, x: Tensor, level: Level) -> Tensor:
    """From "eps", "x0" or v = alpha eps - sigma x_0 (Salimans & Ho 2022) to x_0."""
    if prediction == "x0":
        return output
    if prediction == "eps":
        return torch.add(1 / level.alpha * x, output, alpha=-level.sigma / level.alpha)
    return torch.add(level.alpha * x, output, alpha=-level.sigma)


def predicted_eps(prediction: str, output: Tensor, x: Tensor, level: Level) -> Tensor:
    """From the same three to eps."""
    if prediction == "eps":
        return output
    if prediction == "x0":
        return torch.add(1 / level.sigma * x, output, alpha=-level.alpha / level.sigma)
    return torch.add(level.sigma * x, output, alpha=level.alpha)


def dynamic_thresholding(x_0: Tensor, ratio: float, max_value: float) -> Tensor:
    """Large guidance without saturated pixels (Saharia et al. 2022, "Imagen", section 2.3).

    x_0 [B, ...] is clamped to [-s, s] and divided by s / max_value, where s is the `ratio`-quantile of the sample's
    |x_0|, at least max_value.
    """
    magnitudes = x_0.abs().flatten(1)
    position = ratio * (magnitudes.shape[1] - 1)
    # torch.quantile refuses more than 16 M values, and sorts those that do not matter
    largest = magnitudes.topk(magnitudes.shape[1] - math.floor(position), dim=1).values  # falling; the last is `below`
    below, above = largest[:, -1], largest[:, -1 if position == math.floor(position) else -2]
    quantile = torch.lerp(below, above, position - math.floor(position))
    s = quantile.clamp(min=max_value).reshape(-1, *[1] * (x_0.ndim - 1))
    scaled = x_0.clamp(-s, s).div_(s)
    return scaled if max_value == 1 else scaled.mul_(max_value)
