"""On two GPUs over NCCL: processes that share samples give the results of one, in fp32 and bf16, compiled, in every engine.

python -m pytest -m gpu -s tests/test_gpu_sequence_parallel.py

-s shows what each process says while it runs: how long its case took, its error, and where it is shortly before its time is
over.
"""

import faulthandler
import importlib.util
import os
import sys
import time
import traceback
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.acceleration.engine import build_engine
from opensora.acceleration.sequence_parallel import parallelise
from opensora.models.denoiser import Denoiser
from tests.acceleration.sequence_parallel_cases import SIZES, compare, gradients, masked_inputs, mean_of_ranks, on
from tests.conftest import join_ranks
from tests.models.denoisers import FAMILIES, build, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TIMEOUT_S = 240
DUMP_S = 200
"""After which each process says where it is. Compiling for many sizes takes longest: a minute or two."""
COMPILED = {"STDiT": False, "PixArt-Sigma-compressed": False, "DiT-text": True, "STDiT3": True}
"""Families that between them have every exchange, and whether they are compiled for many sizes."""
ENGINES = {
    "ddp": ("ddp", {}),
    "ddp recorded": ("ddp", {"cuda_graphs": True}),
    "fsdp2": ("fsdp2", {"fsdp_reshard": "zero3"}),
    "zero2-seq": ("zero2-seq", {}),
}
FP32 = 1e-3
"""Of the largest value of each tensor: matrix products of other shapes take other kernels, which add up in another order."""
BF16 = 1.5
"""How many times as far as one process in bf16 two may be from one in fp32."""
LOSS = {"zero2-seq": 3e-2}
"""Relative. ColossalAI's weights are in bf16 everywhere, also in what autocast keeps in fp32."""
CASES = ["exact", "short_formats", *(f"compiled:{name}" for name in COMPILED), *(f"engine:{name}" for name in ENGINES)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES)
def test_two_gpus_equal_one(case, tmp_path):
    if case == "engine:zero2-seq" and importlib.util.find_spec("colossalai") is None:
        pytest.skip("needs ColossalAI: docs/how-to/speed.md says how to install it")
    rendezvous = tmp_path / "rendezvous"
    arguments = (case, rendezvous.as_uri(), "cuda")
    context = torch.multiprocessing.spawn(run_rank, arguments, nprocs=2, join=False)
    join_ranks(context, case, TIMEOUT_S)


def run_rank(rank: int, case: str, rendezvous: str, device: str) -> None:
    """One process; on "cpu" the same over gloo."""
    faulthandler.dump_traceback_later(DUMP_S)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.backends.cudnn.allow_tf32 = False  # convolutions have it on, and it is coarser than FP32
    place = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    bound = {"backend": "nccl", "device_id": place} if device == "cuda" else {"backend": "gloo"}
    dist.init_process_group(**bound, init_method=rendezvous, rank=rank, world_size=2)
    kind, _, name = case.partition(":")
    started = time.monotonic()
    try:
        {"exact": exact, "short_formats": short_formats, "compiled": compiled, "engine": engine}[kind](
            place, *[name] * bool(name)
        )
    except BaseException:
        # now: the other process waits for this one, and leaving the group would wait for that one
        traceback.print_exc()
        sys.stderr.flush()
        raise
    print(f"{case}, process {rank}: {time.monotonic() - started:.1f} s", flush=True)
    shutdown()


def exact(device: torch.device) -> None:
    for family in FAMILIES:
        model = build(family).train().to(device)
        conds = [on(device, masked_inputs(model, size)) for size in SIZES]
        compare(model, conds, family, tolerance=FP32)
    model = build("STDiT2").train().to(device)
    conds = [on(device, masked_inputs(model, size)) for size in SIZES]
    compare(model, conds, "checkpointed", lambda m: checkpoint_activations(m.transformer_blocks()), FP32)


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm())


def near_in_bf16(whole: Denoiser, cond: dict[str, Tensor], what: str) -> None:
    """As near to fp32 as one process is."""
    sharded = deepcopy(whole)
    parallelise(sharded, dist.group.WORLD)
    out, right = gradients(whole, cond)
    with torch.autocast(out.device.type, torch.bfloat16):
        (one, of_one), (two, of_two) = gradients(whole, cond), gradients(sharded, cond)
    assert distance([two], [out]) < BF16 * distance([one], [out]), what
    assert distance(mean_of_ranks(of_two), right) < BF16 * distance(of_one, right), what


class Operators(TorchDispatchMode):
    """Notes the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


def short_formats(device: torch.device) -> None:
    for family in FAMILIES:
        model = build(family).train().to(device)
        near_in_bf16(model, on(device, masked_inputs(model, (5, 18, 22))), family)
    model = build("STDiT").train().to(device)
    parallelise(model, dist.group.WORLD)
    with Operators() as operators, torch.autocast(device.type, torch.bfloat16):
        model(**on(device, inputs(model, size=(5, 48, 48))))  # each process has 5 x 288 tokens
    ours = {"opensora::short_attention_packed"}
    assert device.type == "cpu" or ours <= operators.seen, sorted(operators.seen)


def compiled(device: torch.device, family: str) -> None:
    varying = COMPILED[family]
    model = build(family).train().to(device)
    sizes = [(4, 8, 8), (5, 6, 10)] if varying else [(5, 6, 10)]
    conds = [on(device, masked_inputs(model, size)) for size in sizes]
    compare(model, conds, f"{family} compiled", partial(_compile, varying_sizes=varying), tolerance=FP32)


def _compile(model: Denoiser, *, varying_sizes: bool) -> None:
    compile_blocks(model.transformer_blocks(), varying_sizes=varying_sizes)
    checkpoint_activations(model.transformer_blocks())


def losses(name: str, world: World, **settings: object) -> Tensor:
    """Of 5 steps in bf16 on the same batch."""
    model = build("STDiT3", hidden_size=96, num_heads=4).train().to(world.device)
    parallelise(model, world.sp_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=world.device.type == "cuda")
    engine = build_engine(name, model, optimizer, world, dtype="bf16", grad_clip=1.0, **settings)
    cond = on(world.device, masked_inputs(build("STDiT3"), (5, 6, 10)))
    seen = []
    for _ in range(5):
        with engine.micro_step(last=True):
            loss = (engine.model(**cond).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        seen.append(loss.detach())
    return torch.stack(seen)


def engine(device: torch.device, name: str) -> None:
    expected = losses("ddp", World(0, 1, device))
    assert expected[-1] < expected[0]
    plugin, settings = ENGINES[name]
    found = losses(plugin, init_world(device.type, sp_size=2), **settings)
    torch.testing.assert_close(found, expected, rtol=LOSS.get(name, 1e-2), atol=0, msg=lambda text: f"{name}: {text}")
