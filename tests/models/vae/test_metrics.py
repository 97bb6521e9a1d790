"""PSNR and SSIM against scikit-image; saturation by hand."""

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from opensora.datasets.transforms import to_float
from opensora.datasets.video.read_video import read_frames
from opensora.models.vae.metrics import mean_quality, psnr, quality, saturation, ssim
from opensora.utils.seed import generator
from tests.datasets.video.videos import CLIPS


@pytest.fixture(scope="module")
def clip():
    """A real clip and a noisy copy of it [1, 3, 3, 60, 80]."""
    x = to_float(read_frames(CLIPS / "city_white.mp4", 5, 3))[None, :, :, 40:100, 60:140]
    return (x + 0.1 * torch.randn(x.shape, generator=generator(1))).clamp(-1, 1), x


def frames(x):
    return x[0].permute(1, 2, 3, 0).numpy().astype(np.float64)  # [T, H, W, 3]


def test_psnr_is_that_of_scikit_image(clip):
    x_hat, x = clip
    expected = peak_signal_noise_ratio(frames(x), frames(x_hat), data_range=2)
    assert float(psnr(x_hat, x)) == pytest.approx(expected, abs=1e-4)
    assert float(psnr(x_hat + 10, x)) == pytest.approx(float(psnr(torch.ones_like(x), x)))  # clamped


def test_ssim_is_that_of_scikit_image(clip):
    """With Wang's Gaussian window and population variances; the frame mean of its values inside the border of half a window."""
    x_hat, x = clip
    expected = [
        structural_similarity(
            a, b, channel_axis=-1, data_range=1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        for a, b in zip(frames(x) / 2 + 0.5, frames(x_hat) / 2 + 0.5, strict=True)
    ]
    assert float(ssim(x_hat, x)) == pytest.approx(np.mean(expected), abs=1e-5)
    assert float(ssim(x, x)) == pytest.approx(1)


def test_each_sample_of_a_batch_is_measured_alone(clip):
    x_hat, x = (torch.cat([v, v.flip(4) * 0.5]) for v in clip)
    for measure in (psnr, ssim):
        alone = torch.cat([measure(a[None], b[None]) for a, b in zip(x_hat, x, strict=True)])
        assert torch.allclose(measure(x_hat, x), alone)
        assert alone[0] != alone[1]


def test_small_images_are_refused_by_ssim():
    with pytest.raises(ValueError, match="at least 11 x 11"):
        ssim(torch.zeros(1, 3, 1, 10, 40), torch.zeros(1, 3, 1, 10, 40))


def test_saturation_and_the_mean_of_several():
    x = torch.zeros(1, 3, 1, 16, 16)
    assert saturation(x) == 0
    x[:, 0], x[:, 1] = 0.5, -0.25
    assert float(saturation(x)) == pytest.approx(0.75)
    grey = quality(x * 0, x)
    assert grey.saturation == 0
    assert np.isnan(grey.lpips)
    both = mean_quality([grey, quality(x, x)])
    assert both.saturation == pytest.approx(0.5)
    assert both.ssim == pytest.approx((grey.ssim + 1) / 2)
