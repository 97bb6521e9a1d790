"""Filter, sort, complete and combine tables of clips: operations are carried out in the order in which they are given.

    python -m tools.datasets.datautil IN.csv [IN2.jsonl 'PART_*.parquet' ...] [--OPERATION [VALUE] ...] --output OUT.csv

Several inputs are put below each other. Formats are CSV, JSONL and parquet, by extension. Without --output, the name is
made of the inputs' and the operations': clips.csv with --info --fmin 16 gives clips_info_fmin16.csv. Paths in a table are
relative to its folder (--root names another); they are rewritten when the output lies elsewhere. docs/how-to/data-tools.md has
examples.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from opensora.datasets.table.files import FORMATS, read_frame, table_format
from opensora.utils.errors import UserError, exit_on_user_error
from tools.command import Parser
from tools.datasets.datautil import columns, filter, info, paths, text  # their operations register themselves
from tools.datasets.datautil.combine import find_tables, merge, same_file
from tools.datasets.datautil.io import write_frames
from tools.datasets.datautil.operations import OPERATIONS, Collect, TableState, apply
from tools.datasets.datautil.parallel import default_workers

__all__ = ["columns", "filter", "info", "main", "paths", "run", "text"]

SEED = 42
RANDOM = ("shuffle", "sample")
LONGEST_NAME = 120


def run(argv: Sequence[str] | None = None) -> list[Path]:
    """Carry out a command line; returns the files that were written.

    Raises:
        UserError: an input, an operation or the output is not as it must be.
    """
    args = read_arguments(argv)
    steps: list[tuple[str, Any]] = args.steps or []
    sources = find_tables(args.tables)
    targets = list(output_names(args, sources, steps))
    refuse_existing(targets, sources, overwrite=args.overwrite)
    root = None if args.root is None else Path(args.root)
    if root is not None and not root.is_dir():
        raise UserError(f"--root: {root} is no folder.")
    folder = targets[0].parent if targets else sources[0].parent
    table, lines = merge([(source, read_frame(source)) for source in sources], root, folder)
    for line in lines:
        print(line)
    workers = 1 if args.disable_parallel else args.num_workers or default_workers()
    seed = SEED if args.seed is None else args.seed
    table = apply(TableState(table.frame, table.folder, root, workers, seed), steps)
    if not targets:
        return []
    if len(table) < len(targets):
        raise UserError(f"{len(table)} rows are left, which do not fill {len(targets)} files; nothing was written.")
    bounds = np.linspace(0, len(table), len(targets) + 1).astype(int)
    parts = [table.frame.iloc[a:b].reset_index(drop=True) for a, b in pairwise(bounds)]
    write_frames(parts, targets)
    for target, part in zip(targets, parts, strict=True):
        print(f"{target}: {len(part)} rows, {len(part.columns)} columns")
    if "path" in table.frame.columns and table.folder.resolve() != targets[0].parent.resolve():
        print(f"paths are relative to {table.folder}: pass --root {table.folder} to what reads this table")
    return targets


def output_names(args: argparse.Namespace, sources: Sequence[Path], steps: Sequence[tuple[str, Any]]) -> Iterator[Path]:
    """The files to write; none when only figures are asked for."""
    if args.output is None and not args.format and len(sources) == 1 and not args.shard:
        if not steps:
            raise UserError("nothing to do: name an operation (see --help) or an --output.")
        if all(flag == "stats" for flag, _ in steps):
            return
    target = Path(args.output) if args.output else default_name(sources, steps, args.format)
    if args.format and table_format(target) != args.format:
        raise UserError(f"--format {args.format} contradicts --output {target}; keep one.")
    table_format(target)
    if args.shard is None:
        yield target
    for i in range(args.shard or 0):
        yield target.with_name(f"{target.stem}_{i}{target.suffix}")


def default_name(sources: Sequence[Path], steps: Sequence[tuple[str, Any]], format: str | None) -> Path:
    """`a.csv b.csv` with --info --fmin 16 -> `a_b_info_fmin16.csv`, in the folder of the first."""
    stems = "_".join(source.stem for source in sources)
    if len(stems) > LONGEST_NAME:
        stems = f"{sources[0].stem}_and_{len(sources) - 1}_more"
    suffixes = [OPERATIONS[flag].suffix.format(_in_name(value)) for flag, value in steps]
    name = "_".join([stems, *suffixes])
    if len(name) > 2 * LONGEST_NAME:
        raise UserError("the name made of the inputs and operations is too long; choose one with --output.")
    return sources[0].with_name(f"{name}.{format or table_format(sources[0])}")


def _in_name(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    words = [f"{v:g}" if isinstance(v, float) else Path(str(v)).stem.lstrip(".") for v in values]
    return re.sub(r"[^\w.+-]+", "-", "-".join(words)).strip("-.")


def refuse_existing(targets: Sequence[Path], sources: Sequence[Path], *, overwrite: bool) -> None:
    """Raise UserError where a file would be replaced without having been asked for."""
    for target in targets if not overwrite else ():
        if any(same_file(target, source) for source in sources):
            raise UserError(f"{target} is an input; name another --output, or pass --overwrite.")
        if target.exists():
            raise UserError(f"{target} exists; name another --output, or pass --overwrite.")


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `steps` holds the operations as (flag, value) in their order.

    Raises:
        UserError: flags contradict each other, or one has no effect.
    """
    parser = Parser(__doc__, __spec__)
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="tables, or patterns of their names")
    parser.add_argument("--output", "-o", metavar="FILE", help="the table to write; its extension is the format")
    parser.add_argument("--format", choices=FORMATS, help="of an output that is not named")
    parser.add_argument(
        "--shard", type=_positive, metavar="N", help="write N files NAME_0 ... of equal length, last of all"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists, even an input")
    parser.add_argument("--root", metavar="FOLDER", help="what the paths of all tables are relative to, and stay so")
    parser.add_argument("--seed", type=int, help=f"of --shuffle and --sample (default {SEED})")
    processes = parser.add_mutually_exclusive_group()
    processes.add_argument("--num-workers", type=_positive, metavar="N", help="processes (default: one for each core)")
    processes.add_argument("--disable-parallel", action="store_true", help="one process")
    parser.set_defaults(steps=[])
    groups: dict[str, Any] = {}
    for op in OPERATIONS.values():
        group = groups.get(op.group) or groups.setdefault(op.group, parser.add_argument_group(op.group))
        group.add_argument(f"--{op.flag}", action=Collect, help=op.help, **op.arguments)
    args = parser.parse_args(argv)
    if args.seed is not None and not any(flag in RANDOM for flag, _ in args.steps):
        raise UserError("--seed has no effect without --shuffle or --sample.")
    return args


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


@exit_on_user_error
def main() -> None:
    """The command line."""
    run()


if __name__ == "__main__":
    main()
