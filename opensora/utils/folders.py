"""Folders that a program is going to write to, checked before hours of work, and JSON files that it reads."""

import json
import tempfile
from pathlib import Path
from typing import Any

from opensora.utils.errors import UserError


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
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {remedy}") from error
    except ValueError as error:  # of the text's encoding or of JSON
        raise UserError(f"{path} is no valid JSON ({error}). {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected an object. {remedy}")
    return content
