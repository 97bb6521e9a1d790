"""On two GPUs: every engine trains a toy STDiT to the losses of ddp in one process; ColossalAI's too, if it is installed.

python -m pytest -m gpu tests/test_gpu_engines.py
"""

import importlib.util
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DTensor

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import Engine, build_engine
from opensora.checkpoint.tensors import full_tensor
from opensora.training.ema import EMA
from tests.conftest import join_ranks
from tests.models.denoisers import build

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
STEPS, BATCH, TIMEOUT_S = 10, 8, 500
ENGINES = {
    "ddp": ("ddp", {}),
    "ddp hybrid": ("ddp", {"hybrid_zero": True}),
    "ddp offloaded": ("ddp", {"optimizer_offload": True}),
    "ddp recorded": ("ddp", {"cuda_graphs": True}),
    "ddp hybrid recorded": ("ddp", {"cuda_graphs": True, "hybrid_zero": True}),
    "fsdp2 zero2": ("fsdp2", {}),
    "fsdp2 zero3": ("fsdp2", {"fsdp_reshard": "zero3"}),
    "fsdp2 offloaded": ("fsdp2", {"optimizer_offload": True}),
}
COLOSSALAI = {"zero2": ("zero2", {}), "zero2-seq": ("zero2-seq", {})}
# Relative, of the losses (about 1) and of the gradient norms. Ours compute in the same formats as ddp: what differs is the
# order of sums, which half precision rounds otherwise. ColossalAI has weights in half precision everywhere, also in the
# timestep's MLP, the modulation and the tables, which autocast keeps in fp32.
OURS = {"bf16": (1e-2, 5e-2), "fp16": (3e-3, 2e-2)}
THEIRS = {"bf16": (3e-2, 1.5e-1), "fp16": (1e-2, 5e-2)}


def toy() -> torch.nn.Module:
    torch.manual_seed(0)
    return build("STDiT", hidden_size=60, num_heads=3, mlp_ratio=1.25).train().cuda()


def data(step: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    rng = torch.Generator().manual_seed(step % 2)  # two batches in turn: a loss that must fall
    x, y = torch.randn(BATCH, 4, 2, 4, 4, generator=rng), torch.randn(BATCH, 1, 7, 16, generator=rng)
    t = torch.randint(0, 1000, (BATCH,), generator=rng)
    return (x.cuda(), t.cuda(), y.cuda()), torch.randn(BATCH, 8, 2, 4, 4, generator=rng).cuda()


def engine_for(name: str, world: World, dtype: str, *, compiled: bool = False, **settings: object) -> Engine:
    model = toy()
    if compiled:
        compile_blocks(model.transformer_blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    return build_engine(name, model, optimizer, world, dtype=dtype, grad_clip=0.5, **settings)


def train(engine: Engine, world: World, accumulation: int = 1, steps: range = range(STEPS)) -> torch.Tensor:
    """Losses of the whole batch and gradient norms, [steps, 2]; steps that overflow are repeated, as fp16 begins so."""
    seen = []
    for step in steps:
        (x, t, y), target = data(step)
        own = torch.arange(BATCH).view(accumulation, world.size, -1)[:, world.rank]
        for _ in range(40):
            total = torch.zeros((), device="cuda")
            for i, rows in enumerate(own):
                with engine.micro_step(last=i == accumulation - 1):
                    loss = (engine.model(x[rows], t[rows], y[rows]) - target[rows]).square().mean()
                engine.backward(loss / accumulation)
                total += loss.detach() / accumulation
            if world.size > 1:
                dist.all_reduce(total)
            norm = float(engine.step())
            if torch.isfinite(torch.tensor(norm)):
                break
            assert engine.scales_loss
        seen.append((float(total) / world.size, norm))
    return torch.tensor(seen)


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (full_tensor(t) if isinstance(t, DTensor) else t).detach().clone().cpu() for name, t in state.items()}


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerances: tuple[float, float], case: object) -> None:
    for column, tolerance in enumerate(tolerances):
        torch.testing.assert_close(
            found[:, column], expected[:, column], rtol=tolerance, atol=0, msg=lambda text: f"{case}: {text}"
        )


def compare(rank: int, size: int, folder: Path, engines: dict, tolerances: dict) -> None:
    """Losses, norms, state that round-trips bit for bit, an EMA laid out as the weights."""
    world, expected = World(rank, size, torch.device("cuda", rank)), torch.load(folder / "expected.pt")
    for label, (name, settings) in engines.items():
        for dtype in ("bf16", "fp16"):
            for accumulation in (1, 2):
                engine = engine_for(name, world, dtype, **settings)
                found = train(engine, world, accumulation)
                assert_near(found, expected[dtype], tolerances[dtype], (label, dtype, accumulation))
                assert found[-1, 0] < found[0, 0]
            resumes_exactly(engine, engine_for(name, world, dtype, **settings), world, (label, dtype))
            drops_bad_steps(engine, world, (label, dtype))
        average_follows_the_masters(engine_for(name, world, "bf16", **settings), world, label)


def resumes_exactly(engine: Engine, other: Engine, world: World, case: object) -> None:
    other.load_model_state(whole(engine.model_state()), "test")
    other.load_optimizer_state(whole(engine.optimizer_state()))
    kept, taken = ({**e.model_state(), **e.optimizer_state()} for e in (engine, other))
    taken = whole(taken)
    assert all(torch.equal(value, taken[name]) for name, value in whole(kept).items()), case
    more = range(STEPS, STEPS + 2)
    torch.testing.assert_close(train(other, world, steps=more), train(engine, world, steps=more), rtol=1e-3, atol=0)


def drops_bad_steps(engine: Engine, world: World, case: object) -> None:
    before = whole({**engine.model_state(), **engine.optimizer_state()})
    (x, t, y), _ = data(0)
    with engine.micro_step(last=True):
        loss = engine.model(x[:1], t[:1], y[:1]).square().mean()
    engine.backward(loss * (float("nan") if world.rank == world.size - 1 else 1.0))
    assert not torch.isfinite(torch.as_tensor(engine.step())), case
    after = whole({**engine.model_state(), **engine.optimizer_state()})
    assert all(torch.equal(after[name], v) for name, v in before.items() if not name.startswith("/")), case
    assert torch.isfinite(train(engine, world, steps=range(1))).all(), case


def average_follows_the_masters(engine: Engine, world: World, case: object) -> None:
    for device in ("model", "cpu"):
        ema = EMA(raw(engine), 0.9, device=device, masters=engine.masters)
        expected = whole(engine.model_state())
        for step in range(1, 3):
            train(engine, world, steps=range(step, step + 1))
            ema.update(raw(engine), step)
            decay = min(0.9, (1 + step) / (10 + step))
            now = whole(engine.model_state())
            expected = {
                n: torch.lerp(v, now[n], 1 - decay) if v.is_floating_point() else v for n, v in expected.items()
            }
        found = whole(ema.state_dict())
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m: f"{case}: {m}")
        trained = whole(engine.model_state())
        (x, t, y), _ = data(0)
        with torch.no_grad(), engine.micro_step(last=True):
            own = raw(engine)(x, t, y)
            with ema.applied_to(raw(engine)):
                assert not torch.equal(raw(engine)(x, t, y), own), case
            assert torch.equal(raw(engine)(x, t, y), own), case
        assert all(torch.equal(v, trained[n]) for n, v in whole(engine.model_state()).items()), case


def raw(engine: Engine) -> torch.nn.Module:
    return getattr(engine.model, "module", engine.model)  # DDP wraps


def ours(rank: int, size: int, folder: Path) -> None:
    compare(rank, size, folder, ENGINES, OURS)


def theirs(rank: int, size: int, folder: Path) -> None:
    compare(rank, size, folder, COLOSSALAI, THEIRS)


def compiled(rank: int, size: int, folder: Path) -> None:
    """Compiled blocks under hooks that gather weights."""
    world, expected = World(rank, size, torch.device("cuda", rank)), torch.load(folder / "expected.pt")
    for label in ("ddp", "fsdp2 zero2", "fsdp2 zero3", *(COLOSSALAI if importlib.util.find_spec("colossalai") else ())):
        name, settings = {**ENGINES, **COLOSSALAI}[label]
        found = train(engine_for(name, world, "bf16", compiled=True, **settings), world)
        assert_near(found, expected["bf16"], THEIRS["bf16"], (label, "compiled"))


def run_rank(rank: int, size: int, folder: Path, what) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / what.__name__), size)
    place = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=place)
    try:
        what(rank, size, folder)
    except BaseException:
        # now: the other process waits for this one, and leaving the group would wait for that one
        traceback.print_exc()
        sys.stderr.flush()
        raise
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """What ddp makes of it in one process."""
    folder, alone = tmp_path_factory.mktemp("engines"), World(0, 1, torch.device("cuda", 0))
    torch.save({dtype: train(engine_for("ddp", alone, dtype), alone) for dtype in OURS}, folder / "expected.pt")
    return folder


@pytest.mark.parametrize("what", [ours, theirs, compiled], ids=lambda what: what.__name__)
def test_two_gpus_train_as_one(what, expected):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    if what is theirs and importlib.util.find_spec("colossalai") is None:
        pytest.skip("needs ColossalAI: docs/how-to/speed.md says how to install it")
    context = torch.multiprocessing.spawn(run_rank, args=(2, expected, what), nprocs=2, join=False)
    join_ranks(context, what.__name__, TIMEOUT_S)
