"""Guidance split over processes against one process; the cut of the world into teams."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opensora.acceleration.cfg_parallel import ParallelPlan, make_parallel_plan, split_guidance
from opensora.acceleration.distributed import World
from opensora.schedulers.guidance import classifier_free_guidance
from opensora.utils.errors import UserError


def model(x, timestep, y, mask=None):
    """Depends on every input, sample by sample; twice as many channels come out, as with a learned variance."""
    shift = y.mean(dim=(1, 2, 3)) + timestep / 1000
    if mask is not None:
        shift = shift + mask.sum(dim=1)
    out = torch.sin(x) + shift.reshape(-1, 1, 1, 1, 1)
    return torch.cat([out, out**2], dim=1)


def arguments(batch):
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 4, 2, 3, 5, generator=generator)
    y, null = (torch.randn(batch, 1, length, 8, generator=generator) for length in (6, 9))  # a longer negative prompt
    masks = [torch.arange(length)[None] < torch.tensor([[3]] * batch) for length in (6, 9)]
    return x, torch.full((batch,), 500.0), {"y": y, "mask": masks[0]}, {"y": null, "mask": masks[1]}


def on_four_ranks(rank: int, world_size: int, _: Path) -> None:
    check_teams(rank)
    group = make_parallel_plan(World(rank, world_size, torch.device("cpu")), cfg_parallel=True).cfg_group
    assert group is not None
    for batch in (1, 3):
        x, t, cond, null = arguments(batch)
        halved = split_guidance(model, group, batch)
        for options in ({}, {"channels": 3}, {"rescale": 0.7}):
            guided = [classifier_free_guidance(m, null, 4.0, **options)(x, t, **cond) for m in (model, halved)]
            assert torch.equal(*guided)
        assert torch.equal(halved(x, t, **cond), model(x, t, **cond))  # a step outside the guidance interval
    check_work_is_halved(group)
    check_agreement(rank, world_size)


def check_teams(rank):
    world = World(rank, 4, torch.device("cpu"))
    alone = make_parallel_plan(world)
    assert (alone.dp_rank, alone.dp_size, alone.is_leader, alone.groups) == (rank, 4, True, ())
    halves = make_parallel_plan(world, cfg_parallel=True)
    assert (halves.dp_rank, halves.dp_size, halves.is_leader) == (rank // 2, 2, rank % 2 == 0)
    assert halves.cfg_group is not None
    assert dist.get_process_group_ranks(halves.cfg_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    both = make_parallel_plan(world, 2, cfg_parallel=True)
    assert (both.dp_rank, both.dp_size, both.is_leader) == (0, 1, rank == 0)
    assert both.sp_group is not None
    assert both.cfg_group is not None
    assert dist.get_process_group_ranks(both.sp_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(both.cfg_group) == [rank % 2, rank % 2 + 2]
    with pytest.raises(UserError, match=r"sp_size=3 with cfg_parallel takes 6 processes.*, 4"):
        make_parallel_plan(world, 3, cfg_parallel=True)


def check_work_is_halved(group):
    seen = []

    def counted(x, timestep, **cond):
        seen.append(len(x))
        return model(x, timestep, **cond)

    x, t, cond, null = arguments(2)
    classifier_free_guidance(split_guidance(counted, group, 2), null, 4.0)(x, t, **cond)
    assert seen == [2]


def check_agreement(rank, world_size):
    plan = make_parallel_plan(World(rank, world_size, torch.device("cpu")), 2, cfg_parallel=True)
    assert torch.equal(plan.broadcast(torch.full((2, 3), float(rank)).T), torch.zeros(3, 2))
    assert plan.broadcast_from_rank0(lambda: ["todo", rank]) == ["todo", 0]

    def fails():
        raise UserError(f"rank {rank}")

    with pytest.raises(UserError, match="rank 0"):
        plan.broadcast_from_rank0(fails)


@pytest.mark.multiprocess
def test_four_processes_do_what_one_does(spawn, tmp_path):
    spawn(on_four_ranks, 4, tmp_path)


def test_one_process_is_a_team_of_its_own():
    plan = make_parallel_plan(World(0, 1, torch.device("cpu")))
    assert plan == ParallelPlan()
    assert plan.broadcast_from_rank0(lambda: 3) == 3
    with pytest.raises(UserError, match="sp_size=2 takes 2 processes"):
        make_parallel_plan(World(0, 1, torch.device("cpu")), 2)
