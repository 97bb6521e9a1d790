"""Records in sharded files: what is expensive to compute, kept so that any of it can be read at any time.

    FOLDER/METADATA                      JSON: format, features, settings, notes (not used), shards, entries
    FOLDER/index.safetensors             where each record is, sorted by a hash of its key
    FOLDER/00000000-<hash>.safetensors   shards of many records each, in the order in which they were written

A record is a dict with a fixed set of fields, its features. In a shard, record i is the tensors `i/FIELD`, and `i/record`: a
checksum and JSON with the key, the small fields, and each tensor's dtype, shape and checksum. Any reader of
safetensors can open a shard; nothing is pickled. A shard appears whole or not at all, and is named after its content, so
a job that was killed loses only the shard it was filling, and processes that share the work cannot overwrite each other.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from torch import Tensor

from opensora.utils.errors import UserError
from opensora.utils.folders import read_json
from opensora.utils.logging import progress_bar

FORMAT = 2
METADATA, INDEX = "METADATA", "index.safetensors"
SHARD_BYTES = 256 * 2**20
SHARD_RECORDS = 4096  # opening a shard reads a line for each tensor in it
OPEN_SHARDS = 64
ABANDONED_S = 600  # after which a temporary file is taken for that of a writer that was killed
SCALARS = {"string": str, "int64": int, "float64": float}
KINDS = ("tensor", "bytes", *SCALARS, *([name] for name in SCALARS))
OTHER_FOLDER = "Write to another folder."
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, TypeError)

Record = dict[str, Any]


class RecordWriter:
    """Appends records to a folder; where an earlier writer stopped, this one continues. docs/how-to/caches.md has an example.

    Args:
        features: Field -> "tensor", "bytes", "string", "int64" or "float64"; or a list with one of the last three, such as
            ["int64"], for a list of them.
        settings: What the records depend on (JSON values).
        shard_bytes: A shard is written when so many bytes have been gathered.
        remedy: What an error tells the user to do.

    Raises:
        UserError: the folder holds records of other features or settings.
    """

    def __init__(
        self,
        path: str | Path,
        features: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        shard_bytes: int = SHARD_BYTES,
        remedy: str = OTHER_FOLDER,
    ) -> None:
        self.path, self.features, self.shard_bytes = Path(path), dict(features), shard_bytes
        for name, kind in self.features.items():
            if kind not in KINDS or "/" in name or name == "record":
                raise ValueError(f"feature {name!r}: {kind!r} is not one of {KINDS} (or the name is reserved).")
        metadata = prepare_folder(self.path, self.features, settings, remedy=remedy)
        self._finished = _full_index(self.path, metadata)[1]
        self._number = len(self._finished.hi)
        self._new: set[tuple[int, int]] = set()
        self._waiting: list[tuple[str, Record]] = []
        self._waiting_bytes = 0

    def __contains__(self, key: str) -> bool:
        """Whether a record with this key is in a finished shard, or waits for its shard."""
        return _hash(key) in self._new or self._finished.find(key) is not None

    def write(self, record: Mapping[str, Any], key: str | None = None) -> None:
        """Add a record; one with the same key is replaced. `key`: by default the record's number."""
        if record.keys() != self.features.keys():
            raise ValueError(f"a record with {sorted(record)}, but the features are {sorted(self.features)}.")
        copy: Record = {}
        for name, kind in self.features.items():
            value = record[name]
            if kind == "tensor":
                value = torch.as_tensor(value).detach().cpu().clone(memory_format=torch.contiguous_format)
            elif kind == "bytes":
                value = torch.from_numpy(np.frombuffer(value, np.uint8).copy())
            elif kind == "string" and not isinstance(value, str):
                raise ValueError(f"field {name!r}: {value!r} is no string.")
            else:
                value = [SCALARS[kind[0]](item) for item in value] if isinstance(kind, list) else SCALARS[kind](value)
            copy[name] = value
        key = str(self._number) if key is None else key
        self._waiting.append((key, copy))
        self._waiting_bytes += sum(value.nbytes for value in copy.values() if isinstance(value, Tensor))
        self._new.add(_hash(key))
        self._number += 1
        if self._waiting_bytes >= self.shard_bytes or len(self._waiting) >= SHARD_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard. Readers see it after `consolidate`."""
        if not self._waiting:
            return
        tensors: dict[str, Tensor] = {}
        digest = hashlib.blake2b(digest_size=8)
        for i, (key, record) in enumerate(self._waiting):
            stored = {name: value for name, value in record.items() if isinstance(value, Tensor)}
            small = {name: value for name, value in record.items() if name not in stored}
            content = {"key": key, "fields": small, "tensors": {name: _check(value) for name, value in stored.items()}}
            text = json.dumps(content, ensure_ascii=False).encode()
            text = zlib.crc32(text).to_bytes(4, "little") + text
            digest.update(text)
            tensors |= {f"{i}/{name}": value for name, value in stored.items()}
            tensors[f"{i}/record"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        name = f"{self._number - len(self._waiting):08d}-{digest.hexdigest()}.safetensors"
        metadata = {"format": "pt", "records": str(len(self._waiting))}
        _publish(self.path / name, lambda path: save_file(tensors, path, metadata=metadata))
        self._waiting, self._waiting_bytes = [], 0

    def close(self) -> None:
        """Write what waits, and make all records readable. Of several processes, one calls it after all have flushed."""
        self.flush()
        consolidate(self.path)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


class RecordReader:
    """Random access to a folder of records, by key or by number, also in worker processes; a `UserError`, which ends with `remedy`,
    where there are no finished ones. Files are mapped into memory, not read at once; the checksums of a record are verified when a
    process first reads its tensors."""

    def __init__(self, path: str | Path, *, remedy: str = "Write it with RecordWriter, and close it.") -> None:
        self.path, self.remedy = Path(path), remedy
        metadata = read_metadata(self.path, remedy)
        if metadata["entries"] is None:
            raise UserError(f"the records in {self.path} are not finished: their writer was interrupted. {remedy}")
        self.features: dict[str, Any] = metadata["features"]
        self.settings: dict[str, Any] = metadata["settings"]
        self._shards: list[str] = metadata["shards"]
        self._index = _read_index(self.path, metadata)
        if gone := [name for name in self._shards if not (self.path / name).is_file()]:
            raise UserError(f"{len(gone)} files of the cache {self.path} are missing, such as {gone[0]}. {remedy}")
        if len(self) != metadata["entries"]:
            raise UserError(f"{self.path / INDEX} has {len(self)} of {metadata['entries']} records. {remedy}")
        self._order = np.lexsort((self._index.position, self._index.shard))  # number of a record -> row of the index
        self._verified = np.zeros(len(self), bool)
        self._open: dict[tuple[int, str], Any] = {}  # by process: a forked worker maps the files itself

    def __len__(self) -> int:
        return len(self._index.hi)

    def __contains__(self, key: str) -> bool:
        return self._index.find(key) is not None

    def present(self, keys: Iterable[str]) -> np.ndarray:
        """[N] bool, which keys have a record, for many at once."""
        hashes = np.array([_hash(key) for key in keys], np.uint64).reshape(-1, 2)
        own = np.stack([self._index.hi, self._index.lo], axis=1)
        pair = np.dtype([("hi", np.uint64), ("lo", np.uint64)])
        return np.isin(hashes.view(pair)[:, 0], own.view(pair)[:, 0])

    def __getitem__(self, number: int) -> Record:
        """A record by its number, in the order of writing."""
        return self.at(number)

    def at(self, number: int, fields: Collection[str] | None = None) -> Record:
        """Some fields of a record by its number, in the order of writing."""
        return self._read(int(self._order[number]), fields)[1]

    def read(self, key: str, fields: Collection[str] | None = None) -> Record:
        """The record with this key, or some of its fields. Its tensors are views of the file: copy before writing to them.

        Raises a `KeyError` where there is none, and a `UserError` where the file was damaged.
        """
        row = self._index.find(key)
        if row is None:
            raise KeyError(key)
        found, record = self._read(row, fields)
        assert found == key, f"{self.path}: the index leads from {key!r} to {found!r}"
        return record

    def content_names(self) -> list[str]:
        """What distinguishes these records from others: shards are named after their content."""
        return sorted([INDEX, *self._shards])

    def check(self) -> Iterator[str]:
        """Read everything; yields what is wrong with each damaged record."""
        self._verified[:] = False
        for row in progress_bar(range(len(self)), desc=f"checking {self.path}", unit="record"):
            try:
                self._read(row, None)
            except UserError as error:
                yield str(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def _read(self, row: int, fields: Collection[str] | None) -> tuple[str, Record]:
        """The key and the fields of a row of the index."""
        shard, i = self._shards[int(self._index.shard[row])], int(self._index.position[row])
        where = f"{self.path / shard}, record {i}"
        try:
            if (os.getpid(), shard) not in self._open:
                if len(self._open) >= OPEN_SHARDS:
                    self._open.clear()
                self._open[os.getpid(), shard] = safe_open(self.path / shard, framework="pt")
            opened = self._open[os.getpid(), shard]
            content = _parse(opened.get_tensor(f"{i}/record"))
            record, checks = content["fields"], content["tensors"]
            wanted = [name for name in checks if fields is None or name in fields]
            verify = bool(wanted) and not self._verified[row]
            tensors = {name: opened.get_tensor(f"{i}/{name}") for name in (checks if verify else wanted)}
        except UNREADABLE as error:
            raise UserError(f"{where} cannot be read ({error}); delete the file. {self.remedy}") from error
        if bad := [name for name in checks if verify and checks[name] != _check(tensors[name])]:
            raise UserError(f"{where}: {', '.join(bad)} is damaged (wrong checksum); delete the file. {self.remedy}")
        self._verified[row] |= verify
        for name, tensor in tensors.items():
            record[name] = tensor.numpy().tobytes() if self.features[name] == "bytes" else tensor
        return content["key"], {name: value for name, value in record.items() if fields is None or name in fields}


def prepare_folder(
    path: Path, features: Mapping[str, Any], settings: Mapping[str, Any] | None = None, remedy: str = OTHER_FOLDER
) -> dict[str, Any]:
    """Make a folder for such records, or check that it is one (see `refuse_other`); returns its metadata."""
    settings = dict(settings or {})
    if (path / METADATA).exists():
        found = read_metadata(path, remedy)
        refuse_other(path, found["features"], features, "fields", remedy)
        refuse_other(path, found["settings"], settings, "settings", remedy)
        return found
    path.mkdir(parents=True, exist_ok=True)
    metadata = {"format": FORMAT, "features": dict(features), "settings": settings}
    return _write_metadata(path, {**metadata, "notes": {}, "shards": [], "entries": None})


def refuse_other(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise a `UserError` that names what differs; what only one of the two has is None in the other."""
    expected = json.loads(json.dumps(expected))
    names = dict.fromkeys([*expected, *found])
    wrong = [f"{n} is {found.get(n)}, not {expected.get(n)}" for n in names if found.get(n) != expected.get(n)]
    if wrong:
        raise UserError(f"the cache {path} was made with other {what}: {'; '.join(wrong)}. {remedy}")


def read_metadata(path: Path, remedy: str) -> dict[str, Any]:
    """The content of METADATA; a `UserError` where it is missing, unreadable or of another version."""
    file = path / METADATA
    if not file.is_file():
        raise UserError(f"there is no cache in {path} (no {METADATA}). {remedy}")
    content = read_json(file, remedy)
    try:
        if content["format"] != FORMAT:
            raise UserError(f"{file} has format {content['format']}, not {FORMAT}: write the cache anew. {remedy}")
        return {key: content[key] for key in ("format", "features", "settings", "notes", "shards", "entries")}
    except KeyError as error:
        raise UserError(f"{file} does not describe a cache: {error!r}. {remedy}") from error


def consolidate(path: str | Path) -> int:
    """Make all finished shards readable, and remove what interrupted writers left; returns the number of records.

    What is younger than `ABANDONED_S` may be of another writer that is at work.
    """
    path = Path(path)
    metadata = read_metadata(path, "")
    names, index = _full_index(path, metadata)
    written_again = np.append((index.hi[1:] == index.hi[:-1]) & (index.lo[1:] == index.lo[:-1]), False)
    index = Index(*(column[~written_again[: len(column)]] for column in index))
    _publish(path / INDEX, lambda temporary: save_numpy(index._asdict(), temporary))
    _write_metadata(path, {**metadata, "shards": names, "entries": len(index.hi)})
    for leftover in path.glob("*.tmp"):
        with suppress(FileNotFoundError):  # it has its name by now
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                leftover.unlink()
    return len(index.hi)


class Index(NamedTuple):
    """Where records are, each [N], sorted by the halves of the key's hash."""

    hi: np.ndarray  # uint64
    lo: np.ndarray  # uint64
    shard: np.ndarray  # uint32, number of the shard
    position: np.ndarray  # uint32, number of the record in its shard

    def find(self, key: str) -> int | None:
        """The row of a key."""
        hi, lo = _hash(key)
        first, last = (int(np.searchsorted(self.hi, np.uint64(hi), side)) for side in ("left", "right"))
        return next((row for row in range(first, last) if int(self.lo[row]) == lo), None)


def _hash(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _full_index(path: Path, metadata: Mapping[str, Any]) -> tuple[list[str], Index]:
    """All finished shards, and an index with a row for each time that a key was written, in order.

    Shards that are in the index are not opened, unless one has vanished.
    """
    known = [name for name in metadata["shards"] if (path / name).is_file()]
    names = known + sorted({p.name for p in path.glob("*-*.safetensors")} - set(known))
    indexed = len(known) if known == metadata["shards"] else 0
    parts = [_read_index(path, metadata if indexed else {"shards": []})]
    for number, name in enumerate(names[indexed:], start=indexed):
        try:
            with safe_open(path / name, framework="pt") as opened:
                count = int(opened.metadata()["records"])
                keys = [_hash(_parse(opened.get_tensor(f"{i}/record"))["key"]) for i in range(count)]
        except UNREADABLE as error:
            message = f"{path / name} is damaged ({error}); delete it, and what it held is written again."
            raise UserError(message) from error
        hi, lo = np.array(keys, np.uint64).reshape(-1, 2).T
        parts.append(Index(hi, lo, np.full(count, number, np.uint32), np.arange(count, dtype=np.uint32)))
    every = Index(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    order = np.lexsort((every.position, every.shard, every.lo, every.hi))
    return names, Index(*(column[order] for column in every))


def _read_index(path: Path, metadata: Mapping[str, Any]) -> Index:
    if not metadata["shards"]:
        return Index(*(np.empty(0, dtype) for dtype in (np.uint64, np.uint64, np.uint32, np.uint32)))
    try:
        return Index(**load_numpy(path / INDEX))
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(
            f"{path / INDEX} cannot be read ({error}); delete {METADATA} and write the cache again."
        ) from error


def _check(tensor: Tensor) -> list[Any]:
    """Dtype, shape and CRC-32 of a tensor."""
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), zlib.crc32(flat)]


def _parse(tensor: Tensor) -> dict[str, Any]:
    """The JSON of a record: key, fields, tensors."""
    data = tensor.numpy().tobytes()
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("its description is damaged: wrong checksum")
    return json.loads(data[4:])


def _publish(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, and give it its own when its content is on the disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_metadata(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(metadata, indent=1)
    _publish(path / METADATA, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return metadata
