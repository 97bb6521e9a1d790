import math

import torch
from torch.distributions import Normal, kl_divergence

from opensora.schedulers.iddpm.gaussian import discretised_gaussian_log_likelihood, vlb_term


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
