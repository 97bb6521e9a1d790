"""Engine x sequence parallelism x activation checkpointing x accumulation x dtype: each trains as ddp alone does.

The table in docs/how-to/engines.md is about this file. By default a part of all combinations, in which every two values of
different columns meet; a slow test runs all of them in fp32, another the part on four processes.
"""

from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.distributed import World, init_world
from opensora.acceleration.sequence_parallel import parallelise
from tests.acceleration.toy_training import ALONE, engine_for, toy, train

ENGINES = {
    "ddp": ("ddp", {}),
    "ddp hybrid": ("ddp", {"hybrid_zero": True}),
    "fsdp2 zero2": ("fsdp2", {}),
    "fsdp2 zero3": ("fsdp2", {"fsdp_reshard": "zero3"}),
    "fsdp2 offloaded": ("fsdp2", {"optimizer_offload": True}),
}
OF_FOUR = {
    "ddp hybrid in pairs": ("ddp", {"hybrid_zero": True, "shard_size": 2}),
    "hsdp zero2": ("fsdp2", {"shard_size": 2}),
    "hsdp zero3": ("fsdp2", {"shard_size": 2, "fsdp_reshard": "zero3"}),
}
LEVELS = ("none", "mlp:1/3", "mlp:2/3", "mlp", "selective", "every:2", "selective:2", "block")
ACCUMULATION = (1, 2)
# Of the losses (about 1) and the norms. In half precision sums in another order are rounded otherwise.
TOLERANCE = {"fp32": 5e-6, "bf16": 2e-2, "fp16": 4e-3}


class Case(NamedTuple):
    """One training."""

    engine: str
    sp_size: int
    level: str
    accumulation: int
    dtype: str


def everything(engines, sp_sizes) -> list[Case]:
    return [Case(*values) for values in product(engines, sp_sizes, LEVELS, ACCUMULATION, TOLERANCE)]


def pairwise(cases: list[Case]) -> list[Case]:
    """Some of them, so that any two values that are in a case together are in one of these."""
    left = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(left & _pairs(case)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set:
    return set(combinations(enumerate(case), 2))


def trains_as_one(cases, engines, world_size, expected) -> None:
    worlds: dict[int, World] = {sp_size: init_world("cpu", sp_size) for sp_size in {case.sp_size for case in cases}}
    for case in cases:
        world = worlds[case.sp_size]
        model = toy()
        checkpoint_activations(model.transformer_blocks(), case.level)
        parallelise(model, world.sp_group)
        name, settings = engines[case.engine]
        found = train(engine_for(name, world, case.dtype, settings, model), world, case.accumulation)
        torch.testing.assert_close(
            found, expected[case.dtype], atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype], equal_nan=True,
            msg=lambda text, case=case: f"{case}, {world_size} processes: {text}",
        )  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses and norms of ddp in one process, without checkpointing."""
    path = tmp_path_factory.mktemp("matrix") / "expected.pt"
    seen = {dtype: train(engine_for("ddp", ALONE, dtype), ALONE) for dtype in TOLERANCE}
    assert torch.isfinite(seen["fp32"]).all()
    assert seen["fp32"][-1, 0] < seen["fp32"][0, 0]
    torch.save(seen, path)
    return path.parent


def some_on_two(rank, world_size, folder):
    cases = pairwise(everything(ENGINES, (1, 2)))
    trains_as_one(cases, ENGINES, world_size, torch.load(folder / "expected.pt"))


def all_on_two(rank, world_size, folder):
    cases = [case for case in everything(ENGINES, (1, 2)) if case.dtype == "fp32"]
    trains_as_one(cases, ENGINES, world_size, torch.load(folder / "expected.pt"))


def all_on_four(rank, world_size, folder):
    """Groups of groups: two samples at a time on two processes each, one on four, and four on one each."""
    engines = ENGINES | OF_FOUR
    cases = pairwise(everything(engines, (1, 2, 4)))
    trains_as_one(cases, engines, world_size, torch.load(folder / "expected.pt"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_with_every_pair_of_settings(expected, spawn):
    spawn(some_on_two, 2, expected)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_with_all_settings_in_fp32(expected, spawn):
    spawn(all_on_two, 2, expected, timeout_s=600)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_four_processes_with_every_pair_of_settings(expected, spawn):
    spawn(all_on_four, 4, expected, timeout_s=600)


def test_the_part_has_every_pair():
    cases = everything(ENGINES, (1, 2))
    part = pairwise(cases)
    assert len(part) < len(cases) / 8
    for one, other in (("fsdp2 zero3", 2), (2, "bf16"), ("selective", 2), ("ddp hybrid", "block")):
        assert any(one in case and other in case for case in part)
