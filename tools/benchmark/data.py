"""The tools for data: what long tables cost, and videos on their way to a table."""

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opensora.utils.errors import UserError
from tools.benchmark.measure import Options, Table, attempt, resident_gib

CONFIG = "configs/opensora-v1-2/train/stage1.py"
CAPTIONS = [
    "A dog runs over a field of grass in the morning, seen from the side of the road",
    'Waves break on black sand, and a sign says "no swimming"; the camera pans to the left',
    "雪の屋根 at dusk, slowly approached from above",
    "A close-up of hands that fold a paper crane on a wooden table, with a window behind them",
]
SIZES = [(240, 426), (360, 640), (480, 854), (720, 1280), (1280, 720), (1080, 1920)]
TYPES = {
    "path": "string", "text": "string", "num_frames": "int64", "height": "int64", "width": "int64", "fps": "float64",
    "aes": "float64", "flow": "float64", "digest": "string", "source": "string",
}  # fmt: skip
TRAINING = 6  # columns of a table to train on; the others are what tools measure
FILES = 1000  # in each folder; all folders are links to one
DATAUTIL: tuple[tuple[str, Any], ...] = (
    ("fmin", 16.0), ("aesmin", 4.5), ("fpsmax", 30.0), ("remove-text-duplication", True), ("sort", "aes"), ("head", 500_000),
)  # fmt: skip
PARTS = ("csv", "parquet", "datautil", "footage", "split", "analyze")
TABLE_COLUMNS = {"": "", "wall s": ".1f", "CPU s": ".1f", "peak GiB": ".2f"}


def table(argv: Sequence[str]) -> None:
    """Time what a long table costs: every process before the first step, and the tools for tables.

    `csv` and `parquet`: imports, and the table read, checked, hashed for a resume and planned over buckets, by the dataset and the
    sampler that `scripts/train.py` builds for configs/opensora-v1-2/train/stage1.py. `datautil`: reading, filters, sorting, writing
    each format. `footage`: its stages filter, unique and table. `split` and `analyze`: these tools, clips of videos, twenty of each.
    Each part has a fresh process and one core; "peak" is its memory up to then, PyTorch included.
    """
    options = Options("table", table.__doc__, argv, device="cpu")
    options.add("--rows", 10_000_000, 2000)
    options.add("--parts", ["csv", "parquet"], list(PARTS), choices=PARTS)
    options.add_argument("--measure", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # in this process
    args = options.parse()
    if args.measure:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        measure_part(args.parts[0], args.measure)
        return
    options.heading(f"{args.rows} rows, {os.cpu_count()} cores, Python {platform.python_version()}")
    Table(TABLE_COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), args.rows)
        for part in args.parts:
            command = [sys.executable, "-m", "tools.benchmark", "table", "--measure", folder, "--parts", part]
            subprocess.run(command, check=True)


def rows_of(count: int) -> Iterator[tuple[object, ...]]:
    """Videos, and one image in sixteen; captions of some 100 to 200 bytes, quoted in a CSV; every digest twice."""
    rng = random.Random(0)
    for i in range(count):
        is_image = rng.random() < 1 / 16
        path = f"shard-{i // FILES:06d}/clip-{i % FILES:06d}.{'jpg' if is_image else 'mp4'}"
        caption = f"{rng.choice(CAPTIONS)}, take {i}, {rng.choice(CAPTIONS)}."
        frames, fps = (1, None) if is_image else (rng.randrange(20, 900), rng.choice([24.0, 23.976, 29.97, 30.0, 60.0]))
        scores = round(rng.gauss(5, 1), 3), i % 97 / 10
        yield path, caption, frames, *rng.choice(SIZES), fps, *scores, f"{i // 2:x}", f"videos/{i // 20}.mp4"


def write_tables(folder: Path, count: int) -> None:
    """The same rows as clips.csv and clips.parquet, to train on, and as scored.parquet with all columns; empty files that they name."""
    import pyarrow
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    (folder / "files").mkdir()
    for i in range(2 * FILES):
        (folder / f"files/clip-{i // 2:06d}.{('jpg', 'mp4')[i % 2]}").touch()
    for shard in range(-(-count // FILES)):
        (folder / f"shard-{shard:06d}").symlink_to("files")
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in TYPES.items()])
    train = pyarrow.schema(list(schema)[:TRAINING])
    rows = rows_of(count)
    with (
        CSVWriter(folder / "clips.csv", train) as lines,
        ParquetWriter(folder / "clips.parquet", train) as clips,
        ParquetWriter(folder / "scored.parquet", schema) as scored,
    ):
        while block := list(islice(rows, 200_000)):
            whole = pyarrow.table(
                [
                    pyarrow.array(column, kind)
                    for column, kind in zip(zip(*block, strict=True), schema.types, strict=True)
                ],
                schema,
            )
            scored.write_table(whole)
            clips.write_table(whole.select(train.names))
            lines.write_table(whole.select(train.names))


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print what a block takes, as a row of the table."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times = time.perf_counter() - wall, time.process_time() - cpu
    print(f"| {name} | {times[0]:.1f} | {times[1]:.1f} | {resident_gib():.2f} |", flush=True)


def measure_part(part: str, folder: Path) -> None:
    """Rows of the table for one of PARTS."""
    if part in ("csv", "parquet"):
        measure_training(folder / f"clips.{part}")
    elif part == "datautil":
        measure_datautil(folder / "scored.parquet")
    elif part == "footage":
        measure_footage(folder)
    else:
        from tools.datasets import analyze, split

        with phase(part):
            if part == "split":
                split.run(folder / "scored.parquet", {"train": 0.99, "val": 0.01})
            else:
                (folder / "page.html").write_text(analyze.page_of(folder / "scored.parquet")[0], encoding="utf-8")


def measure_training(file: Path) -> None:
    """What happens before step 1."""
    kind = file.suffix[1:]
    with phase(f"{kind}: imports"):
        from mmengine.config import Config

        import opensora.datasets  # noqa: F401  (datasets register themselves)
        from opensora.datasets.dataloader import build_sampler
        from opensora.datasets.summary import summarise
        from opensora.registry import DATASETS
    config = Config.fromfile(CONFIG)
    with phase(f"**{kind}: all three**"):
        with phase(f"{kind}: read and check"):
            dataset = DATASETS.build(dict(config.dataset, data_path=str(file), bucket_config=config.bucket_config))
        with phase(f"{kind}: fingerprint"):
            dataset.fingerprint()
        with phase(f"{kind}: buckets, plan and summary of an epoch"):
            summarise(dataset, build_sampler(dataset, 1, seed=42, world_size=8), 8, 1)


def measure_datautil(file: Path) -> None:
    """Reading and writing each format, and operations on the rows."""
    import tools.datasets.datautil.__main__  # noqa: F401  (operations register themselves)
    from opensora.datasets.table.files import FORMATS, read_frame
    from tools.datasets.datautil.io import write_frames
    from tools.datasets.datautil.operations import TableState, apply

    state = TableState(read_frame(file), file.parent)
    whole = state.frame
    with phase(" ".join(f"`--{flag}`" for flag, _ in DATAUTIL)):
        apply(state, DATAUTIL, lambda _: None)
    for name in FORMATS:
        target = file.parent / f"out.{name}"
        with phase(f"datautil: write {name}"):
            write_frames([whole], [target])
        with phase(f"datautil: read {name}"):
            read_frame(target)


def measure_footage(folder: Path) -> None:
    """The stages filter, unique and table of `tools.footage`."""
    import json

    from pyarrow.parquet import ParquetFile

    from tools.footage import stages
    from tools.footage.recipe import Planned

    before = folder / "before.jsonl"
    with before.open("w") as file:
        for batch in ParquetFile(folder / "scored.parquet").iter_batches():
            file.writelines(json.dumps({**row, "path": f"{folder}/{row['path']}"}) + "\n" for row in batch.to_pylist())
    settings: dict[str, dict[str, Any]] = {
        "filter": {"fmin": 16, "flowmin": 0.5},
        "unique": {},
        "table": {"output": "train.parquet"},
    }
    for number, (kind, of_stage) in enumerate(settings.items()):
        work = stages.Work(folder, Planned(number, kind, of_stage, f"{number}-{kind}"), before)
        with phase(f"footage: {kind}"):
            stages.STAGES[kind](work, **of_stage)
        before = work.kept


def footage(argv: Sequence[str]) -> None:
    """Time the stages of `tools.footage` on the videos of a folder, on one core: probing, scene detection, cutting.

    Seconds are of processor time, so that a busy machine matters less. Stages that only see tables: `table --parts footage`.
    """
    from tools.footage import stages
    from tools.scene_cut.cutting import cut_video
    from tools.scene_cut.detectors import find_cuts, scenes_of
    from tools.scene_cut.frames import Footage
    from tools.scene_cut.rules import Rules

    options = Options("footage", footage.__doc__, argv, device="cpu")
    options.add_argument("folder", type=Path, nargs="?", default=Path("assets/clips"))
    args = options.parse()
    files = list(stages.find_files(args.folder, stages.VIDEO_EXTENSIONS).files)[: 2 if args.toy else None]
    videos = [Footage(path) for path in files]
    frames = sum(video.num_frames for video in videos)
    scenes = {video.path: scenes_of(find_cuts(video, "content"), video.num_frames) for video in videos}

    def cut(rules: Rules, out: Path) -> None:
        for video in videos:
            cut_video(video, scenes[video.path], rules, out, Path(video.path).stem)

    calls: dict[str, Callable[[], object]] = {
        "probe": lambda: stages.Probe().score([video.path for video in videos]),
        "detect, content": lambda: [find_cuts(video, "content") for video in videos],
    }
    with tempfile.TemporaryDirectory() as work:
        for name, rules in {
            "cut, encode": Rules(min_seconds=1),
            "cut, encode, shorter_side=256": Rules(min_seconds=1, shorter_side=256),
            "cut, copy": Rules(min_seconds=1, how="copy"),
        }.items():
            calls[name] = partial(cut, rules, Path(work) / name)
        options.heading(f"{len(videos)} videos, {frames} frames")
        rows = Table({"stage": "", "s": ".2f", "videos/s": ".2f", "frames/s": ".0f"})
        for name, call in calls.items():
            start = time.process_time()
            call()
            taken = time.process_time() - start
            rows.row(name, taken, len(videos) / taken, frames / taken)


def scoring(argv: Sequence[str]) -> None:
    """Time the scorers that need no weights: processor seconds for each clip of a table, on one core.

    `--clips` also times the comparison of that many clips by `duplicate`, of which a tenth repeat others.
    """
    from opensora.datasets.video.read_video import probe
    from tools.datasets.stream import read_blocks
    from tools.scoring.duplicate import FRAMES, Duplicate
    from tools.scoring.registry import names, scorer

    options = Options("scoring", scoring.__doc__, argv, device="cpu")
    options.add_argument("table", type=Path, nargs="?", default=Path("assets/clips/clips.csv"))
    options.add_argument("--clips", type=int, help="time the comparison of so many clips too")
    options.add("--scorers", sorted(set(names()) - {"aesthetic", "matching"}), ["sharpness", "static"])
    args = options.parse()
    torch.set_num_threads(1)
    rows = (name for block in read_blocks(args.table, 1 << 14, ["path"]) for name in block["path"])
    paths = [args.table.parent / name for name in rows][: 2 if args.toy else None]
    sizes = [probe(path) for path in paths]
    widths, lengths = ([getattr(size, name) for size in sizes] for name in ("width", "num_frames"))
    of = f"{min(widths)} to {max(widths)} pixels width and {min(lengths)} to {max(lengths)} frames"
    options.heading(f"{len(paths)} clips of {of}", f"Python {platform.python_version()}, one core")
    table = Table({"scorer": "", "ms per clip, median": ".0f", "largest": ".0f", "clips/s of one core": ".1f"})
    for name in args.scorers:
        found = attempt(lambda: [processor_ms(scorer(name), path) for path in [paths[0], *paths]][1:], UserError)  # noqa: B023
        if isinstance(found, str):
            table.row(name, found)
        else:
            table.row(name, statistics.median(found), max(found), 1000 / statistics.mean(found))
    if args.clips:
        rng, copies = np.random.default_rng(0), args.clips // 10
        hashes = rng.integers(0, 1 << 63, (args.clips, FRAMES), dtype=np.uint64)
        hashes[-copies:] = hashes[:copies] ^ np.uint64(0b10001)
        texts = ["".join(f"{part:016x}" for part in row) for row in hashes.tolist()]
        start = time.process_time()
        same = Duplicate().compare({"path": [str(i) for i in range(args.clips)], "phash": texts})["duplicate_of"]
        print(f"\ncomparing {args.clips} clips: {time.process_time() - start:.1f} s")
        assert sum(of is not None for of in same) == copies


def processor_ms(scorer: Any, path: Path) -> float:
    """Of scoring one file."""
    start = time.process_time()
    row = scorer.score([path])[0]
    if "error" in row:
        raise UserError(f"{path}: {row['error']}")
    return 1000 * (time.process_time() - start)
