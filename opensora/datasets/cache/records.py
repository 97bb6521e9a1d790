"""Records in sharded files: what is expensive to compute, kept so that any of it can be read at any time.

    FOLDER/METADATA                      JSON: format, features, settings, notes, shards, entries
    FOLDER/index.safetensors             where each record is, sorted by a hash of its key
    FOLDER/00000000-<hash>.safetensors   shards of many records each, in the order in which they were written

A record is a dict with a fixed set of fields, its features. In a shard, record i is the tensors `i/FIELD`, and `i/record`: a
checksum and JSON with the key, the small fields, and each tensor's number format, shape and checksum. Any reader of
safetensors can open a shard; nothing is pickled. A shard appears whole or not at all, and is named after its content, so
a job that was killed loses only the shard it was filling, and processes that share the work cannot overwrite each other.
"""

import hashlib
import json
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from torch import Tensor

from opensora.utils.errors import UserError

FORMAT = 2
METADATA, INDEX = "METADATA", "index.safetensors"
SHARD_BYTES = 256 * 2**20
SHARD_RECORDS = 4096  # opening a shard reads a line for each tensor in it
OPEN_SHARDS = 64
ABANDONED_S = 600  # after which a file that is not complete is taken for that of a writer that was killed
SCALARS = {"string": str, "int64": int, "float64": float}
TENSORS = ("tensor", "bytes")

Features = Mapping[str, Any]
Record = dict[str, Any]


class RecordWriter:
    """Appends records to a folder; where an earlier writer stopped, this one goes on.

        with RecordWriter("latents", {"moments": "tensor", "caption": "string", "flow": "float64"}) as writer:
            writer.write({"moments": moments, "caption": "a lake", "flow": 5.0})

    Args:
        path: The folder; made if missing.
        features: Field -> "tensor", "bytes", "string", "int64" or "float64"; or a list with one of the last three, such as
            ["int64"], for a list of them.
        settings: What the records depend on (JSON values). A folder with other settings or features is refused.
        notes: Kept beside the settings, and not compared.
        shard_bytes: A shard is written when so much has been gathered.
        remedy: What an error tells the user to do.

    Raises:
        UserError: the folder holds records of another kind.
    """

    def __init__(
        self,
        path: str | Path,
        features: Features,
        *,
        settings: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        shard_bytes: int = SHARD_BYTES,
        remedy: str = "Write to another folder.",
    ) -> None:
        self.path, self.features = Path(path), dict(features)
        self.shard_bytes = shard_bytes
        _check_features(self.features)
        self._metadata = claim(self.path, self.features, settings, notes, remedy=remedy)
        self._finished = _sorted(_all_rows(self.path, self._metadata))
        self._number = len(self._finished.hi)
        self._new: set[tuple[int, int]] = set()
        self._waiting: list[tuple[str, Record]] = []
        self._waiting_bytes = 0

    def __contains__(self, key: str) -> bool:
        """Whether a record with this key is in a finished shard, or waits for its shard."""
        return _hash(key) in self._new or _find(self._finished, _hash(key)) is not None

    def write(self, record: Mapping[str, Any], key: str | None = None) -> None:
        """Add a record; one with the same key is replaced. `key`: by default the record's number.

        Raises:
            ValueError: the record's fields are not the features.
        """
        if record.keys() != self.features.keys():
            raise ValueError(f"a record with {sorted(record)}, but the features are {sorted(self.features)}.")
        key = str(self._number) if key is None else key
        copy = {name: _normal(name, kind, record[name]) for name, kind in self.features.items()}
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
            tensors |= {f"{i}/{name}": value for name, value in stored.items()}
            tensors[f"{i}/record"] = _describe(key, record, stored)
            digest.update(tensors[f"{i}/record"].numpy().tobytes())
        name = f"{self._number - len(self._waiting):08d}-{digest.hexdigest()}.safetensors"
        temporary = self.path / f"{name}.{os.getpid()}.tmp"
        save_file(tensors, temporary, metadata={"format": "pt", "records": str(len(self._waiting))})
        _publish(temporary, self.path / name)
        self._waiting, self._waiting_bytes = [], 0

    def close(self) -> None:
        """Write what waits, and make all records readable. Of several processes, one calls it after all have flushed."""
        self.flush()
        consolidate(self.path)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


class RecordReader:
    """Random access to a folder of records, by key or by number. Files are mapped into memory, not read at once.

    The checksums of a record's tensors are verified when a process reads one of them first. It may be used in worker processes, forked or not.

    Args:
        path: The folder.
        remedy: What an error tells the user to do when the folder holds no readable records.

    Raises:
        UserError: there are no finished records in the folder.
    """

    def __init__(self, path: str | Path, *, remedy: str = "Write it with RecordWriter, and close it.") -> None:
        self.path, self.remedy = Path(path), remedy
        metadata = read_metadata(self.path, remedy)
        if metadata["entries"] is None:
            raise UserError(f"the records in {self.path} are not finished: their writer was interrupted. {remedy}")
        self.features: dict[str, Any] = metadata["features"]
        self.settings: dict[str, Any] = metadata["settings"]
        self.notes: dict[str, Any] = metadata["notes"]
        self._shards: list[str] = metadata["shards"]
        self._rows = _read_index(self.path, metadata)
        if missing := [name for name in self._shards if not (self.path / name).is_file()]:
            raise UserError(
                f"{len(missing)} files of the cache {self.path} are missing, such as {missing[0]}. {remedy}"
            )
        if len(self._rows.hi) != metadata["entries"]:
            raise UserError(f"{self.path / INDEX} has {len(self._rows.hi)} of {metadata['entries']} records. {remedy}")
        self._verified = np.zeros(len(self), bool)
        self._order: np.ndarray | None = None
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self._rows.hi)

    def __contains__(self, key: str) -> bool:
        return self._find(key) is not None

    def __getitem__(self, number: int) -> Record:
        """A record by its place, in the order of writing."""
        return self.at(number)

    def at(self, number: int, fields: Collection[str] | None = None) -> Record:
        """Some fields of a record by its place, in the order of writing."""
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        if self._order is None:
            self._order = np.lexsort((self._rows.position, self._rows.shard))
        return self._read(int(self._order[number]), fields)[1]

    def read(self, key: str, fields: Collection[str] | None = None) -> Record:
        """The record with this key, or some of its fields. Its tensors are views of the file: copy before writing to them.

        Raises:
            KeyError: there is no such record.
            UserError: the file was damaged.
        """
        row = self._find(key)
        if row is None:
            raise KeyError(key)
        found, record = self._read(row, fields)
        assert found == key, f"{self.path}: the index leads from {key!r} to {found!r}"
        return record

    def content_names(self) -> list[str]:
        """What tells these records from others: shards are named after their content."""
        return sorted([INDEX, *self._shards])

    def check(self) -> Iterator[str]:
        """Read everything; yields what is wrong with each damaged record."""
        self._verified[:] = False
        for row in range(len(self)):
            try:
                self._read(row, None)
            except UserError as error:
                yield str(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _find(self, key: str) -> int | None:
        return _find(self._rows, _hash(key))

    def _read(self, row: int, fields: Collection[str] | None) -> tuple[str, Record]:
        shard, i = self._shards[int(self._rows.shard[row])], int(self._rows.position[row])
        where = f"{self.path / shard}, record {i}"
        try:
            opened = self._opened(shard)
            key, record, checks = _parse(opened.get_tensor(f"{i}/record"))
            wanted = [name for name in checks if fields is None or name in fields]
            verify = bool(wanted) and not self._verified[row]
            tensors = {name: opened.get_tensor(f"{i}/{name}") for name in (checks if verify else wanted)}
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise UserError(f"{where} cannot be read ({error}); delete the file. {self.remedy}") from error
        if verify:
            if bad := [name for name in checks if checks[name] != _check(tensors[name])]:
                raise UserError(
                    f"{where}: {', '.join(bad)} is damaged (wrong checksum); delete the file. {self.remedy}"
                )
            self._verified[row] = True
        kinds = self.features
        record |= {n: t.numpy().tobytes() if kinds[n] == "bytes" else t for n, t in tensors.items()}
        return key, {name: value for name, value in record.items() if fields is None or name in fields}

    def _opened(self, shard: str) -> Any:
        if self._process != os.getpid():  # a forked worker maps the files itself
            self._open, self._process = OrderedDict(), os.getpid()
        if shard not in self._open:
            self._open[shard] = safe_open(self.path / shard, framework="pt")
        self._open.move_to_end(shard)
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return self._open[shard]


def claim(
    path: Path,
    features: Features,
    settings: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
    *,
    remedy: str = "Write to another folder.",
) -> dict[str, Any]:
    """Make the folder one for such records, or see that it is one; returns its metadata.

    Raises:
        UserError: it holds records with other features or settings; the message names what differs.
    """
    mine = {"features": dict(features), "settings": dict(settings or {})}
    if (path / METADATA).exists():
        found = read_metadata(path, remedy)
        refuse_other(path, found["features"], mine["features"], "fields", remedy)
        refuse_other(path, found["settings"], mine["settings"], "settings", remedy)
        return found
    path.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {"format": FORMAT, **mine, "notes": dict(notes or {}), "shards": [], "entries": None}
    _write_metadata(path, metadata)
    return metadata


def refuse_other(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise a `UserError` that names each of the `expected` values that is not as `found`."""
    expected = json.loads(json.dumps(expected))
    wrong = [f"{key} is {found.get(key)}, not {value}" for key, value in expected.items() if found.get(key) != value]
    wrong += [f"it has no {key} here" for key in found.keys() - expected.keys()] if what == "fields" else []
    if wrong:
        raise UserError(f"the cache {path} was made with other {what}: {'; '.join(wrong)}. {remedy}")


def read_metadata(path: Path, remedy: str) -> dict[str, Any]:
    """The content of METADATA.

    Raises:
        UserError: it is missing, unreadable or of another version.
    """
    file = path / METADATA
    if not file.is_file():
        raise UserError(f"there is no cache in {path} (no {METADATA}). {remedy}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UserError(f"{file} has format {content['format']}, not {FORMAT}: write the cache anew. {remedy}")
        return {key: content[key] for key in ("format", "features", "settings", "notes", "shards", "entries")}
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} does not describe a cache: {error!r}. {remedy}") from error


def consolidate(path: str | Path) -> int:
    """Make all finished shards readable, and remove what interrupted writers left; returns the number of records.

    What is younger than `ABANDONED_S` may be of another writer that is at work.
    """
    path = Path(path)
    metadata = read_metadata(path, "")
    names = _shard_names(path, metadata)
    rows = _sorted(_last_of_each(_all_rows(path, metadata)))
    temporary = path / f"{INDEX}.{os.getpid()}.tmp"
    save_numpy(rows._asdict(), temporary)
    _publish(temporary, path / INDEX)
    _write_metadata(path, {**metadata, "shards": names, "entries": len(rows.hi)})
    for leftover in path.glob("*.tmp"):
        with suppress(FileNotFoundError):  # it has its name by now
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                leftover.unlink()
    return len(rows.hi)


# ---------------------------------------------------------------------------------------------------- index


class Rows(NamedTuple):
    """Where records are: halves of the key's hash, shard number and place in the shard; each [N]."""

    hi: np.ndarray  # uint64
    lo: np.ndarray  # uint64
    shard: np.ndarray  # uint32
    position: np.ndarray  # uint32


def _hash(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _find(rows: Rows, key: tuple[int, int]) -> int | None:
    """The row of a key in sorted rows."""
    hi, lo = key
    row = int(np.searchsorted(rows.hi, np.uint64(hi)))
    while row < len(rows.hi) and int(rows.hi[row]) == hi:
        if int(rows.lo[row]) == lo:
            return row
        row += 1
    return None


def _sorted(rows: Rows) -> Rows:
    order = np.lexsort((rows.lo, rows.hi))
    return Rows(*(column[order] for column in rows))


def _rows(hashes: Iterable[tuple[int, int]], shard: int) -> Rows:
    pairs = np.array(list(hashes), np.uint64).reshape(-1, 2)
    n = len(pairs)
    return Rows(pairs[:, 0], pairs[:, 1], np.full(n, shard, np.uint32), np.arange(n, dtype=np.uint32))


def _shard_names(path: Path, metadata: Mapping[str, Any]) -> list[str]:
    """Those that the index knows, then the newer ones."""
    known = [name for name in metadata["shards"] if (path / name).is_file()]
    return known + sorted({p.name for p in path.glob("*-*.safetensors")} - set(known))


def _all_rows(path: Path, metadata: Mapping[str, Any]) -> Rows:
    """Of all readable shards; those that are in the index are not opened, unless one has vanished."""
    names = _shard_names(path, metadata)
    indexed = metadata["shards"] if names[: len(metadata["shards"])] == metadata["shards"] else []
    parts = [_read_index(path, metadata)] if indexed else []
    for number, name in enumerate(names[len(indexed) :], start=len(indexed)):
        parts.append(_rows(_keys_of(path / name), number))
    return Rows(*(np.concatenate(columns) for columns in zip(_rows([], 0), *parts, strict=True)))


def _keys_of(shard: Path) -> list[tuple[int, int]]:
    try:
        with safe_open(shard, framework="pt") as opened:
            count = int(opened.metadata()["records"])
            return [_hash(_parse(opened.get_tensor(f"{i}/record"))[0]) for i in range(count)]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shard} is damaged ({error}); delete it, and what it held is written again.") from error


def _last_of_each(rows: Rows) -> Rows:
    """A key that was written again keeps its last record."""
    newest_first = np.lexsort((rows.position, rows.shard))[::-1]
    pairs = np.stack([rows.hi, rows.lo], axis=1)[newest_first]
    _, first = np.unique(pairs, axis=0, return_index=True)
    return Rows(*(column[newest_first[first]] for column in rows))


def _read_index(path: Path, metadata: Mapping[str, Any]) -> Rows:
    if not metadata["shards"]:
        return _rows([], 0)
    try:
        return Rows(**load_numpy(path / INDEX))
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(
            f"{path / INDEX} cannot be read ({error}); delete {METADATA} and write the cache again."
        ) from error


# ---------------------------------------------------------------------------------------------------- a record


def _check_features(features: Features) -> None:
    for name, kind in features.items():
        inner = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
        known = (*SCALARS,) if isinstance(kind, list) else (*SCALARS, *TENSORS)
        if inner not in known or "/" in name or name == "record":
            raise ValueError(f"feature {name!r}: {kind!r} is not one of {', '.join(known)} (or the name is reserved).")


def _normal(name: str, kind: Any, value: Any) -> Any:
    """A field's value as it is kept: a contiguous tensor on the CPU, or plain Python."""
    if kind == "tensor":
        return (torch.from_numpy(value) if isinstance(value, np.ndarray) else value).detach().cpu().contiguous().clone()
    if kind == "bytes":
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    if isinstance(kind, list):
        return [SCALARS[kind[0]](item) for item in value]
    if kind == "string" and not isinstance(value, str):
        raise ValueError(f"field {name!r}: {value!r} is no string.")
    return SCALARS[kind](value)


def _check(tensor: Tensor) -> list[Any]:
    """Number format, shape and CRC-32 of a tensor."""
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), zlib.crc32(flat)]


def _describe(key: str, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    small = {name: value for name, value in record.items() if name not in tensors}
    content = {"key": key, "fields": small, "tensors": {name: _check(value) for name, value in tensors.items()}}
    text = json.dumps(content, ensure_ascii=False).encode()
    return torch.frombuffer(bytearray(zlib.crc32(text).to_bytes(4, "little") + text), dtype=torch.uint8)


def _parse(tensor: Tensor) -> tuple[str, Record, dict[str, list[Any]]]:
    data = tensor.numpy().tobytes()
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("its description is damaged: wrong checksum")
    content = json.loads(data[4:])
    return content["key"], content["fields"], content["tensors"]


def _publish(temporary: Path, path: Path) -> None:
    """Give a file its name when its content is on the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    temporary = path / f"{METADATA}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(metadata, indent=1), encoding="utf-8")
    _publish(temporary, path / METADATA)
