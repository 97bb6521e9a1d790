"""Batches over buckets: every sample as often as the policy says, equal on all processes, the same after any resume."""

import os
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora.datasets.buckets.bucket import NONE, Assignment, Buckets
from opensora.datasets.buckets.sampler import BucketBatchSampler
from opensora.datasets.dataloader import build_loader
from opensora.datasets.sampler import BatchKeys, BucketKey, DataPosition
from opensora.utils.errors import UserError

TAILS, ORDERS = ("keep", "pad", "drop"), ("mixed", "same")
EXAMPLES = int(os.environ.get("OPENSORA_HYPOTHESIS_EXAMPLES", "120"))
SIZES = [(frames, 16 * h, 16 * w) for frames in (1, 2, 5, 9) for h, w in ((2, 3), (3, 2), (4, 6))]  # of files


class Clips:
    """A dataset of numbers: what a loader reads are its keys."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]], config: dict, seed: int = 1) -> None:
        self.sizes = np.array(sizes, np.int64).reshape(-1, 3)
        self.buckets, self.seed = Buckets(config), seed
        self.read: list[BucketKey] = []

    def assign(self, epoch: int) -> Assignment:
        return self.buckets.assign(*self.sizes.T, seed=self.seed, epoch=epoch)

    def __getitem__(self, key: BucketKey) -> dict:
        self.read.append(key)
        return {"key": torch.tensor(key), "path": str(key.index)}


@st.composite
def clips(draw: st.DrawFn) -> Clips:
    batch = st.integers(1, 5)
    keep = st.sampled_from([1.0, 0.5, 0.2])
    levels = draw(st.lists(st.sampled_from(["32x48", "48x32", "40px", "64x96"]), min_size=1, max_size=3, unique=True))
    config = {
        name: {
            frames: ((draw(keep), draw(keep)) if frames > 1 and draw(st.booleans()) else draw(keep), draw(batch))
            for frames in draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3, unique=True))
        }
        for name in levels
    }
    return Clips(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=60)), config, draw(st.integers(0, 99)))


def samplers(dataset: Clips, world: int, tail: str, order: str) -> list[BucketBatchSampler]:
    return [
        BucketBatchSampler(dataset, seed=dataset.seed, rank=rank, world_size=world, tail=tail, order=order)
        for rank in range(world)
    ]


def epoch_of(
    ranks: list[BucketBatchSampler], position: DataPosition, count: int | None = None
) -> list[list[BatchKeys]]:
    """What is left of the epoch, or `count` steps of it: one list of batches for each step."""
    steps = []
    for sampler in ranks:
        sampler.seek(position, None)
        left = sampler.batches_in(position.epoch) - position.batch
        sampler.seek(position, left if count is None else min(left, count))
        steps.append(list(sampler))
        assert len(steps[-1]) == len(sampler)
    assert len({len(batches) for batches in steps}) == 1
    return [list(step) for step in zip(*steps, strict=True)]


def indices(steps: Sequence[Sequence[BatchKeys]]) -> Counter:
    return Counter(key.index for step in steps for batch in step for key in batch.keys)


def check_steps(steps: Sequence[Sequence[BatchKeys]], dataset: Clips, assigned: np.ndarray, order: str) -> None:
    for step in steps:
        index = 0
        for batch in step:
            assert len(batch.keys) > 0
            sizes = {key[2:] for key in batch.keys}
            assert len(sizes) == 1
            buckets = {int(assigned[key.index]) for key in batch.keys}
            assert len(buckets) == 1
            bucket = dataset.buckets[buckets.pop()]
            assert sizes == {(bucket.num_frames, bucket.height, bucket.width)}
            assert len(batch.keys) <= bucket.batch_size
            assert batch.first_index == index  # indices in the global batch are 0, 1, 2, ... over the processes
            index += len(batch.keys)
        assert {batch.global_batch_size for batch in step} == {index}
        if order == "same":
            assert len({batch.keys[0][2:] for batch in step}) == 1


def check_counts(steps: Sequence, assigned: np.ndarray, dataset: Clips, world: int, tail: str, order: str) -> None:
    """No sample is lost or seen again beyond the policy."""
    counts = indices(steps)
    batches = [[key.index for key in batch.keys] for step in steps for batch in step]
    sizes = dataset.buckets.batch_sizes
    per_bucket = Counter(assigned[assigned != NONE].tolist())
    seen = Counter()
    for index, times in counts.items():
        seen[int(assigned[index])] += times
    if tail == "drop":
        assert set(counts.values()) <= {1}
        whole = sum(n // int(sizes[b]) for b, n in per_bucket.items())
        if order == "same":
            assert all(seen[b] == n // (world * int(sizes[b])) * world * sizes[b] for b, n in per_bucket.items())
        else:  # fewer than `world` whole micro-batches are left over
            assert sum(seen[b] // int(sizes[b]) for b in seen) == whole // world * world
        return
    assert counts.keys() == set(np.flatnonzero(assigned != NONE).tolist())
    again = sum(counts.values()) - sum(per_bucket.values())
    if tail == "keep" and order == "mixed":  # seen again only where every batch has come down to one sample
        assert again == 0 or (again < world and set(map(len, batches)) == {1})
    elif tail == "keep":
        for b, n in per_bucket.items():
            own = {len(batch) for batch in batches if assigned[batch[0]] == b}
            assert seen[b] == n or (seen[b] - n < world and own == {1})
    else:
        assert all(seen[b] % int(sizes[b]) == 0 for b in seen)
        assert again < sum(int(sizes[b]) for b in per_bucket) + int(max(sizes[list(per_bucket)])) * world * (
            len(per_bucket) if order == "same" else 1
        )


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(clips(), st.integers(1, 5), st.sampled_from(TAILS), st.sampled_from(ORDERS), st.integers(0, 3))
def test_an_epoch_is_what_the_policy_says(dataset, world, tail, order, epoch):
    assigned = dataset.assign(epoch).bucket
    ranks = samplers(dataset, world, tail, order)
    if ranks[0].batches_in(epoch) == 0:
        assert tail == "drop" or (assigned == NONE).all()
        return
    steps = epoch_of(ranks, DataPosition(epoch))
    check_steps(steps, dataset, assigned, order)
    check_counts(steps, assigned, dataset, world, tail, order)
    assert steps == epoch_of(samplers(dataset, world, tail, order), DataPosition(epoch))


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(clips(), st.integers(1, 4), st.sampled_from(TAILS), st.sampled_from(ORDERS), st.integers(0, 40), st.data())
def test_resuming_anywhere_is_going_on(dataset, world, tail, order, done, data):
    whole = samplers(dataset, world, tail, order)
    lengths = [whole[0].batches_in(epoch) for epoch in range(3)]
    if min(lengths) == 0:
        return
    whole = samplers(dataset, world, tail, order)
    for sampler in whole:
        sampler.seek(DataPosition(), sum(lengths))
    every = [list(step) for step in zip(*(sampler for sampler in whole), strict=True)]
    epoch, batch = 0, done % sum(lengths)
    while batch >= lengths[epoch]:
        epoch, batch = epoch + 1, batch - lengths[epoch]
    rank = data.draw(st.integers(0, world - 1))
    again = samplers(dataset, world, tail, order)[rank]
    again.seek(DataPosition(epoch, batch), sum(lengths) - done % sum(lengths))
    assert list(again) == [step[rank] for step in every[done % sum(lengths) :]]
    assert {key.epoch for batch in every[sum(lengths[:1]) + lengths[1] :] for b in batch for key in b.keys} == {2}


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(clips(), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3), st.integers(1, 4),
       st.sampled_from(TAILS), st.sampled_from(ORDERS))  # fmt: skip
def test_going_on_with_other_numbers_of_processes(dataset, parts, world, tail, order):
    """Within one epoch, the number of processes changes after some batches, several times."""
    assigned = dataset.assign(0).bucket
    counts: Counter = Counter()
    segments: tuple[tuple[int, int], ...] = ()
    copies = 0
    for processes, batches in parts:
        ranks = samplers(dataset, processes, tail, order)
        position = DataPosition(0, sum(n for _, n in segments), segments)
        ranks[0].seek(position, None)
        if ranks[0].batches_in(0) - position.batch <= batches:
            return  # the epoch ends in this part
        steps = epoch_of(ranks, position, batches)
        check_steps(steps, dataset, assigned, order)
        copies += int(ranks[0].plan(0).micro["size"][ranks[0].plan(0).micro["repeated"]].sum())
        counts += indices(steps)
        segments = (*segments, (processes, batches))
    ranks = samplers(dataset, world, tail, order)
    position = DataPosition(0, sum(n for _, n in segments), segments)
    ranks[0].seek(position, None)
    steps = epoch_of(ranks, position)
    check_steps(steps, dataset, assigned, order)
    counts += indices(steps)
    used = set(np.flatnonzero(assigned != NONE).tolist())
    if tail == "drop":
        assert set(counts.values()) <= {1}
        lost = used - counts.keys()
        micro = sum(n // int(dataset.buckets.batch_sizes[b]) for b, n in Counter(assigned[list(used)].tolist()).items())
        assert order == "same" or micro - sum(processes * n for processes, n in segments) - len(steps) * world < world
        assert lost <= used
    else:
        assert counts.keys() == used
        if tail == "keep":
            copies += int(ranks[0].plan(0).micro["size"][ranks[0].plan(0).micro["repeated"]].sum())
            assert sum(counts.values()) - len(used) <= copies


@pytest.mark.parametrize("tail", ["keep", "pad"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_two_processes_would_have_seen_again_one_does_not(tail, order):
    """Three batches are filled up to two steps of two processes; after the first step, one process has one batch left."""
    dataset = Clips([(1, 32, 48)] * 3, {"32x48": {1: (1.0, 1)}})
    steps = epoch_of(samplers(dataset, 2, tail, order), DataPosition(), 1)
    steps += epoch_of(samplers(dataset, 1, tail, order), DataPosition(0, 1, segments=((2, 1),)))
    assert indices(steps) == Counter(range(3))


def test_workers_change_nothing():
    """The order is that of the sampler for any number of workers, over three epochs."""
    sizes = [SIZES[i % len(SIZES)] for i in range(50)]
    config = {"64x96": {8: (0.5, 2), 1: (1.0, 3)}, "32x48": {1: (1.0, 4), 2: ((1.0, 0.5), 3), 4: (1.0, 2)}}

    def keys(num_workers: int) -> list[list[list[int]]]:
        dataset = Clips(sizes, config)
        sampler = BucketBatchSampler(dataset, seed=1)
        sampler.seek(DataPosition(), sum(map(sampler.batches_in, range(3))))
        return [batch["key"].tolist() for batch in build_loader(dataset, sampler, num_workers=num_workers)]

    alone = keys(0)
    assert {key[0] for batch in alone for key in batch} == {0, 1, 2}
    assert keys(2) == alone


@pytest.mark.parametrize("done", [0, 3, 7])
def test_what_was_done_is_not_read_again(done):
    dataset = Clips([SIZES[i % 3] for i in range(30)], {"32x48": {1: (1.0, 4)}})
    sampler = BucketBatchSampler(dataset, seed=3)
    sampler.seek(DataPosition(0, done), 8 - done)
    batches = list(build_loader(dataset, sampler))
    assert len(dataset.read) == sum(len(batch["key"]) for batch in batches) == 30 - 4 * done
    assert [batch["global_batch_size"] for batch in batches][-1] == 2


def test_indices_in_the_global_batch():
    """What noise is drawn from: 0, 1, 2, ... over ranks of different batch sizes."""
    dataset = Clips([(1, 32, 48)] * 7 + [(2, 32, 48)] * 6, {"32x48": {1: (1.0, 5), 2: (1.0, 2)}})
    loaders = []
    for sampler in samplers(dataset, 2, "keep", "mixed"):
        sampler.seek(DataPosition(), sampler.batches_in(0))
        loaders.append(list(build_loader(dataset, sampler)))
    for left, right in zip(*loaders, strict=True):
        assert torch.cat([left["sample_index"], right["sample_index"]]).tolist() == list(
            range(left["global_batch_size"])
        )
        assert left["global_batch_size"] == right["global_batch_size"] == len(left["key"]) + len(right["key"])
    assert len({len(left["key"]) for left, _ in zip(*loaders, strict=True)}) > 1


def test_an_epoch_without_batches_says_so():
    dataset = Clips([(1, 32, 48)] * 160, {"32x48": {1: (1.0, 51)}})
    assert BucketBatchSampler(dataset, seed=1, world_size=4, tail="drop").batches_in(0) == 0
    assert BucketBatchSampler(dataset, seed=1, world_size=4, tail="keep").batches_in(0) == 1
    with pytest.raises(UserError, match="epoch 0 has no batch"):
        next(iter(BucketBatchSampler(dataset, seed=1, world_size=4, tail="drop")))


def test_one_sample_and_one_batch_are_not_lost():
    one = Clips([(1, 32, 48)], {"32x48": {1: (1.0, 4)}})
    for world in (1, 4):
        steps = epoch_of(samplers(one, world, "pad", "mixed"), DataPosition())
        assert [[len(batch.keys) for batch in step] for step in steps] == [[4] * world]
        steps = epoch_of(samplers(one, world, "keep", "mixed"), DataPosition())
        assert [[len(batch.keys) for batch in step] for step in steps] == [[1] * world]


def test_epochs_and_seeds_differ():
    dataset = Clips([(1, 32, 48)] * 40, {"32x48": {1: (1.0, 4)}})
    orders = [
        [
            key.index
            for batch in epoch_of([BucketBatchSampler(dataset, seed=seed)], DataPosition(epoch))
            for key in batch[0].keys
        ]
        for seed in (1, 2)
        for epoch in (0, 1, 2)
    ]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == list(range(40)) for order in orders)


def test_mistakes():
    dataset = Clips([(1, 32, 48)], {"32x48": {1: (1.0, 4)}})
    with pytest.raises(UserError, match="tail='last' is one of keep, pad, drop"):
        BucketBatchSampler(dataset, seed=1, tail="last")
    with pytest.raises(ValueError, match="rank=2, world_size=2"):
        BucketBatchSampler(dataset, seed=1, rank=2, world_size=2)
    with pytest.raises(TypeError, match="without count"):
        len(BucketBatchSampler(dataset, seed=1))
