"""What a forward pass keeps for its backward pass, counted on tensors without content (PyTorch's FakeTensorMode).

Attention is that of a CPU, whose fused kernel keeps what flash attention keeps. Blocks are not compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.utils.dtype import to_torch_dtype
from tools.activations import kept_storages


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
    return sum(size for _, size in kept_storages(forward))
