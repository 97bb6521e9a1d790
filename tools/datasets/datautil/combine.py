"""Several tables: putting them together, and comparing one with another. Rows belong together when they name one file."""

import glob
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from opensora.datasets.table.files import EXACT, integer_type, is_numeric, read_frame, strings
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from tools.datasets.datautil.operations import Result, TableState, keep, operation
from tools.datasets.datautil.paths import REPEATS, SOURCE, file_keys, rebased, respelled

GROUP = "other tables (rows belong together when they name the same file)"


def find_tables(patterns: Sequence[str]) -> list[Path]:
    """The files of names and glob patterns, each once, in the order given; a pattern's in the order of their names.

    Raises:
        UserError: nothing matches a pattern.
    """
    found: list[Path] = []
    for pattern in patterns:
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not names:
            folder = Path(pattern).parent
            near = [path.name for path in folder.glob("*")] if folder.is_dir() else []
            raise UserError(f"{pattern}: there is no such file.{did_you_mean(Path(pattern).name, near)}")
        found += map(Path, names)
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def merge(tables: Sequence[tuple[Path, pd.DataFrame]], root: Path | None, folder: Path) -> tuple[TableState, list[str]]:
    """The rows of all tables below each other, and lines that say what was done.

    Args:
        tables: where each is from, and its rows.
        root: what their paths are relative to; None = each table's own folder.
        folder: where the result will lie; paths are rewritten to be relative to it, unless there is a root.
    """
    lines, frames = [], []
    every = list(dict.fromkeys(name for _, frame in tables for name in frame.columns))
    for source, frame in tables:
        line = f"{source}: {len(frame)} rows"
        if absent := [name for name in every if name not in frame.columns]:
            line += f", without {', '.join(absent)} (left empty)"
        if root is None and "path" in frame.columns:
            columns = _rebased(frame, source.parent, folder)
            if changed := int((strings(frame["path"]) != columns["path"]).sum()):
                line += f"; {changed} paths rewritten to be relative to {folder}"
            frame = frame.assign(**columns)
        lines.append(line)
        frames.append(frame)
    columns = {name: _stacked(name, frames) for name in every}
    whole = pd.DataFrame(columns, index=pd.RangeIndex(sum(map(len, frames))))
    return TableState(whole, folder if root is None else root, root), lines


def _rebased(frame: pd.DataFrame, old: Path, new: Path) -> dict[str, pd.Series]:
    return respelled(frame, old, lambda names: rebased(names, old, new))


def _stacked(name: str, frames: Sequence[pd.DataFrame]) -> pd.Series:
    """One column of all tables: numbers when it is numbers in all that have it, else objects; gaps are empty."""
    there = [frame[name] for frame in frames if name in frame.columns]
    numeric = [is_numeric(part) for part in there]
    kind: Any = _type_of(there) if all(numeric) else object
    parts = []
    for frame in frames:
        if name not in frame.columns:
            part = pd.Series(np.nan if all(numeric) else "", index=frame.index, dtype=kind)
        else:  # numbers among text become text, as a CSV would have them
            mixed = any(numeric) and not all(numeric) and not all(map(_holds_numbers, there))
            part = strings(frame[name]) if mixed else frame[name].astype(kind)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _holds_numbers(part: pd.Series) -> bool:
    """Of a column that may be of objects, as one is where floats and whole numbers beyond 2^53 are mixed."""
    return is_numeric(part) or all(type(value) in (int, float) for value in part[part.notna()])


def _type_of(parts: Sequence[pd.Series]) -> Any:
    """The type that keeps the numbers of all parts as they are; objects where there is none."""
    floating = [pd.api.types.is_float_dtype(part.dtype) for part in parts]
    whole = [part for part, is_float in zip(parts, floating, strict=True) if not is_float]
    ends = [int(end) for part in whole for end in (part.min(), part.max()) if not pd.isna(end)]
    least, most = min(ends, default=0), max(ends, default=0)
    if not any(floating):
        return integer_type(least, most) or object
    if least >= -EXACT and most <= EXACT:
        return np.float64
    gaps_alone = all(_is_whole(part) for part, is_float in zip(parts, floating, strict=True) if is_float)
    return integer_type(least, most) or object if gaps_alone else object


def _is_whole(part: pd.Series) -> bool:
    """Floats that are whole numbers, as pandas makes them of whole numbers with gaps."""
    known = part.dropna()
    return bool((known % 1 == 0).all() and (known.abs() <= EXACT).all())


class _Other(NamedTuple):
    """Another table, the key of each row's file, and what its relative paths are relative to."""

    frame: pd.DataFrame
    keys: pd.Series
    folder: Path


def _read_other(table: TableState, source: str) -> _Other:
    path = Path(source)
    frame = read_frame(path)
    if "path" not in frame.columns:
        raise UserError(f"{path} has no column 'path'; its columns are: {', '.join(frame.columns)}.")
    folder = table.root or path.parent
    return _Other(frame, file_keys(strings(frame["path"]), folder), folder)


def _keys(table: TableState) -> pd.Series:
    return file_keys(table.text("path"), table.folder)


@operation("difference", "minus_{}", group=GROUP, metavar="TABLE")
def difference(table: TableState, source: str) -> Result:
    """drop rows whose file TABLE names"""
    named = _keys(table).isin(_read_other(table, source).keys).to_numpy()
    return keep(table, ~named, [(f"that {source} names", named)])


@operation("intersection", "and_{}", group=GROUP, metavar="TABLE")
def intersection(table: TableState, source: str) -> Result:
    """keep rows whose file TABLE names too, and take from it the columns that are missing here"""
    other = _read_other(table, source)
    named = _keys(table).isin(other.keys).to_numpy()
    result = keep(table, named, [(f"that {source} does not name", ~named)])
    joined = _with_columns_of(result.table, other)
    return replace(joined, dropped=result.dropped)


@operation("merge", "merge_{}", group=GROUP, metavar="TABLE")
def merge_columns(table: TableState, source: str) -> Result:
    """take from TABLE the columns that are missing here; rows that it does not name get empty cells"""
    return _with_columns_of(table, _read_other(table, source))


def _with_columns_of(table: TableState, other: _Other) -> Result:
    first = ~other.keys.duplicated().to_numpy()
    index = pd.Index(other.keys[first])
    match = index.get_indexer(pd.Index(_keys(table)))  # -1 where there is none
    new = [name for name in other.frame.columns if name not in table.frame.columns]
    frame = other.frame.assign(**_as_here(table, other))
    columns = {name: _picked(frame[name][first], match) for name in new}
    notes = [f"new columns: {', '.join(new) or 'none'}"]
    if absent := int((match < 0).sum()):
        notes.append(f"{absent} rows have no partner")
    if twice := int((~first).sum()):
        notes.append(f"{twice} rows of the other table name a file again and were not looked at")
    return Result(table.with_columns(**columns), note="; ".join(notes))


def _as_here(table: TableState, other: _Other) -> dict[str, pd.Series]:
    """The other table's columns of paths but `path`, spelled as this table spells the same files."""
    columns = _rebased(other.frame, other.folder, table.folder)
    if REPEATS in columns:
        here = dict(zip(_keys(table), table.text("path"), strict=True))
        there = file_keys(strings(other.frame[REPEATS]), other.folder)
        spelled = zip(there, columns[REPEATS], strict=True)
        columns[REPEATS] = pd.Series([here.get(key, name) for key, name in spelled], index=there.index, dtype=object)
    return {name: columns[name] for name in (REPEATS, SOURCE) if name in columns}


def _picked(column: pd.Series, match: np.ndarray) -> pd.Series:
    """The cells at `match`, empty ones where it is -1."""
    picked = column.reset_index(drop=True).reindex(match).reset_index(drop=True)
    return picked if is_numeric(column) else picked.where(match >= 0, "")


@operation("update-text", "updated", group=GROUP, metavar="TABLE")
def update_text(table: TableState, source: str) -> Result:
    """take the captions of TABLE for the files that it names; an empty one replaces nothing"""
    other = _read_other(table, source)
    if "text" not in other.frame.columns:
        raise UserError(f"{source} has no column 'text'; its columns are: {', '.join(other.frame.columns)}.")
    filled = strings(other.frame["text"])
    useful = (filled != "") & ~other.keys.duplicated()
    captions = dict(zip(other.keys[useful], filled[useful], strict=True))
    old = table.text("text") if "text" in table.frame.columns else pd.Series([""] * len(table), dtype=object)
    files = _keys(table)
    new = pd.Series([captions.get(p, o) for p, o in zip(files, old, strict=True)], dtype=object)
    absent = sum(key not in captions for key in files)
    note = f"{int((new != old).sum())} captions changed, {absent} files have none in {Path(source).name}"
    return Result(table.with_columns(text=new), note=note)


def same_file(one: Path, other: Path) -> bool:
    """Whether two names mean one existing file."""
    return one.exists() and other.exists() and os.path.samefile(one, other)  # noqa: PTH121
