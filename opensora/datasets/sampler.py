"""Which samples make which batch: a function of the seed alone, for the whole run and any number of processes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from opensora.utils.errors import UserError
from opensora.utils.seed import generator


class SampleKey(NamedTuple):
    """What a dataset is asked for: sample `index`, with the random choices of `epoch`."""

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used


class BucketKey(NamedTuple):
    """What a dataset of several sizes is asked for: sample `index` as a clip of this length and size."""

    epoch: int
    index: int  # type: ignore[assignment]
    num_frames: int
    height: int
    width: int


class BatchKeys(NamedTuple):
    """A batch of one process."""

    keys: Sequence[SampleKey | BucketKey]
    first_index: int  # of its first sample in the global batch, which all processes share in this step
    global_batch_size: int


class DataPosition(NamedTuple):
    """How far a run is in its data."""

    epoch: int = 0  # counted from 0
    batch: int = 0  # batches that each process took of this epoch
    # (processes, batches) for each earlier part of this epoch that ran on another number of processes
    segments: tuple[tuple[int, int], ...] = ()


class BatchSampler(Protocol):
    """What a train loop and a loader ask of a sampler."""

    def batches_in(self, epoch: int) -> int:
        """Batches of each process in an epoch."""

    def seek(self, position: DataPosition, count: int | None) -> None:
        """Yield `count` batches from `position` on; None: go on for ever."""

    def __iter__(self) -> Iterator[BatchKeys]:
        """This process' batches."""

    def __len__(self) -> int: ...


class EpochBatchSampler:
    """Yields this rank's micro-batches `start` ... `stop - 1` of the run (None: for ever), with `SampleKey`s.

    The order of an epoch is f(seed, epoch). It is extended from its own beginning to whole batches, so that every sample is
    seen in every epoch. Rank r takes rows r*B ... (r+1)*B of a global batch, so that two processes with batch 2 see what one
    sees with batch 4. Resuming is arithmetic: nothing is skipped over.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        if num_samples < 1:
            raise UserError("the dataset has no samples, so there is nothing to train on.")
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size={batch_size}, rank={rank}, world_size={world_size}")
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.global_batch = rank, batch_size * world_size
        self.batches_per_epoch = -(-num_samples // self.global_batch)
        self.start, self.stop = start, stop

    def batches_in(self, epoch: int) -> int:
        """See `BatchSampler`; all epochs are alike."""
        return self.batches_per_epoch

    def seek(self, position: DataPosition, count: int | None) -> None:
        """See `BatchSampler`."""
        self.start = position.epoch * self.batches_per_epoch + position.batch
        self.stop = None if count is None else self.start + count

    def __len__(self) -> int:
        if self.stop is None:
            raise TypeError("an EpochBatchSampler without stop has no length")
        return max(self.stop - self.start, 0)

    def __iter__(self) -> Iterator[BatchKeys]:
        first_index, last_epoch = self.rank * self.batch_size, -1
        for number in itertools.count(self.start) if self.stop is None else range(self.start, self.stop):
            epoch, batch = divmod(number, self.batches_per_epoch)
            if epoch != last_epoch:
                order = torch.randperm(self.num_samples, generator=generator(self.seed, "order", epoch))
                last_epoch = epoch
            first = batch * self.global_batch + first_index
            indices = order[torch.arange(first, first + self.batch_size) % self.num_samples]
            yield BatchKeys([SampleKey(epoch, index) for index in indices.tolist()], first_index, self.global_batch)
