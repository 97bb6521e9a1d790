"""Folders that a program is going to write to, checked before hours of work, JSON files that it reads, and files that come with the project."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from opensora.utils.errors import UserError

MAX_NESTING = 100  # lists and objects in one another
PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = next(folder for folder in (PACKAGE / "_repository", PACKAGE.parent) if folder.is_dir())
"""Where scripts/, tools/, configs/ and assets/ are: inside the package when it was installed from a wheel."""


def shipped(path: str) -> str:
    """A path in configs/ or assets/ that is not in the working directory, as that of the file or model which comes with the project.

    Any other text is returned as it is, also the name of a whole folder such as `assets/clips`, where somebody may want to write.
    """
    name = Path(path)
    if name.parts[:1] not in (("configs",), ("assets",)) or ".." in name.parts or name.exists():
        return path
    found = REPOSITORY / name
    return str(found) if found.is_file() or (len(name.parts) > 2 and found.is_dir()) else path


def shipped_values(value: Any) -> Any:
    """The values of a config, with `shipped` applied to every string in them."""
    if isinstance(value, Mapping):
        return {key: shipped_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([shipped_values(item) for item in value])
    return shipped(value) if isinstance(value, str) else value


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
