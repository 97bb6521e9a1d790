"""Timestep strategies and weights against the published values, and in every scheduler."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from opensora.registry import SCHEDULERS
from opensora.schedulers.noise_schedule import named_schedule
from opensora.schedulers.timesteps import (
    build_sampling,
    build_weights,
    flow_alphas_cumprod,
    meaningful_steps,
    quantile,
    speed_density,
    speedit_density,
)
from opensora.utils.errors import UserError
from opensora.utils.seed import generators

ABAR = named_schedule("linear", 1000).table["alphas_cumprod"]
SNR = ABAR / (1 - ABAR)


def weights(choice, prediction="eps", abar=ABAR):
    return build_weights(choice, "uniform", abar, prediction).table.double().numpy()


def tanh_rule():
    """SpeeDiT's probabilities before its dual sampling, as published."""
    p = np.tanh(1e6 * (np.gradient(np.sqrt(1 - ABAR)) - 1e-4)) + 1.5
    return p / p.sum()


def test_the_tanh_rule_of_speedit():
    p = tanh_rule()
    high, low = p.max(), p.min()
    assert (high, low) == (pytest.approx(0.0014024, abs=5e-8), pytest.approx(0.00028047, abs=5e-9))
    assert high / low == pytest.approx(5, rel=1e-6)
    assert (np.isclose(p, high, rtol=0.05).sum(), np.isclose(p, low, rtol=0.05).sum()) == (640, 357)  # 3 between them
    assert p[:642].sum() == pytest.approx(0.8995, abs=5e-5)


@pytest.mark.parametrize(("schedule", "m"), [("linear", 642), ("squaredcos_cap_v2", 959), ("scaled_linear", 866)])
def test_meaningful_steps(schedule, m):
    assert meaningful_steps(named_schedule(schedule, 1000).table["alphas_cumprod"]) == m


def test_meaningful_steps_follow_the_number_of_timesteps():
    assert meaningful_steps(named_schedule("linear", 4000).table["alphas_cumprod"]) == pytest.approx(4 * 642, abs=8)


def test_the_density_of_speedit_after_dual_sampling():
    p = speedit_density(ABAR)
    assert p.sum() == pytest.approx(1)
    masses = [p[:100].sum(), p[100:300].sum(), p[300:642].sum(), p[642:].sum()]
    assert masses == [pytest.approx(value, abs=5e-4) for value in (0.153, 0.309, 0.487, 0.051)]
    assert p[:642].sum() == pytest.approx(0.949, abs=5e-4)
    assert 1000 * p[0] == pytest.approx(0.88, abs=0.01)
    assert 1000 * p[50:358] == pytest.approx(1.54, abs=0.01)  # down here are the mirror images of both sides of m
    assert 1000 * p[358:630] == pytest.approx(1.40, abs=0.01)
    assert 1000 * p[642] == pytest.approx(0.88, abs=0.01)
    assert 1000 * p[700:] == pytest.approx(0.14, abs=0.005)


def test_a_million_draws_have_that_density():
    """Against the seed's own procedure: half of the draws, and their mirror images."""
    u = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    cumulative = torch.cat([torch.zeros(1), torch.from_numpy(speedit_density(ABAR)).cumsum(0)]).double()
    ours = torch.bincount((quantile(cumulative, u) * 1000).long(), minlength=1000) / 1e6
    p = torch.from_numpy(tanh_rule())
    t = torch.multinomial(p, 500_000, replacement=True, generator=torch.Generator().manual_seed(1))
    seeds = torch.bincount(torch.cat([t, torch.where(t < 642, 642 - t, t - 642)]), minlength=1000) / 1e6
    for histogram in (ours, seeds):
        edges = [0, 50, 100, 300, 500, 642, 700, 850, 1000]
        for a, b in pairwise(edges):
            expected = float(speedit_density(ABAR)[a:b].sum())
            assert float(histogram[a:b].sum()) == pytest.approx(expected, abs=5 * (expected / 1e6) ** 0.5)
    # of one timestep: some 1500 draws each, 4 standard errors of the difference
    assert (ours - seeds).abs().max() < 4.5 * (2 * 0.00154 / 1e6) ** 0.5


def test_p2_is_one_minus_abar():
    w = weights("p2")
    np.testing.assert_allclose(w, 1 - ABAR, rtol=1e-6)
    np.testing.assert_allclose(
        w[[0, 100, 200, 300, 500, 642, 700]], [1e-4, 0.105, 0.344, 0.606, 0.922, 0.985, 0.993], atol=6e-4
    )
    assert w.mean() == pytest.approx(0.724, abs=5e-4)
    assert (w * speedit_density(ABAR)).sum() == pytest.approx(0.582, abs=5e-4)
    np.testing.assert_allclose(weights({"type": "p2", "k": 2.0, "gamma": 0.5}), (2 + SNR) ** -0.5, rtol=1e-5)


def test_the_density_of_speed():
    p = speed_density(ABAR, mirrored=0)
    assert (p[0], p[699]) == (pytest.approx(0.0013158, abs=5e-8),) * 2
    assert (p[700], p[999]) == (pytest.approx(0.00026316, abs=5e-9),) * 2
    assert p[:700].sum() == pytest.approx(0.921, abs=5e-4)
    np.testing.assert_array_equal(p, speed_density(ABAR, tau=0.7, mirrored=0))
    dual = speed_density(ABAR)
    assert dual.sum() == pytest.approx(1)
    assert dual[700:].sum() == pytest.approx(p[700:].sum() / 2)  # m = 642: nothing is mirrored up there


def test_the_weights_of_speed():
    w = weights("speed")
    assert w[:700].argmax() == 219
    expected = [0.409, 0.539, 0.600, 0.577, 0.516, 0.458, 0.423, 0.407]
    np.testing.assert_allclose(w[[0, 100, 219, 300, 400, 500, 600, 699]], expected, atol=6e-4)
    assert (w[700:] == 1).all()
    assert (w * speed_density(ABAR, mirrored=0)).sum() == pytest.approx(0.544, abs=5e-4)
    theory = weights({"type": "speed", "lam": 0.8, "tau": None})
    assert (theory.min(), theory.max()) == (pytest.approx(0.2), pytest.approx(0.8))


@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
def test_min_snr_weighs_the_loss_of_x_0_alike_whatever_is_predicted(schedule):
    """Each prediction's error, turned into one of x_0, has the weight min(SNR, 5) of Hang et al."""
    abar = named_schedule(schedule, 1000).table["alphas_cumprod"]
    snr = abar / (1 - abar)
    per_x_0 = {"eps": (1 - abar) / abar, "x0": 1.0, "v": 1 - abar}  # |error of x_0|^2 for |error|^2 = 1
    for prediction, factor in per_x_0.items():
        np.testing.assert_allclose(
            weights("min-snr", prediction, abar), np.minimum(snr, 5) * factor, rtol=2e-6, atol=1e-12
        )
    tau = (np.arange(1000) + 0.5) / 1000
    flow = flow_alphas_cumprod(1000)
    expected = np.minimum(((1 - tau) / tau) ** 2, 5) * tau**2
    np.testing.assert_allclose(weights("min-snr", "velocity", flow), expected, rtol=2e-6, atol=1e-9)


def test_no_weight_is_negative_or_not_finite():
    for abar in (ABAR, flow_alphas_cumprod(1000)):
        for choice in ("p2", "min-snr", "speed"):
            for prediction in ("v", "x0") if choice == "min-snr" else ("v",):
                w = weights(choice, prediction, abar)
                assert np.isfinite(w).all()
                assert (w >= 0).all()


STRATEGIES = ["uniform", "logit-normal", "speedit", "speed"]
SCHEDULER_SETTINGS = [
    {"type": "iddpm", "variance": "fixed_small"},
    {
        "type": "iddpm",
        "variance": "fixed_small",
        "diffusion_steps": 64,
        "noise_schedule": "squaredcos_cap_v2",
        "prediction": "v",
    },
    {"type": "rflow"},
    {"type": "rflow", "time": "discrete"},
]


def toy_model(x, timestep, **_):
    return torch.tanh(x)


@pytest.mark.parametrize("settings", SCHEDULER_SETTINGS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("weighting", ["none", "p2", "min-snr", "speed"])
def test_every_strategy_in_every_scheduler(settings, strategy, weighting):
    choice = {"type": "speed", "tau": 0.7} if strategy == "speed" else strategy
    weight = {"type": "speed", "tau": 0.7} if weighting == "speed" else weighting
    scheduler = SCHEDULERS.build({**settings, "timestep_sampling": choice, "loss_weighting": weight})
    x0 = torch.randn(6, 2, 2, 3, 3, generator=torch.Generator().manual_seed(0))

    def losses(ids):
        return scheduler.training_losses(toy_model, x0[ids], {}, generators=generators(7, ids=ids))

    whole = losses([0, 1, 2, 3, 4, 5])
    parts = torch.cat([losses([0, 1]), losses([2]), losses([3, 4, 5])])
    assert whole.isfinite().all()
    torch.testing.assert_close(whole, parts)  # a timestep does not depend on its batch


def test_uniform_draws_are_those_of_the_plain_scheduler_bit_for_bit():
    x0 = torch.randn(4, 2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    plain = SCHEDULERS.build({"type": "iddpm", "variance": "fixed_small"})
    for settings in (
        {"type": "iddpm-speed", "timestep_sampling": "uniform"},
        {"type": "iddpm", "loss_weighting": "none"},
    ):
        other = SCHEDULERS.build({**settings, "variance": "fixed_small"})
        a, b = (s.training_losses(toy_model, x0, {}, generators=generators(3, ids=range(4))) for s in (plain, other))
        assert torch.equal(a, b)


def test_the_names_of_speedit():
    """`iddpm-speed` and the strategy's name are one thing."""
    x0 = torch.randn(64, 1, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    out = []
    for settings in (
        {"type": "iddpm-speed"},
        {"type": "iddpm", "timestep_sampling": "speedit"},
        {"type": "iddpm", "timestep_sampling": "speedit", "loss_weighting": "p2"},
    ):
        scheduler = SCHEDULERS.build({**settings, "variance": "fixed_small"})
        out.append(scheduler.training_losses(toy_model, x0, {}, generators=generators(3, ids=range(64))))
    assert all(torch.equal(out[0], other) for other in out[1:])


@pytest.mark.parametrize("variance", ["fixed_small", "learned_range"])
def test_weights_touch_the_mse_term_only(denoiser, variance):
    x0, noise, t = torch.randn(2, 4, 3, 5, 5), torch.randn(2, 4, 3, 5, 5), torch.tensor([100, 700])
    cond, n = {"y": torch.zeros(2, 1, 5, 6)}, 2 if variance == "learned_range" else 1

    def losses(**settings):
        return SCHEDULERS.build({"type": "iddpm", "variance": variance, **settings}).training_losses(
            denoiser(n), x0, cond, t=t, noise=noise
        )

    mse = SCHEDULERS.build({"type": "iddpm", "variance": "fixed_small"}).training_losses(
        denoiser(1), x0, cond, t=t, noise=noise
    )
    expected = losses() - mse + mse * torch.from_numpy(1 - ABAR[t.numpy()]).float()
    torch.testing.assert_close(losses(loss_weighting="p2"), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="weighs the MSE, which loss='kl' does not have"):
        losses(loss_weighting="p2", loss="kl")
    if n == 2:
        assert losses(loss="kl", timestep_sampling="speedit").isfinite().all()


def test_weights_of_a_flow(denoiser):
    x0, noise, t = torch.randn(2, 4, 3, 5, 5), torch.randn(2, 4, 3, 5, 5), torch.tensor([200.5, 700.5])
    cond = {"y": torch.zeros(2, 1, 5, 6)}

    def losses(**settings):
        return SCHEDULERS.build({"type": "rflow", **settings}).training_losses(denoiser(1), x0, cond, t=t, noise=noise)

    tau = t / 1000
    torch.testing.assert_close(losses(loss_weighting="p2"), losses() / (1 + ((1 - tau) / tau) ** 2))


@pytest.mark.parametrize("settings", [s for s in SCHEDULER_SETTINGS if "diffusion_steps" not in s], ids=str)
def test_the_model_gets_distinct_timesteps_under_autocast(settings):
    """bf16 has 8 bits: of a thousand timesteps it keeps 507 apart."""
    seen = []

    def model(x, timestep, **cond):
        seen.append(timestep)
        return toy_model(x, timestep, **cond)

    scheduler = SCHEDULERS.build(settings)
    with torch.autocast("cpu", torch.bfloat16):
        x0, t = torch.zeros(1000, 1, 1, 1, 1), torch.arange(1000)
        scheduler.training_losses(model, x0.bfloat16(), {}, t=t, noise=torch.zeros_like(x0))
    assert len(seen[0].unique()) == 1000
    assert len(seen[0].bfloat16().unique()) == 507


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("speedy", "expected one of uniform, .*Did you mean 'speed'"),
        ({"type": "speed", "K": 3}, "'speed' takes no 'K'.*It takes: k, mirrored, tau"),
        ({"k": 3}, "expected one of uniform"),
        (5, "timestep_sampling=5: expected one of uniform"),
        ({"type": "logit-normal", "loc": "x"}, "loc='x': expected a number"),
        ({"type": "speed", "tau": 2000}, "tau=2000 is not in"),
        ({"type": "speed", "k": 0}, "must be positive"),
        ({"type": "speedit", "threshold": 1e-9}, "never rises by less"),
        ({"type": "logit-normal", "scale": 0}, "must be positive"),
        ("loss-second-moment", "'loss-second-moment' was removed"),
    ],
)
def test_mistakes_in_sampling(choice, message):
    with pytest.raises(UserError, match=message):
        build_sampling(choice, ABAR)


@pytest.mark.parametrize(
    ("choice", "prediction", "message"),
    [
        ("snr", "eps", "Did you mean 'min-snr'"),
        ({"type": "p2", "gama": 1}, "eps", "Did you mean 'gamma'"),
        ({"type": "speed", "lam": 0.3}, "eps", "lam=0.3 is not in"),
    ],
)
def test_mistakes_in_weighting(choice, prediction, message):
    with pytest.raises(UserError, match=message):
        build_weights(choice, "uniform", ABAR, prediction)


@pytest.mark.parametrize("seed", range(20))
def test_quantile_is_the_inverse_of_any_density(seed):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(1 + seed * 7, generator=g, dtype=torch.float64) + 1e-3
    cumulative = torch.cat([torch.zeros(1, dtype=torch.float64), (p / p.sum()).cumsum(0)])
    u = torch.cat([torch.rand(200, generator=g), torch.tensor([0.0, 1 - 2**-24])])
    time = quantile(cumulative, u)
    assert ((time >= 0) & (time < 1)).all()
    grid = torch.arange(len(p) + 1).double() / len(p)
    back = torch.from_numpy(np.interp(time.double().numpy(), grid.numpy(), cumulative.numpy()))
    torch.testing.assert_close(back, u.double(), rtol=0, atol=1e-6 * len(p))
