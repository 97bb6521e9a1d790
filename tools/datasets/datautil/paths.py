"""Operations on paths."""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from opensora.datasets.table.files import strings
from opensora.utils.errors import UserError
from tools.datasets.datautil.operations import Result, TableState, operation

PATHS = "paths"
REPEATS, SOURCE = "duplicate_of", "source"  # columns that hold paths as `path` does, the second among other words


def is_url(name: str) -> bool:
    """Whether a path is an address on the network; it is relative to nothing."""
    return "://" in name


def rebased(names: pd.Series, old: Path, new: Path) -> pd.Series:
    """Paths relative to `old` as paths relative to `new`; absolute ones, URLs and empty cells stay."""
    old, new = old.resolve(), new.resolve()
    if old == new:
        return names
    return names.map(lambda name: os.path.relpath(_joined(old, name), new) if _is_relative(name) else name)


def respelled(frame: pd.DataFrame, folder: Path, spell: Callable[[pd.Series], pd.Series]) -> dict[str, pd.Series]:
    """Each column of a table that holds paths, spelled anew, so that equal paths stay equal: `split` joins by them.

    `source` may be the video that a clip was cut from, or a mere name: what names no file from `folder` stays as it is.
    """
    columns = {name: spell(strings(frame[name])) for name in ("path", REPEATS) if name in frame.columns}
    if SOURCE in frame.columns:
        names = strings(frame[SOURCE])
        files = []
        for name in names.unique():
            with contextlib.suppress(OSError, ValueError):  # too long for a name, or with a zero byte
                if name and not is_url(name) and (folder / name).is_file():
                    files.append(name)
        if files:
            columns[SOURCE] = spell(names).where(names.isin(files), names)
    return columns


def _is_relative(name: str) -> bool:
    return bool(name) and not is_url(name) and not name.startswith("/")


def _joined(folder: Path, name: str) -> str:
    """`folder/name`, where the name's first `..` go up the folders that there really are, as when the file is opened."""
    if name.startswith("../"):
        folder = folder.resolve()
    while name.startswith("../"):
        folder, name = folder.parent, name[3:].lstrip("/")
    return str(folder / name)


def absolute(names: pd.Series, folder: Path) -> pd.Series:
    """Absolute paths of files whose paths are relative to `folder`; URLs and empty cells stay."""
    here = folder.absolute()
    return names.map(lambda name: _joined(here, name) if _is_relative(name) else name)


def file_keys(names: pd.Series, folder: Path) -> pd.Series:
    """One spelling of each file, to compare by: absolute, with links among its folders followed."""

    real = functools.lru_cache(maxsize=1 << 16)(os.path.realpath)

    def key(name: str) -> str:
        parent, _, file = name.rpartition("/")
        return f"{real(parent)}/{file}" if name.startswith("/") else name

    return absolute(names, folder).map(key)


@operation("abspath", "abspath", group=PATHS, nargs="?", metavar="ROOT")
def abspath(table: TableState, root: str | None) -> Result:
    """make paths absolute; relative ones are relative to ROOT, or to where the table is"""
    folder = table.folder if root is None else _folder(root)
    table.column("path")
    return Result(table.with_columns(**respelled(table.frame, folder, lambda names: absolute(names, folder))))


@operation("relpath", "relpath", group=PATHS, metavar="ROOT")
def relpath(table: TableState, root: str) -> Result:
    """make paths relative to ROOT; train with --root ROOT"""
    folder = _folder(root)
    table.column("path")
    columns = respelled(table.frame, table.folder, lambda names: relative(names, table.folder, folder))
    outside = int(columns["path"].str.startswith("../").sum())
    note = f"{outside} files lie outside {root}" if outside else ""
    return Result(replace(table.with_columns(**columns), folder=folder), note=note)


def relative(names: pd.Series, old: Path, new: Path) -> pd.Series:
    """Paths relative to `old`, or absolute, as paths relative to `new`, by which the files can be opened; URLs stay."""

    def below(names: pd.Series, base: Path) -> pd.Series:
        return names.map(lambda name: os.path.relpath(name, base) if name.startswith("/") else name)

    found = below(absolute(names, old), new.absolute())
    outside = found.str.startswith("../").to_numpy(bool)
    if outside.any():  # `..` leads to the folders that there really are
        found[outside] = below(file_keys(names[outside], old), new.resolve())
    return found


@operation("path-to-id", "id", group=PATHS)
def path_to_id(table: TableState, _: Any) -> Result:
    """add id, the file's name without its extension"""
    ids = table.text("path").map(lambda name: Path(name).stem)
    twice = int(ids.duplicated().sum())
    note = f"{twice} rows have an id that another row before them has" if twice else ""
    return Result(table.with_columns(id=ids), note=note)


def _folder(root: str) -> Path:
    if not Path(root).is_dir():
        raise UserError(f"{root} is no folder.")
    return Path(root)
