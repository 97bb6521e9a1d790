"""Which part of a tensor a process holds, and checkpoints that any number of processes write and read: 4 gloo processes."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from opensora.acceleration.distributed import World
from opensora.checkpoint.load import load_strictly, open_checkpoint
from opensora.checkpoint.save import Writing
from opensora.checkpoint.tensors import load_into, shard_of
from opensora.config.schema import LoopConfig
from opensora.training.run import RunState
from opensora.training.saver import Saver
from opensora.utils.errors import UserError

SHAPES = [(8, 3), (7, 5), (2, 6), (1,), (), (5, 3, 4), (0, 3)]


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {f"w{i}": torch.randn(shape, generator=g) for i, shape in enumerate(SHAPES)}


def layouts() -> dict[str, tuple]:
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    return {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(-1)]),
        "hsdp": (grid, [Replicate(), Shard(0)]),
        "both": (grid, [Shard(0), Shard(1)]),
        "twice": (grid, [Shard(0), Shard(0)]),
        "replicas": (flat, [Replicate()]),
    }


def laid_out(layout: tuple) -> dict[str, torch.Tensor]:
    """The tensors as DTensors, those that have too few dimensions plain."""
    mesh, placements = layout
    need = 1 + max((p.dim for p in placements if isinstance(p, Shard)), default=-1)
    return {n: distribute_tensor(t, mesh, placements) if t.ndim >= max(need, 1) else t for n, t in tensors().items()}


def write_and_read(rank: int, world_size: int, tmp_path: Path) -> None:
    world, made = World(rank, world_size, torch.device("cpu")), layouts()
    expected = {name: laid_out(layout) for name, layout in made.items()}
    for name, layout in made.items():
        check_parts(expected[name])
        run = tmp_path / name
        run.mkdir(exist_ok=True)
        saver = Saver(run, world, LoopConfig(ckpt_async=name != "rows"), {"model": "toy"})
        parts = laid_out(layout)
        saver.save(RunState("d", 1, step=3), {"model": parts, "ema": tensors()})
        for tensor in parts.values():
            shard_of(tensor).local.zero_()  # training goes on in place
        saver.wait()
        opened = open_checkpoint(run / "epoch0-global_step3", check="checksum")
        for part in ("model", "ema"):
            saved = opened.tensors(part)
            for other, wanted in expected.items():
                for key, tensor in wanted.items():
                    target = torch.full_like(tensor, -1)
                    load_into(target, saved, key)
                    assert torch.equal(shard_of(target).local, shard_of(tensor).local), (name, other, key)
        dist.barrier()
    what_fails(rank, world, tmp_path, made)


def check_parts(parts: dict[str, torch.Tensor]) -> None:
    """The parts that are written make up the whole tensor, each number once."""
    for name, tensor in parts.items():
        shard, whole = shard_of(tensor), tensors()[name]
        counts = torch.zeros_like(whole)
        here = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.local.shape, strict=True))
        assert torch.equal(whole[here], shard.local)
        if shard.writes:
            counts[here] += 1
        dist.all_reduce(counts)
        assert torch.equal(counts, torch.ones_like(counts)), name


def what_fails(rank: int, world: World, tmp_path: Path, made: dict) -> None:
    mesh = made["rows"][0]
    with pytest.raises(ValueError, match="has no part of its own"):
        shard_of(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    # one process cannot write: all of them hear of it, and write the next one at once
    run = tmp_path / "fails"
    run.mkdir(exist_ok=True)
    saver = Saver(run, world, LoopConfig(), {"model": "toy"})
    odd = distribute_tensor(torch.ones(3, dtype=torch.complex64), mesh, [Shard(0)])  # rank 3 has none of it
    saver.save(RunState("d", 1, step=1), {"model": {"odd": odd}})
    saver.save(RunState("d", 1, step=2), {"model": tensors()})
    assert [p.name for p in run.glob("[!.]*")] == ["epoch0-global_step2"]
    saver.save(RunState("d", 1, step=3), {"model": {"odd": odd}})
    with pytest.raises(UserError, match=r"could not be written.*odd is torch.complex64"):
        saver.save(RunState("d", 1, step=4), {"model": {"odd": odd}})
    assert [p.name for p in run.glob("[!.]*")] == ["epoch0-global_step2"]
    # a process that does not answer
    writing = Writing(tmp_path / "late", "t", rank, 4)
    if rank != 2:
        writing.write_own({"model": {}}, {})
    if rank == 0:
        with pytest.raises(UserError, match=r"the files of rank 2 are not in .*late.partial-t"):
            writing.commit({}, {}, timeout_s=0.5)
    dist.barrier()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_layout_reads_what_every_layout_wrote(spawn, tmp_path):
    spawn(write_and_read, 4, tmp_path)
    rows = open_checkpoint(tmp_path / "rows" / "epoch0-global_step3")
    assert sorted(p.name for p in (rows.path / "model").iterdir()) == [
        f"model-0000{r}-of-00004.safetensors" for r in range(4)
    ]
    assert [p.name for p in (rows.path / "ema").iterdir()] == ["ema.safetensors"]
    for name in ("rows", "columns", "hsdp", "both", "twice", "replicas"):  # and one process reads them all
        saved = open_checkpoint(tmp_path / name / "epoch0-global_step3").tensors("model")
        assert {n: saved[n].shape for n in saved} == {n: t.shape for n, t in tensors().items()}
        assert all(torch.equal(saved[n], t) for n, t in tensors().items())
    model = torch.nn.ParameterDict({n: torch.zeros_like(t) for n, t in tensors().items()})
    load_strictly(model, saved, "here")
    assert all(torch.equal(model[n], t) for n, t in tensors().items())


def test_a_plain_tensor_is_whole_and_written_once():
    shard = shard_of(torch.ones(2, 3))
    assert shard[1:] == ((2, 3), (0, 0), True)


def test_values_change_their_format_on_the_way():
    target = torch.zeros(2, dtype=torch.bfloat16)
    load_into(target, {"w": torch.tensor([1.0, 2.0])}, "w")
    assert target.tolist() == [1, 2]
    with pytest.raises(KeyError):
        load_into(target, {}, "w")
    with pytest.raises(ValueError, match=re.escape("w: the stored shape is (3,), the wanted one (2,)")):
        load_into(target, {"w": torch.zeros(3)}, "w")
