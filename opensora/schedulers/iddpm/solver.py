"""IDDPM's reverse steps as a `Solver`: the timesteps of a respaced schedule, from the last to the first."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from opensora.schedulers.diffusion import model_log_variance, predicted_x_0, q_sample
from opensora.schedulers.iddpm.output import split_output
from opensora.schedulers.iddpm.samplers import ancestral_step, ddim_step
from opensora.schedulers.noise_schedule import Coefficients, Schedule
from opensora.schedulers.sampling import Denoise, Time


class Settings(Protocol):
    """What a step needs to know of IDDPM."""

    prediction: str
    variance: str
    sampler: str
    eta: float
    clip_x0: float | None
    sampling_schedule: Schedule

    @property
    def model_times(self) -> Sequence[Time]:
        """What the model is told at each of the schedule's timesteps."""
        ...


class ReverseSolver:
    """One run of the ancestral or the DDIM sampler."""

    def __init__(self, settings: Settings, generators: Sequence[torch.Generator] | None) -> None:
        self.settings = settings
        self.generators = generators
        self.timesteps = settings.model_times[::-1]
        num_steps = len(self.timesteps)
        # by steps, not by abar: a mask of 0.3 edits in three of ten steps, as in the reference
        self.levels = [(num_steps - index) / num_steps for index in range(num_steps)]

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        """q(x_t | x_0) at the timestep of step `index`."""
        return q_sample(x_0, noise, self._coefficients(index))

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x_{t-1} and x_0; the last step draws nothing."""
        s, c = self.settings, self._coefficients(index)
        output = split_output(denoise(x, self.timesteps[index]), x.shape[1], s.variance)
        x_0 = predicted_x_0(s.prediction, output.prediction, x, c)
        if s.clip_x0 is not None:
            x_0 = x_0.clamp(-s.clip_x0, s.clip_x0)
        generators = self.generators if index < len(self.timesteps) - 1 else None
        if s.sampler == "ddim":
            return ddim_step(x_0, x, s.eta, c, generators), x_0
        log_variance = model_log_variance(s.variance, output.variance, x, c)
        return ancestral_step(x_0, x, log_variance, c, generators), x_0

    def _coefficients(self, index: int) -> Coefficients:
        return self.settings.sampling_schedule.at(len(self.timesteps) - 1 - index)
