"""The named choices of IDDPM, and the booleans that older configs spell them with."""

from typing import NamedTuple

from opensora.utils.errors import UserError

# The first choice that the legacy booleans leave open is taken; the very first is the default.
CHOICES = {
    "prediction": ("eps", "x0", "v", "previous_x"),
    "variance": ("learned_range", "fixed_large", "fixed_small", "learned"),
    "loss": ("mse", "rescaled_mse", "rescaled_kl", "kl"),
    "sampler": ("ancestral", "ddim"),
}
LEARNED = ("learned_range", "learned")  # the model returns 2C channels

# legacy boolean -> the choice it speaks of, what True leaves open, what False leaves open
LEGACY = {
    "learn_sigma": ("variance", {*LEARNED}, {"fixed_large", "fixed_small"}),
    "sigma_small": ("variance", {"fixed_small"}, {*LEARNED, "fixed_large"}),
    "predict_xstart": ("prediction", {"x0"}, {"eps", "v", "previous_x"}),
    "use_kl": ("loss", {"kl", "rescaled_kl"}, {"mse", "rescaled_mse"}),
    "rescale_learned_sigmas": ("loss", {"rescaled_mse", "rescaled_kl"}, {"mse", "kl", "rescaled_kl"}),
}


class Options(NamedTuple):
    """What is predicted, how large the sampling noise is, what the loss is, how samples are drawn."""

    prediction: str
    variance: str
    loss: str
    sampler: str


def resolve_options(named: dict[str, str | None], legacy: dict[str, bool | None]) -> Options:
    """One value for each choice; None is "not set".

    Raises:
        UserError: an unknown name, or a legacy boolean that contradicts a name or another boolean.
    """
    options = Options(**{choice: _resolve(choice, named[choice], legacy) for choice in CHOICES})
    if options.loss == "rescaled_mse" and options.variance not in LEARNED:
        raise UserError(
            f"scheduler.loss='rescaled_mse' rescales the loss of a learned variance, but variance={options.variance!r} "
            "is fixed; use loss='mse' (rescale_learned_sigmas=False)."
        )
    return options


def _resolve(choice: str, name: str | None, legacy: dict[str, bool | None]) -> str:
    names = CHOICES[choice]
    if name is not None and name not in names:
        raise UserError(f"scheduler.{choice}={name!r} is not one of {', '.join(names)}.")
    left = [name] if name is not None else list(names)
    said = [] if name is None else [f"{choice}={name!r}"]
    for flag, (about, if_true, if_false) in LEGACY.items():
        value = legacy[flag]
        if about != choice or value is None:
            continue
        said.append(f"{flag}={value}")
        left = [n for n in left if n in (if_true if value else if_false)]
    if not left:
        raise UserError(f"scheduler: {' and '.join(said)} contradict each other; keep {choice}=... alone.")
    return left[0]
