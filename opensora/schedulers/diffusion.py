"""The Gaussian algebra between x_0, x_t, eps and v.

Equations of Ho et al. 2020 ("Ho"), Nichol & Dhariwal 2021 ("Nichol") and, for v, Salimans & Ho 2022, appendix D.
Every function takes the coefficients of one timestep, or those of each sample [B, 1, 1, 1, 1].
"""

import torch
from torch import Tensor

from opensora.schedulers.noise_schedule import Coefficients, Number


def q_sample(x_0: Tensor, noise: Tensor, c: Coefficients) -> Tensor:
    """x_t ~ q(x_t | x_0) (Ho eq. 4)."""
    return c.sqrt_alphas_cumprod * x_0 + c.sqrt_one_minus_alphas_cumprod * noise


def prediction_target(prediction: str, x_0: Tensor, noise: Tensor, c: Coefficients) -> Tensor:
    """What a perfect model returns.

    Args:
        prediction: "eps": `noise`; "x0": `x_0`; "v": sqrt(abar) noise - sqrt(1 - abar) x_0; "previous_x": the posterior's
            mean of x_{t-1}.
    """
    if prediction == "eps":
        return noise
    if prediction == "x0":
        return x_0
    if prediction == "previous_x":
        return posterior_mean(x_0, q_sample(x_0, noise, c), c)
    return c.sqrt_alphas_cumprod * noise - c.sqrt_one_minus_alphas_cumprod * x_0


def predicted_x_0(prediction: str, output: Tensor, x_t: Tensor, c: Coefficients) -> Tensor:
    """The x_0 that the model's output stands for."""
    if prediction == "eps":
        return _plus(x_t, -c.sqrt_one_minus_alphas_cumprod, output) / c.sqrt_alphas_cumprod
    if prediction == "x0":
        return output
    if prediction == "previous_x":
        return (output - c.posterior_mean_coef_x_t * x_t) / c.posterior_mean_coef_x_0
    return c.sqrt_alphas_cumprod * x_t - c.sqrt_one_minus_alphas_cumprod * output


def eps_from_x_0(x_0: Tensor, x_t: Tensor, c: Coefficients) -> Tensor:
    """The noise that leads from x_0 to x_t."""
    return _plus(x_t, -c.sqrt_alphas_cumprod, x_0) / c.sqrt_one_minus_alphas_cumprod


def posterior_mean(x_0: Tensor, x_t: Tensor, c: Coefficients) -> Tensor:
    """Mean of q(x_{t-1} | x_t, x_0) (Ho eq. 7)."""
    return _plus(c.posterior_mean_coef_x_0 * x_0, c.posterior_mean_coef_x_t, x_t)


def _plus(x: Tensor, factor: Number, y: Tensor) -> Tensor:
    """`x + factor * y`: one kernel where the factor is one number for the whole batch, as in sampling."""
    return x + factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


def model_log_variance(variance: str, raw: Tensor | None, like: Tensor, c: Coefficients) -> Tensor:
    """Log variance of p(x_{t-1} | x_t), in the shape of `like`.

    `raw` holds the variance channels of a model that learns it: with "learned" they are the log variance; with
    "learned_range" -1 is the posterior's variance, 1 is beta, between
    them the logarithms are interpolated, and nothing clamps (Nichol eq. 15).
    """
    if variance == "learned":
        assert raw is not None, "a learned variance needs the model's variance channels"
        return raw
    if variance == "learned_range":
        assert raw is not None, "a learned range needs the model's variance channels"
        if not isinstance(c.log_beta, Tensor) and not isinstance(c.log_posterior_variance, Tensor):
            middle, half = (c.log_beta + c.log_posterior_variance) / 2, (c.log_beta - c.log_posterior_variance) / 2
            return half * raw + middle
        fraction = (raw + 1) / 2
        return fraction * c.log_beta + (1 - fraction) * c.log_posterior_variance
    log_variance = c.log_fixed_large if variance == "fixed_large" else c.log_posterior_variance
    return torch.zeros_like(like) + log_variance
