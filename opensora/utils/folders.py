"""Output folders, checked before hours of work."""

import tempfile
from pathlib import Path

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
