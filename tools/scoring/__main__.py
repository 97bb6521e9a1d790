"""Add columns of scores to a table of clips.

    python -m tools.scoring clips.csv --scorers flow,sharpness,duplicate --out scored.csv
    python -m tools.scoring clips.csv --scorers aesthetic --out aes.csv --set aesthetic.model=clip-vit-large-patch14 \\
        --set aesthetic.head=sac+logos+ava1-l14-linearMSE.pth --device cuda
    torchrun --nproc-per-node 8 -m tools.scoring clips.parquet --scorers flow,camera_motion --out scored.parquet

Killed and started again, it resumes where it stopped. docs/how-to/scoring.md says what each column means.
"""

import argparse
import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensora.datasets.table.files import table_format
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.command import Parser
from tools.scoring import job as jobs
from tools.scoring.registry import Scorer, names, scorer


def chosen_scorers(wanted: str, settings: Sequence[str], device: str) -> dict[str, Scorer]:
    """The scorers `a,b` with settings such as `a.fps=3`.

    Raises:
        UserError: a scorer or setting is unknown, or a setting is of one that is not wanted.
    """
    chosen = list(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip()))
    if not chosen:
        raise UserError(f"--scorers names none. Scorers: {', '.join(names())}.")
    of_scorer: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for setting in settings:
        target, equals, value = setting.partition("=")
        name, dot, field = target.partition(".")
        if not (equals and dot):
            raise UserError(f"--set {setting}: expected SCORER.SETTING=VALUE, such as flow.fps=3.")
        if name not in of_scorer:
            raise UserError(f"--set {setting} has no effect: --scorers does not name {name!r}.")
        of_scorer[name][field] = value
    scorers = {}
    for name, texts in of_scorer.items():
        base: Any = scorer(name)
        scorer(
            name, **{field: getattr(base, field, None) for field in texts}
        )  # an unknown setting is an error with a hint
        values: dict[str, Any] = {"device": device} if hasattr(base, "device") else {}
        for field, text in texts.items():
            like = getattr(base, field)  # the value is of the type of the default
            try:
                value = text if isinstance(like, str) else ast.literal_eval(text)
                values[field] = tuple(map(float, value)) if isinstance(like, tuple) else type(like)(value)
            except (ValueError, SyntaxError, TypeError) as error:
                raise UserError(f"--set {name}.{field}={text}: expected a value such as {like!r}.") from error
        scorers[name] = scorer(name, **values)
    return scorers


def add_run_arguments(parser: argparse.ArgumentParser, suffix: str = "") -> None:
    """What all tools that go through `tools.scoring.job` have; with a `suffix`, --out may be left to `job_of`."""
    parser.add_argument("table", type=Path, help="CSV, JSONL or parquet with a column path")
    named = f" (default: TABLE with {suffix})" if suffix else ""
    parser.add_argument(
        "--out", "-o", type=Path, required=not suffix, help=f"the table to write; its extension is the format{named}"
    )
    parser.add_argument("--root", type=Path, help="what the paths are relative to (default: the table's folder)")
    parser.add_argument("--num-workers", type=int, default=1, metavar="N", help="processes; 0: this one, unguarded")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="files at a time")
    parser.add_argument("--part-rows", type=int, default=512, metavar="N", help="rows of a part")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument(
        "--retry-failed", action="store_true", help="score the files that failed in an earlier run again"
    )


def job_of(args: argparse.Namespace, scorers: dict[str, Scorer]) -> jobs.Job:
    """The job of a command line.

    Raises:
        UserError: a number is too small, or the output exists.
    """
    for name, least in (("num_workers", 0), ("batch_size", 1), ("part_rows", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {least}.")
    table_format(args.out)
    if args.out.exists() and not args.overwrite:
        raise UserError(f"{args.out} exists; name another --out, or pass --overwrite.")
    if os.path.realpath(args.out) == os.path.realpath(args.table):
        raise UserError("--out is the table itself; name another file.")
    folder = args.root or args.table.parent
    if args.out.parent.resolve() != args.table.parent.resolve() and args.root is None:
        print(f"paths stay relative to {folder}: pass --root {folder} to what reads {args.out}")
    return jobs.Job(args.table, args.out, scorers, folder, args.batch_size, args.part_rows, args.retry_failed)


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    add_run_arguments(parser)
    parser.add_argument("--scorers", required=True, metavar="A,B", help=", ".join(names()))
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SCORER.SETTING=VALUE",
        help="a setting of a scorer; several times",
    )
    parser.add_argument("--device", default="cpu", help="of networks: cpu or cuda")
    return parser.parse_args(argv)


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = read_arguments()
    if os.environ.get("RANK", "0") == "0":
        show_messages()
    scorers = chosen_scorers(args.scorers, args.set, args.device)
    jobs.run(job_of(args, scorers), args.num_workers)


if __name__ == "__main__":
    main()
