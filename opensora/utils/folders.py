"""Folders that a program is going to write to, checked before hours of work, and JSON files that it reads."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from opensora.utils.errors import UserError

MAX_NESTING = 100  # lists and objects in one another


def make_writable(folder: str | Path, option: str) -> Path:
    """Create the folder if needed, and check that files can be written there.

    Args:
        folder: the folder.
        option: the field that names it, for the message.

    Raises:
        UserError: it cannot be made or written to, or is a file.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"0")  # a full disk lets a file be made, but not filled
    except OSError as error:
        flag = f"--{option.replace('_', '-')}"
        raise UserError(
            f"{option}={folder}: no files can be written there ({error.strerror}). Choose another {flag}."
        ) from error
    return path


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: the file is missing, is no JSON or holds something else; the message ends with `remedy`.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {remedy}") from error
    except ValueError as error:  # of the text's encoding or of JSON
        raise UserError(f"{path} is no valid JSON ({error}). {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected an object. {remedy}")
    return content


def parse_json(text: str) -> Any:
    """`json.loads`, with a `ValueError` also for a name that is twice in an object, whose first value would be lost, and for what is
    nested so deeply that it, or a later step, would end at Python's recursion limit."""
    with suppress(RecursionError):
        value = json.loads(text, object_pairs_hook=_without_repeats)
        level = [value] if text.count("[") + text.count("{") > MAX_NESTING else []
        for _ in range(MAX_NESTING + 1):
            inner = [
                each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
            ]
            level = list(chain.from_iterable(inner))
        if not level:
            return value
    raise ValueError(f"lists or objects are nested more than {MAX_NESTING} deep")


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is there twice")
    return found
