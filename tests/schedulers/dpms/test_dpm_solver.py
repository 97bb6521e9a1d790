"""The registered scheduler: any number of steps, guidance, masks, noise, mistakes."""

import itertools

import pytest
import torch

from opensora.registry import SCHEDULERS
from opensora.schedulers.dpms.dpm_solver import DPMSolver
from opensora.utils.errors import UserError
from opensora.utils.seed import generators

VARIANTS = [
    {"algorithm_type": algorithm, "method": method, "order": order}
    for algorithm, method, order in itertools.product(
        ("dpmsolver", "dpmsolver++", "sde-dpmsolver++"), ("multistep", "singlestep"), (1, 2, 3)
    )
    if (algorithm, method) != ("sde-dpmsolver++", "singlestep")
]


def name_of(variant) -> str:
    return "-".join(map(str, variant.values()))


def z_and_cond(batch=2, frames=3):
    g = torch.Generator().manual_seed(3)
    return torch.randn(batch, 4, frames, 2, 2, generator=g), {"y": torch.randn(batch, 1, 5, 8, generator=g)}


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("final", ["sigma_min", "zero", "denoise_to_zero"])
def test_any_number_of_steps(variant, num_steps, final, denoiser, rngs):
    z, cond = z_and_cond()
    model = denoiser(1)
    scheduler = DPMSolver(num_steps, **variant, final=final)
    x = scheduler.sample(model, z, cond, generators=rngs())
    assert x.isfinite().all()
    assert len(model.calls) == scheduler.num_sampling_steps == num_steps + (final == "denoise_to_zero")
    timesteps = [float(call["timestep"][0]) for call in model.calls]
    assert timesteps[0] == 999
    assert all(a > b for a, b in itertools.pairwise(timesteps))  # distinct in fp32
    assert all(call["timestep"].dtype == torch.float32 for call in model.calls)


@pytest.mark.parametrize("skip_type", ["time_uniform", "time_quadratic", "logSNR", "karras"])
@pytest.mark.parametrize("method", ["multistep", "singlestep"])
@pytest.mark.parametrize("noise_schedule", ["linear", "squaredcos_cap_v2"])
def test_the_timesteps_of_a_fine_grid_stay_distinct_in_fp32(skip_type, method, noise_schedule, denoiser):
    z, cond = z_and_cond(1, 1)
    model = denoiser(1)
    DPMSolver(300, method=method, skip_type=skip_type, noise_schedule=noise_schedule).sample(model, z, cond)
    assert len({float(call["timestep"][0]) for call in model.calls}) == 300


def test_the_learned_variance_is_dropped(denoiser):
    z, cond = z_and_cond()
    scheduler = DPMSolver(6)
    assert torch.equal(scheduler.sample(denoiser(2), z, cond), scheduler.sample(denoiser(1), z, cond))


def test_other_channel_counts_are_refused():
    z, cond = z_and_cond()
    with pytest.raises(UserError, match="returned 12 channels for 4-channel"):
        DPMSolver(2).sample(lambda x, timestep, **_: torch.cat([x, x, x], dim=1), z, cond)


def test_fp64_stays_fp64_and_bf16_is_sampled_in_fp32(denoiser):
    z, cond = z_and_cond()
    scheduler = DPMSolver(5, order=3)
    fine = scheduler.sample(denoiser(1), z.double(), cond)
    assert fine.dtype == torch.float64
    torch.testing.assert_close(scheduler.sample(denoiser(1), z, cond), fine.float(), rtol=1e-5, atol=1e-5)
    assert scheduler.sample(denoiser(1), z.bfloat16(), cond).dtype == torch.float32


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
@pytest.mark.parametrize("algorithm_type", ["dpmsolver", "dpmsolver++"])
def test_what_the_model_predicts_is_a_matter_of_form(prediction, algorithm_type, denoiser):
    """The same x_0 in three spellings gives the same samples."""
    z, cond = z_and_cond()
    z = z.double()
    scheduler = DPMSolver(8, prediction=prediction, algorithm_type=algorithm_type)
    levels = iter([step.level for step in scheduler.plan])

    def big(x, timestep, **cond):
        return 3 * denoiser(1)(x, timestep, **cond)

    def spelled(x, timestep, **cond):
        level = next(levels)
        x_0 = big(x, timestep, **cond)
        eps = (x - level.alpha * x_0) / level.sigma
        return {"x0": x_0, "eps": eps, "v": level.alpha * eps - level.sigma * x_0}[prediction]

    reference = DPMSolver(8, prediction="x0", algorithm_type=algorithm_type)
    expected = reference.sample(big, z, cond)
    torch.testing.assert_close(scheduler.sample(spelled, z, cond), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_a_sample_does_not_depend_on_its_batch(variant, denoiser, rngs):
    z, cond = z_and_cond()
    mask = torch.tensor([[1.0, 0.4, 0.0], [1.0, 1.0, 0.7]])
    scheduler = DPMSolver(9, **variant)
    both = scheduler.sample(denoiser(1), z, cond, mask=mask, generators=rngs([5, 6]))
    for i in range(2):
        rows = slice(i, i + 1)
        alone = scheduler.sample(
            denoiser(1), z[rows], {"y": cond["y"][rows]}, mask=mask[rows], generators=rngs([5 + i])
        )
        assert torch.equal(alone, both[rows])


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_masks(variant, denoiser, rngs):
    """0 keeps a frame bit for bit, 1 generates, between them the frame is denoised from its level on."""
    z, cond = z_and_cond(1, 4)
    mask = torch.tensor([[1.0, 0.0, 0.5, 0.02]])
    model = denoiser(1)
    scheduler = DPMSolver(10, **variant)
    steps = list(scheduler.sample_steps(model, z, cond, mask=mask, generators=rngs([0])))
    assert all(torch.equal(step.x[:, :, 1], z[:, :, 1]) for step in steps)
    denoised = [model.calls[i]["x_mask"][0].tolist() for i in range(10)]
    assert denoised[0] == [True, False, False, False]
    assert denoised[-1] == [True, False, True, True]
    starts = [next(i for i in range(10) if denoised[i][frame]) for frame in (0, 2, 3)]
    assert starts == [0, 5, 9]
    level = scheduler.plan[5].level
    assert float((model.calls[5]["x"][:, :, 2] - level.alpha * z[:, :, 2]).std()) > 0.2 * level.sigma  # noised
    assert steps[-1].x.isfinite().all()


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v["algorithm_type"] != "sde-dpmsolver++"], ids=name_of)
def test_an_edited_frame_ignores_predictions_from_before_it_was_denoised(variant, rngs):
    """Its history begins in the step from which it is denoised, wherever in a block that is."""
    z, cond = z_and_cond(1, 2)
    for value in (0.3, 0.4, 0.5, 0.6, 0.7):
        results = []
        for offset in (0.0, 100.0):

            def model(x, timestep, *, x_mask, offset=offset, **_):
                kept = (~x_mask)[:, None, :, None, None]
                return torch.tanh(x) + offset * kept

            mask = torch.tensor([[1.0, value]])
            results.append(DPMSolver(10, **variant).sample(model, z, cond, mask=mask, generators=rngs([0])))
        assert torch.equal(*results)


def test_a_boolean_mask_is_the_float_mask_of_its_values(denoiser, rngs):
    z, cond = z_and_cond()
    mask = torch.tensor([[True, False, True], [True, True, True]])
    scheduler = DPMSolver(7, order=3)
    boolean = scheduler.sample(denoiser(1), z, cond, mask=mask)
    assert torch.equal(boolean, scheduler.sample(denoiser(1), z, cond, mask=mask.float(), generators=rngs()))
    everything = scheduler.sample(denoiser(1), z, cond, mask=torch.ones_like(mask))
    assert torch.equal(everything, scheduler.sample(denoiser(1), z, cond))


def test_the_noise_of_the_sde_comes_from_the_generators_alone(denoiser, rngs):
    z, cond = z_and_cond()
    scheduler = DPMSolver(5, algorithm_type="sde-dpmsolver++")
    torch.manual_seed(0)
    first = scheduler.sample(denoiser(1), z, cond, generators=rngs())
    torch.manual_seed(1)
    assert torch.equal(first, scheduler.sample(denoiser(1), z, cond, generators=rngs()))
    others = generators(1, "test", ids=[0, 1])
    assert not torch.allclose(first, scheduler.sample(denoiser(1), z, cond, generators=others))
    with pytest.raises(ValueError, match="one generator per sample"):
        scheduler.sample(denoiser(1), z, cond)


def test_a_caller_can_look_and_stop(denoiser):
    z, cond = z_and_cond()
    model = denoiser(1)
    scheduler = DPMSolver(10)
    steps = list(itertools.islice(scheduler.sample_steps(model, z, cond), 4))
    assert len(model.calls) == 4  # lazily
    assert [step.index for step in steps] == [0, 1, 2, 3]
    assert {step.num_steps for step in steps} == {10}
    level = scheduler.plan[0].level
    eps = denoiser(1)(z, torch.full((2,), 999.0), **cond)
    torch.testing.assert_close(steps[0].x_0, (z - level.sigma * eps) / level.alpha)


def test_the_timesteps_of_the_model(denoiser):
    z, cond = z_and_cond()
    models = [denoiser(1) for _ in range(3)]
    DPMSolver(4, timesteps="integer", final="denoise_to_zero").sample(models[0], z, cond)
    timesteps = [call["timestep"][0] for call in models[0].calls]
    assert [int(t) for t in timesteps] == [999, 749, 500, 250, 0]
    assert {t.dtype for t in timesteps} == {torch.int64}
    DPMSolver(4, diffusion_steps=500).sample(models[1], z, cond)
    assert [float(call["timestep"][0]) for call in models[1].calls] == [499, 374.25, 249.5, 124.75]
    DPMSolver(4, diffusion_steps=500, rescale_timesteps=True).sample(models[2], z, cond)
    assert [float(call["timestep"][0]) for call in models[2].calls] == [998, 748.5, 499, 249.5]


@pytest.mark.parametrize("noise_schedule", ["scaled_linear", "squaredcos_cap_v2"])
def test_other_schedules(noise_schedule, denoiser):
    z, cond = z_and_cond()
    scheduler = DPMSolver(8, noise_schedule=noise_schedule, order=3)
    assert scheduler.sample(denoiser(1), z, cond).isfinite().all()
    assert -5.1 <= scheduler.plan[0].level.half_log_snr < -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm_type": "dpm++"}, "algorithm_type='dpm.*' is not one of dpmsolver, dpmsolver.., sde"),
        ({"order": 4, "method": "multi"}, "(?s)method='multi'.*order=4 is not one of 1, 2, 3"),
        ({"num_sampling_steps": 0}, "at least 1 step"),
        ({"algorithm_type": "sde-dpmsolver++", "method": "singlestep"}, "multistep"),
        ({"timesteps": "integer", "skip_type": "logSNR", "num_sampling_steps": 300}, "twice.*skip_type='time_uniform'"),
        ({"timesteps": "integer", "num_sampling_steps": 1000}, "=1000 .*twice.*Lower num_sampling_steps"),
        (
            {"timesteps": "integer", "skip_type": "time_quadratic", "num_sampling_steps": 150},
            "=150 .*visit timestep 2 twice.*Lower num_sampling_steps.*'fractional' or skip_type='time_uniform'",
        ),
        (
            {"timesteps": "integer", "noise_schedule": "squaredcos_cap_v2", "num_sampling_steps": 998},
            r"=998 .*from 995 down.*Lower num_sampling_steps, or use timesteps='fractional'\.$",
        ),
        ({"min_half_log_snr": 50.0}, "min_half_log_snr"),
        ({"noise_schedule": "exponential"}, "noise_schedule"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(UserError, match=message):
        DPMSolver(**arguments)


@pytest.mark.parametrize("final", ["sigma_min", "zero", "denoise_to_zero"])
@pytest.mark.parametrize("method", ["multistep", "singlestep"])
def test_whole_timesteps_are_visited_once_or_refused(final, method):
    """For every number of steps: a plan whose timesteps fall, or a `UserError`, never a division by zero."""
    refused = []
    for num_steps in range(100, 160, 3):
        options = {"skip_type": "time_quadratic", "timesteps": "integer", "final": final, "method": method}
        try:
            visited = [step.level.timestep for step in DPMSolver(num_steps, **options).plan]
        except UserError:
            refused.append(num_steps)
        else:
            assert all(a > b for a, b in itertools.pairwise(visited))
    assert refused
    assert refused != list(range(100, 160, 3))


def test_it_does_not_train(denoiser, rngs):
    z, cond = z_and_cond()
    with pytest.raises(UserError, match="type='iddpm'"):
        SCHEDULERS.build({"type": "dpm-solver"}).training_losses(denoiser(1), z, cond, generators=rngs())
