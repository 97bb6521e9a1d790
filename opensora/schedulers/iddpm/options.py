"""The named choices of IDDPM, the booleans that older configs spell them with, and which timesteps a sampler visits."""

from itertools import accumulate, repeat

from opensora.schedulers.iddpm.gaussian import LEARNED
from opensora.utils.errors import UserError

# The first choice that the legacy booleans leave open is taken; the very first is the default.
CHOICES = {
    "prediction": ("eps", "x0", "v", "previous_x"),
    "variance": ("learned_range", "fixed_large", "fixed_small", "learned"),
    "loss": ("mse", "rescaled_mse", "rescaled_kl", "kl"),
    "sampler": ("ancestral", "ddim"),
}

# legacy boolean -> the choice it speaks of, what True leaves open, what False leaves open
LEGACY = {
    "learn_sigma": ("variance", {*LEARNED}, {"fixed_large", "fixed_small"}),
    "sigma_small": ("variance", {"fixed_small"}, {*LEARNED, "fixed_large"}),
    "predict_xstart": ("prediction", {"x0"}, {"eps", "v", "previous_x"}),
    "use_kl": ("loss", {"kl", "rescaled_kl"}, {"mse", "rescaled_mse"}),
    "rescale_learned_sigmas": ("loss", {"rescaled_mse", "rescaled_kl"}, {"mse", "kl", "rescaled_kl"}),
}


def resolve_options(named: dict[str, str | None], legacy: dict[str, bool | None]) -> tuple[str, str, str, str]:
    """Prediction, variance, loss and sampler; None is "not set".

    Raises:
        UserError: an unknown name, or a legacy boolean that contradicts a name or another boolean.
    """
    resolved = []
    for choice, names in CHOICES.items():
        name = named[choice]
        if name is not None and name not in names:
            raise UserError(f"scheduler.{choice}={name!r} is not one of {', '.join(names)}.")
        left = names if name is None else (name,)
        set_by = [] if name is None else [f"{choice}={name!r}"]
        for flag, (about, if_true, if_false) in LEGACY.items():
            value = legacy[flag]
            if about == choice and value is not None:
                set_by.append(f"{flag}={value}")
                left = tuple(n for n in left if n in (if_true if value else if_false))
        if not left:
            raise UserError(f"scheduler: {' and '.join(set_by)} contradict each other; keep {choice}=... alone.")
        resolved.append(left[0])
    prediction, variance, loss, sampler = resolved
    if loss == "rescaled_mse" and variance not in LEARNED:
        raise UserError(
            f"scheduler.loss='rescaled_mse' rescales the loss of a learned variance, but variance={variance!r} is fixed; use "
            "loss='mse' (rescale_learned_sigmas=False)."
        )
    return prediction, variance, loss, sampler


def spaced_timesteps(diffusion_steps: int, respacing: str | None) -> list[int]:
    """Which of the T training timesteps a sampler visits, ascending (Nichol & Dhariwal 2021, section 4).

    Args:
        respacing: None or "" visits all; "N" visits N, first and last included; "a,b,c" cuts [0, T) in three equal
            sections and visits a, b and c timesteps in them; "ddimN" visits 0, s, 2s, ... for an integer stride s (Song et
            al. 2021).
    """
    if not respacing:
        return list(range(diffusion_steps))
    if respacing.startswith("ddim"):
        timesteps = _integer_stride(diffusion_steps, _positive(respacing.removeprefix("ddim"), respacing))
    else:
        sections = [_positive(part, respacing) for part in respacing.split(",")]
        timesteps = _sections(diffusion_steps, sections, respacing)
    if timesteps == [0] and diffusion_steps > 1:
        raise UserError(
            f"num_sampling_steps / timestep_respacing {respacing!r} keeps timestep 0 only, where the input is almost "
            "clean: sampling from noise needs at least 2 steps."
        )
    return timesteps


def _positive(text: str, respacing: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise UserError(
            f"num_sampling_steps / timestep_respacing {respacing!r}: {text!r} is not a positive integer. "
            "Write 'N', 'a,b,c' or 'ddimN'."
        )
    return int(text)


def _integer_stride(diffusion_steps: int, num_steps: int) -> list[int]:
    by_length = {len(range(0, diffusion_steps, s)): s for s in range(diffusion_steps, 0, -1)}  # the smallest stride
    if num_steps in by_length:
        return list(range(0, diffusion_steps, by_length[num_steps]))
    nearby = sorted(sorted(by_length, key=lambda n: abs(n - num_steps))[:4])
    raise UserError(
        f"timestep_respacing 'ddim{num_steps}': no integer stride visits exactly {num_steps} of {diffusion_steps} "
        f"timesteps. Nearby counts that work: {', '.join(f'ddim{n}' for n in nearby)}; or '{num_steps}', whose "
        "stride is fractional."
    )


def _sections(diffusion_steps: int, counts: list[int], respacing: str) -> list[int]:
    size, num_longer = divmod(diffusion_steps, len(counts))
    timesteps: list[int] = []
    start = 0
    for i, count in enumerate(counts):
        length = size + (i < num_longer)
        if count > length:
            raise UserError(
                f"num_sampling_steps / timestep_respacing {respacing!r} asks for {count} of the {length} timesteps "
                f"of section {i + 1} (diffusion_steps={diffusion_steps}); lower it to at most {length}."
            )
        stride = (length - 1) / max(count - 1, 1)
        # a running sum, not i * stride: the two round differently at halves, and OpenAI's code sums
        timesteps += [start + round(x) for x in accumulate(repeat(stride, count - 1), initial=0.0)]
        start += length
    return timesteps
