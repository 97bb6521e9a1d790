"""One sampling run along a plan. Remembers the last points, the predictions there, and since when each frame moves."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from opensora.schedulers.dpms.plan import Step
from opensora.schedulers.dpms.predictions import to_eps, to_x_0
from opensora.schedulers.dpms.process import Level
from opensora.schedulers.dpms.thresholding import dynamic_thresholding
from opensora.schedulers.dpms.updates import Update
from opensora.schedulers.frame_mask import per_frame
from opensora.schedulers.sampling import Denoise, Time
from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

MEMORY = 3  # points, and predictions: the highest order


class PlannedSolver:
    """A `Solver` (opensora/schedulers/sampling.py).

    Args:
        plan: the steps.
        diffusion_steps: of the training.
        prediction: what the model returns.
        interpolated: what the plan's weights multiply: "eps", or "x0".
        thresholds: of dynamic thresholding; None: without.
        time_scale: multiplies the timesteps that the model is told; None: 1.
        generators: one per sample, where the plan draws noise.
    """

    def __init__(
        self,
        plan: Sequence[Step],
        diffusion_steps: int,
        *,
        prediction: str,
        interpolated: str,
        thresholds: tuple[float, float] | None,
        time_scale: float | None,
        generators: Sequence[torch.Generator] | None,
    ) -> None:
        self.plan = plan
        trained = [step.level.timestep for step in plan]
        self.timesteps: list[Time] = trained if time_scale is None else [t * time_scale for t in trained]
        self.levels = [(t + 1) / diffusion_steps for t in trained]
        self.prediction, self.interpolated, self.thresholds = prediction, interpolated, thresholds
        self.generators = generators
        self.points: deque[Tensor] = deque(maxlen=MEMORY)  # newest last
        self.predictions: deque[Tensor] = deque(maxlen=MEMORY)
        self.age: Tensor | None = None  # [B, T]: in how many earlier steps a frame moved

    def noised(self, x_0: Tensor, noise: Tensor, index: int) -> Tensor:
        """x_0 at the level of step `index`."""
        level = self.plan[index].level
        return level.alpha * x_0 + level.sigma * noise

    def step(self, denoise: Denoise, x: Tensor, index: int, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """x at the next level, and the predicted x_0. A frame that has just begun to move has no history to use."""
        level, updates = self.plan[index]
        x_0, m = self._x_0_and_m(self._output(denoise, x, index), x, level)
        self.points.append(x)
        self.predictions.append(m)
        if active is not None:
            self.age = active.int() - 1 if self.age is None else self.age + active
        noise = randn_like(x, self.generators) if updates[-1].noise else None
        return self._next(updates, noise), x_0

    def _output(self, denoise: Denoise, x: Tensor, index: int) -> Tensor:
        output, num_channels = denoise(x, self.timesteps[index]), x.shape[1]
        if output.shape[1] not in (num_channels, 2 * num_channels):
            raise UserError(
                f"dpm-solver: the model returned {output.shape[1]} channels for {num_channels}-channel latents, expected "
                f"{num_channels}, or {2 * num_channels} with a learned variance."
            )
        return output[:, :num_channels]

    def _x_0_and_m(self, output: Tensor, x: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        x_0 = to_x_0(self.prediction, level)(x, output)
        if self.thresholds is None:
            return x_0, x_0 if self.interpolated == "x0" else to_eps(self.prediction, level)(x, output)
        x_0 = dynamic_thresholding(x_0, *self.thresholds)
        return x_0, x_0 if self.interpolated == "x0" else to_eps("x0", level)(x, x_0)

    def _next(self, updates: tuple[Update, ...], noise: Tensor | None) -> Tensor:
        """Each frame by the update for its age."""
        if self.age is None or len(updates) == 1:
            return self._apply(updates[-1], noise)
        x = self._apply(updates[0], noise)
        for age, update in enumerate(updates[1:], start=1):
            x = torch.where(per_frame(self.age >= age), self._apply(update, noise), x)
        return x

    def _apply(self, update: Update, noise: Tensor | None) -> Tensor:
        x = update.keep * self.points[-1 - update.base]
        for weight, prediction in zip(update.weights, reversed(self.predictions), strict=False):
            if weight:
                x = x.add_(prediction, alpha=weight)
        return x if noise is None else x.add_(noise, alpha=update.noise)
