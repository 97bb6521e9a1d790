"""One reverse step: ancestral (Ho et al. 2020, algorithm 2) or DDIM (Song et al. 2021, eq. 12 and 16)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opensora.schedulers.diffusion import eps_from_x_0, posterior_mean
from opensora.schedulers.noise_schedule import Coefficients
from opensora.utils.seed import randn_like


def ancestral_step(
    x_0: Tensor,
    x_t: Tensor,
    log_variance: Tensor,
    c: Coefficients,
    generators: Sequence[torch.Generator] | None,
) -> Tensor:
    """x_{t-1} ~ p(x_{t-1} | x_t); without generators its mean, which is what the last step returns."""
    mean = posterior_mean(x_0, x_t, c)
    if generators is None:
        return mean
    return torch.addcmul(mean, torch.exp(0.5 * log_variance), randn_like(mean, generators))


def ddim_step(
    x_0: Tensor,
    x_t: Tensor,
    eta: float,
    c: Coefficients,
    generators: Sequence[torch.Generator] | None,
) -> Tensor:
    """x_{t-1} of DDIM; eta = 0 is deterministic. eps is taken from x_0, so a clamped x_0 is felt in both."""
    abar, abar_prev = float(c.alphas_cumprod), float(c.alphas_cumprod_prev)
    sigma = eta * math.sqrt((1 - abar_prev) / (1 - abar) * (1 - abar / abar_prev))
    direction = math.sqrt(max(1 - abar_prev - sigma**2, 0.0)) * eps_from_x_0(x_0, x_t, c)
    mean = torch.add(direction, x_0, alpha=math.sqrt(abar_prev))
    return mean if generators is None or eta == 0 else mean.add_(randn_like(mean, generators), alpha=sigma)
