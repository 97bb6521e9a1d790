"""Activation checkpointing: what the backward pass needs is computed again instead of kept, or kept in the CPU's memory.

Applied to a denoiser from outside, after `compile_blocks`: a `forward` is wrapped, and no name of a parameter changes.
The forward pass draws nothing at random (docs/adr/0006), so no generator has to be restored. Chen et al. 2016
(arXiv:1604.06174); by operation as in Korthikanti et al. 2022 (arXiv:2205.05198), where what is cheap to compute for its
size is computed again.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from opensora.acceleration.patching import wrap_forward
from opensora.utils.errors import UserError
from opensora.utils.recompute import parse_recompute

logger = logging.getLogger(__name__)

OFFLOAD_BYTES = 1 << 20
"""Smaller tensors stay where they are: each copy costs some ten microseconds, whatever its size."""

KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
}
"""Whose results "selective" keeps, besides our own kernels. Not `bmm`: scores of an unfused attention are [B, H, N, N]."""


def checkpoint_activations(
    blocks: Iterable[nn.Module],
    level: bool | int | str = "block",  # noqa: FBT001  (a config's value)
    stacks: Sequence[int] | None = None,
) -> None:
    """Checkpoint what `level` says (see `opensora.utils.recompute`); nothing happens without gradients.

    Args:
        blocks: of a denoiser, in forward order.
        level: a value of the config's `grad_checkpoint`.
        stacks: how many of the blocks are in each of the model's three stacks, if it has these (`stack_depths`).

    Raises:
        UserError: there is no such level, or it means MLPs and the blocks have no `mlp`.
    """
    blocks = list(blocks)
    what = parse_recompute(level)
    for block in (blocks[i] for i in what.chosen(len(blocks), stacks)):
        part = getattr(block, "mlp", None) if what.part == "mlp" else block
        if part is None:
            raise UserError(
                f"grad_checkpoint={level!r} means MLPs, and a {type(block).__name__} has none; try 'block'."
            )
        wrap_forward(part, partial(_checkpointed, policy=_SELECTIVE if what.part == "selective" else {}))


def offload_activations(model: nn.Module, *, min_bytes: int = OFFLOAD_BYTES) -> None:
    """Keep what the backward pass needs of `model`'s forward in the CPU's (pinned) memory.

    Tensors below `min_bytes` and those with the shape of a weight stay: weights are there anyway, and where an engine
    gathers them they are its own. With checkpointing, what is moved is the inputs of the parts that are computed again.
    """
    if next(model.parameters()).device.type == "cpu":
        logger.warning("activation_offload has no effect on a CPU: everything is in its memory already.")
    weights = {tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim > 1}
    weights |= {shape[::-1] for shape in weights}  # a product saves its weight transposed
    wrap_forward(model, partial(_offloaded, mover=_Mover(min_bytes, weights)))


class _Mover:
    """Copies saved tensors to the CPU and back; on a GPU beside its computing, on a stream of its own."""

    def __init__(self, min_bytes: int, stays: set[tuple[int, ...]]) -> None:
        self.min_bytes, self.stays = min_bytes, stays
        self._stream: torch.cuda.Stream | None = None

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        """The tensor's home, and what is kept instead of it."""
        if tensor.numel() * tensor.element_size() < self.min_bytes or tuple(tensor.shape) in self.stays:
            return tensor.device, tensor
        if tensor.device.type != "cuda":
            return tensor.device, tensor.cpu()
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is reused only after the copy
        return tensor.device, kept

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        """The tensor at home again."""
        device, kept = packed
        if kept.device == device:
            return kept
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)
        return kept.to(device, non_blocking=True)


def _keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name: str = op.name()
    ours = name.startswith("opensora::") and not name.endswith("backward")
    return CheckpointPolicy.MUST_SAVE if ours or name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}


def _offloaded(forward: Callable[..., Any], mover: _Mover) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(mover.pack, mover.unpack):
            return forward(*args, **kwargs)

    return wrapped


def _checkpointed(forward: Callable[..., Any], policy: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **policy, **kwargs)

    return wrapped
