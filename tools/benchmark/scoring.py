"""Time the scorers that need no weights: processor seconds for each clip of a table, on one core.

    python -m tools.benchmark.scoring assets/clips/clips.csv
    python -m tools.benchmark.scoring assets/clips/clips.csv --clips 200000

Prints a Markdown table. `--clips` also times the comparison of that many clips, of which a tenth repeat others.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opensora.datasets.video.read_video import probe
from opensora.utils.errors import UserError, exit_on_user_error
from tools.datasets.stream import read_blocks
from tools.scoring.duplicate import FRAMES, Duplicate
from tools.scoring.registry import names, scorer

NEED_WEIGHTS = ("aesthetic", "matching")


def seconds_of(name: str, paths: list[Path]) -> list[float]:
    """Processor seconds for each file, the first read being over."""
    chosen = scorer(name)
    chosen.score(paths[:1])
    found = []
    for path in paths:
        start = time.process_time()
        row = chosen.score([path])[0]
        found.append(time.process_time() - start)
        if "error" in row:
            raise UserError(f"{path}: {row['error']}")
    return found


def comparison_seconds(clips: int) -> float:
    """Processor seconds for finding the duplicates among so many clips."""
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 1 << 63, (clips, FRAMES), dtype=np.uint64)
    copies = clips // 10
    hashes[-copies:] = hashes[:copies] ^ np.uint64(0b10001)
    table: dict[str, list[Any]] = {
        "path": [str(i) for i in range(clips)],
        "phash": ["".join(f"{part:016x}" for part in row) for row in hashes.tolist()],
    }
    start = time.process_time()
    found = Duplicate().compare(table)["duplicate_of"]
    seconds = time.process_time() - start
    assert sum(of is not None for of in found) == copies
    return seconds


@exit_on_user_error
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--clips", type=int, help="time the comparison of so many clips too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    paths = [args.table.parent / name for block in read_blocks(args.table, 1 << 14, ["path"]) for name in block["path"]]
    sizes = [probe(path) for path in paths]
    print(
        f"{len(paths)} clips of {min(s.width for s in sizes)} to {max(s.width for s in sizes)} pixels width and "
        f"{min(s.num_frames for s in sizes)} to {max(s.num_frames for s in sizes)} frames; {platform.machine()}, "
        f"Python {platform.python_version()}, one core\n"
    )
    print("| scorer | ms per clip, median | largest | clips/s of one core |\n|---|---|---|---|")
    for name in names():
        if name in NEED_WEIGHTS:
            continue
        try:
            found = seconds_of(name, paths)
        except UserError as error:
            print(f"| {name} | not measured: {error} | | |")
            continue
        middle = statistics.median(found)
        print(f"| {name} | {1000 * middle:.0f} | {1000 * max(found):.0f} | {1 / statistics.mean(found):.1f} |")
    if args.clips:
        print(f"\ncomparing {args.clips} clips: {comparison_seconds(args.clips):.1f} s")


if __name__ == "__main__":
    main()
