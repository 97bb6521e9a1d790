"""What becomes of the rows of a table in an epoch, in numbers and in words: for the log, for `--dry-run` and the doctor."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from opensora.datasets.buckets.bucket import AREA_SLACK, Bucket, DropReason
from opensora.datasets.buckets.sampler import BucketBatchSampler
from opensora.datasets.sampler import BatchSampler, EpochBatchSampler
from opensora.datasets.video.read_video import frames_needed


@dataclass(frozen=True)
class BucketUse:
    """One bucket in an epoch; each shape of a resolution has its own."""

    bucket: Bucket
    samples: int
    batches: int  # of all processes
    seen: int  # samples in those batches, those seen again counted again

    @property
    def dropped(self) -> int:
        """Samples that no batch has."""
        return max(0, self.samples - self.seen)

    @property
    def repeated(self) -> int:
        """Samples that are seen again."""
        return max(0, self.seen - self.samples)


@dataclass(frozen=True)
class Summary:
    """One epoch. `str()` is the table that users read.

    Attributes:
        rows: Of the table.
        batches: Of each process.
        samples_per_step: (smallest, mean, largest) number of samples of an optimizer step.
        left_out: Reason -> rows that are in no bucket, and the setting that would keep them.
        buckets: Empty for datasets of one size.
        repeated: Samples seen twice to fill batches.
        dropped: Samples in a bucket but in no batch.
    """

    rows: int
    processes: int
    accumulation_steps: int
    batches: int
    samples_per_step: tuple[int, float, int]
    left_out: dict[str, tuple[int, str]]
    repeated: int
    buckets: tuple[BucketUse, ...] = ()
    dropped: int = 0
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        return self.batches // self.accumulation_steps

    @property
    def num_unseen(self) -> int:
        """Rows that an epoch does not see at all."""
        return sum(count for count, _ in self.left_out.values()) + self.dropped

    def __str__(self) -> str:
        lines = [f"{self.rows} samples in the table"]
        lines += [f"  {count:>9} left out: {reason}. {remedy}" for reason, (count, remedy) in self.left_out.items()]
        if self.buckets:
            lines.append(f"  {'bucket':<28} {'batch':>6} {'samples':>9} {'batches':>8} {'dropped':>8} {'repeated':>8}")
        for use in self.buckets:
            lines.append(
                f"  {use.bucket.name:<28} {use.bucket.batch_size or 0:>6} {use.samples:>9} {use.batches:>8} "
                f"{use.dropped:>8} {use.repeated:>8}"
            )
        lines += [f"  {note}" for note in self.notes]
        low, mean, high = self.samples_per_step
        size = f"{low}" if low == high else f"{low} to {high} (mean {mean:.1f})"
        lines.append(
            f"an epoch: {self.steps} steps of {size} samples; {self.batches} batches on each of {self.processes} "
            f"processes, {self.accumulation_steps} a step; {self.repeated} samples seen twice, {self.num_unseen} not at all"
        )
        return "\n".join(lines)


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
            repeated=sampler.num_padded,
        )
    assert isinstance(sampler, BucketBatchSampler)
    plan = sampler.plan(epoch)
    columns = (plan.samples, plan.batches, plan.seen)
    uses = tuple(
        BucketUse(dataset.buckets[i], *(int(column[i]) for column in columns))
        for i in np.flatnonzero(plan.samples).tolist()
    )
    dropped = sum(use.dropped for use in uses)
    notes = []
    if empty := sum(bucket.batch_size is not None for bucket in dataset.buckets) - len(uses):
        notes.append(f"{empty} more buckets have no sample in this epoch")
    if dropped:
        notes.append(
            f"{dropped} samples are dropped, for they fill no batch on {sampler.world_size} processes: bucket_tail='keep' "
            "or 'pad', or smaller batch sizes, would keep them"
        )
    if thin := [use for use in uses if use.samples < (use.bucket.batch_size or 0) and use.seen]:
        effect = {"keep": "their batches are smaller", "pad": "their samples are repeated", "drop": ""}[sampler.tail]
        notes.append(f"{len(thin)} buckets have fewer samples than one batch: {effect}")
    sizes = plan.global_batch_sizes[: plan.steps // accumulation_steps * accumulation_steps]
    sizes = sizes.reshape(-1, accumulation_steps).sum(1)
    return Summary(
        rows=len(dataset),
        processes=processes,
        accumulation_steps=accumulation_steps,
        batches=plan.steps,
        samples_per_step=(int(sizes.min()), float(sizes.mean()), int(sizes.max())) if len(sizes) else (0, 0.0, 0),
        left_out=_drop_reasons(dataset, epoch),
        buckets=uses,
        repeated=sum(use.repeated for use in uses),
        dropped=dropped,
        notes=tuple(notes),
    )


def _drop_reasons(dataset: Any, epoch: int) -> dict[str, tuple[int, str]]:
    counts = np.bincount(dataset.assign(epoch).drop_reason, minlength=len(DropReason)).tolist()
    levels = dataset.buckets.levels
    smallest = levels[-1].resolution
    lengths = [entry.num_frames for level in levels for entry in level.entries if entry.num_frames > 1]
    short = "There are entries for images only; add one for videos."
    if lengths:
        needs = (
            f"{frames_needed(min(lengths), dataset.frame_interval)} frames at frame_interval={dataset.frame_interval}"
        )
        if dataset.target_fps is not None:
            needs = f"{(min(lengths) - 1) / dataset.target_fps:.2f} s at target_fps={dataset.target_fps:g}"
        short = (
            f"The shortest needs {needs} (a resolution may ask for more); add a shorter one, lower frame_interval or raise "
            "target_fps."
        )
    words = {
        DropReason.UNKNOWN: ("no size is known", "Their files cannot be read: replace them or remove the rows."),
        DropReason.SMALL: (
            "too small for every resolution",
            f"The smallest is {smallest.name}, from {round(AREA_SLACK * smallest.area)} pixels; add a smaller one.",
        ),
        DropReason.SHORT: ("too short for every length", short),
        DropReason.SLOW: (
            f"slower than target_fps={dataset.target_fps}",
            "Lower dataset.target_fps to their rate, or leave them out.",
        ),
        DropReason.NO_IMAGES: ("images", "Add an entry of 1 frame to a resolution that they are large enough for."),
        DropReason.CHANCE: (
            "not drawn in this epoch",
            "Each epoch draws anew; keep_prob 1.0 at the smallest resolution and length keeps all.",
        ),
    }
    return {reason: (counts[code], remedy) for code, (reason, remedy) in words.items() if counts[code]}
