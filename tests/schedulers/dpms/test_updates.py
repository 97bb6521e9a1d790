"""The coefficients of one solver step, against quadrature and against diffusers' formulas in fp64."""

import math

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, DPMSolverSinglestepScheduler

from opensora.schedulers.dpms.dpm_solver import (
    CLEAN,
    RATES,
    Update,
    VariancePreserving,
    first_order,
    interpolating,
    phi,
)
from opensora.schedulers.noise_schedule import named_schedule

PROCESS = VariancePreserving(named_schedule("linear", 1000).table["alphas_cumprod"])
LEVELS = [PROCESS.level(t) for t in (900.0, 700.5, 420.0, 333.3)]  # uneven on purpose
GAUSS = np.polynomial.legendre.leggauss(40)  # exact to rounding for smooth integrands


def integral(function) -> float:
    """Over [0, 1]."""
    nodes, weights = GAUSS
    return float(sum(w * function((x + 1) / 2) for x, w in zip(nodes, weights, strict=True)) / 2)


@pytest.mark.parametrize("z", [-7.0, -1.0, -0.999, -1e-9, 0.0, 1e-3, 0.5, 1.5, 6.0])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_phi_is_its_integral(k, z):
    assert phi(k, z) == pytest.approx(
        integral(lambda s: math.exp((1 - s) * z) * s ** (k - 1) / math.factorial(k - 1)), rel=1e-13
    )


@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize("algorithm", RATES)
def test_an_update_of_order_n_integrates_polynomials_of_degree_below_n(algorithm, num_nodes):
    base, target = LEVELS[2], LEVELS[3]
    nodes = LEVELS[2::-1][:num_nodes]
    h = target.half_log_snr - base.half_log_snr
    update = interpolating(algorithm, base, target, nodes)
    rate = RATES[algorithm]
    scale = {"dpmsolver": -target.sigma, "dpmsolver++": target.alpha, "sde-dpmsolver++": 2 * target.alpha}[algorithm]
    for power in range(num_nodes):
        values = [((node.half_log_snr - base.half_log_snr) / h) ** power for node in nodes]
        exact = scale * h * integral(lambda v, power=power: math.exp(rate * h * (1 - v)) * v**power)
        assert sum(w * m for w, m in zip(update.weights, values, strict=True)) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("algorithm", ["dpmsolver", "dpmsolver++"])
def test_the_first_order_is_ddim(algorithm):
    """Song et al. 2021, eq. 12 with eta = 0, and its last step, which returns x_0."""
    x, x_0 = 0.7, -0.3
    for source, target in [(LEVELS[0], LEVELS[1]), (LEVELS[3], CLEAN)]:
        eps = (x - source.alpha * x_0) / source.sigma
        update = first_order(algorithm, source, target)
        m = eps if algorithm == "dpmsolver" else x_0
        ddim = target.alpha * x_0 + target.sigma * eps
        assert update.keep * x + update.weights[0] * m == pytest.approx(ddim, rel=1e-13)
        assert update.noise == 0


def test_the_sde_step_is_the_ancestral_one():
    """One first-order SDE step has the posterior's mean and variance (Ho et al. 2020, eq. 7), up to O(h^2)."""
    source, target = PROCESS.level(500), PROCESS.level(499)
    table = named_schedule("linear", 1000).table
    update = first_order("sde-dpmsolver++", source, target)
    assert update.keep == pytest.approx(table["posterior_mean_coef_x_t"][500], rel=1e-12)
    assert update.weights[0] == pytest.approx(table["posterior_mean_coef_x_0"][500], rel=1e-9)
    assert update.noise**2 == pytest.approx(math.exp(table["log_posterior_variance"][500]), rel=1e-9)


def theirs(scheduler_class, algorithm: str, solver_type: str, order: int):
    """diffusers' scheduler, standing at the last of LEVELS's steps, with fp64 levels."""
    scheduler = scheduler_class(
        algorithm_type=algorithm, solver_type=solver_type, solver_order=order, final_sigmas_type="sigma_min"
    )
    scheduler.set_timesteps(len(LEVELS) - 1)
    scheduler.sigmas = torch.tensor([level.sigma / level.alpha for level in LEVELS], dtype=torch.float64)
    scheduler._step_index = len(LEVELS) - 2
    return scheduler


def apply(update: Update, x: torch.Tensor, predictions: list[torch.Tensor], noise: torch.Tensor) -> torch.Tensor:
    newest_first = predictions[::-1]
    return (
        update.keep * x + sum(w * m for w, m in zip(update.weights, newest_first, strict=False)) + update.noise * noise
    )


@pytest.fixture
def values():
    """x, three predictions (oldest first), noise."""
    return torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("algorithm", RATES)
@pytest.mark.parametrize("solver_type", ["midpoint", "heun"])
def test_multistep_updates_equal_diffusers(algorithm, solver_type, values):
    x, noise, *predictions = values
    nodes = LEVELS[2::-1]
    scheduler = theirs(DPMSolverMultistepScheduler, algorithm, solver_type, 3)
    ours = first_order(algorithm, LEVELS[2], LEVELS[3])
    expected = scheduler.dpm_solver_first_order_update(predictions[-1], sample=x, noise=noise)
    torch.testing.assert_close(apply(ours, x, predictions, noise), expected, rtol=1e-12, atol=1e-12)

    ours = interpolating(algorithm, LEVELS[2], LEVELS[3], nodes[:2], midpoint=solver_type == "midpoint")
    expected = scheduler.multistep_dpm_solver_second_order_update(predictions, sample=x, noise=noise)
    torch.testing.assert_close(apply(ours, x, predictions, noise), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", RATES)
def test_the_third_multistep_order_of_diffusers_counts_the_curvature_half(algorithm, values):
    """Its D2 is half of h^2 m'', but stands where h^2 m'' belongs: exact for straight m, of second order otherwise."""
    x, noise, *_ = values
    base, target, nodes = LEVELS[2], LEVELS[3], LEVELS[2::-1]
    h = target.half_log_snr - base.half_log_snr
    scheduler = theirs(DPMSolverMultistepScheduler, algorithm, "midpoint", 3)
    ours = interpolating(algorithm, base, target, nodes)
    scale = {"dpmsolver": -target.sigma, "dpmsolver++": target.alpha, "sde-dpmsolver++": 2 * target.alpha}[algorithm]
    if algorithm == "sde-dpmsolver++":
        scale = 0.0  # its D2 term differs in more than the factor; only straight m is compared
    for curvature in (0.0, 1.3) if scale else (0.0,):
        offsets = [(node.half_log_snr - base.half_log_snr) / h for node in nodes]
        predictions = [torch.full_like(x, 0.4 + 0.2 * v + curvature * v**2) for v in reversed(offsets)]
        expected = scheduler.multistep_dpm_solver_third_order_update(predictions, sample=x, noise=noise)
        missing = scale * h * phi(3, RATES[algorithm] * h) * curvature
        torch.testing.assert_close(apply(ours, x, predictions, noise), expected + missing, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("algorithm", ["dpmsolver", "dpmsolver++"])
@pytest.mark.parametrize("solver_type", ["midpoint", "heun"])
def test_singlestep_updates_equal_diffusers(algorithm, solver_type, values):
    x, noise, *predictions = values
    midpoint = solver_type == "midpoint"
    scheduler = theirs(DPMSolverSinglestepScheduler, algorithm, solver_type, 3)
    ours = interpolating(algorithm, LEVELS[1], LEVELS[3], LEVELS[2:0:-1], base_steps_back=1, midpoint=midpoint)
    expected = scheduler.singlestep_dpm_solver_second_order_update(predictions, sample=x)
    torch.testing.assert_close(apply(ours, x, predictions, noise), expected, rtol=1e-12, atol=1e-12)

    nodes = [LEVELS[2], LEVELS[0]] if midpoint else LEVELS[2::-1]
    ours = interpolating(algorithm, LEVELS[0], LEVELS[3], nodes, base_steps_back=2)
    used = [predictions[0], predictions[2]] if midpoint else predictions
    expected = scheduler.singlestep_dpm_solver_third_order_update(predictions, sample=x)
    torch.testing.assert_close(apply(ours, x, used, noise), expected, rtol=1e-11, atol=1e-11)
