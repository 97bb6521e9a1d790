"""One term of the variational lower bound, in bits per dimension (Ho et al. 2020, eq. 5 and 13)."""

import math

import torch
from torch import Tensor

from opensora.schedulers.noise_schedule import Coefficients


def vlb_term(x_0: Tensor, true: tuple[Tensor, Tensor], model: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    """L_t elementwise, in the shape of x_0 [B, C, T, H, W]: a KL divergence, and at t = 0 a negative log likelihood.

    Args:
        true: mean and log variance of q(x_{t-1} | x_t, x_0).
        model: mean and log variance of p(x_{t-1} | x_t).
        t: [B] int64.
    """
    nats = torch.where(
        (t == 0).reshape(-1, *[1] * (x_0.ndim - 1)),
        -discretised_gaussian_log_likelihood(x_0, *model),
        gaussian_kl(*true, *model),
    )
    return nats / math.log(2)


def prior_term(x_0: Tensor, c: Coefficients) -> Tensor:
    """L_T elementwise, in bits: how far x_T, with the coefficients c of the last timestep, is from N(0, 1)."""
    log_variance = torch.zeros_like(x_0) + math.log(c.sqrt_one_minus_alphas_cumprod**2)
    mean, zero = c.sqrt_alphas_cumprod * x_0, torch.zeros_like(x_0)
    return gaussian_kl(mean, log_variance, zero, zero) / math.log(2)


def gaussian_kl(mean_1: Tensor, log_variance_1: Tensor, mean_2: Tensor, log_variance_2: Tensor) -> Tensor:
    """KL(N_1 || N_2), elementwise, in nats."""
    log_ratio = log_variance_2 - log_variance_1
    return 0.5 * (log_ratio - 1 + torch.exp(-log_ratio) + (mean_1 - mean_2) ** 2 * torch.exp(-log_variance_2))


def discretised_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """log P of the bin of width 2/255 around x, the two outermost bins being open (Ho eq. 13), in nats.

    The bins are those of 8-bit pixels in [-1, 1]. Latents are no pixels; the reference uses the same bins for them.
    """
    inverse_std = torch.exp(-0.5 * log_variance)
    below = _normal_cdf((x - mean - 1 / 255) * inverse_std)
    up_to = _normal_cdf((x - mean + 1 / 255) * inverse_std)
    lower = torch.where(x < -0.999, 0.0, below)
    upper = torch.where(x > 0.999, 1.0, up_to)
    return (upper - lower).clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    # the tanh approximation (error below 3e-4), not torch.special.ndtr: losses then equal OpenAI's and DiT's
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
