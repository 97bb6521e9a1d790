"""What the log's figures mean: against figures worked out by hand, in one process and in two."""

import gc
import time
from math import nan, prod
from pathlib import Path

import pytest
import torch

import opensora.training.meter as module
from opensora.acceleration.distributed import World
from opensora.training.flops import Peak
from opensora.training.meter import Meter, Step
from tests.models.denoisers import L, build

ALONE = World(0, 1, torch.device("cpu"))
SIZES = [(1, 64, 64), (4, 32, 48)]


def batch(size: tuple[int, int, int], count: int, whole: int | None = None) -> dict[str, object]:
    numbers = {
        name: torch.full((count,), float(n)) for name, n in zip(("num_frames", "height", "width"), size, strict=True)
    }
    return {"global_batch_size": whole or count, "path": ["a.mp4"] * count, **numbers}


def latent(size: tuple[int, int, int], count: int) -> torch.Tensor:
    return torch.zeros(count, 4, size[0], size[1] // 8, size[2] // 8)


def take(
    meter: Meter, number: int, size: tuple[int, int, int], count: int, loss: float, norm: float = 1.0, whole=None
) -> None:
    cond = {"y": torch.zeros(count, 1, L, 16)}
    meter.add(batch(size, count, whole), latent(size, count), cond, torch.tensor(loss))
    meter.step(number, torch.tensor(norm))


def test_figures_of_one_process():
    model = build("STDiT")
    meter = Meter(ALONE, model, peak=Peak(1.0, "by hand"), sizes=SIZES)
    for _ in meter.data_wait([0]):
        take(meter, 1, SIZES[0], 2, 5.0)
    before = time.perf_counter()
    first = meter.read()
    begin = time.perf_counter()
    assert first.figures == {"loss": 5.0, "grad_norm": 1.0}  # no speed: it would be that of the start
    for step, size in zip(meter.data_wait([2, 3, 4]), [SIZES[0], SIZES[1], SIZES[1]], strict=True):
        take(meter, step, size, 3, float(step), norm=step / 2)
    end = time.perf_counter()
    reading = meter.read()
    after = time.perf_counter()
    assert reading.steps == (Step(2, 2.0, 1.0), Step(3, 3.0, 1.5), Step(4, 4.0, 2.0))
    assert reading.figures["loss"] == 3.0
    assert reading.figures["grad_norm"] == 2.0

    tokens = [3 * prod(model.grid(latent(size, 1).shape[2:])) for size in (SIZES[0], SIZES[1], SIZES[1])]
    flops = [9 * model.flops(tuple(latent(size, 1).shape[2:]), L) for size in (SIZES[0], SIZES[1], SIZES[1])]
    figures = reading.figures
    took = 9 / figures["samples_per_s"]
    assert end - begin <= took <= after - before  # from reading to reading
    assert figures["tokens_per_s"] * took == pytest.approx(sum(tokens))
    assert figures["s_per_step"] * 3 == pytest.approx(took)
    assert figures["mfu"] * took * 1e12 == pytest.approx(sum(flops))
    assert 0 <= figures["data_wait"] < 1
    assert reading.buckets["1x64x64"]["loss"] == 2.0
    assert reading.buckets["4x32x48"]["loss"] == 3.5
    assert reading.buckets["4x32x48"]["samples"] == 6


def test_a_pause_is_not_counted(monkeypatch):
    clock = iter([0.0, 10.0, 110.0, 112.0])  # reading, pause begins, pause ends, reading
    meter = Meter(ALONE, build("STDiT"), sizes=SIZES)
    monkeypatch.setattr(meter, "_now", lambda: 0.0)  # of the buckets, another clock
    meter._begin = 0.0
    take(meter, 1, SIZES[0], 2, 5.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    meter.read()
    with meter.paused():
        pass
    take(meter, 2, SIZES[0], 2, 5.0)
    assert meter.read().figures["s_per_step"] == 12.0


def test_waiting_for_data_is_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def slow_batches():
        for i in range(3):
            now[0] += 1
            yield i

    meter = Meter(ALONE, build("STDiT"))
    for step in meter.data_wait(slow_batches()):
        take(meter, step + 1, SIZES[0], 1, 1.0)
        if step == 0:
            meter.read()
        else:
            now[0] += 3
    assert meter.read().figures["data_wait"] == 0.25


def test_a_batch_that_is_not_finite_spoils_no_mean():
    meter = Meter(ALONE, build("STDiT"), sizes=SIZES)
    for step, loss in zip(meter.data_wait([1, 2]), (nan, 3.0), strict=True):
        take(meter, step, SIZES[0], 2, loss, norm=loss)
    reading = meter.read()
    assert [step.is_finite for step in reading.steps] == [False, True]
    assert reading.figures == {"loss": 3.0, "grad_norm": 3.0}
    assert reading.buckets["1x64x64"]["loss"] == 3.0
    assert reading.buckets["1x64x64"]["samples"] == 2


def test_the_table_of_an_epoch():
    meter = Meter(ALONE, build("STDiT"), sizes=SIZES)
    for step in meter.data_wait([1, 2, 3]):
        take(meter, step, SIZES[step == 3], 2, float(step))
        meter.read()
        table = meter.epoch_table(epoch=step // 2)
        assert bool(table) == (step == 2)
        if table:
            assert "epoch 0, steps 1 to 2" in table
            assert table.splitlines()[2].split()[:3] == ["1x64x64", "4", "1.5000"]
            assert len(table.splitlines()) == 3


def test_an_epoch_without_buckets_is_one_line():
    meter = Meter(ALONE, build("STDiT"))
    for step in meter.data_wait([1, 2]):
        take(meter, step, SIZES[0], 2, float(step))
        meter.read()
    line = meter.epoch_table(epoch=1)
    assert line.startswith("epoch 0, steps 1 to 2: 4 samples, loss 1.5000, ")
    assert len(line.splitlines()) == 1
    for step in meter.data_wait([3, 4]):
        take(meter, step, SIZES[0], 2, float(step))
        meter.read()
    assert meter.epoch_table(epoch=3) == ""  # of two epochs between two readings


@pytest.mark.multiprocess
def test_figures_of_two_processes(spawn, tmp_path):
    spawn(check_two, 2, tmp_path)


def check_two(rank: int, world_size: int, folder: Path) -> None:
    model = build("STDiT")
    cost = 3 * model.flops((1, 8, 8), L)
    for sp_size in (1, 2):
        world = World(rank, 2, torch.device("cpu"), sp_size)
        meter = Meter(world, model, peak=Peak(1.0, "by hand"), sizes=SIZES)
        for step in meter.data_wait([1, 2]):
            # with sp_size=2 both have one sample, and its loss
            loss = float(step) if sp_size == 2 else float(step + 10 * rank)
            take(meter, step, SIZES[0], 2, loss, whole=2 * world.dp_size)
            reading = meter.read()
        figures = reading.figures
        assert figures["loss"] == (2.0 if sp_size == 2 else 7.0)
        assert reading.buckets["1x64x64"]["samples"] == 2 * world.dp_size
        took = figures["s_per_step"]
        assert figures["samples_per_s"] * took == pytest.approx(2 * world.dp_size)
        assert figures["tokens_per_s"] * took == pytest.approx(2 * world.dp_size * 16)
        assert figures["mfu"] * took * 1e12 * 2 == pytest.approx(2 * world.dp_size * cost)
    check_memory(rank)


def check_memory(rank: int) -> None:
    """The most of any process: here there are no GPUs to ask."""
    # retries: of the first process four in the second window, of the other one
    retries = iter([1, 1, 5 - 3 * rank, 5 - 3 * rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "memory_use", lambda _: ((2 + rank) * 2**30, next(retries)))
        meter = Meter(World(rank, 2, torch.device("cpu")), build("STDiT"), sizes=SIZES)
        found = []
        for step in meter.data_wait([1, 2, 3]):
            take(meter, step, SIZES[0], 2, 1.0, whole=4)
            found.append(meter.read().figures)
    assert [each["peak_gib"] for each in found] == [3.0] * 3
    assert [each.get("alloc_retries") for each in found] == [None, 4.0, None]


@pytest.mark.gpu
def test_batches_are_timed_on_the_gpu():
    world = World(0, 1, torch.device("cuda", torch.cuda.current_device()))
    meter, work = Meter(world, build("STDiT"), sizes=SIZES), torch.randn(4096, 4096, device="cuda")
    for step in meter.data_wait([1, 2]):
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)
        cond = {"y": torch.zeros(2, 1, L, 16)}
        meter.add(batch(SIZES[0], 2), latent(SIZES[0], 2), cond, work.mean())
        meter.step(step, work.sum())
        reading = meter.read()
    assert 0 < reading.buckets["1x64x64"]["s_per_batch"] <= reading.figures["s_per_step"]
    assert reading.figures["peak_gib"] > 4096 * 4096 * 4 / 2**30


@pytest.mark.gpu
def test_memory_that_runs_out_is_counted():
    device = torch.device("cuda", torch.cuda.current_device())
    meter = Meter(World(0, 1, device), build("STDiT"))
    gc.collect()
    torch.cuda.empty_cache()  # what others left would do

    def figures():
        for _ in meter.data_wait([0]):
            meter.add(
                {"global_batch_size": 2},
                latent(SIZES[0], 2),
                {"y": torch.zeros(2, 1, L, 16)},
                torch.ones((), device=device),
            )
        meter.step(1, torch.ones((), device=device))
        return meter.read().figures

    assert "alloc_retries" not in figures()
    total, mib = torch.cuda.get_device_properties(device).total_memory, 2**20
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 1000 * mib) / total)
    try:
        left, middle, right = (torch.empty(size * mib, dtype=torch.uint8, device=device) for size in (400, 50, 400))
        del left, right
        large = torch.empty(600 * mib, dtype=torch.uint8, device=device)  # more than lies together
        assert figures()["alloc_retries"] >= 1
        assert "alloc_retries" not in figures()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del middle, large
