"""Every engine that runs on a CPU, on 1, 2 and 4 processes, against ddp in one process: same losses, norms and state."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, shutdown
from opensora.acceleration.engines.fsdp2 import make_mesh
from opensora.acceleration.engines.partition import share_out
from opensora.models.loading import store_frozen
from opensora.training.ema import EMA
from opensora.utils.errors import UserError
from tests.acceleration.toy_training import ALONE, CPU, data, engine_for, toy, train
from tests.models.denoisers import FAMILIES, build, inputs

SHARDED = {
    "fsdp2 zero2": ("fsdp2", {}),
    "fsdp2 zero3": ("fsdp2", {"fsdp_reshard": "zero3"}),
    "fsdp2 offloaded": ("fsdp2", {"optimizer_offload": True}),
    "ddp": ("ddp", {}),
    "ddp hybrid": ("ddp", {"hybrid_zero": True}),
    "ddp hybrid offloaded": ("ddp", {"hybrid_zero": True, "optimizer_offload": True}),
}
GROUPS = {
    "hsdp zero2": ("fsdp2", {"shard_size": 2}),
    "hsdp zero3": ("fsdp2", {"shard_size": 2, "fsdp_reshard": "zero3"}),
    "ddp hybrid in pairs": ("ddp", {"hybrid_zero": True, "shard_size": 2}),
    "fsdp2 zero2": ("fsdp2", {}),
}
FROZEN = {
    "ddp": ("ddp", {}),
    "fsdp2 zero3": ("fsdp2", {"fsdp_reshard": "zero3"}),
    "fsdp2 in bf16": ("fsdp2", {"fsdp_gather": "bf16", "fsdp_reduce": "bf16"}),
}
# the losses of bf16 and fp16 differ from one process's by sums in another order, which half precision rounds otherwise
MATRIX = {"fp32": [1, 2], "bf16": [1, 2], "fp16": [1, 2]}  # dtype -> accumulation_steps
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-2, "fp16": 4e-3}


def whole(state):
    """Full tensors of an engine's state."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in state.items()}


@contextmanager
def alone():
    try:
        yield ALONE
    finally:
        shutdown()


# ------------------------------------------------------------------------------------------------ as one process


def trains_alike(engines, world, expected, matrix):
    for label, (name, settings) in engines.items():
        for dtype, accumulations in matrix.items():
            for accumulation in accumulations:
                found = train(engine_for(name, world, dtype, settings), world, accumulation)
                case = (label, dtype, accumulation)
                torch.testing.assert_close(
                    found, expected[dtype], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True,
                    msg=lambda text, case=case: f"{case}: {text}",
                )  # fmt: skip


def state_moves_between_engines(engines, world):
    """Two steps, then one in an engine of another kind that took over the state: the same as three steps."""
    (first, _), *others = [(engine_for(*engines[key][:1], world, "fp16", engines[key][1]), key) for key in engines]
    train(first, world, steps=range(2))
    model, optimizer = whole(first.model_state()), whole(first.optimizer_state())
    expected = train(first, world, steps=[2])
    for other, key in others:
        other.load_model_state(model, "test")
        other.load_optimizer_state(optimizer)
        assert optimizer.keys() == whole(other.optimizer_state()).keys()
        for name, tensor in whole({**other.model_state(), **other.optimizer_state()}).items():
            assert torch.equal(tensor, {**model, **optimizer}[name]), (key, name)
        torch.testing.assert_close(train(other, world, steps=[2]), expected, msg=lambda text, key=key: f"{key}: {text}")


def a_bad_sample_anywhere_drops_the_step_everywhere(engines, world):
    for key, (name, settings) in engines.items():
        engine = engine_for(name, world, "fp32", settings)
        train(engine, world, steps=[0])
        before = whole({**engine.model_state(), **engine.optimizer_state()})
        (x, t, y), target = data(1)
        x[world.rank] = float("nan") if world.rank == world.size - 1 else 1.0
        with engine.micro_step(last=True):
            loss = (engine.model(x[world.rank :][:1], t[:1], y[:1]) - target[:1]).square().mean()
        engine.backward(loss)
        assert torch.isfinite(loss) == (world.rank < world.size - 1), key
        assert not torch.isfinite(engine.step()), key
        after = whole({**engine.model_state(), **engine.optimizer_state()})
        assert all(torch.equal(after[name], before[name]) for name in before), key


def averages_are_those_of_whole_weights(engines, world):
    """Exactly: each process's shards, gathered, against an EMA of the gathered weights."""
    for name, settings in engines.values():
        for every, device in ((1, "model"), (2, "cpu")):
            engine = engine_for(name, world, "fp32", settings)
            plain = toy()
            ema, expected = EMA(engine.model, 0.9, every=every, device=device), EMA(plain, 0.9, every=every)
            for step in range(4):
                train(engine, world, steps=[step])
                plain.load_state_dict(whole(engine.model_state()))
                ema.update(engine.raw_model, step + 1)
                expected.update(plain, step + 1)
            found = whole(ema.state_dict())
            assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
            swaps(ema, engine, found)
            other = EMA(engine_for(name, world, "fp32", settings).raw_model, 0.9)
            other.load_state_dict(found)
            assert all(torch.equal(value, found[key]) for key, value in whole(other.state_dict()).items())


def averages_follow_flat_masters(world):
    """As zero2 keeps them: half-precision weights, and fp32 chunks of them, flat."""
    mesh = make_mesh(world, world.size)
    exact = {name: torch.randn(shape) for name, shape in (("weight", (3, 5)), ("bias", (3,)))}
    dist.broadcast(exact["weight"], 0)
    dist.broadcast(exact["bias"], 0)
    model = torch.nn.Linear(5, 3).bfloat16()

    def masters():
        return {name: distribute_tensor(value.flatten(), mesh, [Shard(0)]) for name, value in exact.items()}

    ema, expected = EMA(model, 0.9, masters=masters), {name: value.clone() for name, value in exact.items()}
    for step in (1, 2):
        for name, value in exact.items():
            value.add_(step)
            expected[name].lerp_(value, 1 - (1 + step) / (10 + step))
        ema.update(model, step)
    found = whole(ema.state_dict())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    before = model.weight.clone()
    with ema.applied_to(model):
        assert torch.equal(model.weight, expected["weight"].bfloat16())
        assert torch.equal(model.bias, expected["bias"].bfloat16())
    assert torch.equal(model.weight, before)
    other = EMA(model, 0.9, masters=masters)
    other.load_state_dict(found)
    assert all(torch.equal(whole(other.state_dict())[name], value) for name, value in expected.items())


def swaps(ema, engine, state):
    """Inside the context the model predicts with the EMA, outside with its own weights, and it trains on."""
    trained = whole(engine.model_state())
    (x, t, y), _ = data(9)
    plain = toy().eval()
    with torch.no_grad():
        own = engine.raw_model(x, t, y)  # fsdp2 keeps what it gathered
        with ema.applied_to(engine.raw_model):
            plain.load_state_dict(state)
            torch.testing.assert_close(engine.raw_model(x, t, y), plain(x, t, y))
        assert torch.equal(engine.raw_model(x, t, y), own)
    assert all(torch.equal(value, trained[name]) for name, value in whole(engine.model_state()).items())


def every_denoiser_computes_as_unsharded(world):
    for family in FAMILIES:
        plain, model = build(family), build(family)
        if family in ("STDiT", "STDiT3", "DiT-text"):
            checkpoint_activations(model.transformer_blocks())
        if family == "STDiT2":
            compile_blocks(model.transformer_blocks(), backend="aot_eager")
        engine = engine_for("fsdp2", world, "fp32", {"fsdp_reshard": "zero3"}, model)
        cond = inputs(plain)
        assert torch.equal(model.null_condition(2), plain.null_condition(2)), family
        with engine.micro_step(last=True):
            found = engine.model(**cond)
            loss = found.square().mean()
        engine.backward(loss)
        expected = plain(**cond)
        expected.square().mean().backward()
        torch.testing.assert_close(found, expected, msg=lambda text, family=family: f"{family}: {text}")
        for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (weight.grad is None) == (other.grad is None), (family, name)
            if other.grad is not None:
                torch.testing.assert_close(
                    weight.grad.full_tensor(), other.grad, atol=1e-6, rtol=1e-5,
                    msg=lambda text, where=(family, name): f"{where}: {text}",
                )  # fmt: skip


def wan_with_adapters(world, name, settings, stored="bf16"):
    """Three bf16 steps of a LoRA on a base that is stored in less than fp32: losses and adapters."""
    from opensora.config.schema import LoraOptions
    from opensora.training.lora import add_lora

    model = build("Wan").train()
    store_frozen(model, stored)
    add_lora(model, LoraOptions(rank=4, target_modules=["to_q", "ffn.net.2"]), seed=0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    engine = engine_for(name, world, "bf16", settings, model, lr=1e-3)
    losses = []
    for step in range(3):
        cond = inputs(model, seed=step)
        with engine.micro_step(last=True):
            loss = (engine.model(**cond) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses), whole(engine.model_state())


def a_frozen_base_trains_as_in_one_process(world, expected, stored="bf16"):
    for label, (name, settings) in FROZEN.items():
        if settings.get("fsdp_gather") == "bf16" and stored != "bf16":
            continue  # refused
        losses, adapters = wan_with_adapters(world, name, settings, stored)
        torch.testing.assert_close(
            losses, expected[0], atol=1e-3, rtol=1e-3, msg=lambda text, key=label: f"{key}: {text}"
        )
        assert adapters.keys() == expected[1].keys()
        for key, value in adapters.items():
            torch.testing.assert_close(value, expected[1][key], atol=7e-3, rtol=0.0)  # AdamW's three steps are 3e-3


def all_begin_with_the_weights_of_the_first(engines, world):
    """As DistributedDataParallel does it; a stale file on one node would keep its processes apart for ever."""
    engines = {**engines, "ddp graphs": ("ddp", {"cuda_graphs": True})}
    for label, (name, settings) in engines.items():
        model = toy()
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor += world.rank
        engine = engine_for(name, world, settings=settings, model=model)
        for key, value in whole(engine.model_state()).items():
            assert torch.equal(value, expected[key]), (label, key)


def memory_is_shared(world):
    """State bytes in a process are the whole's, divided by the processes that share it; within what odd sizes cost."""
    total = sum(p.numel() for p in toy().parameters())
    for name, settings, parts in (
        ("ddp", {}, 1),
        ("ddp", {"hybrid_zero": True, "shard_size": 2}, 2),
        ("fsdp2", {}, world.size),
        ("fsdp2", {"shard_size": 2}, 2),
    ):
        engine = engine_for(name, world, "fp32", settings)
        train(engine, world, steps=[0])
        kept = sum(v.numel() for state in engine.optimizer.state.values() for v in state.values())
        assert kept < 2 * total / parts * 1.15, (name, settings)


def on_two(rank, world_size, tmp_path):
    world, expected = World(rank, world_size, CPU), torch.load(tmp_path / "expected.pt")
    some = {key: SHARDED[key] for key in ("fsdp2 zero2", "fsdp2 zero3", "ddp hybrid offloaded")}
    trains_alike(some, world, expected, {"fp32": [2], "bf16": [1]})
    state_moves_between_engines(some, world)
    averages_are_those_of_whole_weights({"fsdp2 zero2": SHARDED["fsdp2 zero2"]}, world)
    all_begin_with_the_weights_of_the_first(SHARDED, world)


def all_on_two(rank, world_size, tmp_path):
    world, expected = World(rank, world_size, CPU), torch.load(tmp_path / "expected.pt")
    trains_alike(SHARDED, world, expected, MATRIX)


def the_rest_on_two(rank, world_size, _):
    world = World(rank, world_size, CPU)
    state_moves_between_engines(SHARDED, world)
    a_bad_sample_anywhere_drops_the_step_everywhere(SHARDED, world)
    averages_are_those_of_whole_weights({"fsdp2 zero3": SHARDED["fsdp2 zero3"]}, world)
    averages_follow_flat_masters(world)


def denoisers_on_two(rank, world_size, _):
    every_denoiser_computes_as_unsharded(World(rank, world_size, CPU))


def frozen_base_on_two(rank, world_size, tmp_path):
    world = World(rank, world_size, CPU)
    for stored in ("bf16", "fp8", "int8"):
        a_frozen_base_trains_as_in_one_process(world, torch.load(tmp_path / f"{stored}.pt"), stored)
    # what travels in bf16 is rounded where autocast keeps fp32, and gradients where they are added up
    expected = torch.load(tmp_path / "expected.pt")
    trains_alike({"fsdp2 in bf16": FROZEN["fsdp2 in bf16"]}, world, expected, {"bf16": [1, 2]})


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_with_a_frozen_base(expected, tmp_path, spawn):
    pytest.importorskip("peft")
    for stored in ("bf16", "fp8", "int8"):
        torch.save(wan_with_adapters(ALONE, "ddp", {}, stored), tmp_path / f"{stored}.pt")
    spawn(frozen_base_on_two, 2, tmp_path)


def on_four(rank, world_size, tmp_path):
    world, expected = World(rank, world_size, CPU), torch.load(tmp_path / "expected.pt")
    trains_alike(GROUPS, world, expected, {"fp32": [1, 2], "bf16": [2], "fp16": [1]})
    state_moves_between_engines(GROUPS, world)
    averages_are_those_of_whole_weights({"hsdp zero2": GROUPS["hsdp zero2"]}, world)
    memory_is_shared(world)
    with pytest.raises(
        UserError, match=r"shard_size=3 does not divide the number of processes, 4\. Here it can be 1, 2, 4"
    ):
        engine_for("fsdp2", world, settings={"shard_size": 3})


@pytest.fixture
def expected(tmp_path):
    seen = {dtype: train(engine_for("ddp", ALONE, dtype), ALONE) for dtype in TOLERANCE}
    torch.save(seen, tmp_path / "expected.pt")
    assert torch.isfinite(seen["fp32"]).all()
    assert seen["fp32"][-1, 0] < seen["fp32"][0, 0]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_as_one(expected, tmp_path, spawn):
    spawn(on_two, 2, tmp_path)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("what", [all_on_two, the_rest_on_two, denoisers_on_two], ids=lambda what: what.__name__)
def test_every_engine_and_every_denoiser_on_two_processes(what, expected, tmp_path, spawn):
    spawn(what, 2, tmp_path)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.nightly
def test_four_processes_in_groups_train_as_one(expected, tmp_path, spawn):
    spawn(on_four, 4, tmp_path)


# --------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("reshard", ["zero2", "zero3"])
def test_one_process_computes_exactly_as_ddp(dtype, reshard):
    """The same dtypes whether the state is sharded or not: Automodel #3589."""
    expected = train(engine_for("ddp", ALONE, dtype), ALONE, accumulation=2)
    with alone() as world:
        found = train(engine_for("fsdp2", world, dtype, {"fsdp_reshard": reshard}), world, accumulation=2)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6 if dtype == "fp32" else 1e-3, equal_nan=True)


def test_accumulation_shares_gradients_once(monkeypatch):
    calls = []
    with alone() as world:
        engine = engine_for("fsdp2", world)
        real = dist.reduce_scatter_tensor
        monkeypatch.setattr(dist, "reduce_scatter_tensor", lambda *a, **k: calls.append(1) or real(*a, **k))
        train(engine, world, accumulation=4, steps=[0])
    assert len(calls) <= len(engine.model.transformer_blocks()) + 1


def test_only_trained_weights_have_state():
    model = toy()
    model.x_embedder.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    with alone() as world:
        engine = engine_for("fsdp2", world, model=model)
        train(engine, world, steps=[0, 1])
        state = whole(engine.model_state())
        assert all(torch.equal(state[name], value) for name, value in frozen.items())
        assert not {path.rpartition("/")[0] for path in engine.optimizer_state()} & frozen.keys()


@pytest.mark.parametrize("stored", ["bf16", "fp8", "int8"])
def test_a_base_in_less_than_fp32_and_its_adapters_in_fp32(stored):
    pytest.importorskip("peft")
    expected = wan_with_adapters(ALONE, "ddp", {}, stored)
    with alone() as world:
        a_frozen_base_trains_as_in_one_process(world, expected, stored)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_only_blocks_travel_in_bf16(reduce):
    """And gradients are added up in the dtype that is asked for."""
    seen = {}
    with alone() as world:
        engine = engine_for("fsdp2", world, "bf16", {"fsdp_gather": "bf16", "fsdp_reduce": reduce})
        parts = {"block": engine.model.blocks[0].mlp, "root": engine.model.t_embedder}
        for name, part in parts.items():
            part.register_forward_hook(lambda m, *_, name=name: seen.update({name: {p.dtype for p in m.parameters()}}))
        (x, t, y), target = data(0)
        with engine.micro_step(last=True):
            loss = (engine.model(x, t, y) - target).square().mean()
        engine.backward(loss)
        gradient = parts["root"].mlp[0].weight.grad.full_tensor()
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    assert seen == {"block": {torch.bfloat16}, "root": {torch.float32}}
    assert torch.equal(gradient, gradient.bfloat16().float()) == (reduce == "bf16")


def test_an_unknown_way_to_reshard():
    with alone() as world, pytest.raises(UserError, match="'zero2', 'zero3'"):
        engine_for("fsdp2", world, settings={"fsdp_reshard": "zero1"})


def test_weights_are_shared_out_evenly():
    sizes = {f"w{i}": n for i, n in enumerate([70, 30, 30, 20, 20, 10, 10, 5, 5])}
    owner = share_out(sizes, 2)
    assert [sum(sizes[name] for name in sizes if owner[name] == part) for part in (0, 1)] == [100, 100]
    assert set(share_out({"a": 1}, 3).values()) == {0}
