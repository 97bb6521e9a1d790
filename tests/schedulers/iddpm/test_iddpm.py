import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from opensora.registry import SCHEDULERS
from opensora.schedulers.iddpm import IDDPM
from opensora.utils.errors import UserError

SHAPE = (2, 4, 3, 5, 5)


@pytest.fixture
def x0():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def cond():
    return {"y": torch.randn(2, 1, 5, 6, generator=torch.Generator().manual_seed(4)), "mask": None}


def rows(cond, b):
    return {key: None if value is None else value[b : b + 1] for key, value in cond.items()}


def test_is_registered_under_the_references_keys():
    scheduler = SCHEDULERS.build({"type": "iddpm", "num_sampling_steps": 100, "cfg_scale": 7.0, "cfg_channel": 3})
    assert (scheduler.num_sampling_steps, scheduler.cfg_scale, scheduler.cfg_channel) == (100, 7.0, 3)
    assert SCHEDULERS.build({"type": "iddpm", "timestep_respacing": ""}).num_sampling_steps == 1000


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
def test_fixed_variance_loss_is_the_mse_of_the_target(denoiser, x0, cond, prediction):
    noise, t = torch.randn_like(x0), torch.tensor([0, 700])
    scheduler = IDDPM(prediction=prediction, variance="fixed_small")
    model = denoiser(1)
    losses = scheduler.training_losses(model, x0, cond, t=t, noise=noise)
    abar = torch.from_numpy(scheduler.schedule.table["alphas_cumprod"])[t].reshape(2, 1, 1, 1, 1).float()
    x_t = abar.sqrt() * x0 + (1 - abar).sqrt() * noise
    target = {"eps": noise, "x0": x0, "v": abar.sqrt() * noise - (1 - abar).sqrt() * x0}[prediction]
    expected = ((model(x_t, t, **cond) - target) ** 2).mean(dim=(1, 2, 3, 4))
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def own_vlb(scheduler, out, x0, x_t, t):
    """Bits per dimension at one t > 0, from the two Gaussians."""
    c = scheduler.schedule.at(t)
    abar, beta = c.alphas_cumprod, math.exp(c.log_beta)
    prev = abar / (1 - beta)
    prediction, raw = out.double().chunk(2, dim=1)
    predicted = {
        "eps": (x_t - (1 - abar) ** 0.5 * prediction) / abar**0.5,
        "v": abar**0.5 * x_t - (1 - abar) ** 0.5 * prediction,
    }[scheduler.prediction]

    def mean(x_0):
        return (prev**0.5 * beta * x_0 + (1 - beta) ** 0.5 * (1 - prev) * x_t) / (1 - abar)

    small = torch.full_like(raw, beta * (1 - prev) / (1 - abar))
    variance = torch.exp((raw + 1) / 2 * math.log(beta) + (1 - raw) / 2 * small.log())
    true, model = Normal(mean(x0), small.sqrt()), Normal(mean(predicted), variance.sqrt())
    return kl_divergence(true, model).mean(dim=(1, 2, 3, 4)) / math.log(2)


@pytest.mark.parametrize("prediction", ["eps", "v"])
@pytest.mark.parametrize(
    ("loss", "mse_weight", "vlb_weight"),
    [("mse", 1, 1), ("rescaled_mse", 1, 0.5), ("kl", 0, 1), ("rescaled_kl", 0, 500)],
)
def test_learned_range_loss(denoiser, x0, cond, prediction, loss, mse_weight, vlb_weight):
    scheduler = IDDPM(prediction=prediction, loss=loss, diffusion_steps=500)
    noise, t = torch.randn_like(x0), 200
    model = denoiser(2)
    losses = scheduler.training_losses(model, x0, cond, t=torch.tensor([t, t]), noise=noise)
    c = scheduler.schedule.at(t)
    x_t = c.sqrt_alphas_cumprod * x0.double() + c.sqrt_one_minus_alphas_cumprod * noise
    out = model(x_t, torch.tensor([t, t]), **cond)
    v = c.sqrt_alphas_cumprod * noise - c.sqrt_one_minus_alphas_cumprod * x0
    mse = ((out[:, :4] - (noise if prediction == "eps" else v)) ** 2).mean(dim=(1, 2, 3, 4))
    expected = mse_weight * mse + vlb_weight * own_vlb(scheduler, out, x0.double(), x_t, t)
    torch.testing.assert_close(losses, expected.float(), rtol=1e-4, atol=1e-6)


def test_a_perfect_model_has_no_loss(x0):
    noise, t = torch.randn_like(x0), torch.tensor([1, 900])

    def model(x_t, timestep):
        return torch.cat([noise, torch.full_like(noise, -1.0)], dim=1)  # the true eps, the true posterior's variance

    for loss in ("mse", "kl"):
        losses = IDDPM(loss=loss).training_losses(model, x0, {}, t=t, noise=noise)
        torch.testing.assert_close(losses, torch.zeros(2), rtol=0, atol=1e-5)


class Linear(nn.Module):
    """Two layers, so that the gradients of the prediction and of the variance are separate."""

    def __init__(self, variance: bool = True) -> None:
        super().__init__()
        self.mean, self.variance = nn.Conv3d(4, 4, 1), nn.Conv3d(4, 4, 1) if variance else None

    def forward(self, x, timestep, **cond):
        return self.mean(x) if self.variance is None else torch.cat([self.mean(x), self.variance(x)], dim=1)


def test_the_mean_learns_from_the_mse_only(x0):
    noise, t = torch.randn_like(x0), torch.tensor([400, 3])
    torch.manual_seed(0)
    model = Linear()
    IDDPM().training_losses(model, x0, {}, t=t, noise=noise).mean().backward()
    hybrid = model.mean.weight.grad.clone()
    assert model.variance.weight.grad.abs().sum() > 0
    plain = Linear(variance=False)
    plain.mean.load_state_dict(model.mean.state_dict())
    IDDPM(variance="fixed_small").training_losses(plain, x0, {}, t=t, noise=noise).mean().backward()
    torch.testing.assert_close(hybrid, plain.mean.weight.grad)
    model.zero_grad()
    IDDPM(loss="kl").training_losses(model, x0, {}, t=t, noise=noise).mean().backward()
    assert model.mean.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("settings", [{}, {"prediction": "v"}, {"prediction": "v", "variance": "fixed_small"}])
def test_one_step_of_training_lowers_the_loss(x0, settings):
    noise, t = torch.randn_like(x0), torch.tensor([100, 800])
    torch.manual_seed(0)
    model, scheduler = Linear("variance" not in settings), IDDPM(**settings)
    before = scheduler.training_losses(model, x0, {}, t=t, noise=noise).mean()
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.02 * parameter.grad
        assert scheduler.training_losses(model, x0, {}, t=t, noise=noise).mean() < before


def test_masked_training(denoiser, x0, cond):
    noise, t = torch.randn_like(x0), torch.tensor([300, 900])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    scheduler, model = IDDPM(), denoiser(2)
    losses = scheduler.training_losses(model, x0, cond, mask=mask, t=t, noise=noise)
    (call,) = model.calls
    assert torch.equal(call["x_mask"], mask)
    conditioning = ~mask[:, None, :, None, None].expand(SHAPE)
    assert torch.equal(call["x"][conditioning], x0[conditioning])

    # the toy denoiser does not mix frames: the loss is that of the generated frames alone
    def alone(b, frames):
        pick = (slice(b, b + 1), slice(None), frames)
        return scheduler.training_losses(denoiser(2), x0[pick], rows(cond, b), t=t[b : b + 1], noise=noise[pick])

    torch.testing.assert_close(losses, torch.cat([alone(0, [0, 2]), alone(1, [2])]), rtol=1e-5, atol=1e-6)


def test_all_frames_masked_in_is_no_mask_and_none_is_zero(denoiser, x0, cond):
    noise, t = torch.randn_like(x0), torch.tensor([300, 900])

    def losses(mask):
        return IDDPM().training_losses(denoiser(2), x0, cond, mask=mask, t=t, noise=noise)

    torch.testing.assert_close(losses(torch.ones(2, 3, dtype=torch.bool)), losses(None))
    assert torch.equal(losses(torch.zeros(2, 3, dtype=torch.bool)), torch.zeros(2))


def test_draws_t_then_noise_from_each_samples_generator(denoiser, rngs, x0, cond):
    model = denoiser(2)
    losses = IDDPM().training_losses(model, x0, cond, generators=rngs())
    generators = rngs()
    t = torch.cat([torch.randint(1000, (1,), generator=g) for g in generators])
    noise = torch.stack([torch.randn(SHAPE[1:], generator=g) for g in generators])
    assert torch.equal(model.calls[0]["timestep"], t)
    assert torch.equal(losses, IDDPM().training_losses(denoiser(2), x0, cond, t=t, noise=noise))


def test_training_visits_all_timesteps_whatever_sampling_does(denoiser, rngs):
    model, scheduler = denoiser(2), IDDPM(10)
    x0 = torch.zeros(64, 4, 1, 1, 1)
    scheduler.training_losses(model, x0, {"y": torch.zeros(64, 1, 1, 1)}, generators=rngs(range(64)))
    t = model.calls[0]["timestep"]
    assert t.dtype == torch.int64
    assert not set(t.tolist()) <= set(scheduler.timesteps)
    assert t.min() < 100
    assert t.max() > 900


def test_a_sample_does_not_depend_on_its_batch(denoiser, rngs, x0, cond):
    for settings in ({}, {"prediction": "v", "variance": "fixed_large"}, {"sampler": "ddim", "eta": 0.5}):
        scheduler = IDDPM(8, **settings)
        model = denoiser(1 if "variance" in settings else 2)

        def both(x, c, ids, scheduler=scheduler, model=model):
            null = {"y": torch.zeros_like(c["y"])}
            mask = torch.tensor([[1.0, 0.5, 0.0]] * len(ids))
            losses = scheduler.training_losses(model, x, c, generators=rngs(ids))
            return losses, scheduler.sample(model, x, c, null=null, mask=mask, generators=rngs(ids))

        losses, samples = both(x0, cond, [0, 1])
        for b in (0, 1):
            one_loss, one_sample = both(x0[b : b + 1], rows(cond, b), [b])
            # the same arithmetic; a batch may take another vector path in tanh and exp
            torch.testing.assert_close(losses[b : b + 1], one_loss, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(samples[b : b + 1], one_sample, rtol=1e-4, atol=1e-4)


def test_guidance_scale_and_the_number_of_calls(denoiser, rngs, x0, cond):
    scheduler, null = IDDPM(5, cfg_scale=3.0), {"y": torch.zeros_like(cond["y"])}

    def sample(**settings):
        model = denoiser(2)
        return scheduler.sample(model, x0, cond, generators=rngs(), **settings), [len(c["x"]) for c in model.calls]

    default, sizes = sample(null=null)
    assert sizes == [4] * 5
    assert torch.equal(default, sample(null=null, guidance_scale=3.0)[0])
    plain, sizes = sample()
    assert sizes == [2] * 5
    unguided, sizes = sample(null=null, guidance_scale=1.0)
    assert sizes == [2] * 5
    assert torch.equal(plain, unguided)
    assert not torch.equal(plain, default)


def test_samples_without_gradients_and_leaves_z_alone(rngs, x0):
    z = x0.clone()
    out = IDDPM(3).sample(Linear(), z, {}, generators=rngs())
    assert not out.requires_grad
    assert torch.equal(z, x0)


def test_bf16_latents_are_diffused_in_fp32(denoiser, rngs, x0, cond):
    model = denoiser(2)
    assert IDDPM().training_losses(model, x0.bfloat16(), cond, generators=rngs()).dtype == torch.float32
    assert IDDPM(3).sample(model, x0.bfloat16(), cond, generators=rngs()).dtype == torch.float32
    assert all(call["x"].dtype == torch.float32 for call in model.calls)


@pytest.mark.parametrize("settings", [{}, {"sampler": "ddim", "eta": 1.0, "prediction": "v"}])
def test_never_reads_a_value_back_from_the_device(denoiser, rngs, x0, cond, settings):
    """Tensors on the meta device have no values: whatever would make the host wait for a GPU raises there."""
    scheduler, x = IDDPM(3, **settings), x0.to("meta")
    on_device = {"y": cond["y"].to("meta")}
    null, mask = {"y": on_device["y"]}, torch.tensor([[1.0, 0.0, 0.5], [1.0, 1.0, 0.2]])  # read once, before the steps
    out = scheduler.sample(denoiser(2), x, on_device, null=null, mask=mask, generators=rngs())
    assert out.shape == SHAPE
    assert scheduler.training_losses(denoiser(2), x, on_device, mask=mask.to("meta"), generators=rngs()).shape == (2,)


def test_a_wrong_number_of_channels_names_both_settings(denoiser, rngs, x0, cond):
    with pytest.raises(UserError, match=r"returned 4 channels .* instead of 8: set model.pred_sigma=True") as caught:
        IDDPM().training_losses(denoiser(1), x0, cond, generators=rngs())
    assert "scheduler.variance" in str(caught.value)
    with pytest.raises(UserError, match=r"returned 8 channels .* instead of 4: set model.pred_sigma=False") as caught:
        IDDPM(3, variance="fixed_small").sample(denoiser(2), x0, cond, generators=rngs())
    assert "scheduler.variance='learned_range'" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_sampling_steps": 10, "timestep_respacing": "ddim10"}, "same thing twice"),
        ({"num_sampling_steps": 2000}, "2000 of the 1000 timesteps"),
        ({"num_sampling_steps": 0}, "expected positive integers"),
        ({"eta": 0.5}, "eta=0.5 with sampler='ancestral': .*with sampler='ddim' only"),
        ({"eta": -1.0, "sampler": "ddim"}, "eta=-1.0 .*use 0"),
        ({"eta": 1.5, "sampler": "ddim"}, "eta=1.5 .*use 0 .* to 1"),
        ({"clip_x0": 0.0}, "clip_x0=0.0 must be positive"),
        ({"prediction": "epsilon"}, "prediction='epsilon' is not one of eps, x0, v"),
        ({"sampler": "ddpm"}, "sampler='ddpm' is not one of ancestral, ddim"),
        ({"loss": "rescaled_mse", "variance": "fixed_small"}, "variance='fixed_small' is fixed"),
        ({"noise_schedule": "cosin"}, "not one of linear, squaredcos_cap_v2, scaled_linear"),
    ],
)
def test_mistaken_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        IDDPM(**settings)


def test_missing_generators_are_an_error(denoiser, x0, cond):
    with pytest.raises(ValueError, match="one generator per sample, or both"):
        IDDPM().training_losses(denoiser(2), x0, cond, t=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="the ancestral sampler draws noise"):
        IDDPM(3).sample(denoiser(2), x0, cond)
    assert IDDPM(3, sampler="ddim").sample(denoiser(2), x0, cond).isfinite().all()


def test_rescaled_timesteps_are_on_the_scale_of_a_thousand(denoiser, rngs, x0, cond):
    scheduler = IDDPM(4, diffusion_steps=250, rescale_timesteps=True)
    model = denoiser(2)
    scheduler.training_losses(model, x0, cond, t=torch.tensor([3, 249]), noise=x0)
    assert model.calls[0]["timestep"].tolist() == [12.0, 996.0]
    model = denoiser(2)
    scheduler.sample(model, x0, cond, generators=rngs())
    assert [float(call["timestep"][0]) for call in model.calls] == [996.0, 664.0, 332.0, 0.0]


@pytest.mark.parametrize("diffusion_steps", [1, 2, 21, 1000])
def test_any_number_of_diffusion_steps(denoiser, rngs, x0, cond, diffusion_steps):
    settings = {"diffusion_steps": diffusion_steps, "noise_schedule": "squaredcos_cap_v2", "prediction": "v"}
    for more in ({}, {"loss": "kl"}, {"sampler": "ddim"}, {"variance": "fixed_large"}):
        scheduler = IDDPM(min(diffusion_steps, 3), **settings, **more)
        model = denoiser(1 if "variance" in more else 2)
        assert scheduler.training_losses(model, x0, cond, generators=rngs()).isfinite().all()
        assert scheduler.sample(model, x0, cond, generators=rngs()).isfinite().all()
