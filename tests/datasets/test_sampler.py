"""The order of samples: every sample in every epoch, the same for any number of processes, resumable anywhere."""

from itertools import islice

import pytest
import torch

from opensora.datasets.sampler import EpochBatchSampler, SampleKey
from opensora.utils.errors import UserError


def batches(num_samples: int = 10, batch_size: int = 3, *, seed: int = 7, stop: int | None = 12, **more: int):
    return [batch.keys for batch in EpochBatchSampler(num_samples, batch_size, seed=seed, stop=stop, **more)]


@pytest.mark.parametrize(("n", "batch", "world"), [(1, 4, 1), (1, 4, 4), (3, 1, 4), (10, 3, 1), (10, 2, 3), (8, 4, 2)])
def test_every_sample_in_every_epoch(n, batch, world):
    samplers = [EpochBatchSampler(n, batch, seed=1, rank=r, world_size=world, stop=None) for r in range(world)]
    per_epoch = samplers[0].batches_per_epoch
    for epoch in range(3):
        keys = [
            key for s in samplers for b in islice(iter(s), epoch * per_epoch, (epoch + 1) * per_epoch) for key in b.keys
        ]
        assert {key.epoch for key in keys} == {epoch}
        assert {key.index for key in keys} == set(range(n))
        assert len(keys) == per_epoch * batch * world
        counts = torch.bincount(torch.tensor([key.index for key in keys]))
        assert counts.max() - counts.min() <= 1


def test_two_ranks_see_what_one_sees():
    whole = batches(batch_size=4)
    ranks = [batches(batch_size=2, rank=r, world_size=2) for r in (0, 1)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole


@pytest.mark.parametrize("start", range(13))
def test_resuming_anywhere(start):
    assert batches(start=start) == batches()[start:]


def test_epochs_differ_and_seeds_differ():
    first, second = batches(stop=4), batches(start=4, stop=8)
    assert [[k.index for k in b] for b in first] != [[k.index for k in b] for b in second]
    assert batches(seed=8) != batches()
    assert batches() == batches()


def test_length():
    sampler = EpochBatchSampler(10, 3, seed=0, start=5, stop=12)
    assert len(sampler) == len(list(sampler)) == 7
    assert EpochBatchSampler(10, 3, seed=0, start=12, stop=5).__len__() == 0
    with pytest.raises(TypeError, match="without stop"):
        len(EpochBatchSampler(10, 3, seed=0))


def test_keys_are_plain_numbers_and_the_global_generator_is_untouched():
    before = torch.random.get_rng_state()
    key = batches()[0][0]
    assert isinstance(key, SampleKey)
    assert type(key.index) is int
    assert torch.equal(torch.random.get_rng_state(), before)


def test_mistakes():
    with pytest.raises(UserError, match="no samples"):
        EpochBatchSampler(0, 3, seed=0)
    with pytest.raises(ValueError, match="rank=2, world_size=2"):
        EpochBatchSampler(3, 3, seed=0, rank=2, world_size=2)
