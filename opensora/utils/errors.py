"""The one exception that scripts turn into a message and exit code 2."""

import functools
import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something the user can mend: the message says what is wrong, where, and how to fix it."""


def exit_on_user_error(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate a script's `main`: a `UserError` ends it with its message on stderr and exit code 2."""

    @functools.wraps(main)
    def wrapped() -> None:
        try:
            main()
        except UserError as error:
            sys.stdout.flush()
            sys.stderr.write(f"\nerror: {error}\n")
            sys.exit(2)

    return wrapped
