"""One solver step as a weighted sum: x_next = keep x_base + sum_j weights[j] m_j + noise N(0, I).

In lambda = log(alpha / sigma) the linear part of the diffusion ODE (and SDE) has a closed solution, and what remains is an
integral of the model's prediction m against an exponential (Lu et al. 2022a, "DPM-Solver", eq. 3.4; 2022b,
"DPM-Solver++", eq. 8 and, for the SDE, section 4.3):

    dpmsolver        m = eps   x_t = alpha_t/alpha_s x_s - sigma_t int_0^h e^(h-u) m du
    dpmsolver++      m = x_0   x_t = sigma_t/sigma_s x_s + alpha_t int_0^h e^(u-h) m du
    sde-dpmsolver++  m = x_0   x_t = sigma_t/sigma_s e^-h x_s + 2 alpha_t int_0^h e^(2(u-h)) m du + noise

A solver of order n replaces m by the polynomial through n of its values; the integrals are then the phi-functions of
exponential integrators. All numbers are Python floats (fp64), made once, before sampling.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from opensora.schedulers.dpms.process import Level

RATES = {"dpmsolver": 1.0, "dpmsolver++": -1.0, "sde-dpmsolver++": -2.0}  # of the exponential, per unit of lambda


class Update(NamedTuple):
    """`base` steps back lies the x that is kept; `weights` are those of the latest predictions, newest first."""

    base: int
    keep: float
    weights: tuple[float, ...]
    noise: float = 0.0


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
            half of the constant part's integral. Of the same order, other numbers.
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
