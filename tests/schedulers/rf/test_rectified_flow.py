"""Rectified flow against diffusers step by step, against a Gaussian whose flow is known, and against its own contract."""

import math
from itertools import pairwise

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

from opensora.registry import SCHEDULERS
from opensora.schedulers.rf import RectifiedFlow
from opensora.utils.errors import UserError
from opensora.utils.seed import generators

SHAPE = (2, 4, 3, 5, 5)


@pytest.fixture
def x0():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def cond():
    return {"y": torch.randn(2, 1, 5, 6, generator=torch.Generator().manual_seed(4)), "mask": None}


def theirs(scheduler, model, z, cond):
    """x after each call; diffusers predicts noise - x_0, and carries x in fp32."""
    x, path = z.float(), []
    for t in scheduler.timesteps:
        x = scheduler.step(-model(x, t.expand(2), **cond), t, x).prev_sample
        path.append(x)
    return path


@pytest.mark.parametrize("shift", [1.0, 3.0, 0.5])
@pytest.mark.parametrize("num_steps", [1, 2, 10, 30])
def test_euler_equals_diffusers(denoiser, x0, cond, shift, num_steps):
    reference = FlowMatchEulerDiscreteScheduler(shift=shift)
    reference.set_timesteps(sigmas=[1 - i / num_steps for i in range(num_steps)])
    scheduler = RectifiedFlow(num_steps, shift=shift)
    path = [step.x for step in scheduler.sample_steps(denoiser(1), x0, cond)]
    for ours, other in zip(path, theirs(reference, denoiser(1), x0, cond), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_steps", [2, 3, 10, 30])
def test_heun_equals_diffusers(denoiser, x0, cond, num_steps):
    reference = FlowMatchHeunDiscreteScheduler(shift=3.0)
    reference.set_timesteps(num_steps)
    scheduler = RectifiedFlow(num_steps, shift=3.0, sampler="heun")
    taus = torch.tensor(scheduler.solver(x0, None).levels)
    reference.timesteps = 1000 * torch.cat([taus[:1], taus[1:].repeat_interleave(2)])
    reference.sigmas = torch.cat([taus[:1], taus[1:].repeat_interleave(2), torch.zeros(1)])
    model = denoiser(1)
    path = [step.x for step in scheduler.sample_steps(model, x0, cond)]
    assert len(model.calls) == 2 * num_steps - 1
    after_each_call = theirs(reference, denoiser(1), x0, cond)
    after_each_step = [x for i, x in enumerate(after_each_call) if i % 2 or i == 2 * num_steps - 2]
    for ours, other in zip(path, after_each_step, strict=True):
        torch.testing.assert_close(ours, other, rtol=2e-5, atol=2e-5)


MEAN, STD = 0.7, 0.4


def gaussian_velocity(x, timestep, **_):
    """E[x_0 - noise | x] for x_0 ~ N(MEAN, STD^2)."""
    tau = timestep.to(x).reshape(-1, 1, 1, 1, 1) / 1000
    variance = (1 - tau) ** 2 * STD**2 + tau**2
    return MEAN + ((1 - tau) * STD**2 - tau) / variance * (x - (1 - tau) * MEAN)


def error(sampler, num_steps, shift):
    """Of the flow's map, which takes z to MEAN + STD z."""
    z = torch.randn(2, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = RectifiedFlow(num_steps, sampler=sampler, shift=shift).sample(gaussian_velocity, z, {})
    return float((out - MEAN - STD * z).square().mean().sqrt())


@pytest.mark.parametrize("shift", ["none", 3.0])
@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2), ("midpoint", 2)])
def test_a_gaussian_is_recovered_at_the_order_of_the_solver(sampler, order, shift):
    coarse, fine = error(sampler, 64, shift), error(sampler, 128, shift)
    assert fine < (0.02 if order == 1 else 1e-3)
    assert order - 0.15 < math.log2(coarse / fine) < order + 1.15  # a Gaussian may be kinder than the theory


def test_the_loss_is_the_mse_of_the_velocity(denoiser, x0, cond):
    noise, t = torch.randn_like(x0), torch.tensor([130.5, 871.25])
    model = denoiser(1)
    losses = RectifiedFlow().training_losses(model, x0, cond, t=t, noise=noise)
    tau = (t / 1000).reshape(2, 1, 1, 1, 1)
    (call,) = model.calls
    torch.testing.assert_close(call["x"], (1 - tau) * x0 + tau * noise)
    assert torch.equal(call["timestep"], t)
    expected = ((x0 - noise - denoiser(1)(call["x"], t, **cond)) ** 2).mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(losses, expected)
    assert losses.dtype == torch.float32


def test_the_variance_channels_of_a_model_are_not_used(denoiser, rngs, x0, cond):
    losses = [RectifiedFlow().training_losses(denoiser(n), x0, cond, generators=rngs()) for n in (1, 2)]
    assert torch.equal(*losses)
    samples = [RectifiedFlow().sample(denoiser(n), x0, cond) for n in (1, 2)]
    assert torch.equal(*samples)
    with pytest.raises(UserError, match="12 channels for 4-channel latents; this scheduler expects 4, or 8"):
        RectifiedFlow(2).sample(lambda x, t, **_: torch.cat([x] * 3, dim=1), x0, cond)


def test_masked_training(denoiser, x0, cond):
    noise, t = torch.randn_like(x0), torch.tensor([300.0, 900.0])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    model = denoiser(1)
    losses = RectifiedFlow().training_losses(model, x0, cond, mask=mask, t=t, noise=noise)
    (call,) = model.calls
    assert torch.equal(call["x_mask"], mask)
    conditioning = ~mask[:, None, :, None, None].expand(SHAPE)
    assert torch.equal(call["x"][conditioning], x0[conditioning])
    alone = RectifiedFlow().training_losses(
        denoiser(1), x0[1:, :, 2:], {"y": cond["y"][1:]}, t=t[1:], noise=noise[1:, :, 2:]
    )
    torch.testing.assert_close(losses[1:], alone)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert torch.equal(
        RectifiedFlow().training_losses(denoiser(1), x0, cond, mask=nothing, t=t, noise=noise), torch.zeros(2)
    )


def drawn(scheduler, size=(1, 1, 1), batch=2000, denoise=None):
    """The model's timesteps in a training batch."""
    seen = []

    def model(x, timestep, **_):
        seen.append(timestep)
        return x

    scheduler.training_losses(model, torch.zeros(batch, 1, *size), {}, generators=generators(0, "t", ids=range(batch)))
    return seen[0]


def test_continuous_uniform_time_is_one_uniform_number_of_each_generator():
    t = drawn(RectifiedFlow(), batch=50)
    expected = torch.cat([torch.rand(1, generator=g) for g in generators(0, "t", ids=range(50))])
    assert t.dtype == torch.float32
    torch.testing.assert_close(t, 1000 * expected)


def test_logit_normal_time():
    t = drawn(RectifiedFlow(timestep_sampling={"type": "logit-normal", "loc": 0.5, "scale": 0.8})) / 1000
    logit = torch.logit(t.double())
    assert abs(logit.mean() - 0.5) < 0.08  # 4 standard errors
    assert abs(logit.std() - 0.8) < 0.06


def test_discrete_time_is_whole_and_reaches_pure_noise():
    t = drawn(RectifiedFlow(num_timesteps=10, time="discrete"))
    assert t.dtype == torch.int64
    assert sorted(set(t.tolist())) == list(range(1, 11))
    scheduler = RectifiedFlow(5, num_timesteps=10, time="discrete")
    assert scheduler.solver(torch.zeros(1, 1, 1, 1, 1), None).timesteps == [10, 8, 6, 4, 2]
    shifted = drawn(RectifiedFlow(num_timesteps=10, time="discrete", shift=4.0))
    assert shifted.min() >= 1
    assert shifted.float().mean() > t.float().mean() + 1.5


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 64, 64), (2, 30, 53), (15, 30, 53), (240, 160, 90)])
@pytest.mark.parametrize("shift", ["resolution", "length"])
def test_training_and_sampling_shift_alike_at_every_length(size, shift):
    """No length has the ratio 0, and larger latents are noisier."""
    scheduler = RectifiedFlow(20, shift=shift)
    levels = scheduler.solver(torch.empty(1, 1, *size, device="meta"), None).levels
    plain = RectifiedFlow(20).solver(torch.empty(1, 1, *size, device="meta"), None).levels
    ratio = (levels[10] / (1 - levels[10])) / (plain[10] / (1 - plain[10]))
    assert ratio > 0
    u = torch.cat([torch.rand(1, generator=g) for g in generators(0, "t", ids=range(4))])
    t = _drawn_on_meta_size(scheduler, size)
    torch.testing.assert_close(t / 1000, ratio * u / (1 + (ratio - 1) * u), rtol=1e-5, atol=1e-6)


def _drawn_on_meta_size(scheduler, size):
    """`_draw` needs the size only, not the memory."""
    return scheduler._draw(generators(0, "t", ids=range(4)), torch.zeros(1).expand(4, 1, *size))


@pytest.mark.parametrize("shift", [1.0, 1e-3, 1000.0])
@pytest.mark.parametrize("num_steps", [1, 2, 50, 1000])
def test_timesteps_stay_distinct_in_fp32_under_any_shift(shift, num_steps):
    solver = RectifiedFlow(num_steps, shift=shift).solver(torch.zeros(1, 1, 1, 1, 1), None)
    times = torch.tensor(solver.timesteps, dtype=torch.float32)
    assert len(set(times.tolist())) == num_steps
    assert times[0] == 1000
    assert (times > 0).all()
    assert all(a > b for a, b in pairwise(solver.levels))


def test_drawn_times_never_leave_their_range_under_a_large_shift():
    for shift in (1e-3, 1000.0):
        t = drawn(RectifiedFlow(shift=shift))
        assert (t >= 0).all()
        assert (t <= 1000).all()
        assert t.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "rk4"}, "sampler='rk4' is not one of euler, heun, midpoint"),
        ({"num_sampling_steps": 0}, "at least 1"),
        ({"time": "whole"}, "not one of continuous, discrete"),
        ({"shift": "size"}, "not one of none, resolution, length, nor a positive number"),
        ({"shift": -1.0}, "shift=-1.0 is not one of .*, nor a positive number"),
        ({"transform_scale": 2.0}, "has no effect"),
        ({"shift_base": (64,)}, "expected .rows, columns."),
        ({"loss_weighting": "min-srn"}, "Did you mean 'min-snr'"),
        ({"guidance": {"rescal": 1.0}}, "Did you mean 'rescale'"),
    ],
)
def test_mistaken_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        RectifiedFlow(**settings)


def test_too_many_discrete_steps_are_an_error():
    with pytest.raises(UserError, match="two steps fall on one of the 10 timesteps"):
        RectifiedFlow(8, num_timesteps=10, time="discrete", shift=20.0).sample(None, torch.zeros(1, 1, 1, 1, 1), {})


def test_is_registered():
    scheduler = SCHEDULERS.build({"type": "rflow", "num_sampling_steps": 30, "cfg_scale": 7.0, "shift": "resolution"})
    assert (scheduler.num_sampling_steps, scheduler.cfg_scale, scheduler.shift) == (30, 7.0, "resolution")


def test_missing_generators_are_an_error(denoiser, x0, cond):
    with pytest.raises(ValueError, match="one generator per sample, or both"):
        RectifiedFlow().training_losses(denoiser(1), x0, cond)
