"""Batches of a dataset with buckets, each of one size, planned epoch by epoch as a pure function of ids, seeds and settings.

A bucket's samples are shuffled and split into micro-batches of its batch size; micro-batches are put in order, and step i of
process r takes the (i R + r)-th. What fills no whole micro-batch, and micro-batches that are too few for all R processes,
are dealt with by the tail policy:

    keep   every sample once: the last micro-batch of a bucket is smaller, and where processes would be left without one,
           the last micro-batches are split. Only where there is nothing left to split (each holds one sample) are up
           to R - 1 of them seen again.
    pad    full micro-batches only: a bucket's last one, and the last step, are filled by beginning again.
    drop   full micro-batches only: what does not fill one, and micro-batches beyond the last whole step, are left out.

So every process has the same number of batches, whatever the policy. The order of steps is "mixed" (processes take
micro-batches of any bucket) or "same" (all take one bucket's in a step, so that none waits for a larger one's).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from opensora.datasets.buckets.bucket import NONE, hash_numbers
from opensora.datasets.sampler import BatchKeys, BucketKey, DataPosition
from opensora.utils.errors import UserError
from opensora.utils.seed import derive_seed

Tail = Literal["keep", "pad", "drop"]
Order = Literal["mixed", "same"]
Segment = tuple[int, int]  # processes, and how many batches each of them took

# Micro-batches [M]: samples `first` ... `first + size - 1` of a bucket's order, beginning again at its end; `repeated`: it is
# there once already
MICRO_BATCH = np.dtype([("bucket", np.int64), ("first", np.int64), ("size", np.int64), ("repeated", bool)])


class BucketBatchSampler:
    """Yields a process' batches, each of one bucket, with `BucketKey`s.

    Which sample is in which batch is f(seed, epoch, number of processes); position and number of processes are all that a resumed
    run needs. It continues exactly; on another number of processes, the rest of the epoch is shared out anew, and still no sample
    is lost or seen twice beyond the tail policy. Nothing is skipped over: no file is read for what was done before.

    The dataset has `buckets`, and `assign(epoch)` gives the bucket of every sample. Rank and world size are those of data
    parallelism: processes that share one sample have one rank.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        tail: Tail = "keep",
        order: Order = "mixed",
    ) -> None:
        if tail not in ("keep", "pad", "drop") or order not in ("mixed", "same"):
            raise UserError(f"tail={tail!r} is one of keep, pad, drop; order={order!r} is one of mixed, same.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}, world_size={world_size}")
        self.dataset, self.seed, self.rank, self.world_size = dataset, seed, rank, world_size
        self.tail, self.order = tail, order
        self.start, self.count = DataPosition(), None  # type: DataPosition, int | None
        self._plan: tuple[int, tuple[Segment, ...], EpochPlan] | None = (
            None  # the last one, of an epoch and its segments
        )

    def plan(self, epoch: int) -> "EpochPlan":
        """What is left of an epoch: all of it, but for the one that `seek` named with segments."""
        segments = self._segments(epoch)
        if self._plan is None or self._plan[:2] != (epoch, segments):
            bucket, sizes = self.dataset.assign(epoch).bucket, self.dataset.buckets.batch_sizes
            plan = EpochPlan(
                bucket, sizes, self.seed, epoch, self.world_size, tail=self.tail, order=self.order, segments=segments
            )
            self._plan = epoch, segments, plan
        return self._plan[2]

    def batches_in(self, epoch: int) -> int:
        """Batches of each process in an epoch, with those of its earlier segments."""
        return self.plan(epoch).steps + sum(batches for _, batches in self._segments(epoch))

    def seek(self, position: DataPosition, count: int | None) -> None:
        """Yield `count` batches from `position` on; None: go on for ever."""
        self.start, self.count = position, count

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("a BucketBatchSampler without count has no length")
        return self.count

    def __iter__(self) -> Iterator[BatchKeys]:
        return itertools.islice(self._all(), self.count)

    def _all(self) -> Iterator[BatchKeys]:
        done = self.start.batch - sum(batches for _, batches in self.start.segments)
        for epoch in itertools.count(self.start.epoch):
            plan = self.plan(epoch)
            if plan.steps == 0 and done == 0:
                raise UserError(
                    f"epoch {epoch} has no batch: no bucket fills one on {self.world_size} processes. "
                    "--dry-run True shows what became of the samples."
                )
            for step in range(done, plan.steps):
                bucket, rows, first_index, global_batch_size = plan.batch(step, self.rank)
                size = self.dataset.buckets[bucket][2:5]  # frames, height, width
                yield BatchKeys([BucketKey(epoch, row, *size) for row in rows], first_index, global_batch_size)
            done = 0

    def _segments(self, epoch: int) -> tuple[Segment, ...]:
        return self.start.segments if epoch == self.start.epoch else ()


class EpochPlan:
    """The batches of an epoch.

    Args:
        bucket: [N] of each sample, or NONE.
        batch_sizes: [buckets] per process.
        segments: What was taken from this epoch before by other numbers of processes, in order: the plan is for the rest.

    Attributes:
        rows, offsets: Samples that have a bucket, grouped by it and shuffled inside, and where each group begins.
        samples: [buckets] samples of each bucket in the epoch.
        micro: [steps x processes] micro-batches, in the order of the steps.
        steps: Batches of each process in what is left of the epoch.
    """

    def __init__(
        self,
        bucket: np.ndarray,
        batch_sizes: np.ndarray,
        seed: int,
        epoch: int,
        world_size: int,
        *,
        tail: Tail,
        order: Order,
        segments: Sequence[Segment] = (),
    ) -> None:
        self.world_size, count = world_size, len(batch_sizes)
        rows = np.flatnonzero(bucket != NONE)
        salt = np.uint64(derive_seed(seed, "order", epoch))
        rows = rows[
            np.argsort(hash_numbers(rows.astype(np.uint64), salt))
        ]  # no two hashes are equal: it maps one to one
        ids = bucket[rows].astype(np.int16 if count < 2**15 else np.int32)  # 16 bits sort by radix
        self.rows = rows[np.argsort(ids, kind="stable")]
        self.samples = samples = np.bincount(ids, minlength=count)
        self.offsets = np.concatenate([[0], np.cumsum(samples)]).astype(np.int64)
        sizes = np.maximum(batch_sizes, 1)
        counts = samples // sizes if tail == "drop" else -(-samples // sizes)
        micro = np.zeros(counts.sum(), MICRO_BATCH)
        micro["bucket"] = of = np.repeat(np.arange(count), counts)
        number = np.arange(len(micro)) - np.repeat(np.cumsum(counts) - counts, counts)
        micro["first"], micro["size"] = number * sizes[of], sizes[of]
        if tail == "keep":
            micro["size"] = np.minimum(micro["size"], samples[of] - micro["first"])
        for part, (processes, batches) in enumerate(segments):
            whole, left_over = _arrange(micro, processes, tail, order, derive_seed(seed, "steps", epoch, part))
            rest = np.concatenate([whole[processes * batches :], left_over])
            rest = rest[~rest["repeated"]]
            micro = rest[np.lexsort((rest["first"], rest["bucket"]))]
        self.micro, _ = _arrange(micro, world_size, tail, order, derive_seed(seed, "steps", epoch, len(segments)))
        self.steps = len(self.micro) // world_size

    @property
    def seen(self) -> np.ndarray:
        """[buckets] how many samples the plan hands out, those that are seen again counted again."""
        micro = self.micro
        return np.bincount(micro["bucket"], micro["size"], minlength=len(self.samples)).astype(np.int64)

    @property
    def batches(self) -> np.ndarray:
        """[buckets] micro-batches of each bucket, over all processes."""
        return np.bincount(self.micro["bucket"], minlength=len(self.samples))

    @property
    def global_batch_sizes(self) -> np.ndarray:
        """[steps] samples of each step, over all processes."""
        return self.micro["size"].reshape(-1, self.world_size).sum(1)

    def batch(self, step: int, rank: int) -> tuple[int, list[int], int, int]:
        """The bucket and the rows of a process in a step, the index of its first sample in the global batch, and its size."""
        micro = self.micro[step * self.world_size : (step + 1) * self.world_size]
        bucket, first, size = (int(micro[name][rank]) for name in ("bucket", "first", "size"))
        order = (first + np.arange(size)) % int(self.samples[bucket])
        rows = self.rows[self.offsets[bucket] + order].tolist()
        return bucket, rows, int(micro["size"][:rank].sum()), int(micro["size"].sum())


def _arrange(micro: np.ndarray, world_size: int, tail: Tail, order: Order, salt: int) -> tuple[np.ndarray, np.ndarray]:
    """The micro-batches in the order of the steps, a whole number of steps; and what was left out for that."""

    def shuffled(bucket: np.ndarray, number: np.ndarray) -> np.ndarray:
        names = bucket.astype(np.uint64) << np.uint64(40) | number.astype(np.uint64)
        return np.argsort(hash_numbers(names, np.uint64(salt)), kind="stable")

    if order == "mixed":
        return _fill_steps(micro[shuffled(micro["bucket"], micro["first"])], world_size, tail)
    parts = [_fill_steps(micro[micro["bucket"] == b], world_size, tail) for b in np.unique(micro["bucket"])]
    whole, left_over = (np.concatenate([micro[:0], *(part[i] for part in parts)]) for i in (0, 1))
    steps = whole.reshape(-1, world_size)
    return steps[shuffled(steps["bucket"][:, 0], np.arange(len(steps)))].reshape(-1), left_over


def _fill_steps(micro: np.ndarray, world_size: int, tail: Tail) -> tuple[np.ndarray, np.ndarray]:
    """Make the number of micro-batches a multiple of the processes; and what was left out for that."""
    count, missing = len(micro), -len(micro) % world_size
    if missing and tail == "drop":
        whole = count - count % world_size
        return micro[:whole], micro[whole:]
    if missing and tail == "keep":
        # halve the largest of the last micro-batches: of the last, incomplete step, or of as many steps as are needed
        spare = np.cumsum((micro["size"] - 1)[::-1])  # more micro-batches that the last 1, 2, ... can become
        steps = np.arange(count % world_size, count + 1, world_size)
        enough = np.flatnonzero(spare[steps - 1] >= missing)
        last = int(steps[enough[0]]) if len(enough) else count
        split = micro[count - last :].tolist()  # (bucket, first, size, repeated)
        for _ in range(min(missing, int(spare[-1]))):
            i = max(range(len(split)), key=lambda i: split[i][2])
            bucket, first, size, _ = split[i]
            half = (size + 1) // 2
            split[i : i + 1] = [(bucket, first, half, False), (bucket, first + half, size - half, False)]
        micro = np.concatenate([micro[: count - last], np.array(split, MICRO_BATCH)])
        missing = -len(micro) % world_size
    again = micro[np.arange(missing) % max(len(micro), 1)]
    again["repeated"] = True
    return np.concatenate([micro, again]), micro[:0]
