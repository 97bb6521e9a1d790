"""Time what `tools.datasets.datautil` does to a long table: reading, filters, sorting, writing.

    python -m tools.benchmark.tables --rows 1000000

Prints a Markdown table of processor seconds (of one core, so that a busy machine does not matter) and the peak of memory.
"""

import argparse
import csv
import random
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tools.datasets.datautil.__main__  # noqa: F401  (operations register themselves)
from opensora.datasets.table.files import FORMATS, read_frame
from tools.datasets.datautil.io import write_frames
from tools.datasets.datautil.operations import Sheet, apply

STEPS: tuple[tuple[str, Any], ...] = (
    ("fmin", 16.0),
    ("aesmin", 4.5),
    ("fpsmax", 30.0),
    ("remove-text-duplication", True),
    ("sort", "aes"),
    ("head", 500_000),
)
CAPTION = "Take {} of a dog that runs over a field of grass in the morning, seen from the side of the road."

Value = TypeVar("Value")


def write_table(path: Path, rows: int) -> None:
    """Paths, captions of some twenty words, sizes, rates and scores."""
    rng = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", "text", "num_frames", "height", "width", "fps", "aes"])
        for i in range(rows):
            size = rng.choice([(360, 640), (720, 1280)])
            rest = rng.choice([24, 30, ""]), f"{rng.gauss(5, 1):.3f}"
            writer.writerow([f"clips/{i % 1000:04d}/{i}.mp4", CAPTION.format(i), rng.randrange(1, 300), *size, *rest])


def timed(what: str, function: Callable[[], Value]) -> Value:
    """Call it, and print a row of the table."""
    start = time.process_time()
    value = function()
    print(f"| {what} | {time.process_time() - start:.1f} |", flush=True)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "in.csv"
        write_table(source, args.rows)
        print(f"| {args.rows} rows | s |\n|---|---|")
        sheet = Sheet(timed("read CSV", lambda: read_frame(source)), Path(work))
        lines: list[str] = []
        timed(" ".join(f"`--{flag}`" for flag, _ in STEPS), lambda: apply(sheet, STEPS, lines.append))
        for name in FORMATS:
            target = Path(work) / f"out.{name}"
            timed(f"write {name}, all rows", partial(write_frames, [sheet.frame], [target]))
            timed(f"read {name}", partial(read_frame, target))
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
