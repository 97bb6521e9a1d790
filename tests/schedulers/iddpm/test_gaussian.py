import pytest
import torch

from opensora.schedulers.iddpm.gaussian import (
    eps_from_x_0,
    model_log_variance,
    posterior_mean,
    predicted_x_0,
    prediction_target,
    q_sample,
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


@pytest.mark.parametrize("prediction", ["eps", "x0", "v", "previous_x"])
@pytest.mark.parametrize("t", [0, 1, 500, 999])
def test_conversions_round_trip(pair, prediction, t):
    x_0, noise = pair
    c = SCHEDULE.at(t)
    x_t = q_sample(x_0, noise, c)
    target = prediction_target(prediction, x_0, noise, c)
    exact = 1e-11 if prediction != "previous_x" else 1e-9  # which divides by 1e-4
    torch.testing.assert_close(predicted_x_0(prediction, target, x_t, c), x_0, rtol=0, atol=exact)
    torch.testing.assert_close(eps_from_x_0(x_0, x_t, c), noise, rtol=0, atol=1e-11)


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
    assert model_log_variance("learned", like, like, c) is like
    assert (model_log_variance("fixed_small", None, like, c) == low).all()
    assert (model_log_variance("fixed_large", None, like, c) == high).all()
    assert model_log_variance("fixed_small", None, like, c).shape == like.shape
