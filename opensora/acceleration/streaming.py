"""Weights of blocks that come, and activations that go and come back, while a GPU computes with other blocks.

Weights wait in pinned host memory, one flat buffer a block; the device has room for some blocks. When a block is called, or its
backward pass begins, the weights of the next ones are sent for: forwards in the one, backwards in the other, so that nothing travels
twice at the turn. They are only ever copied to the device: of weights that are trained, the gradients go to the host, where the
optimizer steps. What autograd keeps of a block can go to the host as well: a block's part is away when the next block has ended, and
is sent for one block before its backward pass.

All of it happens around the call of a block, outside of what is compiled or checkpointed, and in hooks on what autograd saves: a
weight is saved as its name, and looked up in the backward pass, where it may lie elsewhere. Events order the copies, which have streams of
their own; the CPU never waits. Where the device is a CPU, all of this happens too and changes nothing.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from opensora.acceleration.patching import wrap_call
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

OFFLOAD_BYTES = 1 << 20
"""Smaller activations stay where they are: each copy costs some ten microseconds, whatever its size."""

ALIGNMENT = 256
"""Bytes; kernels may ask for 16."""


class HostBuffer:
    """Bytes of the host, pinned for a GPU. PyTorch's own pinned memory comes in powers of two, up to twice what is asked for.

    Raises:
        UserError: so much memory cannot be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self.pinned = device.type == "cuda" and num_bytes > 0
        if self.pinned and int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0)):
            self.pinned = False
            raise UserError(
                f"{num_bytes / 2**30:.2f} GiB of host memory cannot be pinned: use a machine or container with more memory, raise its "
                "limit of locked memory (ulimit -l), or leave out weight_streaming and activation_offload."
            )

    def __del__(self) -> None:
        if getattr(self, "pinned", False):
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class Copies:
    """A stream for copies in one direction; on a CPU there are none, and all is done in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: "Copies | None" = None) -> torch.cuda.Event | None:
        """Copy each `(target, source)` when what is computed so far, and `after`'s copies, are done; returns the event of their end."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None and after.stream is not None:
            self.stream.wait_stream(after.stream)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What is computed from now on waits for the event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class StreamedWeights:
    """Weights of `blocks` in host memory, of which `slots` blocks at a time are on the device.

    Args:
        blocks: for each, in forward order, tensors whose `data` is pointed to where they are; a pass takes one block after another.
        slots: at least 2.
    """

    def __init__(self, blocks: Sequence[Iterable[Tensor]], slots: int, device: torch.device) -> None:
        self.slots, self.device, self.copies = slots, device, Copies(device)
        self.tensors = [list({id(tensor): tensor for tensor in block}.values()) for block in blocks]  # tied ones once
        self.masters = []
        for tensors in self.tensors:
            master = HostBuffer(sum(_aligned(tensor) for tensor in tensors), device)
            self.masters.append(master)
            for tensor, view in zip(tensors, _views(tensors, master.bytes), strict=True):
                view.copy_(tensor.data)
                tensor.data = view  # one at a time, so that both copies of all are never there
        self.held: dict[int, Tensor] = {}
        """Block -> its bytes on the device, which may be under way."""
        self.arrivals: dict[int, torch.cuda.Event | None] = {}

    def need(self, block: int, *, backward: bool = False, again: bool = False) -> None:
        """Bring a block, and send for the next ones in the order of the pass; after the last the first, if a pass will come `again`."""
        ahead = [block - n if backward else block + n for n in range(self.slots)]
        wanted = [n % len(self.masters) if again else n for n in ahead]
        wanted = [n for n in dict.fromkeys(wanted) if 0 <= n < len(self.masters)]
        for n in wanted:
            if n not in self.held:
                room = self._room(wanted)
                self.held[n] = room
                self.arrivals[n] = self.copies.copy([(room[: len(self.masters[n].bytes)], self.masters[n].bytes)])
        if block in self.arrivals:
            self.copies.wait(self.arrivals.pop(block))
            self._point(block, self.held[block])

    def release(self) -> None:
        """All blocks back to the host; their memory on the device is free."""
        if self.copies.stream is not None:
            self.copies.stream.synchronize()
        for block in self.held:
            self._point(block, self.masters[block].bytes)
        self.held, self.arrivals = {}, {}

    def at(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the room for weights on the device."""
        place = tensor.untyped_storage().data_ptr()
        return any(room.data_ptr() == place for room in self.held.values())

    def _room(self, wanted: Sequence[int]) -> Tensor:
        if len(self.held) < self.slots:
            return torch.empty(max(len(master.bytes) for master in self.masters), dtype=torch.uint8, device=self.device)
        out = next(block for block in self.held if block not in wanted)
        self.arrivals.pop(out, None)
        self._point(out, self.masters[out].bytes)
        return self.held.pop(out)

    def _point(self, block: int, where: Tensor) -> None:
        for tensor, view in zip(self.tensors[block], _views(self.tensors[block], where), strict=True):
            tensor.data = view


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _views(tensors: Iterable[Tensor], where: Tensor) -> list[Tensor]:
    """The tensors' shapes and dtypes in the bytes `where`, one behind the other."""
    found, begin = [], 0
    for tensor in tensors:
        used = where[begin : begin + tensor.numel() * tensor.element_size()]
        found.append(used.view(tensor.dtype).view(tensor.shape))
        begin += _aligned(tensor)
    return found


class HostGradients:
    """Gradients of streamed weights, which leave the device as they are made.

    From the end of a backward pass to the next forward pass weights and gradients, summed over micro-batches, are on the host, where an
    optimizer finds them; the device has none of the weights, since they are about to change.
    """

    def __init__(self, weights: StreamedWeights, out: Copies) -> None:
        self.weights, self.out = weights, out
        self.sums: dict[Tensor, Tensor] = {}
        self.known: set[Tensor] = set()  # whose sum has something in it
        self.at_rest, self.called_back = True, False
        self.buffers = [HostBuffer(len(master.bytes), weights.device) for master in weights.masters]
        for tensors, buffer in zip(weights.tensors, self.buffers, strict=True):
            self.sums |= {
                weight: view
                for weight, view in zip(tensors, _views(tensors, buffer.bytes), strict=True)
                if weight.requires_grad
            }
        for weight in self.sums:
            weight.register_post_accumulate_grad_hook(self._take)

    def begin(self) -> None:
        """A forward pass begins."""
        if self.at_rest:
            self.known = {weight for weight in self.sums if weight.grad is not None}
            for weight in self.known:
                weight.grad = None  # it is of the host, and the weight will be on the device
            self.at_rest = False

    def _take(self, weight: Tensor) -> None:
        if not self.called_back:
            torch.autograd.Variable._execution_engine.queue_callback(self._rest)
            self.called_back = True
        assert weight.grad is not None
        if weight in self.known:
            weight.grad += self.sums[weight].to(weight.grad.device, non_blocking=True)
        self.known.add(weight)
        self.out.copy([(self.sums[weight], weight.grad)])
        if self.out.stream is not None:
            weight.grad.record_stream(self.out.stream)
        weight.grad = None

    def _rest(self) -> None:
        if self.out.stream is not None:
            self.out.stream.synchronize()
        self.weights.release()
        for weight in self.known:
            weight.grad = self.sums[weight]
        self.at_rest, self.called_back = True, False


class Layout(NamedTuple):
    """How a tensor lies in its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Saved:
    """What autograd keeps of one call of a block: on the device until it is away, on the host, or on the device again."""

    def __init__(self, block: int, before: "Saved | None", pool: list[HostBuffer]) -> None:
        self.block, self.before, self.pool = block, before, pool
        self.here: dict[Any, Tensor] = {}
        self.away: dict[Any, tuple[HostBuffer, Tensor]] = {}
        self.uses: dict[Any, int] = {}
        self.arrival: torch.cuda.Event | None = None

    def __del__(self) -> None:
        self.pool += [buffer for buffer, _ in self.away.values()]


def _nothing() -> Saved | None:
    return None


class BlockStreams:
    """Streams the weights of blocks, what autograd keeps of them, or both.

    Args:
        blocks: of a denoiser, in forward order, compiled and checkpointed.
        device: where they compute.
        weights: of these blocks; None = they are on the device.
        trained: whether these weights are trained.
        min_bytes: activations of this size or more go to the host; None = all stay.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        weights: StreamedWeights | None = None,
        trained: bool = False,
        min_bytes: int | None = None,
    ) -> None:
        self.device, self.weights, self.min_bytes, self.depth = device, weights, min_bytes, len(blocks)
        self.out, self.back = Copies(device), Copies(device)
        self.gradients = HostGradients(weights, self.out) if weights is not None and trained else None
        self.pool: list[HostBuffer] = []
        # of the forward and of the backward pass; autograd alone keeps them
        self.last: Callable[[], Saved | None] = _nothing
        self.current: Callable[[], Saved | None] = _nothing
        self.arguments: set[int] = set()  # where those of the last call lie
        # weights that autograd saves stay, on the device or, gathered, with their engine; a product saves its weight transposed
        shapes = {tuple(weight.shape) for block in blocks for weight in block.parameters() if weight.ndim > 1}
        self.stays = shapes | {shape[::-1] for shape in shapes}
        for number, block in enumerate(blocks):
            wrap_call(block, partial(self._call, number))

    def _call(self, number: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training = torch.is_grad_enabled()
        if training and number == 0:
            self.last, self.arguments = _nothing, set()
            if self.gradients is not None:
                self.gradients.begin()
        if self.weights is not None:
            self.weights.need(number, again=not training and self.gradients is None)
        if not training:
            result = call(*args, **kwargs)
            if self.gradients is not None and number == self.depth - 1 and self.weights is not None:
                self.weights.release()  # weights may be exchanged, for their average or back
            return result
        places = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        # such as the text, which all blocks get: it is there anyway
        shared, self.arguments = places & self.arguments, places
        before = self.last()
        saved = Saved(number, before, self.pool)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, saved, shared), self._unpack):
            result = call(*args, **kwargs)
        if before is not None and before.here:  # it is away by now
            self.out.wait(before.arrival)
            before.here.clear()
        self.last = weakref.ref(saved)
        return result

    def _pack(self, saved: Saved, shared: set[int], tensor: Tensor) -> Any:
        layout = Layout(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        if self.weights is not None and self.weights.at(tensor):
            return saved, layout
        once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in layout.stride)]  # expanded axes
        num_bytes, place = once.numel() * once.element_size(), tensor.untyped_storage().data_ptr()
        stays = self.min_bytes is None or num_bytes < self.min_bytes or place in shared
        if stays or tuple(tensor.shape) in self.stays or tensor.device.type != self.device.type:
            return saved, tensor
        key = place, tensor._version, layout
        if key not in saved.uses:
            buffer = self._buffer(num_bytes)
            host = buffer.bytes[:num_bytes].view(once.dtype).view(once.shape)
            saved.arrival = self.out.copy([(host, once)], after=self.back)  # a buffer may still be read
            saved.away[key], saved.here[key], saved.uses[key] = (buffer, host), tensor, 0
        saved.uses[key] += 1
        return saved, key

    def _unpack(self, packed: tuple[Saved, Any]) -> Tensor:
        saved, kept = packed
        if self.current() is not saved:
            self.current = weakref.ref(saved)
            if self.weights is not None:
                self.weights.need(saved.block, backward=True)
            self._fetch(saved)
            self.back.wait(saved.arrival)
            if saved.before is not None:
                self._fetch(saved.before)
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, Layout):  # of a weight
            assert self.weights is not None
            room = self.weights.held[saved.block].view(kept.dtype)
            return room.as_strided(kept.shape, kept.stride, kept.offset)
        if kept not in saved.here:  # of a graph that is kept, again
            saved.uses[kept] = 1
            self._fetch(saved)
            self.back.wait(saved.arrival)
        saved.uses[kept] -= 1
        return saved.here[kept] if saved.uses[kept] else saved.here.pop(kept)

    def _fetch(self, saved: Saved) -> None:
        """Send for what is away, into memory of the stream that computes."""
        pairs = []
        for key, (_, host) in saved.away.items():
            if key not in saved.here and saved.uses[key] > 0:
                layout: Layout = key[2]
                # elements that share memory, such as those of `unfold`, are written several times with the same value
                once = torch.empty_strided(host.shape, layout.stride, dtype=layout.dtype, device=self.device)
                saved.here[key] = once.expand(layout.shape)
                pairs.append((once, host))
        if pairs:
            saved.arrival = self.back.copy(pairs)

    def _buffer(self, num_bytes: int) -> HostBuffer:
        """The smallest free one that is large enough; else a new one, in the place of a free one that is too small."""
        fits = [buffer for buffer in self.pool if len(buffer.bytes) >= num_bytes]
        if not fits:
            if self.pool:
                self.pool.pop()
            return HostBuffer(num_bytes, self.device)
        best = min(fits, key=lambda buffer: len(buffer.bytes))
        self.pool.remove(best)
        return best


def stream_blocks(
    model: Any, device: torch.device, *, resident: int = 0, adapters: bool = False, activations: bool = False
) -> None:
    """Stream what a `Denoiser` needs in training; its blocks are compiled and checkpointed, and it has its adapters.

    Args:
        device: where it works, and is, unless its weights are streamed: then all but those of the blocks is brought there.
        resident: how many blocks' weights are on the device at a time; 0 = all.
        adapters: only adapters are trained, and stay there.
        activations: keep what autograd saves of the blocks in the host's memory.

    Raises:
        UserError: all blocks would be on the device, so much host memory cannot be pinned, or several processes train the weights.
    """
    blocks, weights = model.transformer_blocks(), None
    if resident:
        if not 2 <= resident < len(blocks):
            raise UserError(
                f"weight_streaming={resident}: a number of blocks from 2 to {len(blocks) - 1}, as the model has {len(blocks)}; "
                "0 keeps all of them on the GPU."
            )
        if not adapters and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                "weight_streaming of weights that are trained is for one process: use plugin='fsdp2', which shards them."
            )
        stays = {id(weight) for block in blocks for weight in block.parameters() if adapters and weight.requires_grad}
        moved = [[weight for weight in block.parameters() if id(weight) not in stays] for block in blocks]
        streamed = {id(weight) for block in moved for weight in block}
        weights = StreamedWeights(moved, resident, device)
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in streamed:
                tensor.data = tensor.data.to(device)
        # DistributedDataParallel wants all that it looks at in one place
        names = [name for name, weight in model.named_parameters() if id(weight) in streamed]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    if activations and device.type == "cpu":
        logger.warning("activation_offload has no effect on a CPU: everything is in its memory already.")
    if resident or activations:
        BlockStreams(
            blocks, device, weights=weights, trained=not adapters, min_bytes=OFFLOAD_BYTES if activations else None
        )
