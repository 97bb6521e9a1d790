"""What the denoiser is told beside the latents: the text, "no text" for guidance, the video's numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opensora.utils.errors import UserError

Condition = dict[str, Tensor]


def condition(text_encoder: Any, texts: Sequence[str], numbers: dict[str, float], device: torch.device) -> Condition:
    """Text features `y [B, 1, L, D]`, their `mask [B, L]`, and each number as [B], fp32."""
    text = text_encoder.encode(list(texts))
    vectors = {name: torch.full((len(texts),), float(value), device=device) for name, value in numbers.items()}
    return {"y": text.y.to(device), "mask": text.mask.to(device), **vectors}


def null_condition(
    model: Any, text_encoder: Any, cond: Condition, negative_prompts: Sequence[str | None], *, guided: bool
) -> Condition | None:
    """What guidance steers away from; None where there is no guidance, since not every model has one.

    Two things are called "no text". A model that was trained with dropped captions has features of its own for it, which take
    the caption's mask: that is what a sample without a negative prompt gets. A negative prompt is encoded like a prompt,
    with its own mask; "" is the encoder's "no text", for models whose own was never trained (diffusers' PixArt and Latte).

    Args:
        cond: of the samples, as `condition` gives it.
        negative_prompts: for each of B samples; None: the model's own.
        guided: whether guidance asks for it.

    Raises:
        UserError: there are negative prompts without guidance, or for classes.
    """
    given = [b for b, prompt in enumerate(negative_prompts) if prompt is not None]
    if given and not guided:
        raise UserError("negative_prompt has no effect with cfg_scale=1; raise --cfg-scale, or leave it out.")
    if not guided:
        return None
    y = model.null_condition(len(cond["y"])).to(cond["y"])
    if not given:
        return {"y": y}
    encoder = getattr(text_encoder, "encoder", text_encoder)
    if hasattr(encoder, "num_classes"):
        raise UserError('negative_prompt: this model knows classes, and its only "no class" is its own; leave it out.')
    text = text_encoder.encode([str(negative_prompts[b]) for b in given])
    if text.y.shape[1:] != y.shape[1:]:
        raise UserError(
            f'negative_prompt: the text encoder gives {tuple(text.y.shape[1:])} numbers, the model\'s own "no text" has '
            f"{tuple(y.shape[1:])}; give every prompt of the batch a negative prompt, or none."
        )
    y, mask = y.clone(), cond["mask"].clone()
    y[given], mask[given] = text.y.to(y), text.mask.to(mask)
    return {"y": y, "mask": mask}
