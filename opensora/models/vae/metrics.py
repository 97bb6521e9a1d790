"""How close a reconstruction is: PSNR and SSIM of videos in [-1, 1]. The third measure, LPIPS, is a network: `lpips.py`."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03  # of Wang et al. 2004
LEAST_ERROR = 1e-10  # of the squared error: equal pictures have 106 dB, not infinity


def psnr(x_hat: Tensor, x: Tensor) -> Tensor:
    """[B, ...] in [-1, 1] -> [B] in dB, of each sample's mean squared error; x_hat is clamped to the range."""
    error = (x_hat.clamp(-1, 1) - x).double().square().flatten(1).mean(1)
    return (10 * torch.log10(4 / error.clamp_min(LEAST_ERROR))).float()


def ssim(x_hat: Tensor, x: Tensor) -> Tensor:
    """x_hat, x [B, 3, T, H, W] in [-1, 1] -> [B]: the mean over frames, channels and whole windows.

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", eq. 13 with a Gaussian
    window of 11 x 11 pixels, sigma 1.5. Sides must be at least 11 pixels.
    """
    if min(x.shape[-2:]) < WINDOW:
        raise ValueError(f"SSIM needs at least {WINDOW} x {WINDOW} pixels, got {tuple(x.shape[-2:])}")
    a, b = (rearrange(v.double() / 2, "B C T H W -> (B C T) 1 H W") for v in (x_hat.clamp(-1, 1), x))  # range 1
    window = _gaussian().to(a)
    mean_a, mean_b, mean_aa, mean_bb, mean_ab = (_blur(v, window) for v in (a, b, a * a, b * b, a * b))
    # statistics do not depend on where zero is, but the means do: the formula is for intensities in [0, 1]
    light_a, light_b = mean_a + 0.5, mean_b + 0.5
    var_a, var_b, cov = mean_aa - mean_a**2, mean_bb - mean_b**2, mean_ab - mean_a * mean_b
    luminance = (2 * light_a * light_b + K1**2) / (light_a**2 + light_b**2 + K1**2)
    structure = (2 * cov + K2**2) / (var_a + var_b + K2**2)
    return rearrange((luminance * structure).mean((1, 2, 3)), "(B N) -> B N", B=len(x)).mean(1).float()


def saturation(x: Tensor) -> Tensor:
    """x [B, 3, T, H, W] in [-1, 1] -> [B]: the mean of max - min over RGB. Grey videos have 0."""
    x = x.clamp(-1, 1)
    return (x.amax(1) - x.amin(1)).flatten(1).mean(1)


def _gaussian() -> Tensor:
    at = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-(at**2) / (2 * SIGMA**2))
    return weights / weights.sum()


def _blur(x: Tensor, window: Tensor) -> Tensor:
    x = F.conv2d(x, window.view(1, 1, -1, 1))
    return F.conv2d(x, window.view(1, 1, 1, -1))
