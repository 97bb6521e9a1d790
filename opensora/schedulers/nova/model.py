"""What the scheduler "nova" asks of a model; `opensora.models.nova` has it."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from opensora.utils.errors import UserError


class AutoregressiveModel(Protocol):
    """See `opensora.models.nova.nova.NOVA` for shapes."""

    image_patch: int
    image_encoder: Any
    image_decoder: nn.Module

    def modules(self) -> Iterator[nn.Module]: ...

    def __call__(self, x: Tensor, timestep: Tensor, y: Tensor, **cond: Any) -> Tensor: ...

    def text_tokens(self, y: Tensor, mask: Tensor | None, fps: Tensor | None, flow: Tensor | None) -> Tensor: ...

    def next_condition(
        self, previous: Tensor | None, text: Tensor, frame: int, size: tuple[int, int, int], past: Any
    ) -> tuple[Tensor, Any]: ...

    def image_tokens(
        self,
        x: Tensor,
        visible: Tensor,
        condition: Tensor,
        size: tuple[int, int],
        skip: Sequence[int] = (),
    ) -> Tensor: ...

    def to_patches(self, frames: Tensor) -> Tensor: ...

    def to_frames(self, patches: Tensor, size: tuple[int, int]) -> Tensor: ...

    def check_size(self, size: Sequence[int]) -> tuple[int, int, int]: ...


def parts_of(model: Any) -> AutoregressiveModel:
    """The model whose parts are called one by one, which an engine may have wrapped.

    Raises:
        UserError: it is a denoiser of whole videos.
    """
    inner = model
    while not hasattr(inner, "next_condition"):
        if not hasattr(inner, "module"):
            raise UserError(
                f"the scheduler 'nova' trains and samples patch by patch, which {type(model).__name__} cannot: use a NOVA "
                "model, or another scheduler."
            )
        inner = inner.module
    return cast(AutoregressiveModel, inner)


def spread(values: Tensor, size: tuple[int, int], patch: int) -> Tensor:
    """A number for each patch `[..., N]` -> for each place `[..., H, W]`."""
    grid = values.unflatten(-1, (size[0] // patch, size[1] // patch))
    return torch.repeat_interleave(torch.repeat_interleave(grid, patch, dim=-1), patch, dim=-2)
