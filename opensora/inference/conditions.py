"""What conditions the denoiser besides the latents: the text, "no text" for guidance, and numbers such as the frame rate."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opensora.models.loading import null_text_known
from opensora.models.text_encoder.condition import TextCondition
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)


def condition(
    text_encoder: Any, texts: Sequence[str], numbers: dict[str, float], device: torch.device
) -> dict[str, Tensor]:
    """Text features `y [B, 1, L, D]`, their `mask [B, L]`, and each number as [B], fp32."""
    text = text_encoder.encode(list(texts))
    vectors = {name: torch.full((len(texts),), float(value), device=device) for name, value in numbers.items()}
    return {"y": text.y.to(device), "mask": text.mask.to(device), **vectors}


def null_condition(
    model: Any, text_encoder: Any, cond: dict[str, Tensor], negative_prompts: Sequence[str | None], *, guided: bool
) -> dict[str, Tensor] | None:
    """What guidance steers away from; None where there is no guidance, since not every model has one.

    Two things are called "no text". A model that was trained with dropped captions has features of its own for it, which take
    the caption's mask: that is what a sample without a negative prompt gets. A negative prompt is encoded like a prompt,
    with its own mask; "" is the encoder's "no text". A model whose weights came without features of their own (diffusers'
    PixArt and Latte) gets that where no negative prompt is given, as in diffusers: with PixArt under its own mask, with Latte
    as many tokens of it, padding too, as the caption has.

    Args:
        model: the denoiser.
        text_encoder: encodes negative prompts.
        cond: of the samples, as `condition` gives it.
        negative_prompts: for each of B samples; None: the model's own.
        guided: whether guidance asks for it.

    Raises:
        UserError: there are negative prompts without guidance, or for classes; or the text encoder has no features of "".
    """
    given = [b for b, prompt in enumerate(negative_prompts) if prompt is not None]
    if given and not guided:
        raise UserError("negative_prompt has no effect with cfg_scale=1; raise --cfg-scale, or leave it out.")
    if not guided:
        return None
    y, mask = model.null_condition(len(cond["y"])).to(cond["y"]).clone(), cond["mask"].clone()
    empty = [] if null_text_known(model) else [b for b in range(len(y)) if b not in given]
    if not given and not empty:
        return {"y": y}
    if empty:
        _log_once(
            'the weights have no "no text" of their own: where no negative prompt is given, guidance uses the encoding of an '
            "empty prompt, as diffusers does."
        )
        try:
            text = text_encoder.encode([""])
        except UserError as error:
            raise UserError(
                f'the weights have no "no text" of their own, and the text encoder gives none of "": {error}\n'
                "Encode with the text encoder itself, give every prompt a negative prompt, or sample with --cfg-scale 1."
            ) from error
        y[empty] = _fitting(text, y).to(y)
        # an empty prompt under the caption's mask needs the features of padding, which not every encoder gives
        has_padding = bool(text.y[:, 0][~text.mask.bool()].any())
        if getattr(model, "empty_prompt_mask", "own") != "caption" or not has_padding:
            mask[empty] = text.mask.to(mask)
    if given:
        if hasattr(getattr(text_encoder, "encoder", text_encoder), "num_classes"):
            raise UserError(
                'negative_prompt: this model knows classes, and its only "no class" is its own; leave it out.'
            )
        text = text_encoder.encode([str(negative_prompts[b]) for b in given])
        y[given], mask[given] = _fitting(text, y).to(y), text.mask.to(mask)
    return {"y": y, "mask": mask}


def _fitting(text: TextCondition, y: Tensor) -> Tensor:
    """The text's features, if they have the shape of the model's own "no text" `y`."""
    if text.y.shape[1:] != y.shape[1:]:
        raise UserError(
            f'negative_prompt: the text encoder gives features {tuple(text.y.shape[1:])}, the model\'s own "no text" has '
            f"{tuple(y.shape[1:])}; give every prompt of the batch a negative prompt, or none."
        )
    return text.y


@cache
def _log_once(message: str) -> None:
    logger.info(message)
