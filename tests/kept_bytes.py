"""What a forward pass keeps for its backward pass, counted on tensors without content (PyTorch's FakeTensorMode).

Attention is that of a CPU, whose fused kernel keeps what flash attention keeps. Blocks are not compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.utils.dtype import to_torch_dtype


def counted_bytes(new_model: Callable[[], Any], latent: Sequence[int], batch: int, level: str, dtype: str) -> int:
    """Bytes that the forward pass of a model leaves for its backward pass, run on tensors without content."""
    with FakeTensorMode():
        model = new_model().train()
        checkpoint_activations(model.transformer_blocks(), level)
        y = torch.randn(model.null_condition(batch).shape)
        cond: dict[str, Tensor] = {"y": y, "mask": torch.ones(batch, y.shape[2], dtype=torch.bool)}
        for condition in ("fps", "height", "width", "num_frames"):
            cond[condition] = torch.ones(batch)
        z, t = torch.randn(batch, model.in_channels, *latent), torch.ones(batch)
        short = to_torch_dtype(dtype)
        with torch.autocast("cpu", short, enabled=short != torch.float32):
            return kept_bytes(lambda: model(z, t, **cond))


def kept_bytes(forward: Callable[[], Any]) -> int:
    """Bytes of all tensors that `forward` makes and that are alive after it, its result among them."""
    with _Storages() as made:
        result = forward()  # keeps the graph alive
        kept = sum(size for storage, size in made.storages.values() if not storage.expired())
        del result
    return kept


class _Storages(TorchDispatchMode):
    """Remembers every storage that an operation returns, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: set[int] = set()  # inputs and weights
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.before.update(key for key in inputs if key not in self.storages)
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.before:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result
