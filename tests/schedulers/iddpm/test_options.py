import pytest

from opensora.schedulers.iddpm import IDDPM
from opensora.schedulers.iddpm.options import spaced_timesteps
from opensora.utils.errors import UserError

DEFAULT = ("eps", "learned_range", "mse", "ancestral")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, DEFAULT),
        # the reference's defaults, spelled out
        (
            {
                "learn_sigma": True,
                "predict_xstart": False,
                "sigma_small": False,
                "use_kl": False,
                "rescale_learned_sigmas": False,
            },
            DEFAULT,
        ),
        ({"learn_sigma": False}, ("eps", "fixed_large", "mse", "ancestral")),
        ({"learn_sigma": False, "sigma_small": True}, ("eps", "fixed_small", "mse", "ancestral")),
        ({"sigma_small": True}, ("eps", "fixed_small", "mse", "ancestral")),
        ({"predict_xstart": True}, ("x0", "learned_range", "mse", "ancestral")),
        ({"use_kl": True}, ("eps", "learned_range", "rescaled_kl", "ancestral")),
        ({"use_kl": True, "rescale_learned_sigmas": False}, ("eps", "learned_range", "rescaled_kl", "ancestral")),
        ({"rescale_learned_sigmas": True}, ("eps", "learned_range", "rescaled_mse", "ancestral")),
        ({"predict_xstart": False, "prediction": "v"}, ("v", "learned_range", "mse", "ancestral")),
        ({"loss": "kl", "use_kl": True}, ("eps", "learned_range", "kl", "ancestral")),
        ({"variance": "fixed_small", "sampler": "ddim"}, ("eps", "fixed_small", "mse", "ddim")),
    ],
)
def test_names_and_legacy_booleans(options, expected):
    scheduler = IDDPM(**options)
    assert (scheduler.prediction, scheduler.variance, scheduler.loss, scheduler.sampler) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variance": "learned_range", "learn_sigma": False}, "variance='learned_range' and learn_sigma=False"),
        ({"variance": "fixed_large", "sigma_small": True}, "variance='fixed_large' and sigma_small=True"),
        ({"variance": "fixed_small", "sigma_small": False}, "variance='fixed_small' and sigma_small=False"),
        ({"learn_sigma": True, "sigma_small": True}, "learn_sigma=True and sigma_small=True"),
        ({"prediction": "v", "predict_xstart": True}, "prediction='v' and predict_xstart=True"),
        ({"loss": "mse", "use_kl": True}, "loss='mse' and use_kl=True"),
        ({"loss": "mse", "rescale_learned_sigmas": True}, "loss='mse' and rescale_learned_sigmas=True"),
        ({"prediction": "epsilon"}, "prediction='epsilon' is not one of eps, x0, v"),
        ({"sampler": "ddpm"}, "sampler='ddpm' is not one of ancestral, ddim"),
        ({"loss": "rescaled_mse", "variance": "fixed_small"}, "variance='fixed_small' is fixed"),
    ],
)
def test_contradictions_and_unknown_names(options, message):
    with pytest.raises(UserError, match=message):
        IDDPM(**options)


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
        ("0", "not a positive integer"),
        ("-5", "not a positive integer"),
        ("ddim", "not a positive integer"),
        ("10,,5", "not a positive integer"),
        ("1", "keeps timestep 0 only"),
        ("ddim1", "keeps timestep 0 only"),
    ],
)
def test_mistakes_are_named(respacing, message):
    with pytest.raises(UserError, match=message):
        spaced_timesteps(1000, respacing)
