"""All batches of one epoch over buckets, for all processes at once: a pure function of ids, seeds and settings.

A bucket's samples are shuffled and cut into micro-batches of its batch size; micro-batches are put in order, and step i of
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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from opensora.datasets.buckets.bucket import NONE, hash_numbers
from opensora.utils.seed import derive_seed

Tail = Literal["keep", "pad", "drop"]
Order = Literal["mixed", "same"]
Segment = tuple[int, int]  # processes, and how many batches each of them took


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches as columns, all [M]: samples `first` ... `first + size - 1` of a bucket's order, beginning again at its end."""

    bucket: np.ndarray
    first: np.ndarray
    size: np.ndarray
    repeated: np.ndarray  # bool: it is there once already

    def __len__(self) -> int:
        return len(self.bucket)

    def take(self, index: np.ndarray | slice) -> "MicroBatches":
        """Some of them."""
        return MicroBatches(self.bucket[index], self.first[index], self.size[index], self.repeated[index])


def join(parts: Sequence[MicroBatches]) -> MicroBatches:
    """One after another."""
    return MicroBatches(
        np.concatenate([part.bucket for part in parts]),
        np.concatenate([part.first for part in parts]),
        np.concatenate([part.size for part in parts]),
        np.concatenate([part.repeated for part in parts]),
    )


class EpochPlan:
    """The batches of an epoch.

    Args:
        bucket: [N] of each sample, or NONE.
        batch_sizes: [buckets] per process.
        segments: What was taken from this epoch before by other numbers of processes, in order: the plan is for the rest.

    Attributes:
        steps: Batches of each process in what is left of the epoch.
        samples: [buckets] samples of each bucket in the epoch.
        seen: [buckets] how many the plan hands out, those that are seen again counted again.
    """

    def __init__(
        self,
        bucket: np.ndarray,
        batch_sizes: np.ndarray,
        *,
        seed: int,
        epoch: int,
        world_size: int,
        tail: Tail,
        order: Order,
        segments: Sequence[Segment] = (),
    ) -> None:
        self.epoch, self.world_size = epoch, world_size
        self.rows, self.offsets = _rows_by_bucket(bucket, len(batch_sizes), seed, epoch)
        self.samples = np.diff(self.offsets)
        micro = _cut(self.samples, batch_sizes, tail)
        for number, (processes, batches) in enumerate(segments):
            whole, cut_off = _arrange(micro, processes, tail, order, derive_seed(seed, "steps", epoch, number))
            rest = join([whole.take(slice(processes * batches, None)), cut_off])
            rest = rest.take(~rest.repeated)
            micro = rest.take(np.lexsort((rest.first, rest.bucket)))
        salt = derive_seed(seed, "steps", epoch, len(segments))
        self.micro, _ = _arrange(micro, world_size, tail, order, salt)
        self.steps = len(self.micro) // world_size
        self._places = np.concatenate([[0], np.cumsum(self.micro.size)])

    @property
    def seen(self) -> np.ndarray:
        """See the class."""
        return np.bincount(self.micro.bucket, self.micro.size, minlength=len(self.samples)).astype(np.int64)

    @property
    def batches(self) -> np.ndarray:
        """[buckets] micro-batches of each bucket, over all processes."""
        return np.bincount(self.micro.bucket, minlength=len(self.samples))

    @property
    def whole_batches(self) -> np.ndarray:
        """[steps] samples of each step, over all processes."""
        return self.micro.size.reshape(-1, self.world_size).sum(1)

    def batch(self, step: int, rank: int) -> tuple[int, list[int]]:
        """The bucket and the samples of a process in a step."""
        i = step * self.world_size + rank
        bucket, first, size = int(self.micro.bucket[i]), int(self.micro.first[i]), int(self.micro.size[i])
        places = (first + np.arange(size)) % int(self.samples[bucket])
        return bucket, self.rows[self.offsets[bucket] + places].tolist()

    def places(self, step: int, rank: int) -> tuple[int, int]:
        """Where a process' samples begin in the batch that all processes share in a step, and how many that batch has."""
        begin, end = step * self.world_size, (step + 1) * self.world_size
        return int(self._places[begin + rank] - self._places[begin]), int(self._places[end] - self._places[begin])


def _rows_by_bucket(bucket: np.ndarray, count: int, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples that have a bucket, grouped by it and shuffled inside: [n], and where each group begins: [buckets + 1]."""
    salt = np.uint64(derive_seed(seed, "order", epoch))
    rows = np.flatnonzero(bucket != NONE)
    rows = rows[np.argsort(hash_numbers(rows.astype(np.uint64), salt))]  # no two hashes are equal: it maps one to one
    ids = bucket[rows].astype(np.int16 if count < 2**15 else np.int32)  # 16 bits sort by radix
    rows = rows[np.argsort(ids, kind="stable")]
    return rows, np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=count))]).astype(np.int64)


def _cut(samples: np.ndarray, batch_sizes: np.ndarray, tail: Tail) -> MicroBatches:
    """Micro-batches of every bucket, in its order."""
    sizes = np.maximum(batch_sizes, 1)
    counts = samples // sizes if tail == "drop" else -(-samples // sizes)
    bucket = np.repeat(np.arange(len(samples)), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first, size = number * sizes[bucket], sizes[bucket]
    if tail == "keep":
        size = np.minimum(size, samples[bucket] - first)
    return MicroBatches(bucket, first, size, np.zeros(len(bucket), bool))


def _arrange(
    micro: MicroBatches, world_size: int, tail: Tail, order: Order, salt: int
) -> tuple[MicroBatches, MicroBatches]:
    """The micro-batches in the order of the steps, a whole number of steps; and what was left out for that."""
    if order == "mixed":
        return _complete(micro.take(_shuffled(micro.bucket, micro.first, salt)), world_size, tail)
    nothing = micro.take(slice(0))
    parts = [_complete(micro.take(micro.bucket == b), world_size, tail) for b in np.unique(micro.bucket)]
    whole, left = (join([nothing, *some]) for some in ([part[0] for part in parts], [part[1] for part in parts]))
    groups = np.arange(len(whole)).reshape(-1, world_size)
    heads = whole.take(groups[:, 0]) if len(groups) else whole
    return whole.take(groups[_shuffled(heads.bucket, np.arange(len(groups)), salt)].reshape(-1)), left


def _shuffled(bucket: np.ndarray, number: np.ndarray, salt: int) -> np.ndarray:
    names = bucket.astype(np.uint64) << np.uint64(40) | number.astype(np.uint64)
    return np.argsort(hash_numbers(names, np.uint64(salt)), kind="stable")


def _complete(micro: MicroBatches, world_size: int, tail: Tail) -> tuple[MicroBatches, MicroBatches]:
    """Make the number of micro-batches a multiple of the processes."""
    count = len(micro)
    missing = -count % world_size
    if missing == 0:
        return micro, micro.take(slice(0))
    if tail == "drop":
        whole = count - count % world_size
        return micro.take(slice(whole)), micro.take(slice(whole, None))
    if tail == "keep":
        micro = _split(micro, world_size, missing)
        missing -= len(micro) - count
    again = micro.take(np.arange(missing) % len(micro))
    return join([micro, replace(again, repeated=np.ones(missing, bool))]), micro.take(slice(0))


def _split(micro: MicroBatches, world_size: int, missing: int) -> MicroBatches:
    """Split the largest of the last micro-batches until there are `missing` more, or all of them hold one sample."""
    count = len(micro)
    spare = np.cumsum((micro.size - 1)[::-1])  # more micro-batches that the last 1, 2, ... can become
    steps = np.arange(
        count % world_size, count + 1, world_size
    )  # the last, incomplete step; that and the one before; ...
    enough = np.flatnonzero(spare[steps - 1] >= missing)
    last = int(steps[enough[0]]) if len(enough) else count
    tail = micro.take(slice(count - last, count))
    bucket, first, size = tail.bucket.tolist(), tail.first.tolist(), tail.size.tolist()
    for _ in range(min(missing, int(spare[-1]))):
        i = max(range(len(size)), key=size.__getitem__)
        half = (size[i] + 1) // 2
        bucket.insert(i + 1, bucket[i])
        first.insert(i + 1, first[i] + half)
        size[i : i + 1] = [half, size[i] - half]
    pieces = MicroBatches(np.array(bucket), np.array(first), np.array(size), np.zeros(len(size), bool))
    return join([micro.take(slice(count - last)), pieces])
