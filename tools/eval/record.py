"""A score and every setting that changes it, in one JSON file: two scores may be compared when their settings are equal."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opensora.utils.run import environment


def score_record(tool: str, scores: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Scores, settings, and the command, commit and versions that made them."""
    return {"tool": tool, "scores": dict(scores), "settings": dict(settings), **environment()}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON; paths become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def file_hash(path: Path) -> str:
    """A hash of all bytes of a file, or of all files of a folder with their names."""
    digest = hashlib.blake2b(digest_size=16)
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        if path.is_dir():
            digest.update(str(file.relative_to(path)).encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
