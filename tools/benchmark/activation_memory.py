"""What the backward pass of a denoiser keeps in memory, for each value of `grad_checkpoint`.

    python -m tools.benchmark.activation_memory [--model STDiT-XL/2] [--latent 16 32 32] [--batch 8] [--dtype bf16] [--depth N]

The forward pass is run on tensors without content (PyTorch's FakeTensorMode), so that any size takes seconds and no GPU; what
is alive after it and was not before is counted. Attention is that of a CPU, whose fused kernel keeps what flash attention
keeps. Blocks are not compiled: compiled ones keep less.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.config.activation_checkpointing import level_of
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype
from tools.benchmark.heading import heading

LEVELS = (
    "none", "mlp:1/3", "mlp:2/3", "mlp", "selective", "selective+every:8", "every:4", "every:2", "selective:2", "selective:4", "block",
)  # fmt: skip


def main() -> None:
    """The command line."""
    args = parse_args()
    print(heading(torch.device("cpu"), "tools.benchmark.activation_memory"))
    print(f"{args.model}, latent {'x'.join(map(str, args.latent))}, batch {args.batch}, {args.dtype}\n")
    print("| grad_checkpoint | kept GiB |\n|---|---|")
    for level in args.levels:
        kept = measure(args.model, level, args.latent, args.batch, args.dtype, depth=args.depth)
        print(f"| {level} | {kept / 2**30:.2f} |", flush=True)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="STDiT-XL/2")
    parser.add_argument("--levels", nargs="+", default=LEVELS, type=level_of)
    parser.add_argument("--latent", type=int, nargs=3, default=(16, 32, 32), metavar=("T", "H", "W"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--depth", type=int, help="number of blocks, where it is not the model's own")
    return parser.parse_args()


def measure(name: str, level: str, latent: Sequence[int], batch: int, dtype: str, *, depth: int | None = None) -> int:
    """Bytes that the forward pass of a model leaves for its backward pass."""
    size = {} if depth is None else {"depth": depth}
    with FakeTensorMode():
        model = MODELS.build({"type": name, **size}).train()
        checkpoint_activations(model.transformer_blocks(), level)
        y = torch.randn(model.null_condition(batch).shape)
        cond: dict[str, Tensor] = {"y": y, "mask": torch.ones(batch, y.shape[2], dtype=torch.bool)}
        for condition in ("fps", "height", "width", "num_frames"):
            cond[condition] = torch.ones(batch)
        z, t = torch.randn(batch, model.in_channels, *latent), torch.ones(batch)
        with torch.autocast("cpu", to_torch_dtype(dtype), enabled=dtype != "fp32"):
            return kept_bytes(lambda: model(z, t, **cond))


def kept_bytes(forward: Callable[[], Any]) -> int:
    """Bytes of all tensors that `forward` makes and that are alive after it, its result among them."""
    with _Made() as made:
        result = forward()  # keeps the graph alive
        kept = made.alive()
        del result
    return kept


class _Made(TorchDispatchMode):
    """Remembers every storage that an operation returns, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self._before: set[int] = set()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            key = tensor.untyped_storage()._cdata
            if key not in self._storages:
                self._before.add(key)  # it was there: an input or a weight
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._before:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """Bytes of what is still there."""
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


if __name__ == "__main__":
    main()
