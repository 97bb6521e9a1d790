import numpy as np
import pytest
import torch

from opensora.schedulers.noise_schedule import NAMES, Schedule, named_schedule, spaced_timesteps
from opensora.utils.errors import UserError

T = [0, 100, 250, 500, 750, 999]


def test_linear_values():
    table = named_schedule("linear", 1000).table
    known = [0.9999, 0.895142, 0.521423, 0.0777967, 0.00330016, 4.03583e-5]
    np.testing.assert_allclose(table["alphas_cumprod"][T], known, rtol=2e-6)  # the digits that are given
    np.testing.assert_allclose(np.exp(table["log_beta"][[0, 999]]), [1e-4, 0.02], rtol=1e-9)
    np.testing.assert_allclose(np.exp(table["log_posterior_variance"][[1, 999]]), [5.4532e-5, 0.0199999835], rtol=1e-5)


def test_cosine_values():
    table = named_schedule("squaredcos_cap_v2", 1000).table
    known = [0.9999587, 0.9715757, 0.8458880, 0.4922852, 0.1431786, 2.4288e-9]
    np.testing.assert_allclose(table["alphas_cumprod"][T], known, rtol=2e-5)  # the last one has 5 digits
    np.testing.assert_allclose(np.exp(table["log_beta"][[0, 1, 999]]), [4.128e-5, 4.614e-5, 0.999], rtol=2e-4)


def test_scaled_linear_values():
    abar = named_schedule("scaled_linear", 1000).table["alphas_cumprod"]
    np.testing.assert_allclose(abar[[0, 500, 999]], [0.99915, 0.2763327, 0.0046601], rtol=1e-5)


def test_betas_of_the_linear_schedule():
    betas = np.exp(named_schedule("linear", 1000).table["log_beta"])
    np.testing.assert_allclose(betas[[0, 500, 999]], [1e-4, 1e-4 + (0.02 - 1e-4) * 500 / 999, 0.02], rtol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1000, 250, 4000])
def test_every_schedule_is_finite_falls_and_keeps_its_last_level(name, steps):
    table = named_schedule(name, steps).table
    assert all(np.isfinite(column).all() for column in table.values())
    abar = table["alphas_cumprod"]
    assert (np.diff(abar) < 0).all()
    assert 0 <= abar[-1] < 0.01
    if name != "squaredcos_cap_v2":
        assert np.log(abar[-1]) == pytest.approx(
            np.log(named_schedule(name, 1000).table["alphas_cumprod"][-1]), rel=0.05
        )


def test_the_posterior_of_the_first_timestep_is_a_point():
    table = named_schedule("linear", 1000).table
    assert table["posterior_mean_coef_x_t"][0] == 0
    assert table["posterior_mean_coef_x_0"][0] == pytest.approx(1)
    variance = np.exp(table["log_beta"]) * (1 - table["alphas_cumprod_prev"]) / (1 - table["alphas_cumprod"])
    np.testing.assert_allclose(variance[[0, 1, 999]], [0, 5.4532e-5, 0.0199999835], rtol=1e-5)


def test_the_first_log_variances_are_the_posteriors_second():
    table = named_schedule("linear", 1000).table
    assert table["log_posterior_variance"][0] == table["log_posterior_variance"][1]
    assert table["log_fixed_large"][0] == table["log_posterior_variance"][1]
    assert np.array_equal(table["log_fixed_large"][1:], table["log_beta"][1:])


@pytest.mark.parametrize("name", ["linear", "squaredcos_cap_v2"])
def test_posterior_is_bayes_rule(name):
    """q(x_{t-1} | x_t, x_0) from the product of two Gaussians, without the paper's closed form."""
    table = named_schedule(name, 1000).table
    t = np.arange(1, 1000)
    prior_var = 1 - table["alphas_cumprod"][t - 1]  # x_{t-1} ~ N(sqrt(abar_{t-1}) x_0, prior_var)
    beta = np.exp(table["log_beta"][t])
    precision = 1 / prior_var + (1 - beta) / beta
    np.testing.assert_allclose(np.exp(table["log_posterior_variance"][t]), 1 / precision, rtol=1e-9)
    from_x_0 = np.sqrt(table["alphas_cumprod"][t - 1]) / prior_var / precision
    from_x_t = np.sqrt(1 - beta) / beta / precision
    np.testing.assert_allclose(table["posterior_mean_coef_x_0"][t], from_x_0, rtol=1e-9)
    np.testing.assert_allclose(table["posterior_mean_coef_x_t"][t], from_x_t, rtol=1e-9)


def test_respacing_keeps_abar_and_chains_its_betas():
    full = named_schedule("linear", 1000)
    visited = [0, 10, 400, 999]
    spaced = full.respaced(visited)
    np.testing.assert_array_equal(spaced.table["alphas_cumprod"], full.table["alphas_cumprod"][visited])
    np.testing.assert_allclose(
        np.cumprod(1 - np.exp(spaced.table["log_beta"])), spaced.table["alphas_cumprod"], rtol=1e-9
    )


def test_gather_and_at_agree_and_have_their_types():
    schedule = named_schedule("linear", 1000)
    rows = schedule.gather(torch.tensor([0, 999, 3]), ndim=5)
    for i, t in enumerate([0, 999, 3]):
        for gathered, number in zip(rows, schedule.at(t), strict=True):
            assert isinstance(number, float)
            assert gathered.shape == (3, 1, 1, 1, 1)
            assert gathered.dtype == torch.float32
            assert gathered[i].item() == np.float32(number)


def test_one_step_has_finite_numbers():
    assert all(np.isfinite(column).all() for column in Schedule(np.array([0.5])).table.values())


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"'scaled' is not one of linear, .* Did you mean 'scaled_linear'"):
        named_schedule("scaled", 1000)
    for steps in (0, 20):
        with pytest.raises(UserError, match=f"diffusion_steps={steps} is too few"):
            named_schedule("linear", steps)
    assert named_schedule("linear", 21).num_timesteps == 21


DDIM_STRIDES = {10: 100, 20: 50, 25: 40, 30: 34, 50: 20, 100: 10, 125: 8, 200: 5, 250: 4, 500: 2}
DDIM_ILLEGAL = [37, 41, 43, 45, 47, 49, 51, 52, 54, 55, 57, 75, 80, 90, 150, 300, 400]


@pytest.mark.parametrize("respacing", [None, ""])
def test_nothing_asked_keeps_all(respacing):
    assert spaced_timesteps(1000, respacing) == list(range(1000))


def test_known_subsets():
    hundred = spaced_timesteps(1000, "100")
    assert len(hundred) == 100
    assert hundred[:6] == [0, 10, 20, 30, 40, 50]
    assert hundred[-4:] == [969, 979, 989, 999]
    assert spaced_timesteps(1000, "20") == [
        *(0, 53, 105, 158, 210, 263, 315, 368, 421, 473),
        *(526, 578, 631, 684, 736, 789, 841, 894, 946, 999),
    ]
    assert spaced_timesteps(1000, "10") == list(range(0, 1000, 111))
    assert spaced_timesteps(1000, "250")[:3] == [0, 4, 8]
    assert spaced_timesteps(1000, "250")[-3:] == [991, 995, 999]
    sections = spaced_timesteps(300, "10,15,20")
    assert sections[:10] == list(range(0, 100, 11))
    assert sections[10:12] == [100, 107]
    assert len(sections) == 45
    assert sections[-1] == 299


def test_unequal_sections_cover_all():
    assert spaced_timesteps(10, "3,3,3") == [0, 2, 3, 4, 5, 6, 7, 8, 9]  # lengths 4, 3, 3; 1.5 rounds to even


@pytest.mark.parametrize("num_steps", [2, 3, 7, 23, 75, 223, 667, 999, 1000])
def test_a_count_is_kept_and_rises(num_steps):
    timesteps = spaced_timesteps(1000, str(num_steps))
    assert timesteps == sorted(set(timesteps))
    assert (len(timesteps), timesteps[0], timesteps[-1]) == (num_steps, 0, 999)


@pytest.mark.parametrize(("num_steps", "stride"), DDIM_STRIDES.items())
def test_ddim_strides(num_steps, stride):
    assert spaced_timesteps(1000, f"ddim{num_steps}") == list(range(0, 1000, stride))


@pytest.mark.parametrize("num_steps", DDIM_ILLEGAL)
def test_illegal_ddim_counts_raise(num_steps):
    with pytest.raises(UserError, match="no integer stride"):
        spaced_timesteps(1000, f"ddim{num_steps}")


def test_an_illegal_ddim_count_lists_legal_ones_near_it():
    with pytest.raises(UserError, match="exactly 51 of 1000") as caught:
        spaced_timesteps(1000, "ddim51")
    assert "ddim50, " in str(caught.value)
    assert "ddim53" in str(caught.value)


@pytest.mark.parametrize(
    ("respacing", "message"),
    [
        ("1001", "1001 of the 1000 timesteps of section 1"),
        ("10,600", "600 of the 500 timesteps of section 2"),
        ("0", "expected positive integers"),
        ("-5", "expected positive integers"),
        ("ddim", "expected positive integers"),
        ("10,,5", "expected positive integers"),
        ("1", "keeps timestep 0 only"),
        ("ddim1", "keeps timestep 0 only"),
    ],
)
def test_mistaken_respacings_are_named(respacing, message):
    with pytest.raises(UserError, match=message):
        spaced_timesteps(1000, respacing)
