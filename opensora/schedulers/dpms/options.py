"""The choices of DPM-Solver by name, and which of them go together."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from opensora.schedulers.dpms.grid import SKIP_TYPES
from opensora.schedulers.dpms.predictions import PREDICTIONS
from opensora.schedulers.dpms.process import Level
from opensora.schedulers.dpms.updates import RATES
from opensora.utils.errors import UserError

CHOICES: dict[str, Iterable[str | int]] = {
    "algorithm_type": RATES,
    "method": ("multistep", "singlestep"),
    "order": (1, 2, 3),
    "solver_type": ("dpmsolver", "taylor"),
    "skip_type": SKIP_TYPES,
    "lower_order_final": ("few_steps", "always", "never"),
    "final": ("sigma_min", "zero", "denoise_to_zero"),
    "timesteps": ("fractional", "integer"),
    "prediction": PREDICTIONS,
    "thresholding": ("none", "dynamic"),
}
FEW_STEPS = 15  # fewer than this: the last steps take lower orders


def check_choices(chosen: dict[str, str | int]) -> None:
    """Raises a UserError that names every choice that is unknown."""
    wrong = [
        f"scheduler.{name}={value!r} is not one of {', '.join(map(str, CHOICES[name]))}."
        for name, value in chosen.items()
        if value not in CHOICES[name]
    ]
    if wrong:
        raise UserError("\n".join(wrong))


def check_together(chosen: dict[str, str | int], num_sampling_steps: int, diffusion_steps: int) -> None:
    """Raises a UserError for choices that exclude one another."""
    if num_sampling_steps < 1:
        raise UserError(f"scheduler.num_sampling_steps={num_sampling_steps}: sampling takes at least 1 step.")
    if chosen["algorithm_type"] == "sde-dpmsolver++" and chosen["method"] == "singlestep":
        raise UserError(
            "scheduler.algorithm_type='sde-dpmsolver++' draws noise at every step, which a singlestep block, going back to "
            "its first level, would throw away; use method='multistep'."
        )
    if chosen["timesteps"] == "fractional":
        return
    if not str(chosen["skip_type"]).startswith("time_"):
        raise UserError(
            f"scheduler.timesteps='integer' rounds steps of time; skip_type={chosen['skip_type']!r} steps in the noise "
            "level and would visit timesteps twice. Use skip_type='time_uniform', or timesteps='fractional'."
        )
    if num_sampling_steps > diffusion_steps - 1:
        raise UserError(
            f"scheduler.num_sampling_steps={num_sampling_steps} with timesteps='integer': there are "
            f"{diffusion_steps - 1} steps between {diffusion_steps} timesteps."
        )


def check_distinct(levels: Sequence[Level], skip_type: str) -> None:
    """Raises a UserError if two of the levels that are visited coincide: a step between them would go nowhere.

    Rounded timesteps do so where a grid's steps are shorter than 1: near the data, or all of them where sampling starts below
    the last timestep, as the cosine does.
    """
    twice = next((a.timestep for a, b in pairwise(levels) if a.timestep == b.timestep), None)
    if twice is None:
        return
    other = "" if skip_type == "time_uniform" else " or skip_type='time_uniform'"
    raise UserError(
        f"scheduler.num_sampling_steps={len(levels) - 1} with timesteps='integer' and skip_type={skip_type!r} would visit "
        f"timestep {twice} twice: on the way from {levels[0].timestep} down there are steps shorter than 1. Lower "
        f"num_sampling_steps, or use timesteps='fractional'{other}."
    )


def thresholds(thresholding: str, ratio: float | None, max_value: float | None) -> tuple[float, float] | None:
    """Ratio and maximum of dynamic thresholding, the paper's 0.995 and 1 where not set; None without it."""
    if thresholding == "none":
        if ratio is not None or max_value is not None:
            raise UserError(
                "scheduler.thresholding_ratio and thresholding_max have no effect with thresholding='none'; set "
                "thresholding='dynamic', or drop them."
            )
        return None
    ratio, max_value = 0.995 if ratio is None else ratio, 1.0 if max_value is None else max_value
    if not 0 < ratio <= 1:
        raise UserError(f"scheduler.thresholding_ratio={ratio} is a part of all values: above 0, at most 1.")
    if max_value <= 0:
        raise UserError(f"scheduler.thresholding_max={max_value} must be positive.")
    return ratio, max_value


def lowers_the_last_orders(chosen: dict[str, str | int], num_sampling_steps: int) -> bool:
    """What `lower_order_final` means for so many steps.

    With "few_steps", below 15. The singlestep solver of order 3 always does so, as in the authors' code.
    """
    if chosen["lower_order_final"] != "few_steps":
        return chosen["lower_order_final"] == "always"
    return num_sampling_steps < FEW_STEPS or (chosen["method"] == "singlestep" and chosen["order"] == 3)
