"""Where a sampler of N steps stops on its way from the noisiest level to the cleanest: N + 1 levels."""

import math
from collections.abc import Callable

import numpy as np

from opensora.schedulers.dpms.process import Level, VariancePreserving

RHO = 7.0  # Karras et al. 2022, eq. 5: larger values bring the levels closer together at the clean end


def time_uniform(process: VariancePreserving, first: Level, last: Level, num_intervals: int) -> list[Level]:
    """Equal steps of t: the authors' advice for latents and high resolutions."""
    return [process.level(t) for t in np.linspace(first.timestep, last.timestep, num_intervals + 1).tolist()]


def time_quadratic(process: VariancePreserving, first: Level, last: Level, num_intervals: int) -> list[Level]:
    """Equal steps of sqrt(t), where time runs from 1 / diffusion_steps to 1: smaller steps near the data."""
    roots = np.linspace(math.sqrt(first.timestep + 1), math.sqrt(last.timestep + 1), num_intervals + 1)
    return [process.level(t) for t in (roots**2 - 1).tolist()]


def log_snr(process: VariancePreserving, first: Level, last: Level, num_intervals: int) -> list[Level]:
    """Equal steps of lambda: the authors' advice for pixels at low resolution."""
    return [process.level_of(h) for h in np.linspace(first.half_log_snr, last.half_log_snr, num_intervals + 1)]


def karras(process: VariancePreserving, first: Level, last: Level, num_intervals: int) -> list[Level]:
    """Equal steps of (sigma / alpha)^(1/7) (Karras et al. 2022, eq. 5)."""
    start, end = ((level.sigma / level.alpha) ** (1 / RHO) for level in (first, last))
    return [
        process.level_of(-math.log(sigma)) for sigma in (np.linspace(start, end, num_intervals + 1) ** RHO).tolist()
    ]


SKIP_TYPES: dict[str, Callable[[VariancePreserving, Level, Level, int], list[Level]]] = {
    "time_uniform": time_uniform,
    "logSNR": log_snr,
    "time_quadratic": time_quadratic,
    "karras": karras,
}


def rounded(process: VariancePreserving, levels: list[Level]) -> list[Level]:
    """The levels at the nearest whole timesteps, halves to even, as diffusers' schedulers visit them."""
    return [process.level(round(level.timestep)) for level in levels]
