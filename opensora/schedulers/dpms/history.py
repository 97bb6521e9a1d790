"""What a solver remembers while sampling: the last points x, the predictions there, and since when each frame moves."""

from collections import deque

import torch
from torch import Tensor

from opensora.schedulers.dpms.updates import Update
from opensora.schedulers.frame_mask import per_frame

LENGTH = 3  # the highest order


class History:
    """Newest last. Nothing here waits for the device."""

    def __init__(self) -> None:
        self.points: deque[Tensor] = deque(maxlen=LENGTH)
        self.predictions: deque[Tensor] = deque(maxlen=LENGTH)
        self.age: Tensor | None = None  # [B, T]: in how many steps before the newest the frame moved

    def append(self, x: Tensor, prediction: Tensor, active: Tensor | None) -> None:
        """Before a step: where x is, the model's word there, and the frames [B, T] that will move (None: all)."""
        self.points.append(x)
        self.predictions.append(prediction)
        if active is not None:
            self.age = active.int() - 1 if self.age is None else self.age + active

    def apply(self, updates: tuple[Update, ...], noise: Tensor | None) -> Tensor:
        """The next x. Each frame takes the update for its age."""
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
