"""Small denoisers with known behaviour."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from opensora.utils.seed import generators


@pytest.fixture
def rngs() -> Callable[..., list[torch.Generator]]:
    """`rngs([3, 4])`: fresh generators of the samples 3 and 4, the same at each call."""

    def make(ids: Sequence[int] = (0, 1)) -> list[torch.Generator]:
        return generators(0, "test", ids=ids)

    return make


class Denoiser:
    """A smooth function of all its inputs that keeps every sample to itself; records how it was called."""

    def __init__(self, out_factor: int = 1) -> None:
        self.out_factor = out_factor
        self.calls: list[dict[str, Tensor | None]] = []

    def __call__(self, x: Tensor, timestep: Tensor, **cond: Tensor | None) -> Tensor:
        self.calls.append({"x": x, "timestep": timestep, **cond})
        y = cond["y"]
        assert y is not None, "the scheduler lost the condition"
        shift = (timestep / 1000 + y.mean(dim=(1, 2, 3)))[:, None, None, None, None]
        mixed = torch.tanh(0.7 * x + 0.2 * x.flip(1) + shift)
        return torch.cat([mixed, 0.5 * mixed.flip(1) - 0.1], dim=1) if self.out_factor == 2 else mixed


@pytest.fixture
def denoiser() -> Callable[[int], Denoiser]:
    """`denoiser(2)` returns 2 C channels: a prediction and a variance."""
    return Denoiser
