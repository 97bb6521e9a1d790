"""Reading the record folders that NOVA's guide writes with the package `codewithgpu`, without that package.

    FOLDER/METADATA        JSON: entries, features (field -> BYTES, STRING, FLOAT32, INT64, or a list with one of them), version
    FOLDER/00000.data      the records of a shard, one behind the other
    FOLDER/00000.index     a line for each of them: its offset, and its size in bytes

A record is a protocol buffer (https://protobuf.dev/programming-guides/encoding) of these messages:

    FeatureMap   1: entry, repeated: 1 = name, 2 = Feature
    FeatureList  1: Feature, repeated
    Feature      one of 1: bytes or text in UTF-8, 2: float32, 3: int64, 4: FeatureList, 5: FeatureMap

Google's parser would copy the latents of every record to look at its shape; the package itself asks for a protobuf below 4.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from opensora.datasets.cache.records import METADATA, Record, read_metadata
from opensora.utils.errors import UserError
from opensora.utils.folders import parse_json

VERSION = 1
KINDS = {"BYTES": "bytes", "STRING": "string", "FLOAT32": "float64", "INT64": "int64"}
NUMBERS = {"bytes": 1, "string": 1, "float64": 2, "int64": 3}  # of the fields of a Feature
TAIL = 64 * 1024  # bytes of a shard that are hashed
COPY_AGAIN = "copy the folder again, or write it anew."


class OriginalRecords:
    """Random access by number to a folder that `codewithgpu.RecordWriter` wrote; has what datasets use of a `RecordReader`. A
    `UserError` where the folder is none, its writer was not closed, or files do not fit together."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / METADATA).is_file() and any(self.path.glob("*.data")):
            raise UserError(f"{path} has records but no {METADATA}: its writer was not closed. Write the folder anew.")
        if not is_original(self.path):
            read_metadata(self.path, "Write it with a RecordWriter, and close it.")
        metadata = json.loads((self.path / METADATA).read_text(encoding="utf-8"))
        if metadata["version"] != VERSION or not {"entries", "features"} <= metadata.keys():
            raise UserError(
                f"{self.path / METADATA} is not of version {VERSION}, with entries and features: write it anew."
            )
        self.settings: dict[str, Any] = {}
        self.features: dict[str, Any] = {}
        for name, kind in metadata["features"].items():
            is_list = isinstance(kind, list) and len(kind) == 1
            one = kind[0] if is_list else kind
            if not isinstance(one, str) or one not in KINDS:
                raise UserError(
                    f"{path}: the field {name!r} is {json.dumps(kind)}; what is read are {', '.join(KINDS)} and lists of "
                    "these. Captions that were stored as a text encoder's features: write the words, and cache the "
                    "features with `python -m tools.cache_features TRAIN_CONFIG --what text`."
                )
            self.features[name] = [KINDS[one]] if is_list else KINDS[one]
        self._spans: list[tuple[Path, int, int]] = []  # shard, offset and size of each record
        for shard in sorted(self.path.glob("*.data")):
            index = shard.with_suffix(".index")
            try:
                spans = [(int(offset), int(size)) for offset, size in map(str.split, index.read_text().splitlines())]
            except (OSError, ValueError) as error:
                raise UserError(f"{index} cannot be read ({error}); {COPY_AGAIN}") from error
            end = max((offset + size for offset, size in spans), default=0)
            if end != shard.stat().st_size:
                raise UserError(f"{shard} has {shard.stat().st_size} bytes, and {index.name} says {end}; {COPY_AGAIN}")
            self._spans += [(shard, *span) for span in spans]
        if len(self) != metadata["entries"]:
            raise UserError(
                f"{path}: {METADATA} counts {metadata['entries']} records, the index files {len(self)}; {COPY_AGAIN}"
            )
        self._open: dict[Path, mmap.mmap] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, number: int) -> Record:
        """A record, in the order of writing."""
        return self.at(number)

    def at(self, number: int, fields: Collection[str] | None = None) -> Record:
        """Some fields of a record; what is not asked for is not read from the file. A `UserError` where it was damaged."""
        shard, offset, size = self._spans[number]
        if shard not in self._open:
            with shard.open("rb") as file:
                self._open[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        record: Record = {}
        wanted = self.features if fields is None else fields
        try:
            for entry in _message(memoryview(self._open[shard])[offset : offset + size])[1]:
                name, feature = (_message(entry)[number][-1] for number in (1, 2))
                if (name := str(name, "utf-8")) in wanted and name in self.features:
                    record[name] = _value(feature, self.features[name])
            if missing := [name for name in wanted if name not in record]:
                raise ValueError(f"it has no {', '.join(missing)}")
        except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
            raise UserError(f"{shard}, record at {offset}, is damaged ({error}); {COPY_AGAIN}") from error
        return record

    def content_names(self) -> list[str]:
        """What distinguishes these records from others: shards with a hash of their index and their end."""
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


def is_original(path: str | Path) -> bool:
    """Whether the folder is one of `codewithgpu`, and none of ours."""
    file = Path(path) / METADATA
    if not file.is_file():
        return any(Path(path).glob("*.data"))
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and "version" in content and "format" not in content


def _message(data: memoryview) -> dict[int, list[Any]]:
    """Number of a field -> its values: an int of a varint, else a view of the bytes. Raises `ValueError` or `IndexError`."""
    at = 0
    fields: dict[int, list[Any]] = {}

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):  # 7 bits a byte, the lowest first
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number of more than 64 bits")

    while at < len(data):
        number, wire_type = divmod(varint(), 8)
        value: Any = varint() if wire_type in (0, 2) else {1: 8, 5: 4}.get(wire_type)
        if value is None:
            raise ValueError(f"wire type {wire_type}")
        if wire_type != 0:  # so far it is the length
            if at + value > len(data):
                raise ValueError("a field ends behind the record")
            value, at = data[at : at + value], at + value
        fields.setdefault(number, []).append(value)
    return fields


def _value(feature: memoryview, kind: Any) -> Any:
    """A Feature in Python's types."""
    fields = _message(feature)
    if isinstance(kind, list):
        return [_value(item, kind[0]) for item in _message(fields[4][-1]).get(1, [])]
    value = fields[NUMBERS[kind]][-1]
    if kind == "int64":
        return value - (1 << 64) if value >= 1 << 63 else value
    if kind == "float64":
        return struct.unpack("<f", value)[0]
    return bytes(memoryview(value)) if kind == "bytes" else str(value, "utf-8")
