"""What a long table costs every process before the first step: read, checked, hashed for a resume, planned over buckets.

    python -m tools.benchmark.table --rows 10000000

Each format is read in a fresh process on one core, by the dataset and the sampler that `scripts/train.py` builds for
configs/opensora-v1-2/train/stage1.py. Prints a Markdown table; "peak" is the resident memory up to then, PyTorch included.
"""

import argparse
import csv
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import islice
from pathlib import Path

import pandas as pd
import pyarrow
from pyarrow.parquet import ParquetWriter

CONFIG = "configs/opensora-v1-2/train/stage1.py"
COLUMNS = ["path", "text", "num_frames", "height", "width", "fps"]
SIZES = [(240, 426), (360, 640), (480, 854), (720, 1280), (1280, 720), (1080, 1920)]
CAPTIONS = [
    "A dog runs over a field of grass in the morning, seen from the side of the road",
    'Waves break on black sand, and a sign says "no swimming"; the camera pans to the left',
    "雪の屋根 at dusk, slowly approached from above",
    "A close-up of hands that fold a paper crane on a wooden table, with a window behind them",
]
FILES = 1000  # in each folder; all folders are links to one


def rows_of_table(count: int) -> Iterator[tuple[object, ...]]:
    """Videos, and one image in sixteen; captions of some 100 to 200 bytes, quoted in a CSV."""
    rng = random.Random(0)
    for i in range(count):
        is_image = rng.random() < 1 / 16
        path = f"shard-{i // FILES:06d}/clip-{i % FILES:06d}.{'jpg' if is_image else 'mp4'}"
        caption = f"{rng.choice(CAPTIONS)}, take {i}, {rng.choice(CAPTIONS)}."
        frames, fps = (1, None) if is_image else (rng.randrange(20, 900), rng.choice([24, 23.976, 29.97, 30, 60]))
        yield path, caption, frames, *rng.choice(SIZES), fps


def write_tables(folder: Path, count: int) -> None:
    """The same rows as clips.csv and clips.parquet, and empty files that they name."""
    (folder / "files").mkdir()
    for i in range(2 * FILES):
        (folder / f"files/clip-{i // 2:06d}.{('jpg', 'mp4')[i % 2]}").touch()
    for shard in range(-(-count // FILES)):
        (folder / f"shard-{shard:06d}").symlink_to("files")
    types = (pyarrow.string(),) * 2 + (pyarrow.int64(),) * 3 + (pyarrow.float64(),)
    schema = pyarrow.schema(list(zip(COLUMNS, types, strict=True)))
    rows = rows_of_table(count)
    with (folder / "clips.csv").open("w", newline="") as file, ParquetWriter(folder / "clips.parquet", schema) as out:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        while block := list(islice(rows, 200_000)):
            lines.writerows(block)
            out.write_table(pyarrow.table(list(zip(*block, strict=True)), schema))


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print what a block takes, as a row of the table."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"| {name} | {time.perf_counter() - wall:.1f} | {time.process_time() - cpu:.1f} | {peak:.2f} |", flush=True)


def measure(table: Path) -> None:
    """What happens before step 1, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kind = table.suffix[1:]
    with phase(f"{kind}: imports"):
        from mmengine.config import Config

        import opensora.datasets  # noqa: F401  (datasets register themselves)
        from opensora.datasets.dataloader import build_sampler
        from opensora.datasets.summary import summarise
        from opensora.registry import DATASETS
    config = Config.fromfile(CONFIG)
    with phase(f"**{kind}: all three**"):
        with phase(f"{kind}: read and check"):
            dataset = DATASETS.build(dict(config.dataset, data_path=str(table), bucket_config=config.bucket_config))
        with phase(f"{kind}: fingerprint"):
            dataset.fingerprint()
        with phase(f"{kind}: buckets, plan and summary of an epoch"):
            summary = summarise(dataset, build_sampler(dataset, 1, seed=42, world_size=8), 8, 1)
    print(str(summary).splitlines()[-1], file=sys.stderr)


def main() -> None:
    """Write the tables, and start a process for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--measure", type=Path, metavar="TABLE", help="only this table, in this process")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    versions = f"Python {platform.python_version()}, pandas {pd.__version__}, pyarrow {pyarrow.__version__}"
    print(f"{args.rows} rows, {os.cpu_count()} cores, {versions}, {date.today().isoformat()}\n")
    with tempfile.TemporaryDirectory() as work:
        write_tables(Path(work), args.rows)
        print("| | wall s | CPU s | peak GiB |\n|---|---|---|---|", flush=True)
        for name in ("clips.csv", "clips.parquet"):
            subprocess.run([sys.executable, "-m", "tools.benchmark.table", "--measure", f"{work}/{name}"], check=True)


if __name__ == "__main__":
    main()
