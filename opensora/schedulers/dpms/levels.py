"""Noise levels in continuous time: x = alpha x_0 + sigma eps, at every timestep between those of training.

Between two training timesteps log alpha is linear in t (Lu et al. 2022a, appendix D.4). All solvers work in
lambda = log(alpha / sigma), half the logarithm of the signal-to-noise ratio, which rises while sampling.
"""

import math
from typing import NamedTuple

import numpy as np

from opensora.utils.errors import UserError

SKIP_TYPES = ("time_uniform", "logSNR", "time_quadratic", "karras")
RHO = 7.0  # Karras et al. 2022, eq. 5: larger values bring the levels closer together at the clean end


class Level(NamedTuple):
    """A noise level. Timesteps count from 0 (cleanest) as in training, and may be fractions."""

    timestep: int | float
    alpha: float
    sigma: float

    @property
    def half_log_snr(self) -> float:
        """lambda; inf without noise."""
        return math.inf if self.sigma == 0 else math.log(self.alpha) - math.log(self.sigma)


CLEAN = Level(timestep=-1.0, alpha=1.0, sigma=0.0)  # where sampling ends; the model is never called there


class VariancePreserving:
    """The process of IDDPM: alpha^2 = abar, alpha^2 + sigma^2 = 1."""

    def __init__(self, alphas_cumprod: np.ndarray) -> None:
        """alphas_cumprod: abar of each training timestep, [diffusion_steps] fp64, falling."""
        with np.errstate(divide="ignore"):  # a schedule may end in pure noise
            self.log_alphas = 0.5 * np.log(alphas_cumprod)

    def level(self, timestep: int | float) -> Level:
        """At a timestep in [0, diffusion_steps - 1]; an int stays one, as the model's argument."""
        log_alpha = float(np.interp(timestep, np.arange(len(self.log_alphas)), self.log_alphas))
        return Level(timestep, math.exp(log_alpha), math.sqrt(-math.expm1(2 * log_alpha)))

    def level_of(self, half_log_snr: float) -> Level:
        """With a given lambda: the inverse of `level(t).half_log_snr`."""
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
        """`num_steps` + 1 levels from the noisiest to the cleanest.

        Args:
            skip_type: equal steps of t ("time_uniform", the authors' advice for latents), of sqrt(t + 1)
                ("time_quadratic"), of lambda ("logSNR", for pixels at low resolution), or of (sigma / alpha)^(1 / RHO)
                ("karras").
        """
        if skip_type == "logSNR":
            return [self.level_of(h) for h in np.linspace(first.half_log_snr, last.half_log_snr, num_steps + 1)]
        if skip_type == "karras":
            start, end = ((level.sigma / level.alpha) ** (1 / RHO) for level in (first, last))
            return [self.level_of(-math.log(s)) for s in (np.linspace(start, end, num_steps + 1) ** RHO).tolist()]
        if skip_type == "time_quadratic":
            roots = np.linspace(math.sqrt(first.timestep + 1), math.sqrt(last.timestep + 1), num_steps + 1)
            return [self.level(t) for t in (roots**2 - 1).tolist()]
        return [self.level(t) for t in np.linspace(first.timestep, last.timestep, num_steps + 1).tolist()]
