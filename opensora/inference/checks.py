"""What is looked at before and after sampling: sizes that the VAE makes, numbers that are finite."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opensora.utils.errors import UserError


def check_size(vae: Any, num_frames: int, image_size: tuple[int, int]) -> tuple[int, int, int]:
    """The latent size (t, h, w) of a video.

    Raises:
        UserError: the VAE makes no such video; the message names the nearest that it makes.
    """
    legal = vae.legal_num_frames(num_frames)
    if legal != num_frames:
        raise UserError(
            f"num_frames={num_frames}: this VAE does not make videos of that length; the nearest is {legal}."
        )
    return vae.latent_size((num_frames, *image_size))


def check_finite(values: Tensor, what: str, prompts: Sequence[str], indices: Sequence[int], settings: str) -> None:
    """Raise a `UserError` that names the prompts for which `values [B, ...]` are not finite."""
    bad = [b for b, row in enumerate(values) if not row.isfinite().all()]
    if bad:
        names = "; ".join(f"prompt {indices[b]} {prompts[b][:80]!r}" for b in bad)
        raise UserError(
            f"{what} are not finite (NaN or infinite) for {names} ({settings}). Nothing is saved for this batch. "
            "Try --dtype fp32 or a lower --cfg-scale; if that does not help, the checkpoint is broken."
        )


def calls_parts(scheduler: Any) -> bool:
    """Whether a sampler calls a model's parts one by one (NOVA's), instead of the whole model once a step."""
    return not hasattr(scheduler, "solver")


def refuse_for_parts(scheduler: Any, settings: Mapping[str, Any]) -> None:
    """Refuse what works on calls of the whole model.

    Args:
        settings: name -> value; a value that is false is not set.

    Raises:
        UserError: one of them is set, and the sampler calls parts.
    """
    if calls_parts(scheduler) and (found := [name for name, value in settings.items() if value]):
        raise UserError(
            f"{found[0]} has no effect with {type(scheduler).__name__}, which calls the model's parts one by one: leave it out."
        )
