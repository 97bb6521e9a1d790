"""Each term against its formula."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from opensora.training.vae_losses import Reconstructor, VAELoss, kl_to_standard_normal
from opensora.utils.errors import UserError
from opensora.utils.seed import generator


def test_terms_are_what_they_say_and_add_up():
    g = generator(0)
    x, x_hat = torch.rand(2, 3, 2, 16, 24, generator=g), torch.rand(2, 3, 2, 16, 24, generator=g)
    moments = torch.randn(2, 8, 2, 2, 3, generator=g)
    weights = {"l1": 1.0, "mse": 2.0, "pooled": 3.0, "kl": 0.1, "lpips": 0.0}
    total, rec, parts = VAELoss(weights)(x_hat, x, moments)
    assert parts.keys() == {"l1", "mse", "pooled", "kl"}
    assert_close(parts["l1"], (x - x_hat).abs().mean())
    assert_close(parts["mse"], (x - x_hat).square().mean())
    cells = (x_hat - x).unflatten(4, (3, 8)).unflatten(3, (2, 8)).mean((4, 6))
    assert_close(parts["pooled"], cells.abs().mean())
    assert_close(total, sum(weights[name] * part for name, part in parts.items()))
    assert_close(total - rec, weights["kl"] * parts["kl"])


def test_kl_is_that_of_torch():
    moments = torch.randn(2, 8, 1, 3, 3, generator=generator(1))
    mean, logvar = moments.chunk(2, dim=1)
    expected = kl_divergence(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).mean()
    assert_close(kl_to_standard_normal(moments), expected)


def test_a_weight_of_zero_costs_nothing_and_an_unknown_one_is_refused():
    x = torch.zeros(1, 3, 1, 8, 8)
    loss = VAELoss({"l1": 1.0, "kl": 0.0, "lpips": 0.0})(x, x + 1, torch.zeros(1, 8, 1, 1, 1))
    assert loss.parts.keys() == {"l1"}
    assert loss.total == 1
    with pytest.raises(UserError, match=r"loss.l2=0.1"):
        VAELoss({"l2": 0.1})


def test_nll_is_a_laplace_likelihood_and_its_best_scale_is_the_mean_error():
    """-log p of a Laplace distribution of scale b = exp(s) is |x - x^| / b + log 2b; the best b is the mean error."""
    x = torch.randn(1, 3, 2, 8, 8, generator=generator(2))
    x_hat, moments = torch.zeros_like(x), torch.zeros(1, 8, 2, 1, 1)
    criterion, s = VAELoss({"l1": 1.0}), torch.tensor(0.3)
    expected = -torch.distributions.Laplace(x_hat, s.exp()).log_prob(x).mean() - torch.log(torch.tensor(2.0))
    assert_close(criterion(x_hat, x, moments, s).total, expected)
    best = x.abs().mean().log().requires_grad_()
    criterion(x_hat, x, moments, best).total.backward()
    assert_close(best.grad, torch.tensor(0.0), atol=1e-6, rtol=0)


def test_the_log_variance_is_trained_with_the_vae():
    vae = torch.nn.Conv3d(3, 3, 1)
    assert Reconstructor(vae).logvar is None
    assert [name for name, _ in Reconstructor(vae, 0.5).named_parameters()] == ["logvar", "vae.weight", "vae.bias"]


def chosen(lpips_frames, num_frames, offset, pieces=1):
    """Numbers of the frames that LPIPS looks at, of each of two clips."""
    frames = torch.arange(num_frames).float().view(1, 1, num_frames, 1, 1).expand(2, 3, -1, -1, -1)
    cut = frames.unflatten(2, (pieces, -1)).transpose(1, 2).flatten(0, 1)  # [2 pieces, 3, T, 1, 1]
    criterion = VAELoss({"l1": 1.0}, lpips_frames=lpips_frames)
    first, second = criterion._frames(cut, offset, pieces)[:, 0, :, 0, 0].tolist()
    assert first == second
    return first


def test_lpips_looks_at_frames_spread_over_the_clip():
    assert chosen(4, 17, 0) == [0, 4, 8, 12]
    assert chosen(4, 17, 6) == [1, 6, 10, 14]
    assert chosen(3, 3, 2) == [0, 1, 2]
    assert chosen(None, 5, 3) == [0, 1, 2, 3, 4]


def test_a_clip_in_pieces_gives_lpips_as_many_frames_as_a_whole_one():
    assert chosen(4, 17, 6, pieces=17) == [1, 6, 10, 14]
    assert chosen(4, 16, 0, pieces=4) == [0, 4, 8, 12]
