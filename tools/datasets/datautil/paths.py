"""Operations on where files are said to be."""

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from opensora.utils.errors import UserError
from tools.datasets.datautil.operations import Result, Sheet, operation

PATHS = "paths"


def is_url(name: str) -> bool:
    """Whether a path is an address on the network; it is relative to nothing."""
    return "://" in name


def rebased(names: pd.Series, old: Path, new: Path) -> pd.Series:
    """Paths relative to `old` as paths relative to `new`; absolute ones, URLs and empty cells stay."""
    old, new = old.resolve(), new.resolve()
    if old == new:
        return names
    return names.map(lambda name: os.path.relpath(_joined(old, name), new) if _is_relative(name) else name)


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
    return Result(sheet.with_columns(path=absolute(sheet.text("path"), folder)))


@operation("relpath", "relpath", group=PATHS, metavar="ROOT")
def relpath(sheet: Sheet, root: str) -> Result:
    """make paths relative to ROOT; train with --root ROOT"""
    folder = _folder(root)
    names = sheet.text("path")
    below = absolute(names, sheet.folder).map(lambda name: _below(name, folder.absolute()))
    outside = below.str.startswith("../").to_numpy(bool)
    if outside.any():  # `..` leads to the folders that there really are
        really = places(names[outside], sheet.folder)
        below[outside] = really.map(lambda name: _below(name, folder.resolve()))
    note = f"{int(outside.sum())} files lie outside {root}" if outside.any() else ""
    return Result(replace(sheet.with_columns(path=below), folder=folder), note=note)


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
