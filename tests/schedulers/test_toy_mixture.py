"""Every sampler finds the distribution behind an exact denoiser, and converges at the order of its theory.

The data are points of a Gaussian mixture in the plane (experiments/toy_mixture.py). The distance of 8192
points from it is the sliced 2-Wasserstein distance.
"""

import pytest
import torch

from experiments import solver_order
from experiments.solver_order import cases, errors, form_of, level_law, measured_order
from experiments.toy_mixture import GaussianMixture
from opensora.registry import SCHEDULERS
from opensora.utils.seed import generators

MIXTURE = GaussianMixture()
BOUND = 0.06  # of the distance; the standard deviation of a mode is 0.2, that of all data about 1.1
FIXED = {"type": "iddpm", "variance": "fixed_small"}
DPM = {"type": "dpm-solver", "final": "denoise_to_zero"}
SAMPLERS = {
    "ancestral": {**FIXED, "num_sampling_steps": 250},
    "ancestral, x_0": {**FIXED, "num_sampling_steps": 250, "prediction": "x0"},
    "ddim": {**FIXED, "num_sampling_steps": 100, "sampler": "ddim"},
    "ddim, eta 1, v": {**FIXED, "num_sampling_steps": 250, "sampler": "ddim", "eta": 1.0, "prediction": "v"},
    "ddim, cosine": {**FIXED, "num_sampling_steps": 100, "sampler": "ddim", "noise_schedule": "squaredcos_cap_v2"},
    "dpm-solver++ 1": {**DPM, "num_sampling_steps": 100, "order": 1},
    "dpm-solver++ 2": {**DPM, "num_sampling_steps": 40},
    "dpm-solver++ 2, cosine": {**DPM, "num_sampling_steps": 40, "noise_schedule": "squaredcos_cap_v2"},
    "dpm-solver++ 2, karras": {**DPM, "num_sampling_steps": 20, "skip_type": "karras"},
    "dpm-solver++ 2, quadratic": {**DPM, "num_sampling_steps": 20, "skip_type": "time_quadratic"},
    "dpm-solver++ 2, logSNR": {**DPM, "num_sampling_steps": 20, "skip_type": "logSNR"},
    "dpm-solver++ 3, v": {**DPM, "num_sampling_steps": 20, "order": 3, "skip_type": "logSNR", "prediction": "v"},
    "dpm-solver 2": {**DPM, "num_sampling_steps": 20, "algorithm_type": "dpmsolver", "skip_type": "logSNR"},
    "dpm-solver 3, singlestep": {
        **DPM, "num_sampling_steps": 24, "algorithm_type": "dpmsolver", "method": "singlestep", "order": 3,
        "skip_type": "logSNR",
    },
    "iddpm-speed samples like iddpm": {**FIXED, "type": "iddpm-speed", "num_sampling_steps": 250},
    "rflow, euler": {"type": "rflow", "num_sampling_steps": 100},
    "rflow, euler, shifted": {"type": "rflow", "num_sampling_steps": 100, "shift": 3.0},
    "rflow, heun": {"type": "rflow", "num_sampling_steps": 25, "sampler": "heun"},
    "rflow, midpoint": {"type": "rflow", "num_sampling_steps": 25, "sampler": "midpoint"},
    "dpm-solver++ 2, sde": {**DPM, "num_sampling_steps": 60, "algorithm_type": "sde-dpmsolver++", "skip_type": "logSNR"},
}  # fmt: skip


def test_the_distance():
    """Of points of the mixture itself it is the noise of their number, far below BOUND; of others it is above."""
    x = MIXTURE.sample(4, 2048, torch.Generator().manual_seed(1))
    assert MIXTURE.distance(x) < BOUND / 2
    for wrong in (1.1 * x, x + 0.2, x[:, [1, 0]], x.sign() * x.abs() ** 0.5, x + 0.25 * x.flip(3)):
        assert MIXTURE.distance(wrong) > BOUND


def test_the_denoiser_is_the_mean_of_x_0_given_x():
    """Against a weighted mean over many x_0: E[x_0 | x] = sum p(x | x_0) x_0 / sum p(x | x_0)."""
    x_0 = MIXTURE.sample(1, 20_000, torch.Generator().manual_seed(0))
    x = torch.tensor([0.3, -0.8], dtype=torch.float64).reshape(1, 2, 1, 1, 1)
    alpha, sigma = torch.tensor([0.8], dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)
    weight = torch.exp(-0.5 * ((x - alpha * x_0) ** 2).sum(dim=1, keepdim=True) / sigma**2)
    expected = (weight * x_0).sum(dim=3, keepdim=True) / weight.sum(dim=3, keepdim=True)
    found, eps = MIXTURE.x_0_and_eps(x, alpha, sigma)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    torch.testing.assert_close(alpha * found + sigma * eps, x)


def test_no_registered_scheduler_is_left_out():
    of_points = set(SCHEDULERS.choices()) - {"nova"}  # which samples patches
    assert {config["type"] for config in SAMPLERS.values()} == of_points


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_recovers_the_mixture(name):
    config = SAMPLERS[name]
    model = MIXTURE.denoiser(form_of(config), level_law(config))
    z = torch.randn(4, 2, 1, 2048, 1, generator=torch.Generator().manual_seed(0))
    rngs = generators(0, "toy", ids=range(4))
    x = SCHEDULERS.build(config).sample(model, z, {}, generators=rngs)
    assert MIXTURE.distance(x) < BOUND


@pytest.mark.parametrize("name", cases())
def test_a_solver_has_the_order_of_its_theory(name):
    case = cases()[name]
    steps = solver_order.STEPS[1:4]
    error = errors(case, steps)
    assert error[0] > error[-1]
    assert measured_order(steps, error) == pytest.approx(case.order, abs=0.25)


def test_the_third_multistep_order_of_diffusers_is_two():
    """Its formula counts the second derivative half: see opensora/schedulers/dpms/dpm_solver.py."""
    steps = solver_order.STEPS[1:4]
    assert measured_order(steps, solver_order.errors_of_diffusers(steps)) == pytest.approx(2, abs=0.2)
