"""From a folder of long videos to a table to train on.

    python -m tools.footage recipe.py --out work [--num-workers 8]
    torchrun --nproc-per-node 8 -m tools.footage recipe.py --out work      also on many machines with one file system

Every stage leaves its table, and one of what it dropped and why, in the folder. Killed at any place and started again, it
goes on there; a changed recipe keeps the stages before the change. `report.html` shows what was kept and dropped. With
--retry-failed, what could not be read, cut, scored or captioned in a run before is tried again, and nothing else.
"""

import argparse
import os
from pathlib import Path
from typing import Literal

from opensora.utils.errors import UserError, exit_on_user_error
from tools.footage.recipe import read_recipe
from tools.footage.report import write_report
from tools.footage.retry import open_failed
from tools.footage.rows import has_rows
from tools.footage.stages import CHECKS, SHARED, STAGES, Work, is_anothers, wait_for


def run(
    recipe: Path,
    out: Path,
    workers: int = 1,
    rank: int = 0,
    world: int = 1,
    again: Literal["none", "failed"] = "none",
) -> list[Work]:
    """Carry out what is left of a recipe.

    Args:
        recipe: .py or .yaml with `stages`.
        out: the folder of all stages.
        workers: processes that this one may start.
        rank: of this process.
        world: how many there are.
        again: which of the rows that were looked at by a run before are looked at again: "none" or "failed" ones.

    Raises:
        UserError: the recipe or something it names is not as it must be, or a stage leaves nothing.
    """
    works = planned(recipe, out, workers, rank, world)
    if again == "failed":
        if world > 1:
            raise UserError(
                "--retry-failed: under torchrun nobody is first to open the parts; run it without, with --num-workers N."
            )
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


def planned(recipe: Path, out: Path, workers: int, rank: int, world: int) -> list[Work]:
    """Where the stages of a recipe work, each on what the one before it keeps."""
    works: list[Work] = []
    for stage in read_recipe(recipe, STAGES, CHECKS):
        works.append(Work(out, stage, works[-1].kept if works else out / "nothing", rank, world, workers))
    return works


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help=".py or .yaml with `stages`: docs/data-processing.md")
    parser.add_argument("--out", "-o", type=Path, required=True, help="folder of the tables, clips and report")
    parser.add_argument("--num-workers", type=int, default=1, metavar="N", help="processes (not under torchrun)")
    parser.add_argument(
        "--retry-failed", action="store_true", help="look again at what failed in a run before (not under torchrun)"
    )
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    run(args.recipe, args.out, max(1, args.num_workers), rank, world, "failed" if args.retry_failed else "none")


if __name__ == "__main__":
    main()
