"""Which part of a tensor a process holds: all of it, or its shard of a DTensor.

An engine hands out its state as it lies in memory, without gathering it. This says where in the whole tensor a part
belongs, so that each process can write its own and read back what belongs to it under any other layout. Only the public
parts of `torch.distributed.tensor` are used: the placements say it all, for shards are cut like `torch.chunk` cuts.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

BLOCK = 2**26  # bytes


class Shard(NamedTuple):
    """The part of a tensor that this process holds.

    Attributes:
        local: the part; it shares its memory with the tensor.
        shape: the whole tensor's.
        offset: where `local` begins, one number a dimension.
        writes: True in exactly one of the processes that hold this part.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    writes: bool


@runtime_checkable
class Parts(Protocol):
    """Stored tensors of which a region can be read without the rest."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""

    def part(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The region of `shape` that begins at `offset`."""


def shard_of(tensor: Tensor) -> Shard:
    """What this process holds of `tensor`.

    A plain tensor is the same everywhere: rank 0 writes it. Of a DTensor each process has its shard, which may be
    smaller than the others' or empty; of replicas (HSDP) the first one writes.

    Raises:
        ValueError: the DTensor is laid out as something else than shards and replicas, for example as a pending sum.
    """
    if not isinstance(tensor, DTensor):
        return Shard(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim, _rank() == 0)
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    local = tensor.to_local().detach()
    if coordinate is None:  # this process is outside the mesh
        return Shard(local, shape, (0,) * len(shape), writes=False)
    offset, size, writes = [0] * len(shape), list(shape), True
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            writes = writes and coordinate[axis] == 0
        elif type(placement) is ShardPlacement:
            dim = placement.dim % len(shape)
            chunk = -(-size[dim] // mesh.size(axis))
            first = min(coordinate[axis] * chunk, size[dim])
            offset[dim], size[dim] = offset[dim] + first, min(chunk, size[dim] - first)
        else:
            raise ValueError(f"a DTensor with placements {tensor.placements} has no part of its own to read or write")
    assert list(local.shape) == size, f"this process holds {tuple(local.shape)} of {shape}, not {tuple(size)}"
    return Shard(local, shape, tuple(offset), writes)


@torch.no_grad()
def fill(target: Tensor, source: Mapping[str, Tensor] | Parts, name: str) -> None:
    """Copy what belongs to `target` from the whole tensor `source[name]`, to its device and dtype.

    Args:
        target: plain, or a DTensor of which only this process's part is written.
        source: whole tensors; from `Parts` no more than the region is read.
        name: the tensor's.

    Raises:
        KeyError: the source has no such tensor.
        ValueError: the whole tensors have different shapes.
    """
    local, shape, offset, _ = shard_of(target)
    if isinstance(source, Parts):
        _check_shape(name, source.shape(name), shape)
        for rows in _row_blocks(local):
            part = local[rows] if local.ndim else local
            begin = (offset[0] + rows.start, *offset[1:]) if local.ndim else offset
            part.copy_(source.part(name, begin, tuple(part.shape)))
        return
    whole = source[name]
    _check_shape(name, tuple(whole.shape), shape)
    if isinstance(whole, DTensor):
        whole = gathered(whole)
    local.copy_(whole[tuple(slice(a, a + n) for a, n in zip(offset, local.shape, strict=True))])


def gathered(tensor: DTensor) -> Tensor:
    """The whole tensor. All processes of its mesh must call it.

    On the mesh's device: NCCL moves nothing that lies in the CPU's memory, as averages and offloaded state do.
    """
    on_mesh: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return on_mesh.full_tensor()


def _row_blocks(tensor: Tensor) -> list[slice]:
    """Its rows in blocks of about BLOCK bytes, so that the copy of a large tensor needs little memory beside it."""
    if tensor.numel() == 0:
        return []
    rows = len(tensor) if tensor.ndim else 1
    step = max(1, BLOCK * rows // (tensor.numel() * tensor.element_size()))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ValueError(f"{name}: the stored shape is {found}, the wanted one {wanted}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
