"""Owners give their weights to the group in few messages, and to the bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from opensora.acceleration.engines import partition
from opensora.acceleration.engines.partition import broadcast_from_owners, share_out


def weights_of(rank):
    """On each process others, of two dtypes; one is stored as a transpose, one is empty, one is a scalar."""
    rngs = torch.Generator().manual_seed(rank)
    weights = {f"blocks.{i}.w": torch.randn(5, 3 + i, generator=rngs) for i in range(20)}
    weights |= {f"blocks.{i}.scale": torch.randn(7, generator=rngs).bfloat16() for i in range(20)}
    weights |= {
        "t": torch.randn(9, 4, generator=rngs).t(),
        "none": torch.randn(0, 3),
        "number": torch.randn((), generator=rngs),
    }
    return {name: torch.nn.Parameter(weight) for name, weight in weights.items()}


def a_few_messages_give_all(rank, world_size, folder):
    before = [weights_of(r) for r in range(world_size)]
    for message_bytes, most in ((partition.MESSAGE_BYTES, 4), (400, 20)):
        partition.MESSAGE_BYTES = message_bytes
        weights = weights_of(rank)
        owner = share_out({name: weight.numel() for name, weight in weights.items()}, world_size)
        with CommDebugMode() as calls:
            broadcast_from_owners(weights, owner, dist.group.WORLD)
        assert most // 2 < calls.get_total_counts() <= most
        for name, weight in weights.items():
            assert torch.equal(weight, before[owner[name]][name]), name
            assert weight.stride() == before[rank][name].stride()


@pytest.mark.nightly
@pytest.mark.slow
def test_weights_travel_in_a_message_for_each_owner_and_dtype(tmp_path, spawn):
    spawn(a_few_messages_give_all, 2, tmp_path)
