"""Add the scenes of each video to a table: columns `timestamp` ([[start, end], ...] in seconds) and `num_scenes`.

    python -m tools.scene_cut.scene_detect videos.csv [--out videos_timestamp.csv --detector auto --threshold 3 --num-workers 8]

Detectors: content (needs nothing), adaptive (PySceneDetect), transnetv2; auto = adaptive where it is installed, else
content. A file that cannot be read keeps its row; the reason is in `status`. Killed, it resumes where it stopped.
"""

import sys
from pathlib import Path

from opensora.utils.errors import exit_on_user_error

sys.path.insert(0, str(Path(__file__).parents[2]))  # as Open-Sora's, it may be run by its path
from tools.command import Parser
from tools.scene_cut.detectors import DETECTORS
from tools.scene_cut.scorers import SceneDetect
from tools.scoring.__main__ import add_run_arguments, job_of
from tools.scoring.job import run


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    add_run_arguments(parser, "_timestamp")
    parser.add_argument("--detector", default="auto", choices=("auto", *DETECTORS))
    parser.add_argument("--threshold", type=float, help="higher finds fewer cuts; default: the detector's own")
    args = parser.parse_args()
    args.out = args.out or args.table.with_stem(f"{args.table.stem}_timestamp")
    run(job_of(args, {"scene_detect": SceneDetect(args.detector, args.threshold)}), args.num_workers)


if __name__ == "__main__":
    main()
