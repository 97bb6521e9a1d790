"""Split a table into parts such as train and val, so that nothing is in two of them.

    python -m tools.datasets.split clips.csv --parts train=0.95 val=0.05 [--by source] [--seed 42]

Writes clips_train.csv and clips_val.csv. Rows that share a value of a `--by` column stay together, also by way of others:
clips of one video (`source`), copies (`digest`, `duplicate_of`). Without --by it is `source` where there is one, else `path`.
Which part a group falls in depends on the seed and on the values, not on the order of the rows. What a `duplicate_of` names
must be spelled as that row's `path` is: where it names no row, but there is a row of that file name, nothing is split.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from opensora.utils.errors import UserError, exit_on_user_error

sys.path.insert(0, str(Path(__file__).parents[2]))  # as Open-Sora's, it may be run by its path
from tools.command import Parser
from tools.datasets.stream import columns_of, read_blocks
from tools.footage.rows import read_rows, write_rows

BLOCK = 1 << 14
EMPTY = np.uint64(0)


def groups_of(table: Path, by: Sequence[str]) -> np.ndarray:
    """[N] int64: the group of each row, by the number of its first row. Equal values of `by` connect rows, also by way of others;
    empty ones do not.

    Values are compared by hashes of 8 bytes: among 10 million values a collision, which joins two groups, has a chance of 1 in
    300 000.
    """
    hashes = _hashes(table, by)
    # what a row is a duplicate of is a path, and belongs to the row of that path
    kinds = {"path" if name == "duplicate_of" else name for name in by}
    columns = [
        [hashes[name] for name in by if name == kind or (kind, name) == ("path", "duplicate_of")] for kind in kinds
    ]
    groups = np.arange(len(next(iter(hashes.values()))))
    joined = [_Joined(np.stack(of_kind)) for of_kind in columns]
    while True:
        before = groups
        for column in joined:
            groups = column.least(groups)
        if np.array_equal(groups, before):
            return groups


class _Joined:
    """The rows that have equal values: [K, N] of K columns whose values mean the same."""

    def __init__(self, values: np.ndarray) -> None:
        flat = values.reshape(-1)
        there = np.flatnonzero(flat != EMPTY)
        order = there[np.argsort(flat[there], kind="stable")]
        is_first = np.append(True, flat[order[1:]] != flat[order[:-1]])[: len(order)]
        self._rows = order % values.shape[1]
        self._starts = np.flatnonzero(is_first)
        self._sizes = np.diff(np.append(self._starts, len(order)))

    def least(self, numbers: np.ndarray) -> np.ndarray:
        """[N]: of the numbers of the rows with the same value, the least."""
        found = numbers.copy()
        if len(self._starts):
            least = np.minimum.reduceat(numbers[self._rows], self._starts)
            np.minimum.at(found, self._rows, np.repeat(least, self._sizes))
        return found


def _hashes(table: Path, columns: Sequence[str], word: str = "") -> dict[str, np.ndarray]:
    """[N] uint64 for each column; 0 where a cell is empty."""
    found: dict[str, list[np.ndarray]] = {name: [np.empty(0, np.uint64)] for name in columns}
    for block in read_blocks(table, BLOCK, list(columns)):
        for name, cells in block.items():
            texts = ["" if cell is None else str(cell) for cell in cells]
            raw = b"".join(
                hashlib.blake2b(f"{word}{text}".encode(), digest_size=8).digest() if text else bytes(8)
                for text in texts
            )
            found[name].append(np.frombuffer(raw, np.uint64))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def check_repeats(table: Path) -> None:
    """Each `duplicate_of` must name a row, or a path that has left the table: its copies still stay together.

    Raises:
        UserError: a row's file has the name that is missing, so its path is spelled in another way.
    """
    hashes = _hashes(table, ["path", "duplicate_of"])
    repeats = hashes["duplicate_of"]
    lost = (repeats != EMPTY) & ~np.isin(repeats, hashes["path"])
    if not lost.any():
        return
    rows = f"{int(lost.sum())} rows are a duplicate_of a path that no row has"
    missing: dict[str, str] = {}
    start = 0
    for block in read_blocks(table, BLOCK, ["duplicate_of"]):
        cells = block["duplicate_of"]
        missing.update({_file_name(cells[i]): str(cells[i]) for i in np.flatnonzero(lost[start : start + len(cells)])})
        start += len(cells)
    for block in read_blocks(table, BLOCK, ["path"]):
        for path in block["path"]:
            if (name := _file_name(path)) in missing:
                raise UserError(
                    f"{table}: {rows}, such as {missing[name]}, but there is {path}. Copies would be in two parts. Spell both "
                    f"alike, or drop the column and let `python -m tools.scoring {table} --scorers duplicate` make it anew."
                )
    print(f"note: {rows}, such as {next(iter(missing.values()))}; those that repeat the same path stay together")


def _file_name(path: object) -> str:
    return str(path).rpartition("/")[2]


def assign(groups: np.ndarray, drawn: np.ndarray, shares: dict[str, float]) -> np.ndarray:
    """[N] the number of the part of each row. Groups go, in the order of what is drawn, to the part that lacks most rows.

    Args:
        groups: [N] the group of each row.
        drawn: [N] a number for each row that depends on the seed and on what the row is; the least of a group's counts.
    """
    order = np.argsort(groups, kind="stable")
    names, starts = np.unique(groups[order], return_index=True)
    least = np.minimum.reduceat(drawn[order], starts)
    sizes = np.diff(np.append(starts, len(groups)))
    lacking = [share * len(groups) for share in shares.values()]
    part_of = np.empty(len(names), np.int8)
    for group in np.argsort(least, kind="stable").tolist():
        part = max(range(len(lacking)), key=lacking.__getitem__)
        part_of[group] = part
        lacking[part] -= int(sizes[group])
    return part_of[np.searchsorted(names, groups)]


def shares_of(texts: Sequence[str]) -> dict[str, float]:
    """`train=0.9 val=0.1` -> shares that sum to 1.

    Raises:
        UserError: they do not, or a part is there twice.
    """
    shares: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            share = float(value)
        except ValueError:
            share = 0.0
        if not equals or not name.isidentifier() or not share > 0 or name in shares:
            raise UserError(f"--parts {text}: write NAME=SHARE once for each part, such as train=0.9 val=0.1.")
        shares[name] = share
    if len(shares) < 2 or abs(sum(shares.values()) - 1) > 1e-6:
        raise UserError(
            f"--parts: {len(shares)} shares that sum to {sum(shares.values()):g}; two or more must sum to 1."
        )
    return shares


def run(table: Path, shares: dict[str, float], by: Sequence[str] = (), seed: int = 42) -> dict[str, Path]:
    """Write a table for each part.

    Raises:
        UserError: a column is missing, an output exists, or a part gets no row.
    """
    there = columns_of(table)
    by = list(by) or [name for name in ("source", "path") if name in there][:1]
    if missing := [name for name in [*by, "path"] if name not in there]:
        raise UserError(f"{table} has no column {missing[0]!r}; its columns are: {', '.join(there)}.")
    if "duplicate_of" in by and "path" not in by:
        by = [*by, "path"]
    targets = {part: table.with_name(f"{table.stem}_{part}{table.suffix}") for part in shares}
    if existing := [path for path in targets.values() if path.exists()]:
        raise UserError(f"{existing[0]} exists; move it, or remove it.")
    if "duplicate_of" in by:
        check_repeats(table)
    groups = groups_of(table, by)
    parts = assign(groups, _hashes(table, ["path"], f"{seed} ")["path"], shares)
    counts = np.bincount(parts, minlength=len(shares))
    if empty := [part for part, count in zip(shares, counts, strict=True) if not count]:
        raise UserError(f"{len(np.unique(groups))} groups by {', '.join(by)} do not fill part {empty[0]!r}.")
    for number, target in enumerate(targets.values()):
        chosen = (row for row, of in zip(read_rows(table), parts, strict=True) if of == number)
        write_rows(target, chosen, there)
        print(f"{target}: {counts[number]} rows, {len(np.unique(groups[parts == number]))} groups")
    return targets


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--parts", nargs="+", required=True, metavar="NAME=SHARE")
    parser.add_argument("--by", nargs="+", default=[], metavar="COLUMN", help="rows with equal values stay together")
    parser.add_argument("--seed", type=int, default=42)
    if {"-c", "--config", "-l", "--limit"} & {*sys.argv}:
        raise UserError(
            "Open-Sora's split, which drew some rows for each bucket, is now: python -m tools.datasets.datautil TABLE --sample N --output OUT"
        )
    args = parser.parse_args()
    run(args.table, shares_of(args.parts), args.by, args.seed)


if __name__ == "__main__":
    main()
