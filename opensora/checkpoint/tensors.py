"""Tensors and shards of tensors, in memory and in safetensors files.

An engine hands out its state as it lies in memory, without gathering it. `shard_of` says which part of a tensor a process
holds; each process writes its own file, and reads back what it needs under any other layout.

A file holds what one process had. For shards the header's entry `shards` says, as JSON, `name -> [shape of the whole tensor,
offset of this part]`. Any program that reads safetensors can open the files; nothing is pickled. They are written tensor by
tensor and read region by region through short-lived memory maps, so that neither needs memory for more than a tensor.
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from opensora.utils.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA, SHARDS = "__metadata__", "shards"
READ_BYTES = 2**24  # at once for a checksum
COPY_BYTES = 2**26  # at once from a file, so that a large tensor needs little memory next to it


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


class FileRecord(NamedTuple):
    """The size of a file in bytes and its CRC-32."""

    size: int
    crc32: int


class _Region(NamedTuple):
    """A part of a tensor, and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    position: int


def shard_of(tensor: Tensor) -> Shard:
    """What this process holds of `tensor`.

    A plain tensor is the same everywhere: rank 0 writes it. Of a DTensor each process has its shard, which may be smaller
    than the others' or empty; of replicas (HSDP) the first one writes.

    Raises:
        ValueError: the DTensor is neither shards nor replicas, for example a pending sum.
    """
    shape, offset = tuple(tensor.shape), [0] * tensor.ndim
    if not isinstance(tensor, DTensor):
        writes = not dist.is_initialized() or dist.get_rank() == 0
        return Shard(tensor.detach(), shape, tuple(offset), writes)
    mesh, size, writes = tensor.device_mesh, list(shape), True
    local, coordinate = tensor.to_local().detach(), mesh.get_coordinate()
    if coordinate is None:  # this process is outside the mesh
        return Shard(local, shape, tuple(offset), writes=False)
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            writes = writes and coordinate[axis] == 0
        elif type(placement) is ShardPlacement:  # cut as torch.chunk cuts
            dim = placement.dim % len(shape)
            chunk = -(-size[dim] // mesh.size(axis))
            first = min(coordinate[axis] * chunk, size[dim])
            offset[dim], size[dim] = offset[dim] + first, min(chunk, size[dim] - first)
        else:
            raise ValueError(f"a DTensor with placements {tensor.placements} has no part of its own to read or write")
    assert list(local.shape) == size, f"this process holds {tuple(local.shape)} of {shape}, not {tuple(size)}"
    return Shard(local, shape, tuple(offset), writes)


@torch.no_grad()
def load_into(target: Tensor, source: Mapping[str, Tensor], name: str) -> None:
    """Copy what belongs to `target` from the whole tensor `source[name]`, to its device and dtype.

    Args:
        target: plain, or a DTensor of which only this process's part is written.
        source: whole tensors; of `SavedTensors` no more than the region is read.
        name: the tensor's.

    Raises:
        KeyError: the source has no such tensor.
        ValueError: the whole tensors have different shapes.
    """
    local, shape, offset, _ = shard_of(target)
    saved = source if isinstance(source, SavedTensors) else None
    found = source[name] if saved is None else saved.meta(name)
    if tuple(found.shape) != shape:
        raise ValueError(f"{name}: the stored shape is {tuple(found.shape)}, the wanted one {shape}")
    if saved is None:
        whole = full_tensor(found) if isinstance(found, DTensor) else found
        local.copy_(whole[_slices(offset, local.shape)])
    elif local.ndim == 0:
        local.copy_(saved[name])
    elif local.numel():
        step = max(1, COPY_BYTES * len(local) // (local.numel() * local.element_size()))
        for first in range(0, len(local), step):
            rows = local[first : first + step]
            rows.copy_(saved.region(name, (offset[0] + first, *offset[1:]), tuple(rows.shape)))


def full_tensor(tensor: DTensor) -> Tensor:
    """The whole tensor. All processes of its mesh must call it.

    On the mesh's device: NCCL moves nothing that lies in the CPU's memory, as EMA weights and offloaded state may.
    """
    on_mesh: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return on_mesh.full_tensor()


def write_tensors(path: Path, shards: Mapping[str, Shard], metadata: Mapping[str, str]) -> FileRecord:
    """Write what a process holds as one safetensors file, and wait until it is on the disk.

    Args:
        path: the file to make.
        shards: name -> a whole tensor or a part of one, on any device.
        metadata: for the header.

    Raises:
        ValueError: safetensors has no such dtype.
        OSError: it cannot be written.
    """
    parts = {n: (s.shape, s.offset) for n, s in shards.items() if s.shape != tuple(s.local.shape)}
    header: dict[str, object] = {METADATA: {**metadata, **({SHARDS: json.dumps(parts)} if parts else {})}}
    order = sorted(shards, key=lambda name: (-shards[name].local.element_size(), name))  # so that all are aligned
    end = 0
    for name in order:
        local = shards[name].local
        if local.dtype not in NAMES:
            raise ValueError(f"{name} is {local.dtype}, which safetensors does not know")
        begin, end = end, end + local.numel() * local.element_size()
        header[name] = {"dtype": NAMES[local.dtype], "shape": list(local.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    on_host = (shards[name].local.detach().cpu().contiguous() for name in order)  # one at a time
    flat = (tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in on_host)
    size = crc = 0
    with path.open("wb") as file:
        for data in chain([memoryview(len(text).to_bytes(8, "little") + text)], flat):
            file.write(data)
            size, crc = size + len(data), zlib.crc32(data, crc)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, crc)


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a set of files of `write_tensors`, read when they are asked for.

    A tensor that is contiguous in its file is mapped from it, so copy it if it is to outlive the file.

    Args:
        files: all files of the set.

    Raises:
        UserError: a file is damaged, or the files do not make up whole tensors.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._regions: dict[str, list[_Region]] = {}
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        file = Path()
        for file in sorted(files):
            try:
                self._take_header(file)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{file} is damaged: {error}. Load another checkpoint.") from error
        for name, regions in self._regions.items():
            found = sum(math.prod(shape) for _, shape in {region[:2] for region in regions})
            wanted = math.prod(self._kinds[name][0])
            if found != wanted:
                raise UserError(f"{file.parent}: {found} of {wanted} elements of {name}.")

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __getitem__(self, name: str) -> Tensor:
        shape = self._kinds[name][0]
        return self.region(name, (0,) * len(shape), shape)

    def meta(self, name: str) -> Tensor:
        """The whole tensor without its values, on the device "meta"."""
        shape, dtype = self._kinds[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def region(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The part of `shape` that begins at `offset`; nothing else is read."""
        dtype = self._kinds[name][1]
        result = None
        for region in self._regions[name]:
            begin = tuple(map(max, offset, region.offset))
            ends = zip(offset, shape, region.offset, region.shape, strict=True)
            size = tuple(min(o + n, p + m) - b for b, (o, n, p, m) in zip(begin, ends, strict=True))
            if any(n <= 0 for n in size):
                continue
            part = _mapped(region, begin, size, dtype)
            if size == shape:
                return part
            result = torch.empty(shape, dtype=dtype) if result is None else result
            result[_slices(begin, size, offset)] = part
        return torch.empty(shape, dtype=dtype) if result is None else result

    def _take_header(self, file: Path) -> None:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        shards = json.loads(header.pop(METADATA, {}).get(SHARDS, "{}"))
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            whole, offset = map(tuple, shards.get(name, (shape, (0,) * len(shape))))
            kind = whole, DTYPES[entry["dtype"]]
            if self._kinds.setdefault(name, kind) != kind:
                raise ValueError(f"{name} is {kind} here and {self._kinds[name]} in another file")
            position = 8 + length + entry["data_offsets"][0]
            self._regions.setdefault(name, []).append(_Region(offset, shape, file, position))


def _slices(offset: Iterable[int], shape: Iterable[int], origin: Iterable[int] | None = None) -> tuple[slice, ...]:
    """A region as indices into a tensor that begins at `origin`."""
    offset = list(offset)
    starts = offset if origin is None else [o - first for o, first in zip(offset, origin, strict=True)]
    return tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))


def _mapped(region: _Region, offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A part of a region, mapped from the file; only its rows are touched."""
    first, *columns = _slices(offset, shape, region.offset) or (slice(0, 1),)
    row = math.prod(region.shape[1:])
    count = (first.stop - first.start) * row
    begin = region.position + first.start * row * dtype.itemsize
    aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
    with region.file.open("rb") as file:
        length = begin - aligned + count * dtype.itemsize
        # a private copy-on-write map: torch asks for memory that could be written
        memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=aligned)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin - aligned)
    return flat.view(shape[:1] + region.shape[1:])[(slice(None), *columns)] if shape else flat.view(())
