"""One solver step as a weighted sum: x_next = keep x_base + sum_j weights[j] m_j + noise N(0, I).

In lambda = log(alpha / sigma) the linear part of the diffusion ODE (and SDE) has a closed solution, and what remains is an
integral of the model's prediction m against an exponential (Lu et al. 2022a, "DPM-Solver", eq. 3.4; 2022b,
"DPM-Solver++", eq. 8 and, for the SDE, section 4.3):

    dpmsolver        m = eps   x_t = alpha_t/alpha_s x_s - sigma_t int_0^h e^(h-u) m du
    dpmsolver++      m = x_0   x_t = sigma_t/sigma_s x_s + alpha_t int_0^h e^(u-h) m du
    sde-dpmsolver++  m = x_0   x_t = sigma_t/sigma_s e^-h x_s + 2 alpha_t int_0^h e^(2(u-h)) m du + noise

A solver of order n replaces m by the polynomial through n of its values; the integrals are then the phi-functions of
exponential integrators. All coefficients are Python floats (fp64), computed once, before sampling.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from opensora.schedulers.dpms.levels import Level

RATES = {"dpmsolver": 1.0, "dpmsolver++": -1.0, "sde-dpmsolver++": -2.0}  # of the exponential, per unit of lambda


class Update(NamedTuple):
    """x is kept from `base` steps back; `weights` are those of the latest predictions, newest first."""

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
    ends_full = rest == 0 and order > 1
    if orders[-1] > 1 and (ends_clean or (lower_order_final and ends_full)):
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
