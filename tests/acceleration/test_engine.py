"""The ddp engine in one process: gradients, clipping, state, precision; the names of engines to come."""

import pytest
import torch
from torch import nn

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.distributed import World, init_world, mean_over_ranks, on_main_first
from opensora.acceleration.engine import NOT_YET, build_engine, check_engine
from opensora.utils.errors import UserError

CPU = World(0, 1, torch.device("cpu"))


def make(dtype="fp32", grad_clip=0.0, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, build_engine("ddp", model, optimizer, CPU, dtype=dtype, grad_clip=grad_clip)


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


@pytest.mark.parametrize("name", NOT_YET)
def test_planned_engines_are_refused_with_advice(name):
    with pytest.raises(UserError, match="--plugin ddp"):
        check_engine(name)
    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="--plugin ddp"):
        build_engine(name, model, torch.optim.AdamW(model.parameters()), CPU)


def test_sequence_parallelism_is_refused_not_ignored():
    with pytest.raises(UserError, match="--sp-size 1"):
        check_engine("ddp", sp_size=2)


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
    assert on_main_first(lambda: 3) == 3
    assert mean_over_ranks(torch.tensor(2.0)) == 2


def test_a_gpu_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="--device cpu"):
        init_world("cuda")
    with pytest.raises(UserError, match="auto, cpu, cuda"):
        init_world("gpu")
