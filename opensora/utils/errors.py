"""Errors that scripts print as a message with an exit code, without a traceback."""

import functools
import sys
from collections.abc import Callable, Sequence

from opensora.registry import PartError

INTERRUPTED = 130  # how shells count a program that Ctrl-C ended


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, where, and how to fix it."""


def first_few(messages: Sequence[str], most: int = 5) -> list[str]:
    """The first of many messages, and how many more there are."""
    return [*messages[:most], *([f"and {len(messages) - most} more"] if len(messages) > most else [])]


def exit_on_user_error(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a script's `main`.

    A `UserError`, or a part that cannot be built, ends it with the message on stderr and exit code 2; Ctrl-C with one line and exit code 130.
    """

    @functools.wraps(main)
    def wrapped() -> None:
        try:
            main()
        except (UserError, PartError) as error:
            sys.stdout.flush()
            sys.stderr.write(f"\nerror: {error}\n")
            sys.exit(2)
        except KeyboardInterrupt:
            sys.stdout.flush()
            sys.stderr.write("\ninterrupted\n")
            sys.exit(INTERRUPTED)

    return wrapped
