import pytest

from opensora.schedulers.iddpm import IDDPM
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
