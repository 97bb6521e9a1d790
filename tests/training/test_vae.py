"""Each term of the loss against its formula; clips of mixed lengths; measured statistics whiten the latents."""

from collections import Counter

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from opensora.models.vae import VideoAutoencoderKL
from opensora.training.vae import (
    LatentStatistics,
    RandomChunks,
    Reconstructor,
    VAELoss,
    kl_to_standard_normal,
    measure_latents,
)
from opensora.utils.errors import UserError
from opensora.utils.seed import generator


def test_terms_are_what_they_say_and_add_up():
    g = generator(0)
    x, x_hat = torch.rand(2, 3, 2, 16, 24, generator=g), torch.rand(2, 3, 2, 16, 24, generator=g)
    moments = torch.randn(2, 8, 2, 2, 3, generator=g)
    weights = {"l1": 1.0, "mse": 2.0, "pooled": 3.0, "kl": 0.1, "lpips": 0.0}
    total, rec, terms = VAELoss(weights)(x_hat, x, moments)
    assert terms.keys() == {"l1", "mse", "pooled", "kl"}
    assert_close(terms["l1"], (x - x_hat).abs().mean())
    assert_close(terms["mse"], (x - x_hat).square().mean())
    cells = (x_hat - x).unflatten(4, (3, 8)).unflatten(3, (2, 8)).mean((4, 6))
    assert_close(terms["pooled"], cells.abs().mean())
    assert_close(total, sum(weights[name] * term for name, term in terms.items()))
    assert_close(total - rec, weights["kl"] * terms["kl"])


def test_kl_is_that_of_torch():
    moments = torch.randn(2, 8, 1, 3, 3, generator=generator(1))
    mean, logvar = moments.chunk(2, dim=1)
    expected = kl_divergence(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).mean()
    assert_close(kl_to_standard_normal(moments), expected)


def test_a_weight_of_zero_costs_nothing_and_an_unknown_one_is_refused():
    x = torch.zeros(1, 3, 1, 8, 8)
    loss = VAELoss({"l1": 1.0, "kl": 0.0, "lpips": 0.0})(x, x + 1, torch.zeros(1, 8, 1, 1, 1))
    assert loss.terms.keys() == {"l1"}
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


def chosen(lpips_frames, num_frames, offset, chunks=1):
    """Indices of the frames that LPIPS looks at, of each of two clips."""
    frames = torch.arange(num_frames).float().view(1, 1, num_frames, 1, 1).expand(2, 3, -1, -1, -1)
    cut = frames.unflatten(2, (chunks, -1)).transpose(1, 2).flatten(0, 1)  # [2 chunks, 3, T, 1, 1]
    criterion = VAELoss({"l1": 1.0}, lpips_frames=lpips_frames)
    first, second = criterion._frames(cut, offset, chunks)[:, 0, :, 0, 0].tolist()
    assert first == second
    return first


def test_lpips_looks_at_frames_spread_over_the_clip():
    assert chosen(4, 17, 0) == [0, 4, 8, 12]
    assert chosen(4, 17, 6) == [1, 6, 10, 14]
    assert chosen(3, 3, 2) == [0, 1, 2]
    assert chosen(None, 5, 3) == [0, 1, 2, 3, 4]


def test_a_clip_in_chunks_gives_lpips_as_many_frames_as_a_whole_one():
    assert chosen(4, 17, 6, chunks=17) == [1, 6, 10, 14]
    assert chosen(4, 16, 0, chunks=4) == [0, 4, 8, 12]


def numbered(samples, frames):
    """[B, 3, T, 1, 1]: frame t of sample b holds 100 b + t."""
    values = 100.0 * torch.arange(samples)[:, None] + torch.arange(frames)  # [B, T]
    return values[:, None, :, None, None].expand(-1, 3, -1, -1, -1)


def test_chunks_are_runs_of_the_clips_frames():
    split = RandomChunks([5, 1], seed=3, device="cpu")
    seen = Counter()
    for step in range(40):
        chunks, rngs, offset = split(numbered(2, 17), [0, 1], step, 0)
        length = chunks.shape[2]
        seen[length] += 1
        assert len(chunks) == len(rngs) == 2 * (17 // length)
        assert 0 <= offset < 17
        values = chunks[:, 0, :, 0, 0]  # [N, L]
        assert (values.diff(dim=1) == 1).all()
        flat = values.flatten().reshape(2, -1)  # the chunks of a clip follow each other
        assert (flat.diff(dim=1) == 1).all()
        assert (flat[:, 0] // 100).tolist() == [0, 1]
    assert set(seen) == {5, 1}
    assert min(seen.values()) > 8


def test_whole_clips_stay_whole():
    chunks, rngs, _ = RandomChunks(None, seed=3, device="cpu")(numbered(3, 7), [0, 1, 2], 5, 0)
    assert torch.equal(chunks, numbered(3, 7))
    assert len(rngs) == 3


def test_two_processes_split_as_one_does():
    split = RandomChunks([4, 2, 1], seed=3, device="cpu")
    video = numbered(4, 9)
    for step in range(6):
        expected, rngs, offset = split(video, [0, 1, 2, 3], step, 0)
        parts = [split(video[a : a + 2], [a, a + 1], step, 0) for a in (0, 2)]
        assert torch.equal(torch.cat([chunks for chunks, _, _ in parts]), expected)
        noise = [torch.randn(2, generator=rng) for _, part, _ in parts for rng in part]
        assert torch.equal(torch.stack(noise), torch.stack([torch.randn(2, generator=rng) for rng in rngs]))
        assert {number for _, _, number in parts} == {offset}


TINY = {"block_out_channels": (8, 8), "norm_num_groups": 4, "mid_block_add_attention": False}


def test_latents_are_whitened():
    torch.manual_seed(0)
    vae = VideoAutoencoderKL(architecture=TINY, posterior="mode").requires_grad_(False).eval()
    videos = [torch.rand(3, 1, size, 16, generator=generator(0, size)) * 2 - 1 for size in (8, 16, 24)]
    statistics = measure_latents(vae, videos)
    vae.set_latent_statistics(scaling_factor=1.0)
    raw = torch.cat([vae.encode(video[None])[0].flatten(1) for video in videos], dim=1)  # [C, N]
    assert_close(statistics.channel_mean, raw.mean(1), rtol=1e-4, atol=1e-5)
    assert_close(statistics.channel_std, raw.std(1, correction=0), rtol=1e-4, atol=1e-5)
    assert statistics.mean == pytest.approx(float(raw.mean()), abs=1e-5)
    assert statistics.std == pytest.approx(float(raw.std(correction=0)), rel=1e-4)
    vae.set_latent_statistics(**statistics.config())
    scaled = torch.cat([vae.encode(video[None])[0].flatten(1) for video in videos], dim=1)
    assert float(scaled.mean()) == pytest.approx(0, abs=1e-3)
    assert float(scaled.std()) == pytest.approx(1, abs=1e-2)


def test_unequal_channels_are_scaled_one_by_one():
    equal = LatentStatistics(torch.tensor([0.0, 0.1]), torch.tensor([2.0, 2.2]), 0.05, 2.1)
    assert not equal.per_channel
    assert equal.config()["scaling_factor"] == pytest.approx(1 / 2.1)
    assert equal.config()["shift_factor"] == 0.05
    for unequal in (
        LatentStatistics(torch.tensor([0.0, 0.1]), torch.tensor([2.0, 2.5]), 0.05, 2.2),
        LatentStatistics(torch.tensor([0.0, 0.9]), torch.tensor([2.0, 2.0]), 0.45, 2.1),
    ):
        assert unequal.per_channel
        assert unequal.config()["scaling_factor"] == 1.0
        assert unequal.config()["latents_std"] == unequal.channel_std.tolist()
        assert "latents_mean and latents_std" in unequal.describe()
