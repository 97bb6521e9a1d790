"""Whole trajectories against diffusers' schedulers, with their noise levels in fp64 and the same noise.

The multistep scheduler of diffusers rounds x to fp32 at every step, hence its wider tolerance.
"""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, DPMSolverSinglestepScheduler

from opensora.schedulers.dpms import DPMSolver
from opensora.schedulers.noise_schedule import named_schedule
from opensora.utils.seed import generators, randn_like

NUM_STEPS = [1, 2, 3, 8, 14, 15, 20]


def model(x, timestep, **_):
    """A smooth function of x and t."""
    return torch.tanh(0.8 * x + 0.1 * x.flip(1)) * (1 - timestep.double().reshape(-1, 1, 1, 1, 1) / 3000)


def model_without_time(x, timestep, **_):
    return torch.tanh(0.8 * x + 0.1 * x.flip(1))


def latents() -> torch.Tensor:
    return torch.randn(2, 4, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def theirs(scheduler, num_steps, z, denoiser, noise_generators=None):
    """x after each step."""
    scheduler.alphas_cumprod = torch.from_numpy(named_schedule("linear", 1000).table["alphas_cumprod"])
    scheduler.set_timesteps(num_steps)
    exact = (1 - scheduler.alphas_cumprod).sqrt() / scheduler.alphas_cumprod.sqrt()
    if not (scheduler.config.use_karras_sigmas or scheduler.config.get("use_lu_lambdas")):
        scheduler.sigmas[:-1] = exact[scheduler.timesteps]
        scheduler.sigmas = torch.cat([exact[scheduler.timesteps], scheduler.sigmas[-1:].double()])
        if scheduler.config.final_sigmas_type == "sigma_min":
            scheduler.sigmas[-1] = exact[0]
    x, path = z, []
    for t in scheduler.timesteps:
        noise = {} if noise_generators is None else {"variance_noise": randn_like(x, noise_generators)}
        x = scheduler.step(denoiser(x, t.expand(len(x))), t, x, **noise).prev_sample
        path.append(x)
    return path


def ours(scheduler, z, denoiser, noise_generators=None):
    return [step.x for step in scheduler.sample_steps(denoiser, z, {}, generators=noise_generators)]


@pytest.mark.filterwarnings("ignore:`algorithm_types:FutureWarning")
@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize(
    ("algorithm", "order", "final"),
    [
        ("dpmsolver++", 1, "zero"),
        ("dpmsolver++", 2, "zero"),
        ("dpmsolver++", 2, "sigma_min"),
        ("dpmsolver", 2, "sigma_min"),
        ("sde-dpmsolver++", 2, "zero"),
    ],
)
@pytest.mark.parametrize(("solver_type", "their_type"), [("dpmsolver", "midpoint"), ("taylor", "heun")])
def test_multistep(algorithm, order, final, solver_type, their_type, num_steps):
    reference = DPMSolverMultistepScheduler(
        algorithm_type=algorithm, solver_order=order, solver_type=their_type, final_sigmas_type=final
    )
    rules = {"timesteps": "integer", "lower_order_final": "below_15"}  # theirs
    scheduler = DPMSolver(num_steps, algorithm, order=order, solver_type=solver_type, final=final, **rules)
    rngs = [generators(0, "test", ids=(0, 1)) if algorithm.startswith("sde") else None for _ in range(2)]
    expected = theirs(reference, num_steps, latents(), model, rngs[0])
    for x, y in zip(ours(scheduler, latents(), model, rngs[1]), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:`algorithm_types:FutureWarning")
@pytest.mark.parametrize("num_steps", [n for n in NUM_STEPS if n > 2])
@pytest.mark.parametrize(("algorithm", "final"), [("dpmsolver++", "zero"), ("dpmsolver", "sigma_min")])
@pytest.mark.parametrize(
    ("order", "solver_type", "their_type"),
    [(1, "dpmsolver", "midpoint"), (2, "dpmsolver", "midpoint"), (2, "taylor", "heun"), (3, "taylor", "heun")],
)
def test_singlestep(algorithm, final, order, solver_type, their_type, num_steps):
    reference = DPMSolverSinglestepScheduler(
        algorithm_type=algorithm,
        solver_order=order,
        solver_type=their_type,
        final_sigmas_type=final,
        lower_order_final=True,
    )
    scheduler = DPMSolver(
        num_steps,
        algorithm,
        "singlestep",
        order=order,
        solver_type=solver_type,
        final=final,
        timesteps="integer",
        lower_order_final="always",
    )
    expected = theirs(reference, num_steps, latents(), model)
    for x, y in zip(ours(scheduler, latents(), model), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_the_middle_stage_of_the_third_singlestep_order_is_the_papers():
    """diffusers takes its "midpoint" second order there, Lu et al. 2022a, algorithm 2, the exact integral."""
    reference = DPMSolverSinglestepScheduler(solver_order=3, lower_order_final=True)
    scheduler = DPMSolver(
        9, method="singlestep", order=3, final="zero", timesteps="integer", lower_order_final="always"
    )
    expected, path = theirs(reference, 9, latents(), model), ours(scheduler, latents(), model)
    torch.testing.assert_close(path[0], expected[0], rtol=1e-10, atol=1e-10)
    assert 1e-4 < (path[1] - expected[1]).norm() / expected[1].norm() < 0.05


@pytest.mark.parametrize("num_steps", [3, 8, 20])
@pytest.mark.parametrize(("skip_type", "theirs_by"), [("karras", "use_karras_sigmas"), ("logSNR", "use_lu_lambdas")])
def test_steps_in_the_noise_level(skip_type, theirs_by, num_steps):
    """Theirs end at sigma_min before the clean end, so they are ours with one step less and a call at timestep 0.

    They round the timesteps that the model gets, but not the levels; the model here does not look at the time.
    """
    reference = DPMSolverMultistepScheduler(final_sigmas_type="zero", lower_order_final=False, **{theirs_by: True})
    scheduler = DPMSolver(num_steps - 1, skip_type=skip_type, final="denoise_to_zero", lower_order_final="never")
    expected = theirs(reference, num_steps, latents(), model_without_time)
    for x, y in zip(ours(scheduler, latents(), model_without_time), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)
