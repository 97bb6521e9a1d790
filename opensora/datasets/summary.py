"""What becomes of the rows of a table in an epoch, in numbers and in words: for the log, for `--dry-run` and the doctor."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from opensora.datasets.buckets.bucket import AREA_SLACK, Bucket, DropReason
from opensora.datasets.buckets.sampler import BucketBatchSampler
from opensora.datasets.sampler import BatchSampler, EpochBatchSampler
from opensora.datasets.video.read_video import FrameRule


class BucketUse(NamedTuple):
    """One bucket in an epoch; each shape of a resolution has its own."""

    bucket: Bucket
    samples: int
    batches: int  # of all processes
    seen: int  # samples in those batches, those seen again counted again


@dataclass(frozen=True)
class Summary:
    """One epoch. `str()` is the table that users read."""

    rows: int  # of the table
    processes: int
    accumulation_steps: int
    batches: int  # of each process
    samples_per_step: tuple[int, float, int]  # smallest, mean and largest
    left_out: dict[str, tuple[int, str]]  # reason -> rows that are in no bucket, and the setting that would keep them
    repeated: int  # samples seen twice to fill batches
    buckets: tuple[BucketUse, ...] = ()  # empty for datasets of one size
    dropped: int = 0  # samples in a bucket but in no batch
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return self.batches // self.accumulation_steps

    def __str__(self) -> str:
        lines = [f"{self.rows} samples in the table"]
        lines += [f"  {count:>9} left out: {reason}. {remedy}" for reason, (count, remedy) in self.left_out.items()]
        if self.buckets:
            lines.append(f"  {'bucket':<28} {'batch':>6} {'samples':>9} {'batches':>8} {'dropped':>8} {'repeated':>8}")
        for bucket, samples, batches, seen in self.buckets:
            lines.append(
                f"  {bucket.name:<28} {bucket.batch_size or 0:>6} {samples:>9} {batches:>8} {max(0, samples - seen):>8} "
                f"{max(0, seen - samples):>8}"
            )
        lines += [f"  {note}" for note in self.notes]
        low, mean, high = self.samples_per_step
        size = f"{low}" if low == high else f"{low} to {high} (mean {mean:.1f})"
        unseen = sum(count for count, _ in self.left_out.values()) + self.dropped
        steps = f"{self.steps} steps of {size} samples"
        if 0 < self.batches < self.accumulation_steps:
            steps = "a part of a step, which goes on in the next epoch"
        lines.append(
            f"an epoch: {steps}; {self.batches} batches on each of {self.processes} "
            f"processes, {self.accumulation_steps} a step; {self.repeated} samples seen twice, {unseen} not at all"
        )
        return "\n".join(lines)


def small_data_warning(sampler: BatchSampler) -> str:
    """A line for a dataset of one size that fills no batch; else nothing. The table of buckets says it of each."""
    if not isinstance(sampler, EpochBatchSampler) or sampler.global_batch <= sampler.num_samples:
        return ""
    n, batch = sampler.num_samples, sampler.global_batch
    processes = batch // sampler.batch_size
    remedy = f"set --batch-size {n // processes} or less" if processes <= n else f"use at most {n} processes"
    return (
        f"warning: a batch of all processes has {batch} samples (batch_size={sampler.batch_size} x {processes}), and the data {n}: each "
        f"batch holds them up to {-(-batch // n)} times, and an epoch is one batch; {remedy}, or add data"
    )


def summarise(dataset: Any, sampler: BatchSampler, processes: int, accumulation_steps: int, epoch: int = 0) -> Summary:
    """What an epoch of `dataset` is with that sampler."""
    if isinstance(sampler, EpochBatchSampler):
        step = sampler.global_batch * accumulation_steps
        return Summary(
            rows=len(dataset.table) if hasattr(dataset, "table") else len(dataset),
            processes=processes,
            accumulation_steps=accumulation_steps,
            batches=sampler.batches_per_epoch,
            samples_per_step=(step, step, step),
            left_out=dataset.clips.dropped if hasattr(dataset, "clips") else {},
            repeated=sampler.batches_per_epoch * sampler.global_batch - sampler.num_samples,
            notes=tuple(filter(None, [small_data_warning(sampler)])),
        )
    assert isinstance(sampler, BucketBatchSampler)
    plan = sampler.plan(epoch)
    counts = np.bincount(dataset.assign(epoch).drop_reason, minlength=len(DropReason)).tolist()
    columns = (plan.samples, plan.batches, plan.seen)
    uses = tuple(
        BucketUse(dataset.buckets[i], *(int(column[i]) for column in columns))
        for i in np.flatnonzero(plan.samples).tolist()
    )
    dropped = int(np.maximum(plan.samples - plan.seen, 0).sum())
    notes = []
    if empty := sum(bucket.batch_size is not None for bucket in dataset.buckets) - len(uses):
        notes.append(f"{empty} more buckets have no sample in this epoch")
    if dropped:
        notes.append(
            f"{dropped} samples are dropped, for they fill no batch on {sampler.world_size} processes: bucket_tail='keep' "
            "or 'pad', or smaller batch sizes, would keep them"
        )
    if thin := sum(use.samples < (use.bucket.batch_size or 0) and use.seen > 0 for use in uses):
        smaller = "smaller batch sizes in bucket_config would not repeat them"
        effect = {"keep": "their batches are smaller", "pad": f"their samples are repeated; {smaller}", "drop": ""}[
            sampler.tail
        ]
        notes.append(f"{thin} buckets have fewer samples than one batch: {effect}")
    sizes = plan.global_batch_sizes[: plan.steps // accumulation_steps * accumulation_steps]
    sizes = sizes.reshape(-1, accumulation_steps).sum(1)
    return Summary(
        rows=len(dataset),
        processes=processes,
        accumulation_steps=accumulation_steps,
        batches=plan.steps,
        samples_per_step=(int(sizes.min()), float(sizes.mean()), int(sizes.max())) if len(sizes) else (0, 0.0, 0),
        left_out={why: (counts[code], remedy) for code, (why, remedy) in drop_reasons(dataset).items() if counts[code]},
        buckets=uses,
        repeated=int(np.maximum(plan.seen - plan.samples, 0).sum()),
        dropped=dropped,
        notes=tuple(notes),
    )


def drop_reasons(dataset: Any) -> dict[DropReason, tuple[str, str]]:
    """Why a row of a dataset with buckets is in none, in words, and the setting that would keep it."""
    levels, interval, rate = dataset.buckets.levels, dataset.frame_interval, dataset.target_fps
    smallest = levels[-1].resolution
    shortest = min((e.num_frames for level in levels for e in level.entries if e.num_frames > 1), default=None)
    if shortest is None:
        short = "There are entries for images only; add one for videos."
    else:
        rule = FrameRule(shortest, interval, rate)
        short = (
            f"The shortest, {rule}, needs {rule.length} (a resolution may ask for more); add a shorter one, lower frame_interval "
            "or raise target_fps."
        )
    return {
        DropReason.UNKNOWN: ("no size is known", "Their files cannot be read: replace them or remove the rows."),
        DropReason.SMALL: (
            "too small for every resolution",
            f"The smallest is {smallest.name}, from {round(AREA_SLACK * smallest.area)} pixels; add a smaller one.",
        ),
        DropReason.SHORT: ("too short for every length", short),
        DropReason.SLOW: (
            f"slower than target_fps={rate}",
            "Lower dataset.target_fps to their rate, or leave them out.",
        ),
        DropReason.NO_IMAGES: ("images", "Add an entry of 1 frame to a resolution that they are large enough for."),
        DropReason.CHANCE: (
            "not drawn in this epoch",
            "Each epoch draws anew; keep_prob 1.0 at the smallest resolution and length keeps all.",
        ),
    }
