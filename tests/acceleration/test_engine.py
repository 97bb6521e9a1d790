"""The ddp engine in one process: gradients, clipping, state, precision; which engines are refused where."""

import importlib.util

import pytest
import torch
from torch import nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.distributed import World, broadcast_from_rank0, init_world, mean_over_ranks
from opensora.acceleration.engine import build_engine, check_engine
from opensora.acceleration.engines.base import GROWTH_INTERVAL, LossScale
from opensora.utils.errors import UserError

CPU = World(0, 1, torch.device("cpu"))


def make(dtype="fp32", grad_clip=0.0, seed=0, *, fused=False, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return model, build_engine("ddp", model, optimizer, CPU, dtype=dtype, grad_clip=grad_clip, **settings)


def take_step(engine, x, parts=1):
    for i, part in enumerate(x.chunk(parts)):
        with engine.micro_step(last=i == parts - 1):
            loss = engine.model(part).square().mean() / parts
        engine.backward(loss)
    return engine.step()


def test_grad_norm_is_the_global_norm_before_clipping():
    x = torch.randn(6, 4)
    model, engine = make(grad_clip=1e-3)
    model(x).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    model.zero_grad()
    torch.testing.assert_close(take_step(engine, x), expected)


def test_clipping_bounds_the_gradient_that_the_optimizer_sees():
    x = torch.randn(6, 4) * 100
    model, engine = make(grad_clip=0.5)
    seen = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
    )
    take_step(engine, x)
    assert seen[0] == pytest.approx(0.5, rel=1e-3)


def test_accumulated_micro_batches_equal_one_batch():
    x = torch.randn(8, 4)
    (a, one), (b, four) = make(), make()
    take_step(one, x)
    take_step(four, x, parts=4)
    torch.testing.assert_close(a.state_dict(), b.state_dict(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_masters_stay_fp32_and_state_round_trips(dtype):
    x = torch.randn(8, 4)
    a, engine = make(dtype)
    for _ in range(3):
        take_step(engine, x)
    assert all(p.dtype == torch.float32 for p in a.parameters())
    b, other = make(dtype, seed=5)
    b.load_state_dict(engine.model_state())
    other.load_optimizer_state({k: v.clone() for k, v in engine.optimizer_state().items()})
    for _ in range(2):
        take_step(engine, x)
        take_step(other, x)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_autocast_computes_in_the_asked_format():
    model, engine = make("bf16")
    with engine.micro_step(last=True):
        assert model(torch.randn(2, 4)).dtype == torch.bfloat16


def test_foreign_optimizer_state_is_refused():
    _, engine = make()
    with pytest.raises(UserError, match=r"no parameter 'blocks\.0\.w'"):
        engine.load_optimizer_state({"blocks.0.w/exp_avg": torch.zeros(1)})


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_that_is_not_finite_changes_nothing(dtype, fused):
    x = torch.randn(8, 4)
    model, engine = make(dtype, grad_clip=1.0, fused=fused)
    take_step(engine, x)
    before = {name: value.clone() for name, value in {**engine.model_state(), **engine.optimizer_state()}.items()}
    x[3, 1] = float("nan")
    assert not torch.isfinite(take_step(engine, x))
    after = {**engine.model_state(), **engine.optimizer_state()}
    assert all(torch.equal(after[name], value) for name, value in before.items() if not name.startswith("/"))
    assert all(p.grad is None for p in model.parameters())
    assert engine.scales_loss == (dtype == "fp16")
    if engine.scales_loss:
        assert after["/scale"] == before["/scale"] / 2
    x[3, 1] = 0.0
    assert torch.isfinite(take_step(engine, x))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("grad_clip", [0.0, 1e-3])
def test_a_fused_optimizer_clips_as_a_plain_one(dtype, grad_clip):
    x = torch.randn(8, 4)
    (a, plain), (b, fused) = make(dtype, grad_clip), make(dtype, grad_clip, fused=True)
    for _ in range(8):  # fp16's first steps overflow
        norm = take_step(fused, x)
        torch.testing.assert_close(norm, take_step(plain, x), equal_nan=True)
    assert torch.isfinite(norm)
    torch.testing.assert_close(a.state_dict(), b.state_dict(), atol=1e-6, rtol=1e-5)  # x / y or x * (1 / y)
    assert not {"grad_scale", "found_inf"} & vars(fused.optimizer).keys()


def test_the_loss_scale_is_that_of_torch():
    ours = LossScale(torch.device("cpu"), enabled=True)
    theirs = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for i in range(GROWTH_INTERVAL + 10):
        weight.grad = torch.tensor(float("inf") if i in (0, 1, 5) else 1.0)
        theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(i not in (0, 1, 5)))
        assert float(ours.scale) == theirs.get_scale()
    assert float(ours.scale) == 2.0**14  # halved three times, doubled once


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_offloaded_optimizer_computes_the_same(dtype, fused):
    x = torch.randn(8, 4)
    (a, here), (b, away) = make(dtype, 0.1, fused=fused), make(dtype, 0.1, fused=fused, optimizer_offload=True)
    b.load_state_dict(a.state_dict())  # weights may come after the engine
    for _ in range(4):
        take_step(here, x)
        take_step(away, x)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    c, other = make(dtype, 0.1, seed=3, fused=fused, optimizer_offload=True)
    other.load_model_state(away.model_state(), "test")
    other.load_optimizer_state({k: v.clone() for k, v in away.optimizer_state().items()})
    take_step(here, x)
    take_step(other, x)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))


def test_frozen_weights_stay():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine = build_engine("ddp", model, optimizer, CPU, dtype="fp32")
    frozen = model[0].weight.clone()
    take_step(engine, torch.randn(3, 4))
    assert torch.equal(model[0].weight, frozen)
    assert {path.split("/")[0] for path in engine.optimizer_state()} == {"1.weight", "1.bias"}


def test_another_models_optimizer_is_refused():
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(UserError, match="make it from this model's"):
        build_engine("ddp", nn.Linear(2, 2), other, CPU)


@pytest.mark.parametrize("name", ["zero2", "zero2-seq"])
def test_colossalai_needs_a_gpu(name):
    with pytest.raises(UserError, match="--plugin fsdp2"):
        check_engine(name, sp_size=2 if name == "zero2-seq" else 1, device=CPU.device)
    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="--plugin fsdp2"):
        build_engine(name, model, torch.optim.AdamW(model.parameters()), CPU)


def test_colossalai_missing_or_asked_for_fp32():
    gpu = torch.device("cuda")
    with pytest.raises(UserError, match="--dtype bf16"):
        check_engine("zero2", device=gpu, dtype="fp32")
    if importlib.util.find_spec("colossalai") is None:
        with pytest.raises(UserError, match=r"pip install --no-deps colossalai==0\.5\.0"):
            check_engine("zero2", device=gpu)


def test_the_two_names_of_zero2_say_whether_samples_are_split():
    with pytest.raises(UserError, match="--plugin zero2-seq"):
        check_engine("zero2", sp_size=2)
    with pytest.raises(UserError, match="--plugin zero2"):
        check_engine("zero2-seq")


def test_settings_without_effect_are_refused():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="fsdp_reshard='zero3' has no effect with plugin='ddp'"):
        build_engine("ddp", model, optimizer, CPU, fsdp_reshard="zero3")


def test_what_does_nothing_here_is_reported(caplog):
    """Legal settings, for the same config runs elsewhere too."""
    for settings, words in (
        ({"hybrid_zero": True}, "hybrid_zero=True has no effect here: of 1 processes"),
        ({"optimizer_offload": True}, "optimizer_offload=True has no effect here"),
        ({}, ""),
    ):
        model = nn.Linear(2, 2)
        caplog.clear()
        build_engine("ddp", model, torch.optim.AdamW(model.parameters()), CPU, **settings)
        assert words in caplog.text
        assert bool(caplog.text) == bool(words)


def test_checkpointing_does_nothing_without_gradients():
    calls = []

    class Block(nn.Linear):
        def forward(self, x):
            calls.append(torch.is_grad_enabled())
            return super().forward(x)

    block = Block(2, 2)
    checkpoint_activations([block])
    with torch.no_grad():
        block(torch.randn(1, 2))
    assert calls == [False]
    block(torch.randn(1, 2)).sum().backward()
    assert len(calls) == 3  # once forward, once again for the backward pass


def test_one_process_without_torchrun(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = init_world("cpu")
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert broadcast_from_rank0(lambda: 3) == 3
    assert mean_over_ranks(torch.tensor(2.0)) == 2


def test_a_gpu_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="--device cpu"):
        init_world("cuda")
    with pytest.raises(UserError, match="auto, cpu, cuda"):
        init_world("gpu")
