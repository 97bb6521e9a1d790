"""Weights in the number format of the computation, rounded in one pass before a forward pass.

Under autocast each use of an fp32 weight begins with a kernel that rounds it, and each gradient ends with one that widens it: for
a transformer a thousand small kernels a step. Here a block's weights are rounded together, and so are its gradients widened, a few
kernels for each block. The numbers are the same: those of autocast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opensora.acceleration.float8 import LAYERS
from opensora.utils.errors import UserError

PARTS = frozenset(LAYERS)
"""What computes under autocast in a denoiser's block. Modulation does not."""


class Slot(NamedTuple):
    """A parameter of a layer."""

    layer: nn.Module
    name: str

    @property
    def value(self) -> Tensor:
        """What the layer computes with."""
        return self.layer._parameters[self.name]  # type: ignore[return-value]  # `slots_of` leaves out those that are None

    def put(self, value: Tensor) -> None:
        """Let the layer compute with something else; `nn.Module.__setattr__` would take parameters only."""
        self.layer._parameters[self.name] = value  # type: ignore[assignment]


class CastOnce:
    """Lets the linear layers of a denoiser's blocks compute with rounded weights that know where their gradients go.

    Outside `forward_pass` and `backward_pass` the model is as it was. Layers of other classes than PyTorch's own, such as
    float8's, round as they like and are left alone.

    Args:
        model: with `transformer_blocks()`, in fp32.
        dtype: of autocast.

    Raises:
        UserError: there is no such layer.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        blocks: list[nn.Module] = getattr(model, "transformer_blocks", list)()
        self.blocks = [slots for block in blocks if (slots := slots_of(block))]
        if not self.blocks:
            raise UserError(
                f"cast_once: {type(model).__name__} has no linear layers in attention or MLPs of blocks. Leave it out."
            )
        self.rounded: list[Tensor] = []  # of the last forward pass, for activation checkpointing

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Round, and compute with that."""
        self.rounded = [value for slots in self.blocks for value in self._round(slots)]
        with self._swapped():
            yield

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Compute with what the forward pass computed with, which is then given up."""
        with self._swapped():
            yield
        self.rounded = []

    def _round(self, slots: Sequence[Slot]) -> list[Tensor]:
        """The weights of a block; those that are not trained get no gradients."""
        trained = [slot.value for slot in slots if slot.value.requires_grad]
        frozen = [slot.value for slot in slots if not slot.value.requires_grad]
        of_trained = iter(_Round.apply(self.dtype, *trained) if trained else ())
        of_frozen = iter(_cast(frozen, self.dtype))
        return [next(of_trained if slot.value.requires_grad else of_frozen) for slot in slots]

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        slots = [slot for block in self.blocks for slot in block] if self.rounded else []
        before = [slot.value for slot in slots]
        try:
            for slot, value in zip(slots, self.rounded, strict=True):
                slot.put(value)
            yield
        finally:
            for slot, value in zip(slots, before, strict=True):
                slot.put(value)


def slots_of(block: nn.Module) -> list[Slot]:
    """The fp32 weights and biases of a block's linear layers that compute under autocast."""
    layers = [
        layer
        for path, layer in block.named_modules()
        if type(layer) is nn.Linear and not PARTS.isdisjoint(path.split("."))
    ]
    return [
        Slot(layer, name)
        for layer in layers
        for name, value in layer._parameters.items()
        if value is not None and value.dtype == torch.float32
    ]


class _Round(torch.autograd.Function):
    """All at once; the gradients too."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_cast([grad for grad in grads if grad is not None], torch.float32))
        return None, *(None if grad is None else next(wide) for grad in grads)


@torch.no_grad()
def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in another number format."""
    if not tensors:
        return []
    copies = [torch.empty_like(tensor, dtype=dtype, requires_grad=False) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies
