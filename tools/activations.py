"""How much a denoiser's forward pass keeps for its backward pass: counted, on tensors without content (PyTorch's FakeTensorMode).

The model runs once with blocks that do nothing, which counts what is around them; then a block of each kind runs, and counts for
all blocks of its kind. It runs as in training: with its adapters, under autocast, checkpointed and compiled, where AOTAutograd
divides it into two passes as it does for Inductor, but no kernels are written. Everything is of one sample: a batch keeps as much for
each. Attention is that of a CPU, whose fused kernel keeps what those of GPUs keep. Of our own kernels is counted what PyTorch keeps for
the same formula: compiled as much as they keep, eagerly a little more.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import allow_many_programs
from opensora.config.schema import checkpointed_parts


class Bytes(NamedTuple):
    """What is kept."""

    activations: int
    casts: int  # of weights, in half precision: once for all samples
    largest: int = 0  # of the activations


class Activations(NamedTuple):
    """Bytes of a denoiser at a value of `grad_checkpoint`: of one sample, but for `casts`."""

    kept: int  # when the backward pass begins
    casts: int
    work: int  # of the block that needs most, in its backward pass: what is recomputed, and two gradients of the largest of it
    block: int  # the most that a block keeps


class Counter:
    """Counts for one model and size of latents; call it with a value of `grad_checkpoint`.

    Args:
        model: a denoiser on the meta device, with its adapters if it has any.
        latent: frames, rows and columns.
        dtype: in which it computes.
        compiled: whether its blocks are compiled.
        masked: whether it has conditioning frames (`x_mask`).
    """

    def __init__(
        self, model: Any, latent: Sequence[int], dtype: torch.dtype, *, compiled: bool, masked: bool = False
    ) -> None:
        self.dtype, self.compiled, self.mode = dtype, compiled, FakeTensorMode(allow_non_fake_inputs=True)
        self.stacks = getattr(model, "stack_depths", None)
        self.calls: list[tuple[nn.Module, Any, Any]] = []  # blocks in forward order, and what they are called with
        self.bytes_of, self.at = cache(self._bytes_of), cache(self._at)
        self.first: list[int] = []  # of each block the first of its kind
        model = copy.deepcopy(model).train()
        with self.mode:
            model.to_empty(device="cpu")
            for block in model.transformer_blocks():
                block.forward = partial(self._record, block)
            self.around = self._count(model, lambda: _forward(model, latent, masked=masked))
        kinds: dict[Any, int] = {}
        for i, (block, _, _) in enumerate(self.calls):
            del block.forward
            self.first.append(kinds.setdefault(_kind(block), i))

    def __call__(self, level: str) -> Activations:
        """What a training at this value of `grad_checkpoint` keeps."""
        return self.at(level)

    def _at(self, level: str) -> Activations:
        parts = checkpointed_parts(level, len(self.calls), self.stacks)
        kept = [self.bytes_of(number, part) for number, part in zip(self.first, parts, strict=True)]
        whole = [self.bytes_of(number, "nothing") for number in self.first]
        return Activations(
            kept=self.around.activations + sum(each.activations for each in kept),
            casts=self.around.casts + sum(each.casts for each in kept),
            work=max(a.activations + 2 * a.largest - b.activations for a, b in zip(whole, kept, strict=True)),
            block=max(each.activations for each in kept),
        )

    def _record(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0]  # is not held, as it would be counted
        self.calls.append((block, (x.shape, x.dtype, *args[1:]), kwargs))
        return x.clone()

    def _bytes_of(self, number: int, part: str) -> Bytes:
        """What a block keeps of which `part` is checkpointed, with its result, which is the next one's input."""
        block, (shape, dtype, *args), kwargs = self.calls[number]
        if part == "block":  # its input alone
            return Bytes(shape.numel() * dtype.itemsize, 0)
        with self.mode:
            checkpoint_activations([block], "none" if part == "nothing" else part)
            if self.compiled:
                block.compile(fullgraph=True, dynamic=False, backend=_aot(), **allow_many_programs())
            args, kwargs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs))
            # of the first block, too, where adapters alone are trained
            x = torch.empty(shape, dtype=dtype, requires_grad=True)
            kept = self._count(block, lambda: block(x, *args, **kwargs), (x, args, kwargs))
        for each in block.modules():  # as it was
            each.__dict__.pop("forward", None)
        block._compiled_call_impl = None
        return kept

    def _count(self, module: nn.Module, forward: Callable[[], Any], inputs: Any = ()) -> Bytes:
        short = self.dtype != torch.float32
        weights = {tuple(p.shape) for p in module.parameters() if p.ndim > 1 and short}
        weights |= {shape[::-1] for shape in weights}
        count = _saved if self.compiled and inputs else kept_storages
        known = [leaf for leaf in tree_leaves((inputs, [*module.parameters()])) if isinstance(leaf, Tensor)]

        def cast() -> Any:  # what autocast itself keeps is gone behind it
            with torch.autocast("cpu", self.dtype, enabled=short):
                return forward()

        kept = list(count(cast, known))
        activations = [size for shape, size in kept if shape not in weights]
        total = sum(activations)
        return Bytes(total, sum(size for _, size in kept) - total, max(activations, default=0))


def kept_storages(forward: Callable[[], Any], known: Sequence[Tensor] = ()) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes of all tensors that `forward` makes and that are alive after it, its result among them; nothing may be compiled."""
    with _Storages() as made:
        result = forward()  # keeps the graph alive
        kept = [(shape, size) for storage, shape, size in made.storages.values() if not storage.expired()]
        del result
    return kept


def _saved(forward: Callable[[], Any], known: Sequence[Tensor]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The same of a compiled `forward`, where autograd saves everything that is kept."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pack(forward())
    inputs = {tensor.untyped_storage()._cdata for tensor in known}
    return ((tuple(t.shape), t.untyped_storage().nbytes()) for key, t in kept.items() if key not in inputs)


class _Storages(TorchDispatchMode):
    """Remembers every storage that an operation returns, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: set[int] = set()  # inputs and weights
        self.storages: dict[int, tuple[StorageWeakRef, tuple[int, ...], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.before.update(key for key in inputs if key not in self.storages)
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.before:
                self.storages[storage._cdata] = StorageWeakRef(storage), tuple(tensor.shape), storage.nbytes()
        return result


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that do the same: their parts with all numbers and names that these hold."""
    parts = ((name, type(part), part) for name, part in block.named_modules())
    return tuple(
        (name, kind, *((k, v) for k, v in vars(part).items() if isinstance(v, str | int | float)))
        for name, kind, part in parts
    )


def _aot() -> Callable[..., Any]:
    """A backend of `torch.compile` that divides a program as for Inductor, and runs it as it is."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def run(graph: Any, _inputs: Any) -> Any:
        return graph.forward

    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table()
    )
    return backend


def _forward(model: Any, latent: Sequence[int], *, masked: bool) -> Any:
    """A denoiser's forward pass on one sample."""
    y, z = model.null_condition(1), torch.randn(1, model.in_channels, *latent)
    cond = {"y": y.detach(), "mask": torch.ones(1, y.shape[2], dtype=torch.bool)}
    cond |= {name: torch.ones(1) for name in ("fps", "height", "width", "num_frames")}
    if masked:
        cond["x_mask"] = torch.ones(1, latent[0], dtype=torch.bool)
    if channels := getattr(model, "condition_channels", 0):
        cond["condition"] = z.new_zeros(1, channels, *latent)
        if model.image_dim is not None:
            cond["image_features"] = z.new_zeros(1, model.image_tokens, model.image_dim)
    return model(z, torch.ones(1), **cond)
