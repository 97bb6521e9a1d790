"""How a VAE's latents are distributed, and what its config has to say so that a diffusion model sees unit variance."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensora.models.vae.base import VideoVAE
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)
UNEQUAL = 0.2  # channels whose spread or centre differ by more than a fifth are scaled one by one


@dataclass(frozen=True)
class LatentStatistics:
    """Of the posterior means: per channel ([C]) and over all numbers."""

    channel_mean: Tensor
    channel_std: Tensor
    mean: float
    std: float

    @property
    def per_channel(self) -> bool:
        """Whether one scale and shift for all channels would leave them unequal."""
        centres = self.channel_mean.max() - self.channel_mean.min()
        return bool(self.channel_std.max() > (1 + UNEQUAL) * self.channel_std.min() or centres > UNEQUAL * self.std)

    def config(self) -> dict[str, Any]:
        """Entries of the VAE's config; see `opensora.models.vae.base` for the formula.

        With per-channel statistics `scaling_factor` is 1, because diffusers multiplies by it as well.
        """
        if self.per_channel:
            channels = {"latents_mean": self.channel_mean.tolist(), "latents_std": self.channel_std.tolist()}
            return {"scaling_factor": 1.0, "shift_factor": None, **channels}
        return {
            "scaling_factor": 1 / self.std,
            "shift_factor": self.mean,
            "latents_mean": None,
            "latents_std": None,
        }

    def describe(self) -> str:
        """For the log."""
        channels = ", ".join(
            f"{mean:.3f} +- {std:.3f}"
            for mean, std in zip(self.channel_mean.tolist(), self.channel_std.tolist(), strict=True)
        )
        used = (
            "latents_mean and latents_std, one number a channel"
            if self.per_channel
            else f"scaling_factor={1 / self.std:.5f}, shift_factor={self.mean:.5f}"
        )
        return (
            f"raw latents {self.mean:.3f} +- {self.std:.3f}, by channel {channels}; the VAE's config scales by {used}"
        )


@torch.no_grad()
def measure_latents(vae: VideoVAE, videos: Iterable[Tensor]) -> LatentStatistics:
    """The statistics of the posterior means of videos [3, T, H, W], whose sizes may differ.

    A video whose latents are not finite is left out, with a warning.

    Raises:
        UserError: no video has finite latents.
    """
    device, left_out = next(vae.parameters()).device, 0
    count, total, squares = 0, torch.zeros(vae.out_channels, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for video in videos:
        means = vae.moments(video[None].to(device)).chunk(2, dim=1)[0]  # [1, C, T, h, w]
        means = means.double().cpu().transpose(0, 1).flatten(1)  # [C, T h w]
        if not means.isfinite().all():
            left_out += 1
            continue
        count, total, squares = count + means.shape[1], total + means.sum(1), squares + means.square().sum(1)
    if not count:
        raise UserError(f"none of {left_out} videos has finite latents: the VAE, or the data, is broken.")
    if left_out:
        logger.warning("%d videos have latents that are not finite; the statistics leave them out.", left_out)
    channel_mean = total / count
    variance = (squares / count - channel_mean.square()).clamp_min(0)
    # total variance = mean variance inside the channels + variance of their means
    std = (variance.mean() + channel_mean.var(correction=0)).sqrt()
    return LatentStatistics(channel_mean.float(), variance.sqrt().float(), float(channel_mean.mean()), float(std))
