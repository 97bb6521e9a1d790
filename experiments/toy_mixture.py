"""A diffusion problem with a known answer: points of a Gaussian mixture in the plane, whose denoiser is a formula.

Under x = alpha x_0 + sigma eps a Gaussian mixture stays one, so E[x_0 | x] is exact, and what a sampler gets wrong is the
sampler's own doing. A batch of points is laid out as a video [B, 2, 1, N, 1]: the two coordinates are channels, and each
of the B samples holds N independent points.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LevelOf = Callable[[Tensor], tuple[Tensor, Tensor]]  # timestep [B] -> alpha, sigma [B]


@dataclass(frozen=True)
class GaussianMixture:
    """`num_modes` round Gaussians of one `std` on a circle of radius `radius`, with unequal weights 1, 2, ..., K."""

    num_modes: int = 5
    radius: float = 1.5
    std: float = 0.2

    def sample(self, batch: int, num_points: int, generator: torch.Generator) -> Tensor:
        """[batch, 2, 1, num_points, 1] fp64."""
        modes = torch.multinomial(self._weights(), batch * num_points, replacement=True, generator=generator)
        noise = torch.randn(batch * num_points, 2, generator=generator, dtype=torch.float64)
        points = self._means()[modes] + self.std * noise  # [batch num_points, 2]
        return points.reshape(batch, num_points, 2).permute(0, 2, 1)[:, :, None, :, None]

    def x_0_and_eps(self, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """E[x_0 | x] and E[eps | x] for x [B, 2, T, N, 1] at the levels alpha, sigma [B]; sigma may be 0."""
        means = self._means().to(x)  # [K, 2]
        alpha, sigma = (level.to(x).reshape(-1, 1, 1, 1, 1, 1) for level in (alpha, sigma))
        offset = x[:, None] - alpha * means[None, :, :, None, None, None]  # [B, K, 2, T, N, 1]
        variance = alpha**2 * self.std**2 + sigma**2
        log_weights = self._weights().log().to(x).reshape(1, -1, 1, 1, 1, 1)
        responsibility = torch.softmax(log_weights - 0.5 * (offset**2).sum(dim=2, keepdim=True) / variance, dim=1)
        x_0_of_mode = means[None, :, :, None, None, None] + alpha * self.std**2 / variance * offset
        eps_of_mode = sigma / variance * offset
        return (responsibility * x_0_of_mode).sum(dim=1), (responsibility * eps_of_mode).sum(dim=1)

    def denoiser(self, prediction: str, level_of: LevelOf) -> Callable[..., Tensor]:
        """A model as the schedulers call it, that predicts "x0", "eps", "v" or, for a rectified flow, "velocity"."""

        def model(x: Tensor, timestep: Tensor, **cond: Tensor | None) -> Tensor:
            alpha, sigma = level_of(timestep)
            x_0, eps = self.x_0_and_eps(x, alpha, sigma)
            if prediction in ("x0", "eps"):
                return x_0 if prediction == "x0" else eps
            if prediction == "velocity":
                return x_0 - eps
            alpha, sigma = (level.to(x).reshape(-1, 1, 1, 1, 1) for level in (alpha, sigma))
            return alpha * eps - sigma * x_0

        return model

    def distance(self, x: Tensor, num_directions: int = 32) -> float:
        """Sliced 2-Wasserstein distance of the points x [B, 2, T, N, 1] from this mixture, RMS over directions.

        Against the exact quantiles of the mixture along each direction, so the only noise is that of the points.
        """
        angles = torch.arange(num_directions, dtype=torch.float64) * (math.pi / num_directions)
        directions = torch.stack([angles.cos(), angles.sin()])  # [2, D]
        along = (points(x) @ directions).sort(dim=0).values  # [B T N, D]
        modes = self._means() @ directions  # [K, D]
        grid = torch.linspace(-self.radius - 8 * self.std, self.radius + 8 * self.std, 4001, dtype=torch.float64)
        cdf = (self._weights()[:, None, None] * torch.special.ndtr((grid - modes[:, :, None]) / self.std)).sum(dim=0)
        ranks = (np.arange(len(along)) + 0.5) / len(along)
        exact = np.stack([np.interp(ranks, row, grid) for row in cdf.numpy()], axis=1)  # [B T N, D]
        return float((along - torch.from_numpy(exact)).square().mean().sqrt())

    def _means(self) -> Tensor:
        angles = torch.arange(self.num_modes, dtype=torch.float64) * (2 * math.pi / self.num_modes)
        return self.radius * torch.stack([angles.cos(), angles.sin()], dim=1)

    def _weights(self) -> Tensor:
        weights = torch.arange(1, self.num_modes + 1, dtype=torch.float64)
        return weights / weights.sum()


def variance_preserving(alphas_cumprod: np.ndarray) -> LevelOf:
    """The levels of IDDPM and DPM-Solver; log alpha is linear between two training timesteps."""
    log_alphas = torch.from_numpy(0.5 * np.log(alphas_cumprod))

    def level_of(timestep: Tensor) -> tuple[Tensor, Tensor]:
        t = timestep.double().clamp(0, len(log_alphas) - 1)
        below = t.floor().long().clamp(max=len(log_alphas) - 2)
        log_alpha = torch.lerp(log_alphas[below], log_alphas[below + 1], t - below)
        return log_alpha.exp(), (-torch.expm1(2 * log_alpha)).sqrt()

    return level_of


def rectified_flow(num_timesteps: int = 1000) -> LevelOf:
    """x = (1 - t) x_0 + t eps, with t = timestep / num_timesteps."""
    return lambda timestep: (1 - timestep.double() / num_timesteps, timestep.double() / num_timesteps)


def points(x: Tensor) -> Tensor:
    """[B, 2, T, N, 1] -> [B T N, 2] fp64."""
    return x.double().movedim(1, -1).reshape(-1, 2)
