"""What every sampler promises, whatever its algorithm."""

import itertools

import pytest
import torch

from opensora.registry import SCHEDULERS
from opensora.utils import logging
from tests.schedulers.no_reading import NoReading

FIXED = {"type": "iddpm", "variance": "fixed_small"}
SAMPLERS = {
    "ancestral": FIXED,
    "learned variance": {"type": "iddpm", "rescale_timesteps": True},
    "ddim": {**FIXED, "sampler": "ddim", "prediction": "v"},
    "ddim, eta, x0": {**FIXED, "sampler": "ddim", "eta": 0.7, "prediction": "x0"},
    "cosine, v": {**FIXED, "noise_schedule": "squaredcos_cap_v2", "prediction": "v"},
    "euler": {"type": "rflow"},
    "heun": {"type": "rflow", "sampler": "heun", "shift": "resolution"},
    "midpoint": {"type": "rflow", "sampler": "midpoint", "shift": 1000.0},
    "discrete": {"type": "rflow", "time": "discrete", "shift": "length"},
    "dpm-solver": {"type": "dpm-solver"},
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def build(name, num_steps=8, **settings):
    return SCHEDULERS.build({**SAMPLERS[name], "num_sampling_steps": num_steps, **settings})


def factor(name) -> int:
    return 2 if name == "learned variance" else 1


def start(batch=2, frames=3):
    g = torch.Generator().manual_seed(5)
    return torch.randn(batch, 4, frames, 5, 5, generator=g), {"y": torch.randn(batch, 1, 5, 6, generator=g)}


@every_sampler
def test_steps_end_where_sample_does_and_a_caller_may_stop(denoiser, rngs, name):
    z, cond = start()
    scheduler = build(name)
    steps = list(scheduler.sample_steps(denoiser(factor(name)), z, cond, generators=rngs()))
    assert [step.index for step in steps] == list(range(8))
    assert {step.num_steps for step in steps} == {8} == {scheduler.num_sampling_steps}
    assert torch.equal(steps[-1].x, scheduler.sample(denoiser(factor(name)), z, cond, generators=rngs()))
    assert all(step.x.shape == step.x_0.shape == z.shape and step.timestep.shape == (2,) for step in steps)
    model = denoiser(factor(name))
    few = list(itertools.islice(scheduler.sample_steps(model, z, cond, generators=rngs()), 3))
    assert len(model.calls) <= 6  # computed when asked for; second-order steps call twice
    assert torch.equal(few[2].x, steps[2].x)
    seen = [call["timestep"] for call in model.calls]
    assert all(any(torch.equal(step.timestep, t) for t in seen) for step in few)


@every_sampler
@pytest.mark.parametrize("num_steps", [2, 3, 17])
def test_any_number_of_steps_is_finite_and_its_timesteps_are_distinct(denoiser, rngs, name, num_steps):
    z, cond = start()
    model = denoiser(factor(name))
    out = build(name, num_steps).sample(model, z, cond, null={"y": 0 * cond["y"]}, generators=rngs())
    assert out.isfinite().all()
    times = [float(call["timestep"][0]) for call in model.calls]
    assert len(set(times)) == len(times) or name == "heun"  # heun meets the end of a step again as the next start
    assert all(a >= b for a, b in itertools.pairwise(times))
    assert all(call["timestep"].dtype in (torch.float32, torch.int64) for call in model.calls)


@every_sampler
def test_a_sample_does_not_depend_on_its_batch(denoiser, rngs, name):
    z, cond = start(3)
    mask = torch.tensor([[1.0, 0.5, 0.0], [1, 1, 1], [0.2, 1, 0.8]])
    options = {"guidance": {"rescale": 0.7, "interval": (0.1, 0.9995)}}  # a shift of 1000 stays above 0.99
    scheduler = build(name, **options)
    null = torch.zeros_like(cond["y"])
    batch = scheduler.sample(
        denoiser(factor(name)), z, cond, null={"y": null}, mask=mask, generators=rngs([4, 5, 6])
    )  # fmt: skip
    for b in range(3):
        r = slice(b, b + 1)
        one = scheduler.sample(
            denoiser(factor(name)),
            z[r],
            {"y": cond["y"][r]},
            null={"y": null[r]},
            mask=mask[r],
            generators=rngs([4 + b]),
        )
        torch.testing.assert_close(batch[r], one, rtol=1e-4, atol=1e-4)  # batches take other vector paths


@every_sampler
def test_the_global_generator_is_left_alone(denoiser, rngs, name):
    z, cond = start()
    mask = torch.tensor([[1.0, 0.5, 0.0]] * 2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = build(name).sample(denoiser(factor(name)), z, cond, mask=mask, generators=rngs())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(first, build(name).sample(denoiser(factor(name)), z, cond, mask=mask, generators=rngs()))


@every_sampler
def test_gradients_are_off_inside_and_as_they_were_outside(denoiser, rngs, name):
    z, cond = start()
    z = z.requires_grad_()
    for step in build(name).sample_steps(denoiser(factor(name)), z, cond, generators=rngs()):
        assert not step.x.requires_grad
        assert torch.is_grad_enabled()


@every_sampler
def test_formats(denoiser, rngs, name):
    z, cond = start()
    assert build(name).sample(denoiser(factor(name)), z.bfloat16(), cond, generators=rngs()).dtype == torch.float32
    fine = build(name).sample(denoiser(factor(name)), z.double(), cond, generators=rngs())
    assert fine.dtype == torch.float64


@every_sampler
def test_the_loop_reads_nothing_back_from_the_device(rngs, name):
    z, cond = start()
    mask = torch.tensor([[1.0, 0.5, 0.0]] * 2)
    options = {"guidance": {"rescale": 0.7}}
    scheduler = build(name, **options)

    def model(x, timestep, **_):
        return torch.cat([x, x], dim=1) if name == "learned variance" else 0.5 * x

    with NoReading():
        scheduler.sample(model, z, cond, null={"y": 0 * cond["y"]}, mask=mask, generators=rngs())


def test_that_check_catches_a_read():
    x = torch.ones(3)
    for read in (lambda: x.sum().item(), lambda: x[x > 0], lambda: bool(x.any())):
        with NoReading(), pytest.raises(AssertionError, match="waits for the device"):
            read()


@every_sampler
def test_progress_shows_a_bar(denoiser, rngs, capsys, monkeypatch, name):
    monkeypatch.setattr(logging, "LINE_S", 0.0)
    z, cond = start()
    build(name, 3).sample(denoiser(factor(name)), z, cond, generators=rngs())
    assert capsys.readouterr().err == ""
    build(name, 3).sample(denoiser(factor(name)), z, cond, generators=rngs(), progress=True)
    assert "3/3" in capsys.readouterr().err


def test_the_doubled_condition_is_made_once_a_run(denoiser, rngs):
    z, cond = start()
    null = {"y": torch.zeros_like(cond["y"])}
    model = denoiser(1)
    build("ancestral").sample(model, z, cond, null=null, mask=torch.ones(2, 3), generators=rngs())
    for name, doubled in (("y", torch.cat([cond["y"], null["y"]])), ("x_mask", torch.ones(4, 3, dtype=torch.bool))):
        assert len({id(call[name]) for call in model.calls}) == 1
        assert torch.equal(model.calls[-1][name], doubled)
