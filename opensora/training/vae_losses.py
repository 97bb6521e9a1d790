"""What a VAE is trained on.

    rec  = l1 |x^ - x| + mse (x^ - x)^2 + pooled |P(x^) - P(x)| + lpips LPIPS(x^, x),   P = mean over 8x8 pixels
    loss = rec + kl KL(q(z|x) || N(0, 1))                      reconstruction "plain"
    loss = rec / exp(s) + s + kl KL(q(z|x) || N(0, 1))         reconstruction "nll", s the learned log variance

each a mean over pixels (over latent numbers for KL). With few latent channels a network first spends all of them on
brightness, and stays there: its pictures are grey while their L1 looks fine. `pooled` asks for the mean colour of every
latent cell, and brings colour within minutes. "nll" is the likelihood of a Laplace distribution whose scale is learned
(Rombach et al. 2022): as pictures get better, their weight against KL and GAN grows. Open-Sora and LDM sum KL over the
latents and rec over the pixels of a sample; their KL weight times (latent numbers / pixel numbers) is the weight here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.models.vae.lpips import LPIPS
from opensora.utils.errors import UserError

TERMS = ("l1", "mse", "pooled", "lpips", "kl")
POOL = 8  # pixels: the cell of a VAE with spatial factor 8


class Loss(NamedTuple):
    """What to lower, the part of it that is about pixels (with its share of "nll"), and numbers for the log."""

    total: Tensor
    reconstruction: Tensor
    parts: dict[str, Tensor]  # unweighted, detached


class VAELoss(nn.Module):
    """The loss of reconstructions.

    Args:
        weights: Term -> weight; a missing term counts 0.
        lpips: Weights of LPIPS, see `LPIPS`; read only if the term has a weight.
        lpips_frames: LPIPS looks at so many frames of a clip, evenly spread from a place that `offset` moves; None: all.
            A clip that was cut into pieces counts as one, so that a batch of single frames costs what one of video costs.

    Raises:
        UserError: A weight is given for something else than `TERMS`, or LPIPS' weights are not there.
    """

    def __init__(self, weights: Mapping[str, float], lpips: str = "vgg", lpips_frames: int | None = None) -> None:
        super().__init__()
        check_weights(weights)
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.lpips = LPIPS(lpips) if "lpips" in self.weights else None
        self.lpips_frames = lpips_frames

    def forward(
        self,
        x_hat: Tensor,
        x: Tensor,
        moments: Tensor,
        logvar: Tensor | None = None,
        offset: int = 0,
        pieces: int = 1,
    ) -> Loss:
        """x_hat, x [B, 3, T, H, W], x in [-1, 1]; moments: raw mean and log variance [B, 2C, t, h, w].

        `logvar`: the learned scalar of "nll"; None = "plain". `pieces`: so many neighbours in the batch are one clip.
        """
        parts = pixel_terms(x_hat, x, self.weights)
        if self.lpips is not None:
            parts["lpips"] = self.lpips(*(self._frames(video, offset, pieces) for video in (x_hat, x))).mean()
        rec = weighted_sum(parts, self.weights, like=x_hat)
        if logvar is not None:
            rec = rec / logvar.exp() + logvar
        total = rec
        if "kl" in self.weights:
            parts["kl"] = kl_to_standard_normal(moments)
            total = rec + self.weights["kl"] * parts["kl"]
        if logvar is not None:
            parts["logvar"] = logvar
        return Loss(total, rec, {name: part.detach() for name, part in parts.items()})

    def _frames(self, x: Tensor, offset: int, pieces: int) -> Tensor:
        """x [(B n), C, T, H, W] -> the chosen ones of each clip's n T frames [B, C, T', H, W]."""
        clips = rearrange(x, "(B n) C T H W -> B C (n T) H W", n=pieces)
        frames = clips.shape[2]
        count = min(self.lpips_frames or frames, frames)
        chosen = sorted((offset + i * frames // count) % frames for i in range(count))
        # a list as index would be copied to the device, and the host would wait for it
        return torch.stack([clips[:, :, i] for i in chosen], dim=2)


class Reconstructor(nn.Module):
    """What the training of a VAE trains: the VAE and, with "nll", one number.

    Args:
        vae: Called as `vae(x, generators) -> (x_hat, moments)`.
        logvar: The start of the learned log variance; None = "plain".
    """

    def __init__(self, vae: nn.Module, logvar: float | None = None) -> None:
        super().__init__()
        self.vae: Any = vae
        self.logvar = None if logvar is None else nn.Parameter(torch.tensor(float(logvar)))

    def forward(self, x: Tensor, generators: Any = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B, 3, T, H, W] -> (x_hat [B, 3, T, H, W], moments [B, 2C, t, h, w], logvar)."""
        x_hat, moments = self.vae(x, generators)
        return x_hat, moments, self.logvar


def pixel_terms(x_hat: Tensor, x: Tensor, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """The terms that pixels alone decide, of those with a weight: scalars."""
    error = x_hat.float() - x.float()
    terms = {
        "l1": lambda: error.abs().mean(),
        "mse": lambda: error.square().mean(),
        # pooling is linear: the error of the means is the mean of the errors
        "pooled": lambda: F.avg_pool2d(rearrange(error, "B C T H W -> (B T) C H W"), POOL).abs().mean(),
    }
    return {name: term() for name, term in terms.items() if weights.get(name)}


def weighted_sum(parts: Mapping[str, Tensor], weights: Mapping[str, float], like: Tensor) -> Tensor:
    """The sum of weight times part, fp32."""
    return sum((weights[name] * part for name, part in parts.items()), start=like.new_zeros((), dtype=torch.float32))


def kl_to_standard_normal(moments: Tensor) -> Tensor:
    """KL(N(mean, exp(logvar)) || N(0, 1)) in nats, mean over all latent numbers: a scalar."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse a term that would be ignored."""
    for name, weight in weights.items():
        if weight and name not in TERMS:
            raise UserError(f"loss.{name}={weight}: a VAE is trained on {', '.join(TERMS)}; set it to 0.")


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Hinge loss (Lim & Ye 2017, arXiv:1705.02894): mean of max(0, 1 - real) and max(0, 1 + fake)."""
    return 0.5 * (F.relu(1 - real.float()).mean() + F.relu(1 + fake.float()).mean())


def generator_loss(fake: Tensor) -> Tensor:
    """What the generator is to lower: -mean of the scores of what it made."""
    return -fake.float().mean()
