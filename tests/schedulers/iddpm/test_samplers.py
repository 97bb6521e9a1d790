"""The samplers against diffusers' step by step, and against a Gaussian whose best denoiser is known."""

import math
from itertools import pairwise

import diffusers
import pytest
import torch

from opensora.schedulers.iddpm import IDDPM

PREDICTION_TYPES = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
SCHEDULES = ["linear", "squaredcos_cap_v2"]


def theirs(cls: type, ours: IDDPM, noise_schedule: str, **settings: object):
    """diffusers' scheduler with our fp64 abar, since its own is fp32 and would hide errors below 1e-5."""
    scheduler = cls(
        beta_start=1e-4,
        beta_end=0.02,
        beta_schedule=noise_schedule,
        prediction_type=PREDICTION_TYPES[ours.prediction],
        clip_sample=ours.clip_x0 is not None,
        clip_sample_range=ours.clip_x0 or 1.0,
        **settings,
    )
    abar = torch.from_numpy(ours.schedule.table["alphas_cumprod"])
    torch.testing.assert_close(scheduler.alphas_cumprod, abar.float(), rtol=1e-4, atol=1e-9)
    scheduler.alphas_cumprod = abar
    return scheduler


def start() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    z = torch.randn(2, 4, 3, 4, 4, generator=g, dtype=torch.float64)
    return z, {"y": torch.randn(2, 1, 5, 6, generator=g, dtype=torch.float64)}


def trajectory(model) -> list[torch.Tensor]:
    return [call["x"] for call in model.calls]


def assert_same_path(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> None:
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)  # fp64


@pytest.mark.parametrize("noise_schedule", SCHEDULES)
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "learned_range"])
@pytest.mark.parametrize(("prediction", "clip_x0"), [("eps", None), ("v", None), ("x0", None), ("eps", 0.8)])
def test_ancestral_equals_diffusers_ddpm(denoiser, rngs, noise_schedule, variance, prediction, clip_x0):
    ours = IDDPM(12, noise_schedule=noise_schedule, prediction=prediction, variance=variance, clip_x0=clip_x0)
    model, (z, cond) = denoiser(2 if variance == "learned_range" else 1), start()
    final = ours.sample(model, z, cond, generators=rngs())

    reference = theirs(diffusers.DDPMScheduler, ours, noise_schedule, variance_type=variance)
    reference.set_timesteps(timesteps=ours.timesteps[::-1])
    x, generators, path = z, rngs(), []
    for t in reference.timesteps:
        path.append(x)
        output = model(x, t.expand(2), **cond)
        x = reference.step(output, t, x, generator=generators).prev_sample
    assert [int(call["timestep"][0]) for call in model.calls[:12]] == ours.timesteps[::-1]
    assert_same_path([*trajectory(model)[:12], final], [*path, x])


@pytest.mark.parametrize("noise_schedule", SCHEDULES)
@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("prediction", "clip_x0"), [("eps", None), ("v", None), ("x0", None), ("v", 0.8)])
def test_ddim_equals_diffusers_ddim(denoiser, rngs, noise_schedule, eta, prediction, clip_x0):
    ours = IDDPM(
        timestep_respacing="ddim20",
        noise_schedule=noise_schedule,
        prediction=prediction,
        variance="fixed_small",
        sampler="ddim",
        eta=eta,
        clip_x0=clip_x0,
    )
    model, (z, cond) = denoiser(1), start()
    final = ours.sample(model, z, cond, generators=rngs())

    reference = theirs(diffusers.DDIMScheduler, ours, noise_schedule, timestep_spacing="leading")
    reference.set_timesteps(20)
    assert reference.timesteps.tolist() == ours.timesteps[::-1]
    x, generators, path = z, rngs(), []
    for t in reference.timesteps:
        path.append(x)
        output = model(x, t.expand(2), **cond)
        noise = torch.stack([torch.randn(z.shape[1:], generator=g, dtype=z.dtype) for g in generators]) if t else 0 * z
        step = reference.step(output, int(t), x, eta=eta, use_clipped_model_output=True, variance_noise=noise)
        x = step.prev_sample
    assert_same_path([*trajectory(model)[:20], final], [*path, x])


def test_fp32_follows_fp64(denoiser, rngs):
    ours = IDDPM(20, variance="fixed_small", sampler="ddim")
    z, cond = start()
    exact = ours.sample(denoiser(1), z, cond)
    out = ours.sample(denoiser(1), z.float(), {"y": cond["y"].float()})
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact.float(), rtol=1e-3, atol=1e-3)  # eps at t=999: x_0 = (x - eps) / 0.006


MEAN, STD = 0.7, 0.4


class GaussianDenoiser:
    """E[x_0 | x_t] for x_0 ~ N(MEAN, STD^2), as eps, x0 or v; with the best variance of each reverse step if learned."""

    def __init__(self, scheduler: IDDPM, mean: float = MEAN, std: float = STD) -> None:
        self.scheduler, self.mean, self.std = scheduler, mean, std

    def __call__(self, x: torch.Tensor, t: torch.Tensor, **cond: object) -> torch.Tensor:
        c = self.scheduler.sampling_schedule.at(self.scheduler.timesteps.index(int(t[0])))
        abar = c.alphas_cumprod
        marginal = abar * self.std**2 + 1 - abar
        x_0 = self.mean + abar**0.5 * self.std**2 * (x - abar**0.5 * self.mean) / marginal
        eps = (x - abar**0.5 * x_0) / (1 - abar) ** 0.5
        output = {
            "eps": eps,
            "x0": x_0,
            "v": abar**0.5 * eps - (1 - abar) ** 0.5 * x_0,
        }[self.scheduler.prediction]
        if self.scheduler.variance != "learned_range":
            return output
        posterior = math.exp(c.log_posterior_variance) if c.alphas_cumprod_prev < 1 else 0.0  # x_0 is a point given x_0
        best = torch.tensor(posterior + c.posterior_mean_coef_x_0**2 * self.std**2 * (1 - abar) / marginal)
        fraction = (best.log() - c.log_posterior_variance) / (c.log_beta - c.log_posterior_variance)
        return torch.cat([output, torch.full_like(output, 2 * fraction.item() - 1)], dim=1)


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        # the best variance makes each reverse step exact, however few there are; 0.01 is 4 standard errors of the std
        ({"num_sampling_steps": 10}, 0.01),
        ({"num_sampling_steps": 250, "variance": "fixed_large"}, 0.01),
        # the posterior's variance is the lower bound of the best one (Ho, section 3.2): finitely many steps shrink the std
        ({"num_sampling_steps": 250, "variance": "fixed_small"}, 0.02),
        ({"num_sampling_steps": 100, "variance": "fixed_small", "sampler": "ddim"}, 0.015),
        ({"num_sampling_steps": 250, "variance": "fixed_small", "sampler": "ddim", "eta": 1.0}, 0.02),
    ],
)
def test_a_gaussian_is_recovered(rngs, prediction, settings, tolerance):
    scheduler = IDDPM(prediction=prediction, **settings)
    z = torch.randn(2, 4, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    out = scheduler.sample(GaussianDenoiser(scheduler), z, {}, generators=rngs())
    assert abs(out.mean().item() - MEAN) < tolerance
    assert abs(out.std().item() - STD) < tolerance


def test_clip_x0_bounds_the_result(denoiser, rngs):
    z, cond = start()
    out = IDDPM(10, variance="fixed_small", clip_x0=0.3).sample(denoiser(1), 5 * z, cond, generators=rngs())
    assert out.abs().max() <= 0.3 + 1e-12


def test_more_noise_moves_further(denoiser, rngs):
    """eta is felt, and rises from the deterministic path."""
    z, cond = start()
    paths = [
        IDDPM(20, variance="fixed_small", sampler="ddim", eta=eta).sample(denoiser(1), z, cond, generators=rngs())
        for eta in (0.0, 0.01, 0.3)
    ]
    distances = [0.0, *((path - paths[0]).abs().mean().item() for path in paths[1:])]
    assert all(a < b for a, b in pairwise(distances))
