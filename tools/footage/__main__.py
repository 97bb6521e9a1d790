"""From a folder of long videos to a table to train on.

    python -m tools.footage recipe.py --out work [--num-workers 8]
    torchrun --nproc-per-node 8 -m tools.footage recipe.py --out work      also on many machines with one file system

Every stage leaves its table, and one of what it dropped and why, in the folder. Killed at any place and started again, it
goes on there; a changed recipe keeps the stages before the change. `report.html` shows what was kept and dropped.
"""

import argparse
import os
from pathlib import Path

from opensora.utils.errors import UserError, exit_on_user_error
from tools.footage.recipe import read_recipe
from tools.footage.report import write_report
from tools.footage.rows import has_rows
from tools.footage.stages import SHARED, STAGES, Work, wait_for


def run(recipe: Path, out: Path, workers: int = 1, rank: int = 0, world: int = 1) -> list[Work]:
    """Carry out what is left of a recipe.

    Raises:
        UserError: the recipe or something it names is not as it must be, or a stage leaves nothing.
    """
    out.mkdir(parents=True, exist_ok=True)
    if world == 1:  # what a run that was killed left half written; with several, another one may be at it
        for unfinished in out.glob(".[0-9][0-9]-*.jsonl"):
            unfinished.unlink()
    before = out / "nothing"
    done: list[Work] = []
    for stage in read_recipe(recipe, STAGES):
        work = Work(out, stage, before, rank, world, workers)
        if work.kept.is_file():
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
        before = work.kept
    if rank == 0:
        for line in write_report(out, done):
            print(line)
    return done


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help=".py or .yaml with `stages`: docs/data-processing.md")
    parser.add_argument("--out", "-o", type=Path, required=True, help="folder of the tables, clips and report")
    parser.add_argument("--num-workers", type=int, default=1, metavar="N", help="processes (not under torchrun)")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    run(args.recipe, args.out, max(1, args.num_workers), rank, world)


if __name__ == "__main__":
    main()
