"""Time the stages of `tools.footage` on videos, and its streaming on a table of any length.

    python -m tools.benchmark.footage FOLDER                 clips and frames a second of one core, by stage
    python -m tools.benchmark.footage --rows 10000000        seconds and peak memory of filter, unique, table
    python -m tools.benchmark.footage --rows 10000000 --tools split analyze

Prints Markdown. Seconds are of one core's processor time, so that a busy machine matters less.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.datasets import analyze, split
from tools.footage import stages
from tools.footage.recipe import Planned
from tools.footage.rows import read_rows
from tools.scene_cut.cutting import cut_video
from tools.scene_cut.detectors import find_cuts, scenes_of
from tools.scene_cut.frames import Footage
from tools.scene_cut.pieces import Rules


def timed(what: str, frames: int, files: int, function: Callable[[], object]) -> None:
    """Call it, and print a row of the table."""
    start = time.process_time()
    function()
    seconds = time.process_time() - start
    print(f"| {what} | {seconds:.2f} | {files / seconds:.2f} | {frames / seconds:.0f} |", flush=True)


def of_videos(folder: Path) -> None:
    """Probing, detecting and cutting all videos of a folder."""
    footage = [Footage(path) for path in stages.find_files(folder, stages.VIDEO_EXTENSIONS).files]
    frames, files = sum(video.num_frames for video in footage), len(footage)
    scenes = {video.path: scenes_of(find_cuts(video, "content"), video.num_frames) for video in footage}
    print(f"{files} videos, {frames} frames\n\n| stage | s | videos/s | frames/s |\n|---|---|---|---|")
    timed("probe", frames, files, lambda: stages.Probe().score([video.path for video in footage]))
    timed("detect, content", frames, files, lambda: [find_cuts(video, "content") for video in footage])
    with tempfile.TemporaryDirectory() as work:
        for words, rules in (
            ("cut, encode", Rules(min_seconds=1)),
            ("cut, encode, shorter_side=256", Rules(min_seconds=1, shorter_side=256)),
            ("cut, copy", Rules(min_seconds=1, how="copy")),
        ):

            def cut(rules: Rules = rules, words: str = words) -> None:
                for video in footage:
                    cut_video(video, scenes[video.path], rules, Path(work) / words, stages.Path(video.path).stem)

            timed(words, frames, files, cut)


def of_rows(rows: int) -> None:
    """Filter, unique and table on rows that are made up."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before.jsonl"
        with before.open("w") as file:
            for i in range(rows):
                row: dict[str, object] = {
                    "path": f"{folder}/clips/{i}.mp4",
                    "text": f"Take {i} of a dog that runs over a field in the morning.",
                }
                row |= {
                    "num_frames": i % 300,
                    "fps": 24,
                    "height": 720,
                    "width": 1280,
                    "flow": i % 97 / 10,
                    "digest": f"{i // 2:x}",
                }
                file.write(json.dumps(row) + "\n")
        print(f"| {rows} rows | s |\n|---|---|")
        settings: dict[str, dict[str, Any]] = {
            "filter": {"fmin": 16, "flowmin": 0.5},
            "unique": {},
            "table": {"output": "train.parquet"},
        }
        for number, (kind, of_stage) in enumerate(settings.items()):
            work = stages.Work(Path(folder), Planned(number, kind, of_stage, f"{number}-{kind}"), before)
            start = time.process_time()
            stages.STAGES[kind](work, **of_stage)
            print(f"| {kind} | {time.process_time() - start:.1f} |", flush=True)
            before = work.kept
        print(f"\n{sum(1 for _ in read_rows(Path(folder) / 'train.parquet'))} rows are left")
    print(f"peak memory {_peak():.2f} GiB")


def of_tools(rows: int, tools: Sequence[str]) -> None:
    """Tools on a parquet table that is made up: clips of videos, twenty of each."""
    with tempfile.TemporaryDirectory() as folder:
        table, page = Path(folder) / "clips.parquet", Path(folder) / "page.html"
        _write_clips(table, rows)
        print(
            f"{rows} rows, {table.stat().st_size / 2**20:.0f} MiB of parquet\n\n| tool | s | peak GiB |\n|---|---|---|"
        )
        print(f"| making the table | {time.process_time():.1f} | {_peak():.2f} |", flush=True)
        for tool in tools:
            start = time.process_time()
            if tool == "split":
                split.run(table, {"train": 0.99, "val": 0.01})
            else:
                page.write_text(analyze.page_of(table)[0], encoding="utf-8")
            print(f"| {tool} | {time.process_time() - start:.1f} | {_peak():.2f} |", flush=True)


def _write_clips(table: Path, rows: int) -> None:
    import pyarrow
    import pyarrow.compute
    from pyarrow.parquet import ParquetWriter

    def texts(before: str, numbers: np.ndarray, behind: str) -> Any:
        return pyarrow.compute.binary_join_element_wise(before, pyarrow.array(numbers).cast("string"), behind, "")

    writer = None
    for first in range(0, rows, 1 << 17):
        i = np.arange(first, min(first + (1 << 17), rows))
        columns = {
            "path": texts("clips/", i, ".mp4"),
            "source": texts("videos/", i // 20, ".mp4"),
            "text": texts("Take ", i, " of a dog that runs over a field in the morning."),
            "num_frames": i % 300 + 1,
            "fps": np.full(len(i), 24.0),
            "height": 360 + 360 * (i % 2),
            "width": 640 + 640 * (i % 2),
            "aes": 3 + i % 401 / 100,
            "flow": i % 97 / 10,
        }
        block = pyarrow.table(columns)
        writer = writer or ParquetWriter(table, block.schema)
        writer.write_table(block)
    assert writer is not None, "at least one row"
    writer.close()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, help="time a table of so many rows")
    parser.add_argument("--tools", nargs="+", choices=("split", "analyze"), help="time these on it instead")
    args = parser.parse_args()
    if args.tools and args.rows is None:
        parser.error("--tools needs --rows")
    if (args.folder is None) == (args.rows is None):
        parser.error("name a folder of videos, or --rows")
    if args.tools:
        of_tools(args.rows, args.tools)
    elif args.rows is not None:
        of_rows(args.rows)
    else:
        of_videos(args.folder)


if __name__ == "__main__":
    main()
