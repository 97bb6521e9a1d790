"""From a folder of long videos to a table to train on.

    python -m tools.footage recipe.py --out work [--num-workers 8]
    torchrun --nproc-per-node 8 -m tools.footage recipe.py --out work      also on many machines with one file system

Every stage leaves its table, and one of what it dropped and why, in the folder. Killed at any point and started again, it
resumes there; a changed recipe keeps the stages before the change. `report.html` shows what was kept and dropped. With
--retry-failed, what could not be read, cut, scored or captioned in a run before is tried again, and nothing else.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.command import Parser
from tools.footage.recipe import read_recipe
from tools.footage.report import write_report
from tools.footage.rows import has_rows
from tools.footage.stages import CHECKS, SHARED, STAGES, Work, is_anothers, wait_for
from tools.scoring.carry import hold_table
from tools.scoring.parts import failed_in, parts_in, reopen


def run(
    recipe: Path,
    out: Path,
    workers: int = 1,
    rank: int = 0,
    world: int = 1,
    *,
    retry_failed: bool = False,
) -> list[Work]:
    """Carry out what is left of a recipe.

    Args:
        recipe: .py or .yaml with `stages`.
        out: the folder of all stages.
        workers: processes that this one may start.
        rank: of this process.
        world: how many there are.
        retry_failed: process the rows that failed in an earlier run again.

    Raises:
        UserError: the recipe or something it names is not as it must be, or a stage leaves nothing.
    """
    works = planned(recipe, out, workers, rank, world)
    if retry_failed:
        if world > 1:
            raise UserError("--retry-failed does not work under torchrun; run it without, with --num-workers N.")
        open_failed(works)
    out.mkdir(parents=True, exist_ok=True)
    if world == 1:  # what a run that was killed left half written; with several, another one may be at it
        for unfinished in out.glob(".[0-9][0-9]-*.jsonl"):
            unfinished.unlink()
    done: list[Work] = []
    for work in works:
        stage = work.stage
        if work.kept.is_file() and not (rank == 0 and stage.type == "table" and is_anothers(work)):
            print(f"{stage.name}: done before")
        elif rank == 0 or stage.type in SHARED:
            print(f"{stage.name}", flush=True)
            STAGES[stage.type](work, **stage.settings)
        wait_for(work.kept)
        done.append(work)
        if not has_rows(work.kept):
            if rank == 0:
                write_report(out, done)
            raise UserError(
                f"stage {stage.name} leaves no row; {work.dropped} says why, and {out / 'report.html'} shows it."
            )
    if rank == 0:
        for line in write_report(out, done):
            print(line)
    return done


def open_failed(works: Sequence[Work]) -> None:
    """Open the rows that failed again, and mark the stages from the first of them on as not done.

    From then on it is a run like any other: the scores of other rows stay in the parts (`tools.scoring.parts`), and rows that
    pass an earlier stage now are new to the later ones (`tools.scoring.carry`).
    """
    failed = [sum(map(failed_in, parts_in(work.parts))) for work in works]
    first = next((number for number, count in enumerate(failed) if count), len(works))
    # the last first: where this is killed, no table is there that is made of one that is not
    for number in reversed(range(first, len(works))):
        work = works[number]
        if number + 1 < len(works):
            hold_table(works[number + 1].parts, work.kept)
        work.kept.unlink(missing_ok=True)
        work.scored.unlink(missing_ok=True)
        for part in parts_in(work.parts):
            reopen(part)
    for work, count in zip(works, failed, strict=True):
        if count:
            print(f"{work.stage.name}: {count} rows that failed are tried again")
    if not any(failed):
        print("no row failed in an earlier run")


def planned(recipe: Path, out: Path, workers: int, rank: int, world: int) -> list[Work]:
    """Where the stages of a recipe work, each on what the one before it keeps."""
    works: list[Work] = []
    for stage in read_recipe(recipe, STAGES, CHECKS):
        works.append(Work(out, stage, works[-1].kept if works else out / "nothing", rank, world, workers))
    return works


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("recipe", type=Path, help=".py or .yaml with `stages`: docs/how-to/data-processing.md")
    parser.add_argument("--out", "-o", type=Path, required=True, help="folder of the tables, clips and report")
    parser.add_argument("--num-workers", type=int, default=1, metavar="N", help="processes (not under torchrun)")
    parser.add_argument(
        "--retry-failed", action="store_true", help="process again what failed in an earlier run (not under torchrun)"
    )
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank == 0:
        show_messages()
    run(args.recipe, args.out, max(1, args.num_workers), rank, world, retry_failed=args.retry_failed)


if __name__ == "__main__":
    main()
