"""Operations on where files are said to be."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from opensora.datasets.table.files import strings
from opensora.utils.errors import UserError
from tools.datasets.datautil.operations import Result, Sheet, operation

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

    `source` may be the film that a clip was cut from, or a mere name: what names no file from `folder` stays as it is.
    """
    columns = {name: spell(strings(frame[name])) for name in ("path", REPEATS) if name in frame.columns}
    if SOURCE in frame.columns:
        names = strings(frame[SOURCE])
        files = [name for name in names.unique() if _is_file(folder, name)]
        if files:
            columns[SOURCE] = spell(names).where(names.isin(files), names)
    return columns


def _is_file(folder: Path, name: str) -> bool:
    try:
        return bool(name) and not is_url(name) and (folder / name).is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


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


def places(names: pd.Series, folder: Path) -> pd.Series:
    """One spelling for each file, to compare by: absolute, with the links among its folders followed."""

    @functools.lru_cache(maxsize=1 << 16)
    def real(parent: str) -> str:
        return os.path.realpath(parent)

    def place(name: str) -> str:
        parent, _, file = name.rpartition("/")
        return f"{real(parent)}/{file}" if name.startswith("/") else name

    return absolute(names, folder).map(place)


@operation("abspath", "abspath", group=PATHS, nargs="?", metavar="ROOT")
def abspath(sheet: Sheet, root: str | None) -> Result:
    """make paths absolute; relative ones are relative to ROOT, or to where the table is"""
    folder = sheet.folder if root is None else _folder(root)
    sheet.column("path")
    return Result(sheet.with_columns(**respelled(sheet.frame, folder, lambda names: absolute(names, folder))))


@operation("relpath", "relpath", group=PATHS, metavar="ROOT")
def relpath(sheet: Sheet, root: str) -> Result:
    """make paths relative to ROOT; train with --root ROOT"""
    folder = _folder(root)
    sheet.column("path")
    columns = respelled(sheet.frame, sheet.folder, lambda names: relative(names, sheet.folder, folder))
    outside = int(columns["path"].str.startswith("../").sum())
    note = f"{outside} files lie outside {root}" if outside else ""
    return Result(replace(sheet.with_columns(**columns), folder=folder), note=note)


def relative(names: pd.Series, old: Path, new: Path) -> pd.Series:
    """Paths relative to `old`, or absolute, as paths relative to `new`, by which the files can be opened; URLs stay."""
    below = absolute(names, old).map(lambda name: _below(name, new.absolute()))
    outside = below.str.startswith("../").to_numpy(bool)
    if outside.any():  # `..` leads to the folders that there really are
        below[outside] = places(names[outside], old).map(lambda name: _below(name, new.resolve()))
    return below


def _below(name: str, base: Path) -> str:
    return os.path.relpath(name, base) if name.startswith("/") else name


@operation("path-to-id", "id", group=PATHS)
def path_to_id(sheet: Sheet, _: Any) -> Result:
    """add id, the file's name without its extension"""
    ids = sheet.text("path").map(lambda name: Path(name).stem)
    twice = int(ids.duplicated().sum())
    note = f"{twice} rows have an id that another row before them has" if twice else ""
    return Result(sheet.with_columns(id=ids), note=note)


def _folder(root: str) -> Path:
    if not Path(root).is_dir():
        raise UserError(f"{root} is no folder.")
    return Path(root)
