"""What the model's output says about x_0 and eps: each is `of_x * x_t + of_output * output` at a noise level."""

from typing import NamedTuple

import torch
from torch import Tensor

from opensora.schedulers.dpms.process import Level

PREDICTIONS = ("eps", "x0", "v")


class Conversion(NamedTuple):
    """`of_x * x_t + of_output * output`."""

    of_x: float
    of_output: float

    def __call__(self, x_t: Tensor, output: Tensor) -> Tensor:
        return output if self == (0.0, 1.0) else torch.add(self.of_x * x_t, output, alpha=self.of_output)


def to_x_0(prediction: str, level: Level) -> Conversion:
    """From "eps", "x0" or v = alpha eps - sigma x_0 (Salimans & Ho 2022) to x_0."""
    if prediction == "eps":
        return Conversion(1 / level.alpha, -level.sigma / level.alpha)
    if prediction == "x0":
        return Conversion(0.0, 1.0)
    return Conversion(level.alpha, -level.sigma)


def to_eps(prediction: str, level: Level) -> Conversion:
    """From the same three to eps."""
    if prediction == "eps":
        return Conversion(0.0, 1.0)
    if prediction == "x0":
        return Conversion(1 / level.sigma, -level.alpha / level.sigma)
    return Conversion(level.sigma, level.alpha)
