"""Noise levels in continuous time: x = alpha x_0 + sigma eps, at every timestep between those of training.

Lu et al. 2022a, "DPM-Solver", appendix D.4: between two training timesteps log alpha is linear in t. All solvers work in
lambda = log(alpha / sigma), half the logarithm of the signal-to-noise ratio, which rises while sampling.
"""

import math
from typing import NamedTuple

import numpy as np

from opensora.utils.errors import UserError


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

    def noisiest(self, min_half_log_snr: float) -> float:
        """The last training timestep whose lambda is at least this, where sampling may start."""
        half_log_snr = self.log_alphas - 0.5 * np.log(-np.expm1(2 * self.log_alphas))
        visible = np.flatnonzero(half_log_snr >= min_half_log_snr)
        if len(visible) < 2:
            raise UserError(
                f"scheduler.min_half_log_snr={min_half_log_snr} leaves no timestep to start from: this schedule runs from "
                f"{half_log_snr[-1]:.2f} (noise) to {half_log_snr[0]:.2f} (data)."
            )
        return float(visible[-1])
