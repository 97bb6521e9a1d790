"""Cut the scenes of a table's videos into clips of their own, and write the table of the clips.

    python -m tools.scene_cut.cut scenes.csv --save_dir clips [--out scenes_clips.csv --min_seconds 2 --max_seconds 20
        --target_fps 30 --shorter_side 720 --how encode --num-workers 8]

Each clip has columns of where it is from: `source`, `start`, `end` (seconds), `start_frame`, `end_frame`, `scene`. What becomes no clip
is in OUT_dropped with the reason. Killed, it resumes where it stopped. OUT_cut.jsonl holds the table while it is at work.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from opensora.utils.errors import exit_on_user_error

sys.path.insert(0, str(Path(__file__).parents[2]))  # as Open-Sora's, it may be run by its path
from tools.command import Parser
from tools.datasets.stream import renamed
from tools.footage.rows import read_rows, refuse_existing, write_rows
from tools.scene_cut.rules import Rules
from tools.scene_cut.scorers import Cut, clips_of, lost_of, rules_of
from tools.scoring.__main__ import add_run_arguments, job_of
from tools.scoring.frames import Row
from tools.scoring.job import run

LOST = ["path", "source", "scene", "start", "end", "reason"]  # of a whole video there is no scene


def lost_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """What became no clip: whole videos, and parts."""
    for row in rows:
        if row["status"] != "ok":
            yield {"path": row["path"], "source": row["path"], "reason": row["status"]}
        else:
            yield from lost_of(row)


def read_arguments() -> argparse.Namespace:
    """The command line; the names of Open-Sora's options, with _."""
    default = Rules()
    parser = Parser(__doc__, __spec__)
    add_run_arguments(parser, "_clips")
    parser.add_argument("--save_dir", type=Path, required=True, help="folder of the clips")
    parser.add_argument("--min_seconds", type=float, default=default.min_seconds)
    parser.add_argument("--max_seconds", type=float, default=default.max_seconds)
    parser.add_argument("--longer", choices=("split", "truncate"), default=default.longer)
    parser.add_argument("--target_fps", type=float, help="rate that clips are brought down to")
    parser.add_argument("--shorter_side", "--shorter_size", type=int, help="pixels that clips are brought down to")
    parser.add_argument("--disable_parallel", dest="num_workers", action="store_const", const=1, help="one process")
    parser.add_argument("--how", choices=("encode", "copy", "auto"), default=default.how)
    parser.add_argument("--crf", type=int, default=default.crf, help="quality of encode, 0 is best")
    return parser.parse_args()


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = read_arguments()
    out, overwrite = args.out or args.table.with_stem(f"{args.table.stem}_clips"), args.overwrite
    dropped = out.with_name(f"{out.stem}_dropped{out.suffix}")
    rules = rules_of(vars(args))
    args.out = out.with_name(f"{out.stem}_cut.jsonl")
    args.overwrite = True  # of an earlier run; `refuse_existing` checks the others
    args.batch_size = 1  # a video at a time is lost by a kill
    job = job_of(args, {"cut": Cut(str(args.save_dir.absolute()), rules)})
    option = "--out, or pass --overwrite"
    refuse_existing(job.table, (out, dropped), option, overwrite=overwrite)
    # a job that was killed, or is done anew, meets its own table
    refuse_existing(job.table, [job.out], option, overwrite=overwrite or job.parts.is_dir())
    whole = run(job, args.num_workers)
    if not whole.is_file():
        return  # another process of this job is not done yet; the last one writes the table
    clips, lost = write_tables(whole, out, dropped)
    print(f"{out}: {clips} clips")
    print(f"{dropped}: {lost} videos and parts that became no clip")


def write_tables(whole: Path, out: Path, dropped: Path) -> tuple[int, int]:
    """Write the clips and what became none; returns how many there are of each."""
    clips = (clip for row in read_rows(whole) if row["status"] == "ok" for clip in clips_of(row))
    # both get their names at the end, so that one of them alone does not stand in the way after a kill
    with renamed(out) as good, renamed(dropped) as bad:
        return write_rows(good, clips), write_rows(bad, lost_rows(read_rows(whole)), LOST)


if __name__ == "__main__":
    main()
