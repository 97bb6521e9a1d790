"""The benchmark of the goals: its rivals compute what they stand for, its rows are complete; errors against fp32 show mistakes."""

import pytest
import torch
from diffusers import DiTTransformer2DModel, LatteTransformer3DModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from tests.tools.markdown import table_of
from tools.benchmark import goals
from tools.benchmark.__main__ import run
from tools.benchmark.denoisers import TOY, build, errors_of, exact, inputs
from tools.benchmark.goals import RoundedWeights, diffusers_like, like_the_reference

CPU = torch.device("cpu")
MODELS = {"STDiT-XL/2": (3, 5, 4), "STDiT3-XL/2": (3, 5, 4), "DiT-XL/2": (1, 4, 4)}  # latents


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_the_same_function_in_another_order(name):
    ours, theirs = (build(name, CPU, 6, **TOY) for _ in range(2))
    like_the_reference(theirs)
    z, t, cond = inputs(ours, 2, MODELS[name], CPU)
    gradients = []
    for model in (ours, theirs):
        out = model(z, t, **cond)
        gradients.append(torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(theirs(z, t, **cond), ours(z, t, **cond), rtol=1e-5, atol=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4 * float(one.abs().max()) if one is not None else 0)


def test_rounded_weights_learn_by_their_fp32_masters():
    """Against PyTorch's own clipping and AdamW on the masters; steps of 1e-5 are too small for bf16 weights near 1."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    masters = [nn.Parameter(weight.detach().clone()) for weight in layer.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-5)
    engine = RoundedWeights(layer, autocast=False, grad_clip=0.1)
    for _ in range(3):
        x = torch.randn(4, 8, dtype=torch.bfloat16)
        with engine.micro_step(last=True):
            loss = engine.model(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        rounded = [master.detach().bfloat16().requires_grad_() for master in masters]
        grads = torch.autograd.grad(nn.functional.linear(x, *rounded).float().square().mean(), rounded)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        assert float(nn.utils.clip_grad_norm_(masters, 0.1)) > 0.1  # it clips
        optimizer.step()
    for found, master, weight in zip(engine.masters, masters, layer.parameters(), strict=True):
        torch.testing.assert_close(found, master, rtol=0, atol=1e-8)
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, found.bfloat16())
        assert weight.grad is None


@pytest.mark.parametrize("name", MODELS)
def test_diffusers_model_has_the_nearest_flops_and_our_sizes(name):
    latent, text_len = MODELS[name], 6
    ours = build(name, CPU, text_len, **TOY)
    model, _ = diffusers_like(ours, latent)
    assert type(model.theirs) is (DiTTransformer2DModel if latent[0] == 1 else LatteTransformer3DModel)
    z, t, cond = inputs(ours, 2, latent, CPU)
    with torch.no_grad():
        assert model(z, t, **cond).shape == ours(z, t, **cond).shape
    with torch.device("meta"):  # where attention is matrix products, which are counted
        model, flops = diffusers_like(ours, latent)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(z.to("meta"), t.to("meta"), cond["y"].to("meta"))
    assert counter.get_total_flops() == 2 * flops
    layers = model.theirs.config.num_layers
    wanted = ours.flops(latent, text_len)
    assert 0.6 < flops / wanted < 1.5
    assert (
        abs(flops - wanted) <= (flops / layers) / 2 + flops / 10
    )  # no other number of layers is nearer; embedders besides


@pytest.mark.nightly
@pytest.mark.slow
def test_the_table_has_a_row_for_each_way_and_says_why_one_has_no_figures(monkeypatch, capsys):
    def refuse(*_: object):
        raise RuntimeError("no such model")

    monkeypatch.setattr(goals, "diffusers_like", refuse)
    run(
        [
            "goals",
            "--toy",
            "--settings",
            "stdit-16x256",
            "dit-256",
            "--ways",
            "reference",
            "diffusers",
            "--peak-tflops",
            "1",
        ]
    )
    rows = table_of(capsys.readouterr().out)
    assert {(row["setting"], row["way"]) for row in rows} == {
        (setting, way) for setting in ("stdit-16x256", "dit-256") for way in ("reference", "diffusers")
    }
    assert len(rows) == 6  # diffusers with two levels of checkpointing
    for row in rows:
        if row["way"] != "reference":
            assert row["ms/step"] == "RuntimeError: no such model"
            assert row["error"] == "-"
            continue
        assert row["of the reference"] == "1.00"
        assert 1e-5 < float(row["error"]) < 0.05  # it is bf16, and nothing worse
        assert float(row["samples/s"]) == float(row["at equal FLOPs"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("setting", ["stdit-16x256", "dit-256"])
def test_compiled_ways_compute_what_they_should(setting, monkeypatch, capsys):
    """Inductor's part is run on GPUs; here it would take a minute a setting."""
    compile_block = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **_: compile_block(self, fullgraph=True, backend="aot_eager")
    )
    run(f"goals --toy --settings {setting} --ways ours diffusers --checkpoint every:2 --peak-tflops 1".split())
    ours, theirs = table_of(capsys.readouterr().out)
    assert (ours["way"], ours["checkpointed"]) == ("ours", "every:2")
    assert 1e-5 < float(ours["error"]) < 0.05
    assert (theirs["way"], theirs["checkpointed"]) == ("diffusers", "block")
    assert float(theirs["ms/step"]) > 0


def test_each_way_tries_the_checkpointing_that_it_has():
    levels = ("none", "every:2", "block")
    assert goals.levels_of("ours", levels) == levels
    assert goals.levels_of("reference", levels) == ("block",)
    assert goals.levels_of("diffusers", levels) == ("none", "block")
    assert goals.levels_of("diffusers", ("selective", "block")) == ("block",)


def test_a_gradient_that_is_lost_shows():
    model, other = (build("STDiT-XL/2", CPU, 6, **TOY) for _ in range(2))
    batch = inputs(model, 2, MODELS["STDiT-XL/2"], CPU)
    right = exact(other, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = build_engine("ddp", model, optimizer, World(0, 1, CPU), dtype="fp32")
    errors = errors_of(engine, batch, right)
    assert errors.prediction < 1e-6
    assert errors.gradient < 1e-5
    assert all(weight.grad is None for weight in model.parameters())
    block = model.transformer_blocks()[0]
    block.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
    errors = errors_of(engine, batch, right)
    assert errors.prediction < 1e-6
    assert errors.gradient > 1e-3
