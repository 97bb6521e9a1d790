"""DPM-Solver: fast sampling of a model that IDDPM trained (Lu et al. 2022a, arXiv:2206.00927; 2022b, arXiv:2211.01095).

All solvers work in lambda = log(alpha / sigma), half the log SNR, which rises while sampling. In it the linear part of the
diffusion ODE (and SDE) has a closed solution; what remains is an integral of the model's prediction m against an exponential
(2022a, eq. 3.4; 2022b, eq. 8 and section 4.3):

    dpmsolver        m = eps   x_t = alpha_t/alpha_s x_s - sigma_t int_0^h e^(h-u) m du
    dpmsolver++      m = x_0   x_t = sigma_t/sigma_s x_s + alpha_t int_0^h e^(u-h) m du
    sde-dpmsolver++  m = x_0   x_t = sigma_t/sigma_s e^-h x_s + 2 alpha_t int_0^h e^(2(u-h)) m du + noise

Order n replaces m by the polynomial through n of its values. So each step is a weighted sum, whose coefficients are computed in
fp64 before sampling.

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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opensora.registry import SCHEDULERS
from opensora.schedulers.frame_mask import expand_frames
from opensora.schedulers.guidance import Condition, Denoiser, guidance_from_config
from opensora.schedulers.noise_schedule import named_schedule
from opensora.schedulers.sampling import Denoise, Sampler, Solver, Time
from opensora.schedulers.training import without_variance
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

RATES = {"dpmsolver": 1.0, "dpmsolver++": -1.0, "sde-dpmsolver++": -2.0}  # of the exponential, per unit of lambda
LOWER_ORDER_BELOW = {"few_steps": 10, "below_15": 15, "always": math.inf, "never": 0}  # steps
SKIP_TYPES = ("time_uniform", "logSNR", "time_quadratic", "karras")
RHO = 7.0  # Karras et al. 2022, eq. 5: larger values bring the levels closer together at the clean end
CHOICES: dict[str, Iterable[str | int]] = {
    "algorithm_type": RATES,
    "method": ("multistep", "singlestep"),
    "order": (1, 2, 3),
    "solver_type": ("dpmsolver", "taylor"),
    "skip_type": SKIP_TYPES,
    "lower_order_final": LOWER_ORDER_BELOW,
    "final": ("sigma_min", "zero", "denoise_to_zero"),
    "timesteps": ("fractional", "integer"),
    "prediction": ("eps", "x0", "v"),
}


class Level(NamedTuple):
    """A noise level, x = alpha x_0 + sigma eps. Timesteps count from 0 (cleanest) as in training, and may be fractions."""

    timestep: int | float
    alpha: float
    sigma: float

    @property
    def half_log_snr(self) -> float:
        """lambda; inf without noise."""
        return math.inf if self.sigma == 0 else math.log(self.alpha) - math.log(self.sigma)


class Update(NamedTuple):
    """x_next = keep x_base + sum_j weights[j] m_j + noise N(0, I).

    x is kept from `base` steps back; `weights` are those of the latest predictions, newest first.
    """

    base: int
    keep: float
    weights: tuple[float, ...]
    noise: float = 0.0


class Step(NamedTuple):
    """A call of the model at `level`, and the update after it.

    `updates[n]` is for a frame that was denoised in n earlier steps (the last entry for that many or more): a frame that
    starts late has no history, so it begins with the first order.
    """

    level: Level
    updates: tuple[Update, ...]


CLEAN = Level(timestep=-1.0, alpha=1.0, sigma=0.0)  # where sampling ends; the model is never called there


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
        solver_type: "dpmsolver" or "taylor" (diffusers' "midpoint" and "heun"): a coefficient of the second order (of the third,
            singlestep).
        skip_type: equal steps of the time ("time_uniform"), of its root ("time_quadratic"), of half the log SNR ("logSNR"), or
            of sigma^(1/7) ("karras").
        lower_order_final: the last steps take lower orders, which is more stable: with "few_steps" (below 10, as the authors' and
            Open-Sora's code), "below_15" (steps, as diffusers), "always", "never".
        final: "sigma_min" ends at timestep 0, where sigma is 0.01; "zero" at x_0 (diffusers' default); "denoise_to_zero" calls
            the model once more at timestep 0 and returns its x_0.
        timesteps: "fractional", or "integer": rounded, as diffusers' schedulers do.
        noise_schedule, diffusion_steps, prediction: those of the training; see `IDDPM`. "eps", "x0" or "v".
        min_half_log_snr: sampling starts at the last timestep with lambda of at least this.
        cfg_scale, cfg_channel, guidance: see `opensora.schedulers.guidance.Guidance`.
        rescale_timesteps: condition the model on t * 1000 / diffusion_steps, as in its training.
        """
        self.algorithm_type, self.method, self.order, self.solver_type = algorithm_type, method, order, solver_type
        self.skip_type, self.lower_order_final, self.final = skip_type, lower_order_final, final
        self.timesteps, self.prediction = timesteps, prediction
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
        self.guidance = guidance_from_config(cfg_scale, cfg_channel, guidance)
        self.diffusion_steps = diffusion_steps
        self.time_scale = 1000 / diffusion_steps if rescale_timesteps else None
        process = VariancePreserving(named_schedule(noise_schedule, diffusion_steps).table["alphas_cumprod"])
        self.plan = self._plan(process, process.noisiest(min_half_log_snr), num_sampling_steps)

    def _plan(self, process: "VariancePreserving", first: Level, num_steps: int) -> list[Step]:
        """All updates, computed before sampling, so that the loop has nothing to compute on the host."""
        last, ends_clean = process.level(0.0), self.final == "zero"
        limit = LOWER_ORDER_BELOW[self.lower_order_final]
        if self.method == "singlestep" and self.order == 3 and limit:  # as in the authors' code
            limit = math.inf
        lower = num_steps < limit
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
        if twice := [a.timestep for a, b in pairwise(visited) if a.timestep == b.timestep]:
            other = "" if self.skip_type == "time_uniform" else " or skip_type='time_uniform'"
            raise UserError(
                f"scheduler.num_sampling_steps={num_steps} with timesteps='integer' and skip_type={self.skip_type!r} would visit "
                f"timestep {twice[0]} twice: on the way from {levels[0].timestep} down there are steps shorter than 1. Lower "
                f"num_sampling_steps, or use timesteps='fractional'{other}."
            )
        midpoint = self.solver_type == "dpmsolver"
        if self.method == "multistep":
            steps = multistep(visited, self.algorithm_type, self.order, midpoint=midpoint, lower_order_final=lower)
        else:
            blocks = [visited[end - n : end + 1] for end, n in zip(accumulate(orders), orders, strict=True)]
            steps = singlestep(blocks, self.algorithm_type, midpoint=midpoint)
        if self.final == "denoise_to_zero":
            steps.append(Step(levels[-1], (first_order(self.algorithm_type, levels[-1], CLEAN),)))
        return steps

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
        s, ((_, alpha, sigma), updates) = self.scheduler, self.plan[index]
        x_0 = eps = without_variance(denoise(x, self.timesteps[index]), x.shape[1])
        if s.prediction == "eps":
            x_0 = torch.add(1 / alpha * x, eps, alpha=-sigma / alpha)
        elif s.prediction == "x0":
            eps = torch.add(1 / sigma * x, x_0, alpha=-alpha / sigma)
        else:  # v = alpha eps - sigma x_0 (Salimans & Ho 2022)
            x_0, eps = torch.add(alpha * x, eps, alpha=-sigma), torch.add(sigma * x, eps, alpha=alpha)
        self.points.append(x)
        self.predictions.append(eps if s.algorithm_type == "dpmsolver" else x_0)
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


class VariancePreserving:
    """IDDPM's process in continuous time: alpha^2 = abar, alpha^2 + sigma^2 = 1, log alpha linear between timesteps."""

    def __init__(self, alphas_cumprod: np.ndarray) -> None:
        """alphas_cumprod: abar of each training timestep, [diffusion_steps] fp64, falling."""
        with np.errstate(divide="ignore"):  # a schedule may end in pure noise
            self.log_alphas = 0.5 * np.log(alphas_cumprod)

    def level(self, timestep: int | float) -> Level:
        """At a timestep in [0, diffusion_steps - 1]; an int stays one, as the model's argument."""
        log_alpha = float(np.interp(timestep, np.arange(len(self.log_alphas)), self.log_alphas))
        return Level(timestep, math.exp(log_alpha), math.sqrt(-math.expm1(2 * log_alpha)))

    def level_of(self, half_log_snr: float) -> Level:
        """The inverse of `level(t).half_log_snr`."""
        log_alpha = -0.5 * float(np.logaddexp(0.0, -2.0 * half_log_snr))
        falling = np.arange(len(self.log_alphas))[::-1]
        return self.level(float(np.interp(log_alpha, self.log_alphas[::-1], falling)))

    def noisiest(self, min_half_log_snr: float) -> Level:
        """At the last training timestep whose lambda is at least this, where sampling may start."""
        half_log_snr = self.log_alphas - 0.5 * np.log(-np.expm1(2 * self.log_alphas))
        visible = np.flatnonzero(half_log_snr >= min_half_log_snr)
        if len(visible) < 2:
            raise UserError(
                f"scheduler.min_half_log_snr={min_half_log_snr} leaves no timestep to start from: this schedule runs from "
                f"{half_log_snr[-1]:.2f} (noise) to {half_log_snr[0]:.2f} (data)."
            )
        return self.level(float(visible[-1]))

    def grid(self, skip_type: str, first: Level, last: Level, num_steps: int) -> list[Level]:
        """`num_steps` + 1 levels from the noisiest to the cleanest; see `skip_type` of `DPMSolver`."""
        if skip_type == "logSNR":
            return [self.level_of(h) for h in np.linspace(first.half_log_snr, last.half_log_snr, num_steps + 1)]
        if skip_type == "karras":
            start, end = ((level.sigma / level.alpha) ** (1 / RHO) for level in (first, last))
            return [self.level_of(-math.log(s)) for s in (np.linspace(start, end, num_steps + 1) ** RHO).tolist()]
        if skip_type == "time_quadratic":
            roots = np.linspace(math.sqrt(first.timestep + 1), math.sqrt(last.timestep + 1), num_steps + 1)
            return [self.level(t) for t in (roots**2 - 1).tolist()]
        return [self.level(t) for t in np.linspace(first.timestep, last.timestep, num_steps + 1).tolist()]


def multistep(
    levels: Sequence[Level], algorithm: str, order: int, *, midpoint: bool, lower_order_final: bool
) -> list[Step]:
    """From each level to the next, with the predictions of up to `order - 1` levels before (2022b, algorithm 2)."""
    steps = []
    for i, (source, target) in enumerate(pairwise(levels)):
        n = min(order, i + 1)
        if lower_order_final:
            n = min(n, len(levels) - 1 - i)
        if target.sigma == 0:  # infinitely far in lambda, where only the first order has a limit
            n = 1
        updates = [first_order(algorithm, source, target)]
        for k in range(2, n + 1):
            nodes = [levels[i - j] for j in range(k)]
            updates.append(interpolating(algorithm, source, target, nodes, midpoint=midpoint and k == 2))
        steps.append(Step(source, tuple(updates)))
    return steps


def singlestep(blocks: Sequence[Sequence[Level]], algorithm: str, *, midpoint: bool) -> list[Step]:
    """Each block of n + 1 levels goes from its first to its last with n calls and order n (2022a, algorithms 1 and 2).

    Every update of a block starts again from the block's first level. With `midpoint` the third order leaves out its
    middle prediction, as in the paper.
    """
    steps = []
    for levels in blocks:
        for i, (source, target) in enumerate(pairwise(levels)):
            without_history = first_order(algorithm, source, target)
            if i == 0:
                steps.append(Step(source, (without_history,)))
                continue
            nodes = [source, levels[0]] if i == 1 or midpoint else levels[2::-1]
            shortcut = midpoint and i == 1 and len(levels) == 3
            update = interpolating(algorithm, levels[0], target, nodes, base_steps_back=i, midpoint=shortcut)
            if i == 2 and midpoint:
                update = update._replace(weights=(update.weights[0], 0.0, update.weights[1]))
            steps.append(Step(source, (*[without_history] * i, update)))
    return steps


def block_orders(num_steps: int, order: int, *, lower_order_final: bool, ends_clean: bool) -> list[int]:
    """Orders of the singlestep blocks, as the authors' code has them; order n costs n calls, so they sum to num_steps."""
    full, rest = divmod(num_steps, order)
    orders = [order] * full + [rest] * (rest > 0)
    if orders[-1] > 1 and (ends_clean or (lower_order_final and rest == 0)):
        orders[-1:] = [orders[-1] - 1, 1]
    return orders


def first_order(algorithm: str, source: Level, target: Level) -> Update:
    """m as constant; for the deterministic algorithms it is a step of DDIM with eta = 0. The target may be clean."""
    if algorithm == "dpmsolver" and target.sigma == 0:  # the limit of the sum below: x_0
        return Update(0, 1 / source.alpha, (-source.sigma / source.alpha,))
    h = target.half_log_snr - source.half_log_snr
    keep, scale, noise = _closed_part(algorithm, source, target, h)
    return Update(0, keep, (scale * math.expm1(RATES[algorithm] * h) / RATES[algorithm],), noise)


def interpolating(
    algorithm: str,
    base: Level,
    target: Level,
    nodes: Sequence[Level],
    *,
    base_steps_back: int = 0,
    midpoint: bool = False,
) -> Update:
    """m as the polynomial through its values at the nodes (newest first), of order len(nodes).

    Args:
        midpoint: for two nodes, the papers' shortcut: the linear part of m counts as if the exponential were constant,
            half of the constant part's integral. Of the same order, with other coefficients.
    """
    h = target.half_log_snr - base.half_log_snr
    keep, scale, noise = _closed_part(algorithm, base, target, h)
    positions = [(node.half_log_snr - base.half_log_snr) / h for node in nodes]  # 0 at the base, 1 at the target
    moments = [h * math.factorial(k) * phi(k + 1, RATES[algorithm] * h) for k in range(len(nodes))]
    if midpoint:
        moments[1] = moments[0] / 2
    # weights that integrate every power of u up to len(nodes) - 1 exactly
    weights = np.linalg.solve(np.vander(positions, increasing=True).T, moments)
    return Update(base_steps_back, keep, tuple(scale * float(w) for w in weights), noise)


def phi(k: int, z: float) -> float:
    """phi_k(z) = int_0^1 e^((1-s)z) s^(k-1) / (k-1)! ds = sum_j z^j / (j+k)!, for k >= 1."""
    if abs(z) < 1:  # the recursion below would cancel
        return sum(z**j / math.factorial(j + k) for j in range(20))
    if k == 1:
        return math.expm1(z) / z
    return (phi(k - 1, z) - 1 / math.factorial(k - 1)) / z


def _closed_part(algorithm: str, source: Level, target: Level, h: float) -> tuple[float, float, float]:
    """The factor of x, the factor of the integral, and the standard deviation of the noise."""
    if algorithm == "dpmsolver":
        return target.alpha / source.alpha, -target.sigma, 0.0
    if algorithm == "dpmsolver++":
        return target.sigma / source.sigma, target.alpha, 0.0
    noise = target.sigma * math.sqrt(-math.expm1(-2 * h))
    return target.sigma / source.sigma * math.exp(-h), 2 * target.alpha, noise
