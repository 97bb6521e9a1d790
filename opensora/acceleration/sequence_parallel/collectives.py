"""The two exchanges that sequence parallelism is made of, as operators that differentiate and compile.

Both are custom operators, which a compiled block holds as they are; groups go by name, which a graph can keep. Each process of a
group computes the same loss from the same whole prediction. So that the mean of the processes' parameter gradients is the gradient,
`all_gather` multiplies what flows back by the number of processes, and an engine averages as if all were data-parallel.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


@torch.library.custom_op("opensora::exchange_axes", mutates_args=())
def exchange_axes(x: Tensor, scatter: int, gather: int, length: int, group: str, size: int) -> Tensor:
    """See `Ranks.all_to_all`. Packing is inside the operator: traced, the padding's sizes would make compilation take minutes."""
    parts = _padded(x, scatter, -x.shape[scatter] % size)
    parts = parts.unflatten(scatter, (size, -1)).movedim(scatter, 0).contiguous()  # part i is for process i
    received = torch.empty_like(parts)  # part i is process i's share of axis `gather`
    dist.all_to_all_single(received, parts, group=process_group(group))
    return received.movedim(0, gather).flatten(gather, gather + 1).narrow(gather, 0, length).contiguous()


@exchange_axes.register_fake
def _(x: Tensor, scatter: int, gather: int, length: int, group: str, size: int) -> Tensor:
    shape = list(x.shape)
    shape[scatter], shape[gather] = -(-shape[scatter] // size), length
    return x.new_empty(shape)


def _keep_axes(ctx, inputs: tuple[Tensor, int, int, int, str, int], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    x, ctx.scatter, ctx.gather, _, ctx.group, ctx.size = inputs
    ctx.length = x.shape[ctx.scatter]


def _exchange_back(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[no-untyped-def]
    # the adjoint of padding is cutting, that of cutting is padding, and that of an all-to-all is the reverse one
    back = exchange_axes(grad, ctx.gather, ctx.scatter, ctx.length, ctx.group, ctx.size)
    return back, None, None, None, None, None


exchange_axes.register_autograd(_exchange_back, setup_context=_keep_axes)


@torch.library.custom_op("opensora::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """`x [...] -> [size, ...]`: the parts of all processes, in their order; the gradient comes back `size` times."""
    x = x.contiguous()
    out = x.new_empty(size, *x.shape)
    dist.all_gather(list(out.unbind(0)), x, group=process_group(group))
    return out


@all_gather.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty(size, *x.shape)


def _keep_group_and_size(ctx, inputs: tuple[Tensor, str, int], output: Tensor) -> None:  # type: ignore[no-untyped-def]
    _, ctx.group, ctx.size = inputs


def _all_gather_grad(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
    rank = dist.get_rank(process_group(ctx.group))
    return grad[rank] * ctx.size, None, None  # every process has the same grad: nothing to add up


all_gather.register_autograd(_all_gather_grad, setup_context=_keep_group_and_size)


@dataclass(frozen=True)
class Ranks:
    """A process' rank among the `size` that share a sample. Holds no state: any sizes may follow one another.

    Tokens [B, T, S, D] are sharded along S. An axis that `size` does not divide is padded with zeros at its end while it
    is sharded, and cut again where it is gathered, before anything could attend to the padding.
    """

    group: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Ranks":
        return cls(group.group_name, dist.get_world_size(group), dist.get_rank(group))

    def share(self, length: int) -> int:
        """How much of an axis each process has, padding included."""
        return -(-length // self.size)

    def split(self, x: Tensor) -> Tensor:
        """`x [B, T, S, ...]`, which all processes have -> this process' tokens `[B, T, share(S), ...]`."""
        share = self.share(x.shape[2])
        part = x[:, :, self.rank * share : (self.rank + 1) * share]
        return _padded(part, 2, share - part.shape[2]).contiguous()

    def gather(self, x: Tensor, num_tokens: int) -> Tensor:
        """The reverse of `split`, to all processes: `x [B, T, share, ...] -> [B, T, num_tokens, ...]`."""
        parts = all_gather(x, self.group, self.size)  # [p, B, T, share, ...]
        return parts.movedim(0, 2).flatten(2, 3).narrow(2, 0, num_tokens)

    def all_to_all(self, x: Tensor, *, scatter: int, gather: int, length: int) -> Tensor:
        """Scatter one axis over the processes and gather another one, of `length`.

        All of axis `scatter` and this process' share of axis `gather` -> its share of `scatter`, padded, and all of `gather`.
        """
        return exchange_axes(x, scatter, gather, length, self.group, self.size)


def _padded(x: Tensor, axis: int, by: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, by]) if by else x


def process_group(name: str) -> dist.ProcessGroup:
    """A group by its name, as operators take strings. Newer versions of PyTorch want a type of their own for the string."""
    return _resolve_process_group(cast(Any, name))
