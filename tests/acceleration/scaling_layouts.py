"""Layouts of several processes against one process: a training, and a checkpoint of another layout."""

import faulthandler
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.acceleration.engine import Engine, build_engine
from opensora.acceleration.sequence_parallel import parallelise
from opensora.checkpoint.load import complete_checkpoints, open_checkpoint
from opensora.checkpoint.tensors import full_tensor
from opensora.config.schema import LoopConfig
from opensora.training.ema import EMA
from opensora.training.run import RunState
from opensora.training.saver import Saver
from tests.acceleration.sequence_parallel_cases import on
from tests.models.denoisers import C_TEXT, L, build

STEPS, SAVED_AT, BATCH = 6, 3, 8

SIZE = (5, 6, 10)
"""Of the latent: neither its 5 frames nor the 3 x 5 tokens of a frame are a multiple of 2 or 4."""

ENGINES = {
    "ddp": ("ddp", {}),
    "ddp graphs": ("ddp", {"cuda_graphs": True}),
    "ddp hybrid graphs": ("ddp", {"cuda_graphs": True, "hybrid_zero": True, "shard_size": 2}),
    "fsdp2 zero2": ("fsdp2", {}),
    "fsdp2 zero3": ("fsdp2", {"fsdp_reshard": "zero3"}),
    "hsdp": ("fsdp2", {"shard_size": 2}),
}

COLOSSALAI = {"zero2-seq": ("zero2-seq", {})}

READERS = (("ddp", 1), ("fsdp2 zero2", 1), ("fsdp2 zero3", 4), ("ddp", 2), ("ddp graphs", 2))
"""What goes on with the checkpoint of a layout: engine and sp_size."""


class Tolerance(NamedTuple):
    """Of losses and gradient norms: relative; of EMAs: their distance over how far the EMA moved."""

    loss: float
    norm: float
    ema: float


# Sums in another order are rounded otherwise, and each step carries it on. ColossalAI's weights are in half precision everywhere,
# also in what autocast keeps in fp32.
TOLERANCE = {"fp32": Tolerance(1e-4, 1e-3, 1e-3), "bf16": Tolerance(1e-2, 1e-1, 5e-2)}

THEIRS = Tolerance(3e-2, 3e-1, 3e-1)

DUMP_S = {"cuda": 100, "cpu": 500}
"""After which each process says where it is."""


class Case(NamedTuple):
    """What processes do.

    Attributes:
        kind: "layouts": every engine trains; "resume": a checkpoint of dp x sp goes on in other layouts; "colossalai": both
            with ColossalAI's engine.
        dp, sp: the layout.
    """

    kind: str
    dp: int
    sp: int

    @property
    def size(self) -> int:
        """Processes."""
        return self.dp * self.sp

    def __str__(self) -> str:
        return f"{self.kind} {self.dp}x{self.sp}"


class Outcome(NamedTuple):
    """Of a training: losses and norms [steps, 2], and the whole EMA."""

    seen: Tensor
    ema: dict[str, Tensor]


def toy() -> nn.Module:
    return build("STDiT3", hidden_size=96, num_heads=4).train()


def data(step: int) -> tuple[dict[str, Tensor], Tensor]:
    """A batch of 8 samples that differ in everything, and what to predict; two batches in turn: a loss that must fall."""
    rng = torch.Generator().manual_seed(step % 2)
    lengths = torch.randint(1, L + 1, (BATCH, 1), generator=rng)
    cond = {
        "x": torch.randn(BATCH, 4, *SIZE, generator=rng),
        "timestep": torch.randint(0, 1000, (BATCH,), generator=rng).float(),
        "y": torch.randn(BATCH, 1, L, C_TEXT, generator=rng),
        "mask": torch.arange(L)[None] < lengths,
        "x_mask": torch.arange(SIZE[0])[None] % 3 != torch.arange(BATCH)[:, None] % 4,
        "fps": torch.linspace(8, 24, BATCH),
        "height": torch.linspace(48, 520, BATCH),
        "width": torch.linspace(64, 853, BATCH),
        "num_frames": torch.full((BATCH,), 17.0),
    }
    return cond, torch.randn(BATCH, 8, *SIZE, generator=rng)


def start(engine: str, world: World, dtype: str) -> tuple[Engine, EMA]:
    """A training of the toy model before its first step."""
    model = toy().to(world.device)
    parallelise(model, world.sp_group)
    # a large epsilon: Adam would blow up the rounding of gradients that are nearly zero
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=world.device.type == "cuda")
    name, settings = {**ENGINES, **COLOSSALAI}[engine]
    started = build_engine(name, model, optimizer, world, dtype=dtype, grad_clip=1.0, **settings)
    return started, EMA(raw(started), 0.9, masters=started.masters)


def raw(engine: Engine) -> nn.Module:
    return getattr(engine.model, "module", engine.model)  # DDP wraps


def train(engine: Engine, ema: EMA, world: World, steps: range) -> Outcome:
    """Each data-parallel rank on its part of the batch."""
    seen = []
    for step in steps:
        cond, target = data(step)
        rows = torch.arange(BATCH).view(world.dp_size, -1)[world.dp_rank]
        cond = on(world.device, {name: value[rows] for name, value in cond.items()})
        with engine.micro_step(last=True):
            loss = (engine.model(**cond).float() - target[rows].to(world.device)).square().mean()
        engine.backward(loss)
        total = loss.detach().clone()
        if world.size > 1:
            dist.all_reduce(total)
        seen.append((float(total) / world.size, float(engine.step())))
        ema.update(raw(engine), step + 1)
    return Outcome(torch.tensor(seen), whole(ema.state_dict()))


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (full_tensor(t) if isinstance(t, DTensor) else t).detach().clone().cpu() for name, t in state.items()}


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Without TF32, which cuDNN uses unasked and which is coarser than the tolerance."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def write_expected(folder: Path, device: torch.device) -> None:
    """What ddp makes of it in one process."""
    alone, expected = World(0, 1, device), {}
    with exact_convolutions():
        for dtype in TOLERANCE:
            expected[dtype] = train(*start("ddp", alone, dtype), alone, range(STEPS))
            assert expected[dtype].seen[-1, 0] < 0.9 * expected[dtype].seen[0, 0]
    torch.save({dtype: tuple(outcome) for dtype, outcome in expected.items()}, folder / "expected.pt")


def compare(found: Outcome, expected: Outcome, tolerance: Tolerance, what: str) -> None:
    """Print how far two trainings are apart, and fail if that is too far."""
    steps = len(found.seen)
    last = expected.seen[-steps:]
    loss, norm = ((found.seen - last).abs() / last).max(dim=0).values.tolist()
    begin = toy().state_dict()
    names = [name for name in begin if begin[name].is_floating_point()]
    apart, moved = (
        float(torch.cat([(expected.ema[n] - other[n]).flatten() for n in names]).norm()) for other in (found.ema, begin)
    )
    errors = Tolerance(loss, norm, apart / moved)
    shown = ", ".join(f"{name} {error:.2g}" for name, error in errors._asdict().items())
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{what}: {shown}", flush=True)
    assert all(error < most for error, most in zip(errors, tolerance, strict=True)), f"{what}: {shown}, not {tolerance}"


def assert_same_on_all(state: dict[str, Tensor], what: str) -> None:
    """All processes have the same whole tensors, bit for bit: no replica went its own way."""
    digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in state.values())).hexdigest()
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    assert len(set(digests)) == 1, f"{what}: processes have different EMAs"


def run_rank(rank: int, case: Case, folder: Path, device: str) -> None:
    """One process of a case; its place is the GPU of its rank, or a CPU over gloo."""
    faulthandler.dump_traceback_later(DUMP_S[device])
    os.environ["LOCAL_RANK"] = str(rank)
    torch.backends.cudnn.allow_tf32 = False  # see exact_convolutions
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    bound = {"backend": "nccl", "device_id": place} if device == "cuda" else {"backend": "gloo"}
    rendezvous = (folder / f"rendezvous {case}").as_uri()
    dist.init_process_group(**bound, init_method=rendezvous, rank=rank, world_size=case.size)
    began = time.monotonic()
    try:
        stored = torch.load(folder / "expected.pt")
        expected = {dtype: Outcome(*outcome) for dtype, outcome in stored.items()}
        {"layouts": layouts, "resume": resume, "colossalai": colossalai}[case.kind](case, folder, device, expected)
    except BaseException:
        # now: the other processes wait for this one, and leaving the group would wait for them
        traceback.print_exc()
        sys.stderr.flush()
        raise
    print(f"{case}, process {rank}: {time.monotonic() - began:.1f} s", flush=True)
    shutdown()
    faulthandler.cancel_dump_traceback_later()


def layouts(case: Case, folder: Path, device: str, expected: dict[str, Outcome]) -> None:
    """Every engine trains as one process."""
    world = init_world(device, case.sp)
    for engine in ENGINES:
        for dtype, tolerance in TOLERANCE.items():
            found = train(*start(engine, world, dtype), world, range(STEPS))
            assert_same_on_all(found.ema, f"{engine} {dtype}")
            compare(found, expected[dtype], tolerance, f"{case}, {engine}, {dtype}")


def resume(case: Case, folder: Path, device: str, expected: dict[str, Outcome]) -> None:
    """fsdp2 writes a checkpoint under way, which changes nothing; other engines in other layouts go on as it did."""
    tolerance = TOLERANCE["fp32"]
    run = folder / f"{case} run"
    written = writes("fsdp2 zero2", init_world(device, case.sp), run, "fp32")
    compare(written, expected["fp32"], tolerance, f"{case}, the run that is saved")
    for engine, sp in READERS:
        world = init_world(device, sp)
        what = f"{case}, resumed by {engine} {world.dp_size}x{sp}"
        compare(goes_on(engine, world, run, "fp32"), written, tolerance, what)


def colossalai(case: Case, folder: Path, device: str, expected: dict[str, Outcome]) -> None:
    """zero2-seq trains as one process, to its tolerance, and ddp goes on with its checkpoint."""
    run = folder / f"{case} run"
    written = writes("zero2-seq", init_world(device, case.sp), run, "bf16")
    assert_same_on_all(written.ema, f"{case}")
    compare(written, expected["bf16"], THEIRS, f"{case}, zero2-seq, bf16")
    found = goes_on("ddp", init_world(device), run, "bf16")
    compare(found, written, THEIRS, f"{case}, resumed by ddp")


def writes(engine: str, world: World, run: Path, dtype: str) -> Outcome:
    """A training that saves a checkpoint on its way."""
    training, ema = start(engine, world, dtype)
    before = train(training, ema, world, range(SAVED_AT))
    if world.is_main:
        run.mkdir()
    dist.barrier()
    saver = Saver(run, world, LoopConfig(), {"model": "toy", "config": {}})
    parts = {"model": training.model_state(), "ema": ema.state_dict(), "optimizer": training.optimizer_state()}
    saver.save(RunState("d", 1, step=SAVED_AT), parts)
    saver.wait()
    dist.barrier()
    after = train(training, ema, world, range(SAVED_AT, STEPS))
    return Outcome(torch.cat([before.seen, after.seen]), after.ema)


def goes_on(engine: str, world: World, run: Path, dtype: str) -> Outcome:
    """The rest of a training, from its checkpoint."""
    training, ema = start(engine, world, dtype)
    checkpoint = open_checkpoint(complete_checkpoints(run)[-1])
    training.load_model_state(checkpoint.tensors("model"), "test")
    training.load_optimizer_state(checkpoint.tensors("optimizer"))
    ema.load_state_dict(checkpoint.tensors("ema"))
    return train(training, ema, world, range(SAVED_AT, STEPS))


def one_process_goes_on(case: Case, folder: Path, device: torch.device) -> None:
    """As `resume`, without any other process."""
    with exact_convolutions():
        found = goes_on("ddp", World(0, 1, device), folder / f"{case} run", "fp32")
    expected = Outcome(*torch.load(folder / "expected.pt")["fp32"])
    compare(found, expected, TOLERANCE["fp32"], f"{case}, resumed by one process")
