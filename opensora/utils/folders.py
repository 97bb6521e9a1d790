"""Folders that a program is going to write to, checked before hours of work, and JSON files that it reads."""

import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

_held: dict[tuple[int, Path], IO[str]] = {}  # the open files of `hold_folder`
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


def hold_folder(folder: Path) -> None:
    """Keep other processes out of a run's folder until this one ends, in whatever way; a second call of it has no effect.

    It is a record lock (POSIX `fcntl`) on `.lock` in there, which names the holder. The kernel releases it, and no child inherits
    it. NFS passes it to the server, which may keep it for a machine that has died.

    Raises:
        UserError: another process has it.
    """
    key = (os.getpid(), folder.resolve())
    if key in _held:  # closing any other handle of the file would release it
        return
    file = (folder / ".lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise UserError(
                f"{folder} is in use by another run ({file.read().strip()}): wait for it, end it, or choose another name. If that "
                f"machine has died, and its file server keeps the lock, delete {folder / '.lock'}."
            ) from error
        logger.warning(
            "%s: no locks here (%s), so nothing keeps a second run out of this folder.", folder, error.strerror
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _held[key] = file


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


def parse_json(text: str, **options: Any) -> Any:
    """`json.loads`, with a `ValueError` also for what is nested so deeply that it, or a later step, would end at Python's recursion
    limit."""
    with suppress(RecursionError):
        value = json.loads(text, **options)
        level = [value] if text.count("[") + text.count("{") > MAX_NESTING else []
        for _ in range(MAX_NESTING + 1):
            inner = [
                each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
            ]
            level = list(chain.from_iterable(inner))
        if not level:
            return value
    raise ValueError(f"lists or objects are nested more than {MAX_NESTING} deep")
