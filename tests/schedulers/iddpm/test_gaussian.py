import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from opensora.schedulers.iddpm.gaussian import (
    discretised_gaussian_log_likelihood,
    model_log_variance,
    posterior_mean,
    predicted_x_0,
    prediction_target,
    q_sample,
    vlb_term,
)
from opensora.schedulers.noise_schedule import named_schedule

SCHEDULE = named_schedule("linear", 1000)


@pytest.fixture
def pair():
    g = torch.Generator().manual_seed(0)
    x_0, noise = torch.randn(2, 3, 4, 2, 5, 5, generator=g, dtype=torch.float64)
    return x_0, noise


def test_q_sample_mixes_with_abar(pair):
    x_0, noise = pair
    t = torch.tensor([0, 500, 999])
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)[t].reshape(3, 1, 1, 1, 1)
    x_t = q_sample(x_0, noise, SCHEDULE.gather(t, 5))
    torch.testing.assert_close(x_t, abar.sqrt() * x_0 + (1 - abar).sqrt() * noise, rtol=1e-6, atol=1e-6)  # fp32 tables


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize("t", [0, 1, 500, 999])
def test_conversions_round_trip(pair, prediction, t):
    x_0, noise = pair
    c = SCHEDULE.at(t)
    x_t = q_sample(x_0, noise, c)
    target = prediction_target(prediction, x_0, noise, c)
    torch.testing.assert_close(predicted_x_0(prediction, target, x_t, c), x_0, rtol=0, atol=1e-11)


def test_v_is_the_velocity_on_the_circle(pair):
    """v = d x_t / d phi with x_t = cos(phi) x_0 + sin(phi) eps (Salimans & Ho 2022, appendix D)."""
    x_0, noise = pair
    c = SCHEDULE.at(300)
    phi = torch.atan2(*(torch.tensor(n) for n in (c.sqrt_one_minus_alphas_cumprod, c.sqrt_alphas_cumprod))).double()
    _, v = torch.autograd.functional.jvp(
        lambda a: torch.cos(a) * x_0 + torch.sin(a) * noise, phi, torch.ones((), dtype=torch.float64)
    )
    torch.testing.assert_close(prediction_target("v", x_0, noise, c), v, rtol=0, atol=1e-6)


def test_posterior_mean_of_the_first_step_is_x_0(pair):
    x_0, noise = pair
    c = SCHEDULE.at(0)
    torch.testing.assert_close(posterior_mean(x_0, q_sample(x_0, noise, c), c), x_0, rtol=0, atol=1e-12)


def test_learned_range_interpolates_logarithms_without_a_clamp(pair):
    like, _ = pair
    c = SCHEDULE.at(700)
    low, high = c.log_posterior_variance, c.log_beta
    for raw, expected in [(-1.0, low), (1.0, high), (0.0, (low + high) / 2), (3.0, high + (high - low))]:
        out = model_log_variance("learned_range", torch.full_like(like, raw), like, c)
        torch.testing.assert_close(out, torch.full_like(like, expected), rtol=1e-12, atol=0)
    assert (model_log_variance("fixed_small", None, like, c) == low).all()
    assert (model_log_variance("fixed_large", None, like, c) == high).all()
    assert model_log_variance("fixed_small", None, like, c).shape == like.shape


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_kl_equals_torch_distributions():
    mean_1, log_var_1, mean_2, log_var_2 = draw(4, 3, 2, 2, 4, 4)
    out = vlb_term(mean_1, (mean_1, log_var_1), (mean_2, log_var_2), torch.tensor([1, 5, 999]))
    expected = kl_divergence(Normal(mean_1, (0.5 * log_var_1).exp()), Normal(mean_2, (0.5 * log_var_2).exp()))
    torch.testing.assert_close(out, expected / math.log(2), rtol=1e-10, atol=1e-12)


def test_first_term_is_the_likelihood_of_a_pixel():
    x = (torch.arange(256, dtype=torch.float64) / 127.5 - 1).reshape(1, 256, 1, 1, 1)
    std = 0.05
    mean, log_var = torch.full_like(x, 0.1), torch.full_like(x, 2 * math.log(std))
    out = vlb_term(x, (x, log_var), (mean, log_var), torch.tensor([0]))
    normal = Normal(mean, std)
    bins = normal.cdf(x + 1 / 255) - normal.cdf(x - 1 / 255)
    near = (x - mean).abs() < 2 * std  # further out the approximation of the normal CDF shows
    torch.testing.assert_close(out[near], -bins.log2()[near], rtol=0.02, atol=0)


def test_probabilities_of_all_pixels_add_up_to_one():
    x = (torch.arange(256, dtype=torch.float64) / 127.5 - 1).reshape(1, 256, 1, 1, 1)
    for mean, std in [(0.0, 0.3), (0.97, 0.1), (-1.2, 0.2)]:
        log_p = discretised_gaussian_log_likelihood(x, torch.full_like(x, mean), torch.full_like(x, 2 * math.log(std)))
        assert abs(log_p.exp().sum().item() - 1) < 1e-6


def test_only_the_samples_at_t_0_use_the_likelihood():
    x, true, model = draw(2, 1, 1, 2, 2), (draw(2, 1, 1, 2, 2, seed=1),) * 2, (draw(2, 1, 1, 2, 2, seed=2),) * 2
    mixed = vlb_term(x, true, model, torch.tensor([0, 4]))
    assert torch.equal(mixed[:1], vlb_term(x, true, model, torch.tensor([0, 0]))[:1])
    assert torch.equal(mixed[1:], vlb_term(x, true, model, torch.tensor([4, 4]))[1:])


def test_far_off_likelihoods_stay_finite():
    x = torch.tensor([0.0, 40.0, -40.0]).reshape(3, 1, 1, 1, 1)
    log_p = discretised_gaussian_log_likelihood(x, torch.full_like(x, 5.0), torch.full_like(x, -9.0))
    assert log_p.isfinite().all()
