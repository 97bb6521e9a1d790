"""Each term against its formula."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from opensora.models.vae.losses import kl_to_standard_normal, reconstruction_loss
from opensora.utils.errors import UserError
from opensora.utils.seed import generator


def test_terms_are_what_they_say_and_add_up():
    g = generator(0)
    x, x_hat = torch.rand(2, 3, 2, 16, 24, generator=g), torch.rand(2, 3, 2, 16, 24, generator=g)
    moments = torch.randn(2, 8, 2, 2, 3, generator=g)
    weights = {"l1": 1.0, "mse": 2.0, "pooled": 3.0, "kl": 0.1, "lpips": 0.0}
    total, parts = reconstruction_loss(x_hat, x, moments, weights)
    assert parts.keys() == {"l1", "mse", "pooled", "kl"}
    assert_close(parts["l1"], (x - x_hat).abs().mean())
    assert_close(parts["mse"], (x - x_hat).square().mean())
    cells = (x_hat - x).unflatten(4, (3, 8)).unflatten(3, (2, 8)).mean((4, 6))
    assert_close(parts["pooled"], cells.abs().mean())
    assert_close(total, sum(weights[name] * part for name, part in parts.items()))


def test_kl_is_that_of_torch():
    moments = torch.randn(2, 8, 1, 3, 3, generator=generator(1))
    mean, logvar = moments.chunk(2, dim=1)
    expected = kl_divergence(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).mean()
    assert_close(kl_to_standard_normal(moments), expected)


def test_a_weight_of_zero_costs_nothing_and_an_unknown_one_is_refused():
    x = torch.zeros(1, 3, 1, 8, 8)
    total, parts = reconstruction_loss(x, x + 1, torch.zeros(1, 8, 1, 1, 1), {"l1": 1.0, "kl": 0.0})
    assert parts.keys() == {"l1"}
    assert total == 1
    with pytest.raises(UserError, match=r"loss.lpips=0.1"):
        reconstruction_loss(x, x, torch.zeros(1, 8, 1, 1, 1), {"lpips": 0.1})
