"""The Gaussian algebra between x_0, x_t, eps and v, and the terms of the variational lower bound.

Equations of Ho et al. 2020 ("Ho"), Nichol & Dhariwal 2021 ("Nichol") and, for v, Salimans & Ho 2022, appendix D.
Coefficients c are those of one timestep (floats), or of each sample [B, 1, 1, 1, 1].
"""

import math

import torch
from torch import Tensor

from opensora.schedulers.noise_schedule import Coefficients, Scalar


def q_sample(x_0: Tensor, noise: Tensor, c: Coefficients) -> Tensor:
    """x_t ~ q(x_t | x_0) (Ho eq. 4)."""
    return c.sqrt_alphas_cumprod * x_0 + c.sqrt_one_minus_alphas_cumprod * noise


def prediction_target(prediction: str, x_0: Tensor, noise: Tensor, c: Coefficients) -> Tensor:
    """What a perfect model returns for "eps", "x0" or "v"."""
    if prediction == "eps":
        return noise
    if prediction == "x0":
        return x_0
    return c.sqrt_alphas_cumprod * noise - c.sqrt_one_minus_alphas_cumprod * x_0


def predicted_x_0(prediction: str, output: Tensor, x_t: Tensor, c: Coefficients) -> Tensor:
    """The x_0 that the model's output stands for."""
    if prediction == "eps":
        return add_scaled(x_t, -c.sqrt_one_minus_alphas_cumprod, output) / c.sqrt_alphas_cumprod
    if prediction == "x0":
        return output
    return c.sqrt_alphas_cumprod * x_t - c.sqrt_one_minus_alphas_cumprod * output


def posterior_mean(x_0: Tensor, x_t: Tensor, c: Coefficients) -> Tensor:
    """Mean of q(x_{t-1} | x_t, x_0) (Ho eq. 7)."""
    return add_scaled(c.posterior_mean_coef_x_0 * x_0, c.posterior_mean_coef_x_t, x_t)


def model_log_variance(variance: str, raw: Tensor | None, like: Tensor, c: Coefficients) -> Tensor:
    """Log variance of p(x_{t-1} | x_t), in the shape of `like`.

    `raw` holds the variance channels of a model that learns it ("learned_range"): -1 is the posterior's, 1 is beta, and
    logarithms are interpolated without a clamp (Nichol eq. 15).
    """
    if variance == "learned_range":
        assert raw is not None, "a learned variance needs the model's variance channels"
        if not isinstance(c.log_beta, Tensor) and not isinstance(c.log_posterior_variance, Tensor):
            middle, half = (c.log_beta + c.log_posterior_variance) / 2, (c.log_beta - c.log_posterior_variance) / 2
            return half * raw + middle
        fraction = (raw + 1) / 2
        return fraction * c.log_beta + (1 - fraction) * c.log_posterior_variance
    log_variance = c.log_fixed_large if variance == "fixed_large" else c.log_posterior_variance
    return torch.zeros_like(like) + log_variance


def add_scaled(x: Tensor, factor: Scalar, y: Tensor) -> Tensor:
    """`x + factor * y`: one kernel where the factor is a float, as in sampling."""
    return x + factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


def vlb_term(x_0: Tensor, true: tuple[Tensor, Tensor], model: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    """L_t in bits (Ho eq. 5), in the shape of x_0 [B, C, T, H, W]: a KL divergence, at t = 0 a negative log likelihood.

    Args:
        true: mean and log variance of q(x_{t-1} | x_t, x_0).
        model: mean and log variance of p(x_{t-1} | x_t).
        t: [B] int64.
    """
    (true_mean, true_log_variance), (mean, log_variance) = true, model
    log_ratio = log_variance - true_log_variance
    kl = 0.5 * (log_ratio - 1 + torch.exp(-log_ratio) + (true_mean - mean) ** 2 * torch.exp(-log_variance))
    is_first = (t == 0).reshape(-1, *[1] * (x_0.ndim - 1))
    return torch.where(is_first, -discretised_gaussian_log_likelihood(x_0, mean, log_variance), kl) / math.log(2)


def discretised_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """log P of the bin of width 2/255 around x, the two outermost bins being open (Ho eq. 13), in nats.

    The bins are those of 8-bit pixels in [-1, 1]. The reference uses the same bins for latents.
    """

    def normal_cdf(x: Tensor) -> Tensor:
        # the tanh approximation (error below 3e-4), not torch.special.ndtr: losses then equal OpenAI's and DiT's
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    inverse_std = torch.exp(-0.5 * log_variance)
    below = normal_cdf((x - mean - 1 / 255) * inverse_std)
    up_to = normal_cdf((x - mean + 1 / 255) * inverse_std)
    lower = torch.where(x < -0.999, 0.0, below)
    upper = torch.where(x > 0.999, 1.0, up_to)
    return (upper - lower).clamp(min=1e-12).log()
