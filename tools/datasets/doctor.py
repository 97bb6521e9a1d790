"""What a training run will make of its data, before it runs; no GPU and no weights are needed.

    python -m tools.datasets.doctor CONFIG --data-path TABLE [--processes 8] [--samples 32] [--contact-sheet FILE.png]
                                    [any option of scripts/train.py]

Reports what becomes of every row and which setting would keep those that are left out; how large steps are and how many an
epoch has; what is there twice; how fast clips are decoded; and draws what the model will really see. Exit code: 0 all is
well; 1 it would train, but something was found; 2 it would not train.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from opensora.config.load import TrainConfig, parse_config
from opensora.datasets.buckets.bucket import NONE
from opensora.datasets.buckets.sampler import BucketBatchSampler
from opensora.datasets.dataloader import build_sampler
from opensora.datasets.sampler import BucketKey, SampleKey
from opensora.datasets.summary import Summary, summarise
from opensora.datasets.table.files import list_rows
from opensora.datasets.table.table import Table
from opensora.datasets.video.read_video import probe
from opensora.inference.output import save_image_grid, shown_frames
from opensora.registry import DATASETS, DENOISERS, SCHEDULERS, TEXT_ENCODERS, VAES, build_module
from opensora.utils.errors import UserError, exit_on_user_error, first_few
from opensora.utils.logging import progress_bar, show_messages
from tools.command import Parser

REGISTRIES = {
    "model": DENOISERS,
    "vae": VAES,
    "text_encoder": TEXT_ENCODERS,
    "scheduler": SCHEDULERS,
    "dataset": DATASETS,
}
MANY = 0.01  # share of rows with the same caption that is reported
FEW = 3  # so many of the same caption are never reported
MOST = 0.5  # of a clip's area that a crop may take away
COLUMNS = 3  # frames of a sample in the contact sheet


class Reading(NamedTuple):
    """A sample, or what was wrong with it."""

    label: str = ""
    caption: str = ""
    row: int | None = None
    num_frames: int = 0
    frames: tuple[Tensor, ...] = ()  # [3, <= 3, H, W] in [-1, 1]
    unseen: str = ""  # why there are none
    size: tuple[int, int] = (0, 0)  # height and width
    seconds: float = 0.0
    problem: str = ""


@exit_on_user_error
def main() -> None:
    """Examine, report, and exit with the verdict."""
    options, rest = _options(sys.argv[1:])
    show_messages()
    cfg = parse_config(TrainConfig, REGISTRIES, rest, options=vars(options))
    dataset = build_module(cfg.dataset, DATASETS, seed=cfg.seed)
    sampler = build_sampler(
        dataset,
        cfg.batch_size,
        seed=cfg.seed,
        world_size=options.processes,
        tail=cfg.bucket_tail,
        order=cfg.bucket_order,
    )
    summary = summarise(dataset, sampler, options.processes, cfg.accumulation_steps)
    print(summary)
    complaints = of_the_epoch(summary)
    table = getattr(dataset, "table", None)  # records of latents have none
    if table is not None:
        complaints += of_the_table(table, classes=reads_classes(cfg.text_encoder))
    readings = read_samples(dataset, choose(sampler, options.samples))
    print(throughput(readings))
    complaints += [f"cannot be used: {reading.problem}" for reading in readings if reading.problem]
    if table is not None:
        complaints += of_the_files(table, readings)
        complaints += of_the_crops(dataset, table, readings)
    shown = {f"{i}: {r.label}, {r.caption[:70]}": r.frames for i, r in enumerate(readings) if r.frames}
    if options.contact_sheet and shown:
        save_image_grid(options.contact_sheet, shown, COLUMNS)
        print(f"{options.contact_sheet}: {len(shown)} samples as the model sees them")
    unseen = list(dict.fromkeys(reading.unseen for reading in readings if reading.unseen))
    if options.contact_sheet and unseen:
        print(f"not drawn: {'; '.join(first_few(unseen, 3))}")
    for complaint in complaints:
        print(f"! {complaint}")
    if summary.steps == 0:
        raise UserError("this would not train: an epoch has no step. The settings that would keep samples are above.")
    sys.exit(1 if complaints else 0)


def choose(sampler: Any, count: int) -> Sequence[SampleKey | BucketKey]:
    """Samples to look at: in turn from every bucket, or the first of an epoch."""
    if not isinstance(sampler, BucketBatchSampler):
        indices = (i for keys in _first_batches(sampler, count) for i in keys)
        return list(dict.fromkeys(indices))[:count]
    plan, buckets = sampler.plan(0), sampler.dataset.buckets
    used = [i for i, samples in enumerate(plan.samples.tolist()) if samples]
    keys: list[SampleKey | BucketKey] = []
    for turn in range(max(plan.samples.tolist(), default=0)):
        for bucket in used:
            if len(keys) == count:
                return keys
            if turn < plan.samples[bucket]:
                row = int(plan.rows[plan.offsets[bucket] + turn])
                keys.append(BucketKey(0, row, *buckets[bucket][2:5]))
    return keys


def of_the_epoch(summary: Summary) -> list[str]:
    """What an epoch leaves out."""
    lost = [f"{count} rows are left out: {reason}. {remedy}" for reason, (count, remedy) in summary.left_out.items()]
    if summary.dropped:
        lost.append(f"{summary.dropped} samples fill no batch and are dropped; bucket_tail='keep' would keep them.")
    return [line for line in lost if "not drawn" not in line]  # chance is what the config asks for


def reads_classes(text_encoder: Mapping[str, Any]) -> bool:
    """Whether captions are numbers of classes, which many rows share."""
    stands_for = text_encoder.get("encoder") if text_encoder["type"] == "cached" else None
    return (stands_for or text_encoder)["type"] == "classes"


def of_the_table(table: Table, *, classes: bool = False) -> list[str]:
    """What is there twice, or not at all; `classes`: see `reads_classes`."""
    found = []
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(table.rows["path"]):  # "c.mp4", "./c.mp4" and its absolute path are one file
        rows_of.setdefault(os.path.normpath(table.folder.absolute() / name), []).append(row)
    same, different = [], []
    for rows in (rows for rows in rows_of.values() if len(rows) > 1):
        texts = Counter(tuple(table.rows[column][row] for column in table.text_columns) for row in rows)
        shown = f"{table.name(rows[0])} (rows {list_rows(table.numbers[rows], len(rows))})"
        same += [shown] if max(texts.values()) > 1 else []
        different += [shown] if len(texts) > 1 else []
    if same:
        found.append(f"{len(same)} files are there more than once with the same caption, such as {same[0]}.")
    if different:
        found.append(f"{len(different)} files have different captions in several rows, such as {different[0]}.")
    for column in table.text_columns:
        captions = Counter(table.rows[column].tolist())
        if empty := captions.pop("", 0):
            found.append(f"{empty} of {len(table)} captions in {column!r} are empty.")
        caption, times = captions.most_common(1)[0] if captions else ("", 0)
        if not classes and times > max(FEW, MANY * len(table)):
            found.append(f"{times} rows have one caption in {column!r}: {caption[:80]!r}. Did captioning fail?")
    return found


def read_samples(dataset: Any, keys: Sequence[Any]) -> list[Reading]:
    """Read samples one after another, timed."""
    readings = []
    for key in progress_bar(keys, desc="reading samples", unit="sample"):
        start = time.perf_counter()
        try:
            item = dataset[key]
        except UserError as error:
            readings.append(Reading(problem=str(error)))
            continue
        seconds = time.perf_counter() - start
        size = [int(item[name]) for name in ("num_frames", "height", "width")]
        label = f"{size[0]} x {size[1]} x {size[2]}, {float(item['fps']):.4g} fps"
        video, unseen = item.get("video"), ""
        if video is None:
            try:
                video = dataset.pixels(key) if hasattr(dataset, "pixels") else None
                unseen = "" if video is not None else "there are latents alone, and no files to draw from"
            except UserError as error:
                unseen = str(error)
        frames = () if video is None else shown_frames((video,), COLUMNS)
        readings.append(
            Reading(label, item["text"], int(item["index"]), size[0], frames, unseen, (size[1], size[2]), seconds)
        )
    return readings


def of_the_files(table: Table, readings: Sequence[Reading]) -> list[str]:
    """Where the table is wrong about a file. One that a cache stands for may be gone."""
    found = []
    for reading in readings:
        if reading.problem or reading.row is None or not table.path(reading.row).is_file():
            continue
        info = probe(table.path(reading.row))
        true = {"num_frames": info.num_frames, "height": info.height, "width": info.width}
        for name, value in true.items():
            column = getattr(table, name, None)
            if column is not None and column[reading.row] > 0 and int(column[reading.row]) != value:
                found.append(f"{table.where(reading.row)}: {name}={column[reading.row]}, but the file has {value}.")
    return found


def of_the_crops(dataset: Any, table: Table, readings: Sequence[Reading]) -> list[str]:
    """The clips of which a crop to the size of training leaves less than half; with buckets of all rows, else of those that were read."""
    if hasattr(dataset, "buckets"):
        bucket = dataset.assign(0).bucket
        rows = np.flatnonzero(bucket != NONE)
        sizes = np.array([(b.height, b.width) for b in dataset.buckets])[bucket[rows]]
        files = np.stack([dataset.height[rows], dataset.width[rows]], axis=1)
    else:
        known = [r for r in readings if r.row is not None and table.path(r.row).is_file()]
        rows = np.array([r.row for r in known], np.int64)
        sizes = np.array([r.size for r in known]).reshape(-1, 2)
        files = np.array([probe(table.path(row))[1:3] for row in rows.tolist()]).reshape(-1, 2)
    ratio = (sizes[:, 0] * files[:, 1]) / (sizes[:, 1] * files[:, 0])
    kept = np.minimum(ratio, 1 / ratio)  # resized until it covers the size, then cut
    lost = np.flatnonzero(kept < MOST)
    if not len(lost):
        return []
    worst = lost[np.argmin(kept[lost])]
    height, width = files[worst]
    return [
        f"{len(lost)} of {len(rows)} clips lose more than half of their area to the crop, such as {table.name(int(rows[worst]))} of "
        f"{height}x{width}, of which {sizes[worst][0]}x{sizes[worst][1]} keeps {kept[worst]:.0%}: add a shape nearer to theirs."
    ]


def throughput(readings: Sequence[Reading]) -> str:
    """How fast one process reads."""
    good = [reading for reading in readings if not reading.problem]
    seconds = sum(reading.seconds for reading in good)
    frames = sum(reading.num_frames for reading in good)
    if not good or seconds == 0:
        return "decoding: nothing could be read"
    return (
        f"decoding: {len(good) / seconds:.1f} samples/s, {frames / seconds:.0f} frames/s in one process "
        f"({len(good)} samples; each of num_workers adds about as much, while there are cores)"
    )


def _first_batches(sampler: Any, count: int) -> list[list[SampleKey]]:
    batches = []
    for batch in sampler:
        batches.append(list(batch.keys))
        if sum(map(len, batches)) >= count or len(batches) >= sampler.batches_in(0):
            return batches
    return batches


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(__doc__, __spec__, usage="%(prog)s CONFIG [options] [--field value ...]")
    parser.add_argument("--processes", type=int, default=1, help="of the training")
    parser.add_argument("--samples", type=int, default=32, help="how many are read")
    parser.add_argument("--contact-sheet", type=Path, help="write an image of the samples that were read to this file")
    options, rest = parser.parse_known_args(argv or ["--help"])
    if options.processes < 1 or options.samples < 1:
        raise UserError("--processes and --samples must be at least 1.")
    return options, rest


if __name__ == "__main__":
    main()
