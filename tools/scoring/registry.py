"""What a scorer is, and the scorers by name: the name of the module `tools.scoring.NAME` that registers it.

The command line of a scorer and the chain (`tools.footage`) both go through here. A scorer is a dataclass whose fields are
its settings: `SCORERS[name]` holds one with the defaults, `scorer(name, bs=4)` gives one with others. It loads weights at
its first call of `score`, not before.
"""

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError


class Scorer(Protocol):
    """Adds columns to a table of clips."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what it adds."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns of the table that `score` gets as keyword arguments with the paths, such as ("text",)."""

    def score(self, paths: list[Path], **needed: list[Any]) -> list[dict[str, Any]]:
        """A dict with a value for each of `columns` for each file, in order; None where there is none.

        A file that cannot be read gives None in all columns and the reason under "error"; it is never an exception.
        """


@runtime_checkable
class Comparing(Protocol):
    """A scorer that compares all files, for example to find those that are alike."""

    @property
    def compared(self) -> tuple[str, ...]:
        """The names of what it then adds."""

    def compare(self, table: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
        """A list for each of `compared`, from the cells of `path` and of the scorer's own `columns` for all rows.

        They are read from the disk each time that they are gone over; hold what is needed, or `list(table["path"])`.
        """


SCORERS: dict[str, Scorer] = {}
"""Filled by importing the modules; `scorer` imports the one that is asked for."""

MODULES = ("aesthetic", "black", "camera_motion", "duplicate", "flow", "matching", "ocr", "sharpness", "static")


def names() -> list[str]:
    """The scorers there are."""
    return list(MODULES)


def all_columns(chosen: Scorer) -> tuple[str, ...]:
    """What a scorer adds to a table in the end."""
    return (*chosen.columns, *(chosen.compared if isinstance(chosen, Comparing) else ()))


def scorer(name: str, **settings: Any) -> Scorer:
    """The scorer of a name, with settings of its own.

    Raises:
        UserError: there is none of this name, or it has no such setting.
    """
    if name not in SCORERS and name in names():
        importlib.import_module(f"tools.scoring.{name}")
    if name not in SCORERS:
        raise UserError(f"{name!r} is no scorer.{did_you_mean(name, names())} Scorers: {', '.join(names())}.")
    found: Any = SCORERS[name]
    fields = [field.name for field in dataclasses.fields(found) if field.init]
    if unknown := [key for key in settings if key not in fields]:
        raise UserError(
            f"scorer {name!r} has no setting {unknown[0]!r}.{did_you_mean(unknown[0], fields)} It has: "
            f"{', '.join(fields) or 'none'}."
        )
    chosen: Scorer = dataclasses.replace(found, **settings)
    return chosen
