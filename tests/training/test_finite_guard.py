"""Steps whose loss or gradient is not finite: not taken, named with their files, counted, the same in all processes."""

from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import nn

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.training.ema import EMA
from opensora.training.finite_guard import MOST_OVERFLOWS, FiniteGuard
from opensora.training.meter import Reading, Step
from opensora.utils.errors import UserError

ALONE = World(0, 1, torch.device("cpu"))
BAD_STEP = 5


def reading(*steps: tuple[int, float, float]) -> Reading:
    return Reading(tuple(Step(*step) for step in steps), {"loss": 1.0}, {})


def train(world: World, guard: FiniteGuard, *, steps: int, bad_rank: int = 0, engine: str = "ddp"):
    """A loop over a toy with a NaN sample in step 5 of one process; yields (step, weights, average, reading)."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    engine_ = build_engine(
        engine, model, torch.optim.AdamW(model.parameters(), lr=0.1), world, dtype="fp32", grad_clip=1.0
    )
    ema = EMA(model, 0.9)
    for step in range(1, steps + 1):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + world.rank))
        if step == BAD_STEP and world.rank == bad_rank:
            x[1, 2] = nan
        with engine_.micro_step(last=True):
            loss = engine_.model(x).square().mean()
        engine_.backward(guard(loss, {"path": [f"{step}-{world.rank}-{i}.mp4" for i in range(2)]}))
        norm = engine_.step()
        ema.update(model, step, taken=guard.taken(norm))
        state = {**engine_.model_state(), **{f"opt/{k}": v for k, v in engine_.optimizer_state().items()}}
        mean = loss.detach().clone()
        if world.size > 1:
            torch.distributed.all_reduce(mean)
        yield (
            step,
            {name: value.detach().clone() for name, value in state.items()},
            {name: value.clone() for name, value in ema.state_dict().items()},
            reading((step, float(mean) / world.size, float(norm))),
        )


def check_skipping(rank: int, world_size: int, folder: Path) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    guard = FiniteGuard(world, "skip", max_skipped=1)
    before: tuple[dict, dict] = ({}, {})
    for step, weights, average, seen in train(world, guard, steps=7, bad_rank=world_size - 1):
        figures = guard.checked(seen)
        for was, now in zip(before, (weights, average), strict=True):
            same = [torch.equal(was[name], now[name]) for name in was]
            assert all(same) if step == BAD_STEP else not all(same) or not same
        assert figures.get("skipped_steps", 0) == (step >= BAD_STEP)
        assert all(bool(value.isfinite().all()) for value in {**weights, **average}.values())
        before = weights, average


def test_a_skipped_step_changes_nothing(caplog):
    check_skipping(0, 1, Path())
    assert "step 5 was not taken: its loss is nan" in caplog.text
    assert "process 0 had 5-0-0.mp4, 5-0-1.mp4" in caplog.text


def check_two(rank: int, world_size: int, folder: Path) -> None:
    check_skipping(rank, world_size, folder)
    for policy, limit in (("stop", 10), ("skip", 0)):
        world = World(rank, world_size, torch.device("cpu"))
        guard = FiniteGuard(world, policy, limit)
        run = train(world, guard, steps=7, bad_rank=1)
        with pytest.raises(UserError) as caught:
            all(guard.checked(seen) for _, _, _, seen in run)
        message = str(caught.value)
        assert "step 5 was not taken" in message
        assert "process 1 had 5-1-0.mp4, 5-1-1.mp4" in message  # in both processes, though only one has the files
        assert "process 0" not in message
        assert ("--on-nonfinite skip" in message) == (policy == "stop")
        assert ("more than max_skipped=0" in message) == (policy == "skip")


@pytest.mark.multiprocess
def test_two_processes_agree(spawn, tmp_path):
    spawn(check_two, 2, tmp_path)


def test_a_loss_that_is_not_finite_spoils_every_gradient():
    """Even one whose own gradient is a number, as that of inf - x."""
    guard = FiniteGuard(ALONE)
    x = torch.ones(2, requires_grad=True)
    guard(inf - x.sum(), {"path": ["a.mp4"]}).backward()
    assert x.grad.isnan().all()


def test_a_finite_loss_stays_as_it_is():
    x = torch.randn(5, requires_grad=True)
    plain = x.square().mean()
    (expected,) = torch.autograd.grad(plain, x)
    guarded = FiniteGuard(ALONE)(x.square().mean(), {"path": ["a.mp4"]})
    assert torch.equal(guarded, plain)
    guarded.backward()
    assert torch.equal(x.grad, expected)


def test_the_bad_step_of_a_window_is_named_with_its_bad_batch_alone():
    guard = FiniteGuard(ALONE)
    for step in range(3):
        for micro in range(2):
            value = nan if (step, micro) == (1, 1) else 1.0
            guard(torch.tensor(value), {"path": [f"{step}{micro}.mp4"]})
    with pytest.raises(UserError, match=r"step 8 was not taken.* process 0 had 11.mp4\n"):
        guard.checked(reading((7, 1.0, 1.0), (8, nan, nan), (9, 1.0, 1.0)))


def test_a_gradient_without_a_bad_loss_names_all_files():
    guard = FiniteGuard(ALONE)
    for name in ("a.mp4", "b.mp4"):
        guard(torch.tensor(1.0), {"path": [name]})
    with pytest.raises(UserError, match=r"its gradient norm inf. process 0 had a.mp4, b.mp4"):
        guard.checked(reading((7, 1.0, inf)))


def test_overflows_of_fp16_are_normal_unless_they_never_end():
    guard = FiniteGuard(ALONE, scales_loss=True)
    steps = [(i, 1.0, inf) for i in range(MOST_OVERFLOWS - 1)]
    for _ in steps:
        guard(torch.tensor(1.0), {"path": ["a.mp4"]})
    assert "skipped_steps" not in guard.checked(reading(*steps))
    guard(torch.tensor(1.0), {"path": ["a.mp4"]})
    with pytest.raises(UserError, match="--dtype bf16"):
        guard.checked(reading((0, 1.0, inf)))
