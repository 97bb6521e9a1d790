"""What processes that share samples do in the tests of sequence parallelism, on gloo or NCCL.

Each case compares with a copy of the model in one process, which knows nothing of the others and of the code tested.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.sequence_parallel import parallelise
from opensora.models.denoiser import Denoiser
from tests.models.denoisers import inputs

Cond = dict[str, Tensor]
FLOOR = 1e-2
"""The largest gradients of these cases are 0.01 to 1."""

SIZES = [(3, 6, 8), (5, 3, 10), (1, 6, 10)]
"""Latents whose 3 x 12, 5 x 10 and 1 x 15 tokens are multiples of hardly anything; the last is an image."""


def masked_inputs(model: Denoiser, size: tuple[int, int, int], seed: int = 1) -> Cond:
    """Two samples that differ in everything, captions of different length, and some frames that are conditions."""
    cond = inputs(model, size=size, seed=seed)
    T = size[0]
    cond["x_mask"] = torch.arange(T)[None] % 3 != torch.tensor([[0], [1]])
    return cond


def on(device: torch.device, cond: Cond) -> Cond:
    """The same elsewhere."""
    return {name: value.to(device) for name, value in cond.items()}


def gradients(model: Denoiser, cond: Cond) -> tuple[Tensor, list[Tensor]]:
    """The prediction, and the gradients of a loss that weighs all of it differently."""
    model.zero_grad()
    out = model(**cond)
    weights = torch.linspace(-1, 2, out.numel(), device=out.device).reshape(out.shape)
    (out * weights).square().mean().backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == [], f"without a gradient: {missing}"
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mean_of_ranks(tensors: list[Tensor]) -> list[Tensor]:
    """What an engine makes of gradients."""
    together = torch.cat([tensor.flatten() for tensor in tensors])  # one exchange: each takes long on a busy machine
    dist.all_reduce(together)
    together /= dist.get_world_size()
    parts = together.split([tensor.numel() for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def assert_near(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Near in the largest difference, over the largest value; gradients that should be zero count as if that were `FLOOR`."""
    assert actual.isfinite().all(), f"{what}: not finite"
    actual, expected = actual.detach(), expected.detach()
    error = float((actual - expected).abs().max() / expected.abs().max().clamp(min=FLOOR))
    assert error < tolerance, f"{what}: {error:.2g} off"


def compare(
    whole: Denoiser,
    conds: Iterator[Cond] | list[Cond],
    what: str,
    prepare: Callable[[Denoiser], object] = lambda model: None,
    tolerance: float = 1e-5,
) -> None:
    """A copy sharded over all processes gives the outputs and the gradients of `whole`."""
    sharded = deepcopy(whole)
    prepare(sharded)
    parallelise(sharded, dist.group.WORLD)
    names = [name for name, p in whole.named_parameters() if p.requires_grad]
    for cond in conds:
        case = f"{what} {tuple(cond['x'].shape[2:])}"
        expected, right = gradients(whole, cond)
        out, mine = gradients(sharded, cond)
        assert_near(out, expected, case, tolerance)
        for name, a, b in zip(names, mean_of_ranks(mine), right, strict=True):
            assert_near(a, b, f"{case}: gradient of {name}", tolerance)
