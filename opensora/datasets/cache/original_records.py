"""Reading the record folders that NOVA's guide writes with the package `codewithgpu`, without that package.

    FOLDER/METADATA        JSON: entries, features (field -> BYTES, STRING, FLOAT32, INT64, or a list with one of them), version
    FOLDER/00000.data      the records of a shard, one behind the other
    FOLDER/00000.index     a line for each of them: where it begins, and how many bytes it has

A record is a protocol buffer (https://protobuf.dev/programming-guides/encoding) of these messages:

    FeatureMap   1: entry, repeated: 1 = name, 2 = Feature
    FeatureList  1: Feature, repeated
    Feature      one of 1: bytes or text in UTF-8, 2: float32, 3: int64, 4: FeatureList, 5: FeatureMap

The package itself asks for a protobuf below 4, which newer Pythons and TensorBoards do not go with.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opensora.datasets.cache.records import METADATA, Record, read_metadata
from opensora.utils.errors import UserError

VERSION = 1
KINDS = {"BYTES": "bytes", "STRING": "string", "FLOAT32": "float64", "INT64": "int64"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
TAIL = 64 * 1024  # bytes of a shard that are hashed


class Place(NamedTuple):
    """Where a record is."""

    shard: Path
    offset: int
    size: int


class OriginalRecords:
    """Random access by number to a folder that `codewithgpu.RecordWriter` wrote; has what datasets use of a `RecordReader`.

    Args:
        path: The folder.

    Raises:
        UserError: it is none, or its writer was not closed, or files do not fit together.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        metadata = _metadata(self.path)
        if metadata["version"] != VERSION:
            raise UserError(f"{self.path / METADATA} has version {metadata['version']}, not {VERSION}.")
        self.features: dict[str, Any] = {
            name: _kind(self.path, name, kind) for name, kind in metadata["features"].items()
        }
        self.settings: dict[str, Any] = {}
        self._places = [place for shard in sorted(self.path.glob("*.data")) for place in _places(shard)]
        if len(self._places) != metadata["entries"]:
            raise UserError(
                f"{self.path}: {METADATA} counts {metadata['entries']} records, the index files {len(self._places)}; copy the "
                "folder again, or write it anew."
            )
        self._open: dict[Path, mmap.mmap] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Record:
        """A record, in the order of writing."""
        return self.at(number)

    def at(self, number: int, fields: Collection[str] | None = None) -> Record:
        """Some fields of a record; what is not asked for is not read from the file.

        Raises:
            IndexError: there are not so many.
            UserError: the file was damaged.
        """
        place = self._places[number]
        content = memoryview(self._opened(place.shard))[place.offset : place.offset + place.size]
        try:
            return self._parse(content, self.features if fields is None else fields)
        except (ValueError, IndexError, struct.error) as error:
            raise UserError(
                f"{place.shard}, record at {place.offset}, is damaged ({error}); copy the file again, or write the folder anew."
            ) from error

    def content_names(self) -> list[str]:
        """What tells these records from others: shards with a hash of their index and their end."""
        names = []
        for shard in sorted(self.path.glob("*.data")):
            digest = hashlib.blake2b(shard.with_suffix(".index").read_bytes(), digest_size=8)
            with shard.open("rb") as file:
                file.seek(max(0, shard.stat().st_size - TAIL))
                digest.update(file.read())
            names.append(f"{shard.name}-{digest.hexdigest()}")
        return names

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def _opened(self, shard: Path) -> mmap.mmap:
        if shard not in self._open:
            with shard.open("rb") as file:
                self._open[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._open[shard]

    def _parse(self, content: memoryview, wanted: Collection[str]) -> Record:
        record: Record = {}
        for entry in _numbered(content, 1):
            name = bytes(_one(entry, 1)).decode()
            if name in wanted and name in self.features:
                record[name] = _value(_one(entry, 2), self.features[name])
        if missing := [name for name in wanted if name not in record]:
            raise ValueError(f"it has no {', '.join(missing)}")
        return record


def is_original(path: str | Path) -> bool:
    """Whether the folder is one of `codewithgpu`, and none of ours."""
    file = Path(path) / METADATA
    if not file.is_file():
        return any(Path(path).glob("*.data"))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    return isinstance(content, dict) and "version" in content and "format" not in content


def _metadata(path: Path) -> dict[str, Any]:
    if not (path / METADATA).is_file() and any(path.glob("*.data")):
        raise UserError(f"{path} has records but no {METADATA}: its writer was not closed. Write the folder anew.")
    if not is_original(path):
        return read_metadata(path, "Write it with a RecordWriter, and close it.")
    content = json.loads((path / METADATA).read_text(encoding="utf-8"))
    if missing := {"entries", "features", "version"} - content.keys():
        raise UserError(f"{path / METADATA} does not say {', '.join(sorted(missing))}: write the folder anew.")
    return content


def _kind(path: Path, name: str, kind: Any) -> Any:
    """A kind of field in our words.

    Raises:
        UserError: it is nested, as stored text features are.
    """
    one = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
    if not isinstance(one, str) or one not in KINDS:
        raise UserError(
            f"{path}: the field {name!r} is {json.dumps(kind)}; what is read are {', '.join(KINDS)} and lists of these. Captions "
            "that were stored as a text encoder's features: write the words, and cache the features with `python -m "
            "tools.cache_features TRAIN_CONFIG --what text`."
        )
    return [KINDS[one]] if isinstance(kind, list) else KINDS[one]


def _places(shard: Path) -> list[Place]:
    index = shard.with_suffix(".index")
    try:
        lines = [tuple(map(int, line.split())) for line in index.read_text().splitlines()]
        places = [Place(shard, offset, size) for offset, size in lines]
    except (OSError, ValueError) as error:
        raise UserError(f"{index} cannot be read ({error}); copy the folder again, or write it anew.") from error
    end = max((place.offset + place.size for place in places), default=0)
    if end != shard.stat().st_size:
        raise UserError(
            f"{shard} has {shard.stat().st_size} bytes, and {index.name} says {end}; copy the folder again, or write it anew."
        )
    return places


# ---------------------------------------------------------------------------------------------- protocol buffers


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: an int, or a view of the bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind not in (FIXED64, BYTES, FIXED32):
            raise ValueError(f"wire type {kind}")
        length, at = _varint(data, at) if kind == BYTES else (8 if kind == FIXED64 else 4, at)
        if at + length > len(data):
            raise ValueError("a field ends behind the record")
        yield number, data[at : at + length]
        at += length


def _numbered(data: memoryview, number: int) -> Iterator[memoryview]:
    """The values of a repeated field of messages."""
    for n, value in _fields(data):
        if n == number:
            yield _bytes(value)


def _one(data: memoryview, number: int) -> memoryview:
    """The value of a field of bytes or of a message."""
    found = list(_numbered(data, number))
    if not found:
        raise ValueError(f"it has no field {number}")
    return found[-1]


def _bytes(value: Any) -> memoryview:
    if not isinstance(value, memoryview):
        raise ValueError("a number in place of bytes")
    return value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number in pieces of 7 bits, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _value(feature: memoryview, kind: Any) -> Any:
    """A Feature in Python's types."""
    if isinstance(kind, list):
        return [_value(item, kind[0]) for item in _numbered(_one(feature, 4), 1)]
    fields = dict(_fields(feature))
    number = {"bytes": 1, "string": 1, "float64": 2, "int64": 3}[kind]
    if number not in fields:
        raise ValueError(f"a value is no {kind}")
    value = fields[number]
    if kind == "int64":
        if not isinstance(value, int):
            raise ValueError("bytes in place of a number")
        return value - (1 << 64) if value >= 1 << 63 else value
    if kind == "float64":
        return struct.unpack("<f", _bytes(value))[0]
    return bytes(_bytes(value)) if kind == "bytes" else bytes(_bytes(value)).decode()
