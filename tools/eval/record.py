"""A score and every setting that changes it, in one JSON file: two scores may be compared when their settings are equal."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opensora.utils.environment import environment
from opensora.utils.errors import UserError
from opensora.utils.logging import progress_bar


def score_record(tool: str, scores: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Scores, settings, and the command, commit and versions that made them."""
    return {"tool": tool, "scores": dict(scores), "settings": dict(settings), **environment()}


def refuse_unwritable(path: Path | None, option: str = "--out") -> None:
    """See that a file can be written, before the work whose result it is to hold; nothing is left there.

    Raises:
        UserError: it cannot.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()  # what is in it stays
        if is_new:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error, option) from error


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON; paths become text.

    Raises:
        UserError: the file cannot be written.
    """
    text = json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error, "--out") from error


def _unwritable(path: Path, error: OSError, option: str) -> UserError:
    return UserError(f"{path} cannot be written ({error}). Choose another {option}.")


def file_hash(path: Path) -> str:
    """A hash of all bytes of a file, or of all files of a folder with their names."""
    digest = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    size = sum(file.stat().st_size for file in files)
    with progress_bar(total=size, desc=f"hashing {path}", unit="B", unit_scale=True, delay=1) as bar:
        for file in files:
            if path.is_dir():
                digest.update(str(file.relative_to(path)).encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
                    bar.update(len(block))
    return digest.hexdigest()
