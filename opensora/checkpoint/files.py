"""Tensors, and parts of tensors, in safetensors files.

A file holds what one process had: whole tensors, or shards of them. For shards the header's entry `shards` says, as JSON,
`name -> [shape of the whole tensor, offset of this part in it]`, so a set of files can be read by any number of processes
under any layout. Any program that reads safetensors can open them; nothing is pickled.

Files are written tensor by tensor and read region by region through short-lived memory maps, so that neither needs memory
for more than a tensor at a time.
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
from torch import Tensor

from opensora.checkpoint.shards import Shard
from opensora.utils.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA, SHARDS = "__metadata__", "shards"
BLOCK = 2**24  # bytes; what is read at once for a checksum

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a region


class FileRecord(NamedTuple):
    """What a file must be: its size in bytes and its CRC-32."""

    size: int
    crc32: int


class _Region(NamedTuple):
    """A part of a tensor: where it is in the whole, and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    position: int


def write_tensors(path: Path, shards: Mapping[str, Shard], metadata: Mapping[str, str]) -> FileRecord:
    """Write what a process holds as one safetensors file, and wait until it is on the disk.

    Args:
        path: the file to make.
        shards: name -> a whole tensor or a part of one, on any device.
        metadata: for the header.

    Raises:
        ValueError: safetensors knows no such dtype.
        OSError: it cannot be written.
    """
    header, order = _header(shards, metadata)
    tensors = (_bytes(shards[name].local) for name in order)  # one at a time: of a GPU's, only one is on the host
    size = crc = 0
    with path.open("wb") as file:
        for piece in chain([memoryview(header)], tensors):
            file.write(piece)
            size, crc = size + len(piece), zlib.crc32(piece, crc)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, crc)


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a set of files of `write_tensors`, read when they are asked for; `opensora.checkpoint.shards.Parts`.

    A tensor that lies in one piece is mapped from its file, so copy it if it is to outlive the file.

    Args:
        files: all files of the set.

    Raises:
        UserError: a file is damaged, or the files do not make up whole tensors.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = sorted(files)
        self._regions: dict[str, list[_Region]] = {}
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for file in self.files:
            try:
                self._take_header(file)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{file} is damaged: {error}. Load another checkpoint.") from error
        for name, regions in self._regions.items():
            found = sum(math.prod(shape) for _, shape in {region[:2] for region in regions})
            if found != math.prod(self.shape(name)):
                raise UserError(f"{self.files[0].parent}: {found} of {math.prod(self.shape(name))} numbers of {name}.")

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.part(name, (0,) * len(shape), shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape, from the header."""
        return self._kinds[name][0]

    def meta(self, name: str) -> Tensor:
        """The whole tensor without its numbers, on the device "meta"."""
        shape, dtype = self._kinds[name]
        return torch.empty(shape, dtype=dtype, device="meta")

    def part(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The region of `shape` that begins at `offset`; nothing else is read."""
        dtype = self._kinds[name][1]
        pieces = [(r, box) for r in self._regions[name] if (box := _overlap((r.offset, r.shape), (offset, shape)))]
        if len(pieces) == 1 and pieces[0][1] == (offset, shape):
            return _mapped(pieces[0][0], (offset, shape), dtype)
        result = torch.empty(shape, dtype=dtype)
        for region, box in pieces:
            result[_slices(box, offset)] = _mapped(region, box, dtype)
        return result

    def _take_header(self, file: Path) -> None:
        header, begin = _read_header(file)
        shards = json.loads(header.pop(METADATA, {}).get(SHARDS, "{}"))
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            whole, offset = map(tuple, shards.get(name, (shape, (0,) * len(shape))))
            kind = whole, DTYPES[entry["dtype"]]
            if self._kinds.setdefault(name, kind) != kind:
                raise ValueError(f"{name} is {kind} here and {self._kinds[name]} in another file")
            self._regions.setdefault(name, []).append(_Region(offset, shape, file, begin + entry["data_offsets"][0]))


def _header(shards: Mapping[str, Shard], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The bytes before the numbers, and the order of the tensors: the widest numbers first, so all are aligned."""
    order = sorted(shards, key=lambda name: (-shards[name].local.element_size(), name))
    parts = {n: (s.shape, s.offset) for n, s in shards.items() if s.shape != tuple(s.local.shape)}
    header: dict[str, object] = {METADATA: {**metadata, **({SHARDS: json.dumps(parts)} if parts else {})}}
    end = 0
    for name in order:
        local = shards[name].local
        if local.dtype not in NAMES:
            raise ValueError(f"{name} is {local.dtype}, which safetensors does not know")
        begin, end = end, end + local.numel() * local.element_size()
        header[name] = {"dtype": NAMES[local.dtype], "shape": list(local.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_header(file: Path) -> tuple[dict[str, dict], int]:
    """The header, and the position of the first number."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size - 8:
            raise ValueError("its header is longer than the file")
        return json.loads(stream.read(length)), 8 + length


def _overlap(a: Box, b: Box) -> Box | None:
    """The region that two regions share."""
    begin = tuple(map(max, a[0], b[0]))
    end = [min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True)]
    shape = tuple(e - f for e, f in zip(end, begin, strict=True))
    return (begin, shape) if all(n > 0 for n in shape) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(b - o, b - o + n) for b, n, o in zip(*box, origin, strict=True))


def _mapped(region: _Region, box: Box, dtype: torch.dtype) -> Tensor:
    """The numbers in `box`, mapped from the file: of the region, only the rows that the box has are touched."""
    first, *columns = _slices(box, region.offset) or (slice(0, 1),)
    row = math.prod(region.shape[1:])
    begin = region.position + first.start * row * dtype.itemsize
    count = (first.stop - first.start) * row
    aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
    with region.file.open("rb") as file:
        length = begin - aligned + count * dtype.itemsize
        # a private copy-on-write map: torch asks for memory that could be written
        memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=aligned)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin - aligned)
    return flat.view(box[1][:1] + region.shape[1:])[(slice(None), *columns)] if box[1] else flat.view(())
