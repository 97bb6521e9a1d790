"""Measured statistics give a VAE whose latents have unit variance."""

import pytest
import torch
from torch.testing import assert_close

from opensora.models.vae import VideoAutoencoderKL
from opensora.models.vae.statistics import LatentStatistics, measure_latents
from opensora.utils.seed import generator

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
