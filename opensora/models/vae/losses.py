"""What a picture VAE is trained on.

    loss = l1 |x^ - x| + mse (x^ - x)^2 + pooled |P(x^) - P(x)| + kl KL(q(z|x) || N(0, 1)),   P = mean over 8x8 pixels

each a mean over pixels (over latent numbers for KL). With few latent channels a network first spends all of them on
brightness, and stays there: its pictures are grey while their L1 looks fine. `pooled` asks for the mean colour of every
latent cell, and brings colour within minutes.
"""

from collections.abc import Mapping

from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from opensora.utils.errors import UserError

TERMS = ("l1", "mse", "pooled", "kl")
POOL = 8  # pixels: the cell of a VAE with spatial factor 8


def reconstruction_loss(
    x_hat: Tensor, x: Tensor, moments: Tensor, weights: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum, and its unweighted parts for the log (detached; only terms with a weight).

    Args:
        x_hat: Reconstruction [B, 3, T, H, W].
        x: Video [B, 3, T, H, W] in [-1, 1].
        moments: Raw mean and log variance [B, 2C, T, h, w].
        weights: Term -> weight; a missing term counts 0.

    Raises:
        UserError: A weight is given for something else than `TERMS`.
    """
    check_weights(weights)
    error = x_hat.float() - x.float()
    terms = {
        "l1": lambda: error.abs().mean(),
        "mse": lambda: error.square().mean(),
        # pooling is linear: the error of the means is the mean of the errors
        "pooled": lambda: F.avg_pool2d(rearrange(error, "B C T H W -> (B T) C H W"), POOL).abs().mean(),
        "kl": lambda: kl_to_standard_normal(moments),
    }
    parts = {name: term() for name, term in terms.items() if weights.get(name)}
    total = sum((weights[name] * part for name, part in parts.items()), start=error.new_zeros(()))
    return total, {name: part.detach() for name, part in parts.items()}


def kl_to_standard_normal(moments: Tensor) -> Tensor:
    """KL(N(mean, exp(logvar)) || N(0, 1)) in nats, mean over all latent numbers: a scalar."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse a term that would be ignored."""
    for name, weight in weights.items():
        if weight and name not in TERMS:
            raise UserError(f"loss.{name}={weight}: this version trains a VAE on {', '.join(TERMS)}; set it to 0.")
