"""Split a table into parts such as train and val, so that nothing is in two of them.

    python -m tools.datasets.split clips.csv --parts train=0.95 val=0.05 [--by source] [--seed 42]

Writes clips_train.csv and clips_val.csv. Rows that share a value of a `--by` column stay together, also by way of others:
clips of one video (`source`), copies (`digest`, `duplicate_of`). Without --by it is `source` where there is one, else `path`.
Which part a group falls in depends on the seed and on the values, not on the order of the rows.
"""

import argparse
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from opensora.utils.errors import UserError, exit_on_user_error
from tools.datasets.stream import columns_of, read_blocks
from tools.footage.rows import read_rows, write_rows

BLOCK = 1 << 14


def groups_of(table: Path, by: Sequence[str]) -> list[int]:
    """The number of the group of each row: rows are in one group when values of `by` connect them. Empty values do not."""
    leader: list[int] = []
    first: dict[tuple[str, str], int] = {}

    def find(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    for block in read_blocks(table, BLOCK, list(by)):
        for cells in zip(*block.values(), strict=True):
            row = len(leader)
            leader.append(row)
            for name, cell in zip(by, cells, strict=True):
                if cell not in (None, ""):
                    # what a row is a duplicate of is a path, and belongs to the row of that path
                    key = ("path" if name == "duplicate_of" else name, str(cell))
                    one, other = sorted((find(first.setdefault(key, row)), find(row)))
                    leader[other] = one
    return [find(row) for row in range(len(leader))]


def assign(groups: Sequence[int], keys: Sequence[str], shares: dict[str, float], seed: int) -> list[str]:
    """The part of each row. Groups go, in an order drawn by `seed`, to the part that lacks most rows.

    Args:
        keys: a text of each row that says what it is; a group is drawn by the least of its rows'.
    """
    size = Counter(groups)
    names: dict[int, str] = {}
    for group, key in zip(groups, keys, strict=True):
        names[group] = min(names.get(group, key), key)
    order = sorted(size, key=lambda g: hashlib.blake2b(f"{seed} {names[g]}".encode()).digest())
    filled = dict.fromkeys(shares, 0)
    part_of: dict[int, str] = {}
    for group in order:
        lacking = {part: share * len(groups) - filled[part] for part, share in shares.items()}
        part = max(lacking, key=lambda name: lacking[name])
        part_of[group] = part
        filled[part] += size[group]
    return [part_of[group] for group in groups]


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
    groups = groups_of(table, by)
    keys = [str(path) for block in read_blocks(table, BLOCK, ["path"]) for path in block["path"]]
    parts = assign(groups, keys, shares, seed)
    counts = Counter(parts)
    if empty := [part for part in shares if not counts[part]]:
        raise UserError(f"{len(set(groups))} groups by {', '.join(by)} do not fill part {empty[0]!r}.")
    for part, target in targets.items():
        chosen = (row for row, of in zip(read_rows(table), parts, strict=True) if of == part)
        write_rows(target, chosen, there)
        print(
            f"{target}: {counts[part]} rows, {len({g for g, of in zip(groups, parts, strict=True) if of == part})} groups"
        )
    return targets


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--parts", nargs="+", required=True, metavar="NAME=SHARE")
    parser.add_argument("--by", nargs="+", default=[], metavar="COLUMN", help="rows with equal values stay together")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    run(args.table, shares_of(args.parts), args.by, args.seed)


if __name__ == "__main__":
    main()
