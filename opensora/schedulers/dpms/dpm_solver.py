"""DPM-Solver: fast sampling of a model that IDDPM trained (Lu et al. 2022a, arXiv:2206.00927; 2022b, arXiv:2211.01095).

Deviations from the authors' code, each with a test:
- the third-order multistep update weighs the second derivative in full; theirs (and diffusers') counts it half, which
  leaves a solver of second order;
- a schedule that ends in almost pure noise (the cosine) is entered at its last timestep with lambda >= -5.1; the model is
  always told the true timestep;
- frame masks work as in every scheduler here; noise (of the SDE solver) comes from one generator per sample.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.dpms.grid import SKIP_TYPES, rounded
from opensora.schedulers.dpms.options import (
    check_choices,
    check_distinct,
    check_together,
    lowers_the_last_orders,
    thresholds,
)
from opensora.schedulers.dpms.plan import Solver, Step, block_orders, blocks, multistep, singlestep
from opensora.schedulers.dpms.process import CLEAN, Level, VariancePreserving
from opensora.schedulers.dpms.solver import PlannedSolver
from opensora.schedulers.dpms.updates import first_order
from opensora.schedulers.guidance import Condition, Denoiser, guidance_from_config
from opensora.schedulers.noise_schedule import named_schedule
from opensora.schedulers.sampling import Sampler
from opensora.utils.errors import UserError


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
        noise_schedule, diffusion_steps, prediction: those of the training: "linear" or "squaredcos_cap_v2"; "eps", "x0" or "v".
        min_half_log_snr: sampling starts at the last timestep with lambda = log(alpha / sigma) of at least this.
        thresholding: "none", or "dynamic" (Saharia et al. 2022; for pixels only): keep x_0 within +-`thresholding_max` (1),
            shrinking a sample whose |x_0| is larger in more than 1 - `thresholding_ratio` (0.995) of its places.
        cfg_scale, cfg_channel: default guidance scale, and how many channels it guides (None: all).
        guidance: further options of guidance; see `opensora.schedulers.guidance.Guidance`.
        rescale_timesteps: tell the model t * 1000 / diffusion_steps, as in its training.
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
        self.guidance = guidance_from_config(cfg_scale, cfg_channel, guidance)
        self.diffusion_steps = diffusion_steps
        self.time_scale = 1000 / diffusion_steps if rescale_timesteps else None
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

    def solver(self, z: Tensor, generators: Sequence[torch.Generator] | None) -> PlannedSolver:
        """A run along the plan; only "sde-dpmsolver++" needs generators."""
        if self.algorithm_type == "sde-dpmsolver++" and generators is None:
            raise ValueError(
                "algorithm_type='sde-dpmsolver++' draws noise at every step: pass one generator per sample."
            )
        return PlannedSolver(
            self.plan,
            self.diffusion_steps,
            prediction=self.prediction,
            interpolated="eps" if self.algorithm_type == "dpmsolver" else "x0",
            thresholds=self.thresholding,
            time_scale=self.time_scale,
            generators=generators,
        )


def _plan(chosen: dict[str, str | int], process: VariancePreserving, first: Level, num_steps: int) -> list[Step]:
    solver = Solver(str(chosen["algorithm_type"]), int(chosen["order"]), chosen["solver_type"] == "dpmsolver")
    grid, last = SKIP_TYPES[str(chosen["skip_type"])], process.level(0.0)
    lower, ends_clean = lowers_the_last_orders(chosen, num_steps), chosen["final"] == "zero"
    levels = grid(process, first, last, num_steps)
    if chosen["timesteps"] == "integer":
        levels = rounded(process, levels)
    end = [CLEAN] if ends_clean else levels[-1:]
    check_distinct([*levels[:-1], *end], str(chosen["skip_type"]))
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
        steps.append(Step(levels[-1], (first_order(solver.algorithm, levels[-1], CLEAN),)))
    return steps
