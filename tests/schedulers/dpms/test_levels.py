"""Levels, orders and blocks."""

import numpy as np
import pytest

from opensora.schedulers.dpms import DPMSolver
from opensora.schedulers.dpms.dpm_solver import (
    CLEAN,
    SKIP_TYPES,
    VariancePreserving,
    block_orders,
    multistep,
    singlestep,
)
from opensora.schedulers.noise_schedule import named_schedule

ABAR = named_schedule("linear", 1000).table["alphas_cumprod"]
PROCESS = VariancePreserving(ABAR)
FIRST, LAST = PROCESS.level(999), PROCESS.level(0)


def test_a_level_has_the_alphas_cumprod_of_its_timestep():
    for t in (0, 1, 500, 999):
        level = PROCESS.level(t)
        assert level.alpha**2 == pytest.approx(ABAR[t], rel=1e-12)
        assert level.alpha**2 + level.sigma**2 == pytest.approx(1, rel=1e-15)
    between = PROCESS.level(500.25)
    assert np.log(between.alpha) == pytest.approx(0.5 * (0.75 * np.log(ABAR[500]) + 0.25 * np.log(ABAR[501])))


@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
def test_the_level_of_a_lambda(schedule):
    process = VariancePreserving(named_schedule(schedule, 1000).table["alphas_cumprod"])
    for t in (0.0, 0.3, 17.0, 444.4, 980.5, 999.0):
        found = process.level_of(process.level(t).half_log_snr)
        assert found.timestep == pytest.approx(t, abs=1e-6)
        assert found.alpha == pytest.approx(process.level(t).alpha, rel=1e-9)


def test_where_sampling_starts():
    """The linear schedule ends at lambda = -5.06, the cosine far below, where alpha is almost 0."""
    assert PROCESS.noisiest(-5.1).timestep == 999
    assert PROCESS.level(999).half_log_snr == pytest.approx(-5.06, abs=0.005)
    cosine = VariancePreserving(named_schedule("squaredcos_cap_v2", 1000).table["alphas_cumprod"])
    start = cosine.noisiest(-5.1)
    assert start.half_log_snr >= -5.1 > cosine.level(start.timestep + 1).half_log_snr
    assert 985 < start.timestep < 999


@pytest.mark.parametrize("skip_type", SKIP_TYPES)
@pytest.mark.parametrize("num_intervals", [1, 2, 3, 20, 250])
def test_a_grid_falls_from_the_first_level_to_the_last(skip_type, num_intervals):
    levels = PROCESS.grid(skip_type, FIRST, LAST, num_intervals)
    timesteps = [level.timestep for level in levels]
    assert len(levels) == num_intervals + 1
    assert timesteps[0] == pytest.approx(999, abs=1e-6)
    assert timesteps[-1] == pytest.approx(0, abs=1e-6)
    assert (np.diff(timesteps) < 0).all()
    assert (np.diff([level.half_log_snr for level in levels]) > 0).all()


def test_the_spacings():
    def of(skip_type, value):
        return np.diff([value(level) for level in PROCESS.grid(skip_type, FIRST, LAST, 10)])

    for steps in (
        of("time_uniform", lambda level: level.timestep),
        of("logSNR", lambda level: level.half_log_snr),
        of("time_quadratic", lambda level: (level.timestep + 1) ** 0.5),
        of("karras", lambda level: (level.sigma / level.alpha) ** (1 / 7)),
    ):
        assert steps == pytest.approx(steps[0], rel=1e-6)


@pytest.mark.parametrize("num_intervals", [1, 3, 14, 20, 999])
def test_rounded_timesteps_are_those_of_diffusers(num_intervals):
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler()
    scheduler.set_timesteps(num_intervals)
    levels = [step.level for step in DPMSolver(num_intervals, timesteps="integer").plan]
    assert [level.timestep for level in levels] == scheduler.timesteps.tolist()
    sigmas = [level.sigma / level.alpha for level in levels]
    np.testing.assert_allclose(scheduler.sigmas[:-1].numpy(), sigmas, rtol=1e-4)  # theirs are fp32


@pytest.mark.parametrize(
    ("num_steps", "order", "expected"),
    [
        (10, 3, [3, 3, 3, 1]),
        (14, 3, [3, 3, 3, 3, 2]),
        (15, 3, [3, 3, 3, 3, 2, 1]),
        (20, 3, [3] * 6 + [2]),
        (15, 2, [2] * 7 + [1]),
        (1, 3, [1]),
        (2, 3, [2]),
        (3, 3, [2, 1]),
        (4, 2, [2, 1, 1]),
        (5, 1, [1] * 5),
    ],
)
def test_block_orders_of_the_authors(num_steps, order, expected):
    assert block_orders(num_steps, order, lower_order_final=True, ends_clean=False) == expected


def test_blocks_of_full_order_and_before_a_clean_end():
    assert block_orders(15, 3, lower_order_final=False, ends_clean=False) == [3] * 5
    assert block_orders(15, 3, lower_order_final=False, ends_clean=True) == [3, 3, 3, 3, 2, 1]
    assert block_orders(14, 3, lower_order_final=False, ends_clean=True) == [3, 3, 3, 3, 1, 1]
    assert block_orders(13, 3, lower_order_final=False, ends_clean=True) == [3, 3, 3, 3, 1]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 15, 20])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("end", [LAST, CLEAN])
def test_every_plan_calls_the_model_once_a_step(num_steps, order, end):
    final = "zero" if end is CLEAN else "sigma_min"
    levels = PROCESS.grid("time_uniform", FIRST, LAST, num_steps)
    for method in ("multistep", "singlestep"):
        steps = DPMSolver(num_steps, method=method, order=order, final=final, lower_order_final="never").plan
        assert [step.level for step in steps] == levels[:-1]
        for i, step in enumerate(steps):
            for n, update in enumerate(step.updates):
                assert update.base <= n <= i  # what a frame with n earlier steps has
                assert len(update.weights) <= n + 1
                assert np.isfinite([update.keep, *update.weights, update.noise]).all()


def test_multistep_warms_up_and_cools_down():
    levels = PROCESS.grid("time_uniform", FIRST, LAST, 6)
    for lower, orders in ((True, [1, 2, 3, 3, 2, 1]), (False, [1, 2, 3, 3, 3, 3])):
        steps = multistep(levels, "dpmsolver++", 3, midpoint=True, lower_order_final=lower)
        assert [len(step.updates) for step in steps] == orders


@pytest.mark.parametrize(("rule", "limit"), [("few_steps", 10), ("below_15", 15), ("always", 1000), ("never", 0)])
@pytest.mark.parametrize("num_steps", [9, 10, 14, 15, 20])
@pytest.mark.parametrize("order", [2, 3])
def test_below_how_many_steps_the_last_orders_are_lower(rule, limit, num_steps, order):
    """Open-Sora's and the authors' multistep sampler below 10 steps, diffusers' below 15."""
    counted = list(range(1, order)) + [order] * (num_steps - order + 1)
    if num_steps < limit:
        counted[-order:] = [min(n, left) for n, left in zip(counted[-order:], range(order, 0, -1), strict=True)]
    given = {} if rule == "few_steps" else {"lower_order_final": rule}  # the default
    plan = DPMSolver(num_steps, order=order, **given).plan
    assert [len(step.updates[-1].weights) for step in plan] == counted


def test_a_frame_that_enters_inside_a_block_steps_from_level_to_level():
    levels = PROCESS.grid("time_uniform", FIRST, LAST, 3)
    steps = singlestep([levels], "dpmsolver++", midpoint=True)
    assert [update.base for update in steps[2].updates] == [0, 0, 2]
    assert steps[2].updates[0] == steps[2].updates[1]
    assert steps[2].updates[2].weights[1] == 0  # the paper's third order leaves out the middle
