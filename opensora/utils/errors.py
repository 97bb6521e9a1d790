"""Errors that scripts print as a message with an exit code, without a traceback."""

import errno
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from safetensors import SafetensorError

from opensora.registry import PartError

INTERRUPTED = 130  # how shells count a program that Ctrl-C ended
MENDABLE = {  # what the system says of files and disks, and of a pipe that nobody reads any more
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP, errno.EPIPE,
}  # fmt: skip


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, where, and how to fix it."""


def first_few(messages: Sequence[str], most: int = 5) -> list[str]:
    """The first of many messages, and how many more there are."""
    return [*messages[:most], *([f"and {len(messages) - most} more"] if len(messages) > most else [])]


def exit_on_user_error(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a script's `main`.

    A `UserError`, a part that cannot be built, or one of `MENDABLE` ends it with the message on stderr and exit code 2; Ctrl-C with one
    line and exit code 130. What the terminal's encoding lacks is printed as an escape.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # closed by who started this
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            main()
        except (UserError, PartError) as error:
            _end(f"error: {error}", 2)
        except OSError as error:
            if error.errno not in MENDABLE:
                raise
            _end(f"error: {error.filename or 'output cannot be written'}: {error.strerror}.", 2)
        except SafetensorError as error:
            if "serializing: I/O error" not in str(error):
                raise
            _end(f"error: weights cannot be written: {error}.", 2)
        except KeyboardInterrupt:
            _end("interrupted", INTERRUPTED)

    return wrapped


def _end(message: str, code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe or a full disk: Python would try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stderr.write(f"\n{message}\n")
    sys.exit(code)
