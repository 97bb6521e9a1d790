"""The training of a VAE, without its loop: the loss, clips of mixed lengths, and the statistics of the latents.

    rec  = l1 |x^ - x| + mse (x^ - x)^2 + pooled |P(x^) - P(x)| + lpips LPIPS(x^, x),   P = mean over 8x8 pixels
    loss = rec + kl KL(q(z|x) || N(0, 1))                      reconstruction "plain"
    loss = rec / exp(s) + s + kl KL(q(z|x) || N(0, 1))         reconstruction "nll", s the learned log variance

each a mean over pixels (over latent values for KL). With few latent channels a network first spends all of them on
brightness, and its images stay grey while their L1 looks fine; `pooled`, the mean colour of every latent cell, brings colour
within minutes. "nll" is the likelihood of a Laplace distribution whose scale is learned
(Rombach et al. 2022): as images get better, their weight against KL and GAN grows. Open-Sora and LDM sum KL over the
latents and rec over the pixels of a sample; their KL weight times (latent values / pixel values) is the weight here.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.models.vae.base import VideoVAE
from opensora.models.vae.metrics import LPIPS
from opensora.utils.errors import UserError
from opensora.utils.seed import generator, generators

logger = logging.getLogger(__name__)

TERMS = ("l1", "mse", "pooled", "lpips", "kl")
POOL = 8  # pixels: the cell of a VAE with spatial factor 8
UNEQUAL = 0.2  # channels whose standard deviation or mean differ by more than a fifth are scaled one by one


class Loss(NamedTuple):
    """The loss, its part over pixels (with "nll" applied), and values for the log."""

    total: Tensor
    reconstruction: Tensor
    terms: dict[str, Tensor]  # unweighted, detached


class VAELoss(nn.Module):
    """The loss of reconstructions.

    Args:
        weights: Term -> weight; a missing term has weight 0.
        lpips: Weights of LPIPS, see `LPIPS`; read only if the term has a weight.
        lpips_frames: LPIPS looks at so many frames of a clip, evenly spread and shifted by `offset`; None: all. A clip that
            was split into chunks counts as one, so that a batch of single frames costs what one of video costs.

    Raises:
        UserError: A term is not one of `TERMS`, or LPIPS' weights are missing.
    """

    def __init__(self, weights: Mapping[str, float], lpips: str = "vgg", lpips_frames: int | None = None) -> None:
        super().__init__()
        for name, weight in weights.items():
            if weight and name not in TERMS:
                raise UserError(f"loss.{name}={weight}: a VAE is trained on {', '.join(TERMS)}; set it to 0.")
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.lpips = LPIPS(lpips) if "lpips" in self.weights else None
        self.lpips_frames = lpips_frames

    def forward(
        self, x_hat: Tensor, x: Tensor, moments: Tensor, logvar: Tensor | None = None, offset: int = 0, chunks: int = 1
    ) -> Loss:
        """x_hat, x [B, 3, T, H, W], x in [-1, 1]; moments: raw mean and log variance [B, 2C, t, h, w].

        `logvar`: the learned scalar of "nll"; None = "plain". `chunks`: so many neighbours in the batch are one clip.
        """
        error, terms = x_hat.float() - x.float(), {}
        if "l1" in self.weights:
            terms["l1"] = error.abs().mean()
        if "mse" in self.weights:
            terms["mse"] = error.square().mean()
        if "pooled" in self.weights:  # pooling is linear: the error of the means is the mean of the errors
            terms["pooled"] = F.avg_pool2d(rearrange(error, "B C T H W -> (B T) C H W"), POOL).abs().mean()
        if self.lpips is not None:
            terms["lpips"] = self.lpips(*(self._frames(video, offset, chunks) for video in (x_hat, x))).mean()
        zero = x_hat.new_zeros((), dtype=torch.float32)
        rec = sum((self.weights[name] * term for name, term in terms.items()), start=zero)
        if logvar is not None:
            rec = rec / logvar.exp() + logvar
        total = rec
        if "kl" in self.weights:
            terms["kl"] = kl_to_standard_normal(moments)
            total = rec + self.weights["kl"] * terms["kl"]
        if logvar is not None:
            terms["logvar"] = logvar
        return Loss(total, rec, {name: term.detach() for name, term in terms.items()})

    def _frames(self, x: Tensor, offset: int, chunks: int) -> Tensor:
        """x [(B n), C, T, H, W] -> the chosen ones of each clip's n T frames [B, C, T', H, W]."""
        clips = rearrange(x, "(B n) C T H W -> B C (n T) H W", n=chunks)
        frames = clips.shape[2]
        count = min(self.lpips_frames or frames, frames)
        chosen = sorted((offset + i * frames // count) % frames for i in range(count))
        # a list as index would be copied to the device, and the host would wait
        return torch.stack([clips[:, :, i] for i in chosen], dim=2)


class Reconstructor(nn.Module):
    """The trained module: the VAE and, with "nll", the learned log variance, which starts at `logvar`; None = "plain"."""

    def __init__(self, vae: nn.Module, logvar: float | None = None) -> None:
        super().__init__()
        self.vae: Any = vae
        self.logvar = None if logvar is None else nn.Parameter(torch.tensor(float(logvar)))

    def forward(self, x: Tensor, generators: Any = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B, 3, T, H, W] -> (x_hat [B, 3, T, H, W], moments [B, 2C, t, h, w], logvar)."""
        x_hat, moments = self.vae(x, generators)
        return x_hat, moments, self.logvar


def kl_to_standard_normal(moments: Tensor) -> Tensor:
    """KL(N(mean, exp(logvar)) || N(0, 1)) in nats, mean over all latent values: a scalar."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()


class RandomChunks:
    """Splits clips into chunks of a length that is drawn for each batch: a function of (seed, step, micro-batch, index).

    `lengths`: numbers of frames, each as likely as it is often named; None keeps the clips whole.
    """

    def __init__(self, lengths: Sequence[int] | None, seed: int, device: torch.device | str) -> None:
        self.lengths, self.seed, self.device = lengths, seed, torch.device(device)

    def __call__(
        self, video: Tensor, indices: Sequence[int], step: int, micro_batch: int
    ) -> tuple[Tensor, list[torch.Generator], int]:
        """video [B, 3, T, H, W] of samples with `indices` in the whole batch -> chunks, their generators, and an offset.

        Chunks are [B n, 3, L, H, W]: n = T // L of every clip, one after another, from a random first frame. All processes
        draw the same L. The offset, in [0, T), is for LPIPS' frames.
        """
        frames = video.shape[2]
        rng = generator(self.seed, "pieces", step, micro_batch)
        lengths = self.lengths
        length = frames if lengths is None else lengths[int(torch.randint(len(lengths), (1,), generator=rng))]
        count = frames // length
        start = int(torch.randint(frames - count * length + 1, (1,), generator=rng))
        offset = int(torch.randint(frames, (1,), generator=rng))
        # whole clips are moved: a slice would be copied first, into memory that is not pinned
        video = video.to(self.device, non_blocking=True)
        chunks = rearrange(video[:, :, start : start + count * length], "B C (n L) H W -> (B n) C L H W", n=count)
        ids = [index * frames + chunk for index in indices for chunk in range(count)]
        return chunks, generators(self.seed, "train", step, ids=ids, device=self.device), offset


@dataclass(frozen=True)
class LatentStatistics:
    """Of the posterior means: per channel ([C]) and over all values; `config` scales the latents to unit variance."""

    channel_mean: Tensor
    channel_std: Tensor
    mean: float
    std: float

    @property
    def per_channel(self) -> bool:
        """Whether one scale and shift for all channels would leave them unequal."""
        mean_range = self.channel_mean.max() - self.channel_mean.min()
        return bool(self.channel_std.max() > (1 + UNEQUAL) * self.channel_std.min() or mean_range > UNEQUAL * self.std)

    def config(self) -> dict[str, Any]:
        """Entries of the VAE's config; see `opensora.models.vae.base` for the formula.

        With per-channel statistics `scaling_factor` is 1, because diffusers multiplies by it as well.
        """
        if self.per_channel:
            channels = {"latents_mean": self.channel_mean.tolist(), "latents_std": self.channel_std.tolist()}
            return {"scaling_factor": 1.0, "shift_factor": None, **channels}
        return {"scaling_factor": 1 / self.std, "shift_factor": self.mean, "latents_mean": None, "latents_std": None}

    def describe(self) -> str:
        of_channels = zip(self.channel_mean.tolist(), self.channel_std.tolist(), strict=True)
        channels = ", ".join(f"{mean:.3f} +- {std:.3f}" for mean, std in of_channels)
        scales = f"scaling_factor={1 / self.std:.5f}, shift_factor={self.mean:.5f}"
        if self.per_channel:
            scales = "latents_mean and latents_std, one value a channel"
        return (
            f"raw latents {self.mean:.3f} +- {self.std:.3f}, by channel {channels}; the VAE's config scales by {scales}"
        )


@torch.no_grad()
def measure_latents(vae: VideoVAE, videos: Iterable[Tensor]) -> LatentStatistics:
    """The statistics of the posterior means of videos [3, T, H, W], whose sizes may differ.

    A video whose latents are not finite is left out, with a warning; a UserError where none is left.
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
