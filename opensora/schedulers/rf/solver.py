"""Solvers of the flow's ODE dx / d tau = -v from noise (tau = 1) to data (tau = 0)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opensora.schedulers.sampling import Denoise, Time
from opensora.utils.errors import UserError

SOLVERS = ("euler", "heun", "midpoint")


def flow(x_0: Tensor, noise: Tensor, tau: float | Tensor) -> Tensor:
    """x_tau, on the straight line from x_0 (tau = 0) to the noise (tau = 1)."""
    return (1 - tau) * x_0 + tau * noise


class FlowSolver:
    """One run on a grid of times.

    Args:
        name: "euler" (first order), "heun" or "midpoint" (second order, two calls a step).
        taus: the times of the steps, falling from 1 to above 0; the run ends at 0.
        num_timesteps: the model is told tau * num_timesteps.
        discrete: the model is told integers, which the taus are multiples for.
    """

    def __init__(self, name: str, taus: Sequence[float], num_timesteps: int, *, discrete: bool) -> None:
        self.name = name
        self.levels = list(taus)
        self.discrete = discrete
        self.num_timesteps = num_timesteps
        self.timesteps = [self._time(tau) for tau in taus]

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        """x_0 at the time of step `index`."""
        return flow(x_0, noise, self.levels[index])

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x at the next time, and x_0 as predicted at the start of the step."""
        tau = self.levels[index]
        after = self.levels[index + 1] if index + 1 < len(self.levels) else 0.0
        v = _velocity(denoise, x, self.timesteps[index])
        x_0 = torch.add(x, v, alpha=tau)
        if self.name == "midpoint":
            middle = (tau + after) / 2
            v = _velocity(denoise, torch.add(x, v, alpha=tau - middle), self._time(middle))
        elif self.name == "heun" and after > 0:  # the model is not asked at tau = 0; one Euler step keeps the order
            v = (v + _velocity(denoise, torch.add(x, v, alpha=tau - after), self._time(after))) / 2
        return torch.add(x, v, alpha=tau - after), x_0

    def _time(self, tau: float) -> Time:
        time = tau * self.num_timesteps
        return round(time) if self.discrete else time


def _velocity(denoise: Denoise, x: Tensor, time: Time) -> Tensor:
    return velocity_of(denoise(x, time), x.shape[1])


def velocity_of(output: Tensor, num_channels: int) -> Tensor:
    """The first C channels of a model's output; a learned variance behind them is not used.

    Raises:
        UserError: there are neither C nor 2C channels.
    """
    if output.shape[1] not in (num_channels, 2 * num_channels):
        raise UserError(
            f"rflow: the model returned {output.shape[1]} channels for {num_channels}-channel latents; expected "
            f"{num_channels}, or {2 * num_channels} with a variance, which is not used."
        )
    return output[:, :num_channels]
