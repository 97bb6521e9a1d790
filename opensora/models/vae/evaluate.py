"""Reconstruct clips with a VAE and say how close they are."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opensora.models.vae.metrics import psnr, saturation, ssim


class Quality(NamedTuple):
    """Of one clip, or the mean over clips."""

    psnr: float  # dB
    ssim: float
    lpips: float  # nan where it was not measured
    saturation: float  # ratio, out / in


@torch.no_grad()
def reconstruct(vae: Any, x: Tensor) -> Tensor:
    """x [B, 3, T, H, W] in [-1, 1] through the VAE (its `posterior` decides how): the same shape, clamped, fp32, on x's device."""
    device = next(vae.parameters()).device
    return vae.decode(vae.encode(x.to(device)), num_frames=x.shape[2]).float().clamp(-1, 1).to(x.device)


@torch.no_grad()
def quality(x_hat: Tensor, x: Tensor, lpips: nn.Module | None = None) -> Quality:
    """Of one clip: x_hat, x [1, 3, T, H, W] in [-1, 1]. LPIPS goes frame by frame, so that long clips fit."""
    distance = float("nan")
    if lpips is not None:
        pairs = zip(x_hat.split(1, dim=2), x.split(1, dim=2), strict=True)
        distance = float(torch.stack([lpips(a, b)[0] for a, b in pairs]).mean())
    ratio = float(saturation(x_hat)) / max(float(saturation(x)), 1e-6)
    return Quality(float(psnr(x_hat, x)), float(ssim(x_hat, x)), distance, ratio)


def mean_quality(rows: Iterable[Quality]) -> Quality:
    """Each number's mean."""
    return Quality(*torch.tensor(list(rows), dtype=torch.float64).mean(0).tolist())
