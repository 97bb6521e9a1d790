"""Batches of a dataset with buckets: each of one size, planned epoch by epoch. See `epoch_plan.py` for the policies."""

import itertools
from collections.abc import Iterator
from typing import Protocol

from opensora.datasets.buckets.bucket import Assignment, Buckets
from opensora.datasets.buckets.epoch_plan import EpochPlan, Order, Segment, Tail
from opensora.datasets.sampler import BatchKeys, BucketKey, DataPosition
from opensora.utils.errors import UserError


class Bucketed(Protocol):
    """What the sampler asks of a dataset."""

    buckets: Buckets

    def assign(self, epoch: int) -> Assignment:
        """The bucket of every sample in an epoch."""


class BucketBatchSampler:
    """Yields a process' batches, each a list of `BucketKey` of one bucket.

    Which sample is in which batch is f(seed, epoch, number of processes); position and number of processes are all that a resumed
    run needs. It goes on exactly; on another number of processes, the rest of the epoch is shared out anew, and still no sample
    is lost or seen twice beyond the tail policy. Nothing is skipped over: no file is read for what was done before.

    Args:
        rank, world_size: Of data parallelism: processes that share one sample have one rank.
        tail: What becomes of samples that fill no whole batch: "keep", "pad" or "drop".
        order: "mixed", or "same" for one bucket in each step.
    """

    def __init__(
        self,
        dataset: Bucketed,
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
        self._plan: EpochPlan | None = None

    def plan(self, epoch: int) -> EpochPlan:
        """What is left of an epoch: all of it, but for the one that `seek` named with segments."""
        if self._plan is None or self._plan.epoch != epoch:
            self._plan = EpochPlan(
                self.dataset.assign(epoch).bucket,
                self.dataset.buckets.batch_sizes,
                seed=self.seed,
                epoch=epoch,
                world_size=self.world_size,
                tail=self.tail,
                order=self.order,
                segments=self._segments(epoch),
            )
        return self._plan

    def batches_in(self, epoch: int) -> int:
        """Batches of each process in an epoch, with those of its earlier segments."""
        return self.plan(epoch).steps + sum(batches for _, batches in self._segments(epoch))

    def seek(self, position: DataPosition, count: int | None) -> None:
        """Yield `count` batches from `position` on; None: go on for ever."""
        if (
            self._plan is not None
            and self._plan.epoch == position.epoch
            and self._segments(position.epoch) != position.segments
        ):
            self._plan = None
        self.start, self.count = position, count

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("a BucketBatchSampler without count has no length")
        return self.count

    def __iter__(self) -> Iterator[list[BucketKey]]:
        return (list(batch.keys) for batch in self.batch_keys())  # type: ignore[arg-type]

    def batch_keys(self) -> Iterator[BatchKeys]:
        """The batches, each with its position in the batch of all processes."""
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
                bucket, rows = plan.batch(step, self.rank)
                size = self.dataset.buckets[bucket][2:5]  # frames, height, width
                yield BatchKeys([BucketKey(epoch, row, *size) for row in rows], *plan.places(step, self.rank))
            done = 0

    def _segments(self, epoch: int) -> tuple[Segment, ...]:
        return self.start.segments if epoch == self.start.epoch else ()
