"""Text in sampling: encoded captions from a cache, what conditions the denoiser, and what guidance steers away from."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from opensora.datasets.cache.features import TextFeatures
from opensora.models.loading import null_text_known
from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)


@MODELS.register_module("cached")
class CachedTextEncoder(nn.Module):
    """What `tools.cache_features --what text` wrote: y [B, 1, L, D], mask [B, L], on the CPU; y is zero where mask is False.

    Args:
        cache_dir: The cache's folder.
        encoder: The text encoder that it stands for, as in `text_encoder=dict(type=..., ...)`. `tools.cache_features` makes
            the cache with it; in training it only documents.
        fingerprint: Of the encoder that the features must come from; None: it is not checked.
    """

    def __init__(
        self, cache_dir: str, encoder: Mapping[str, Any] | None = None, fingerprint: str | None = None
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.features = TextFeatures(cache_dir)
        found = self.features.settings["encoder"]
        if fingerprint not in (None, found):
            raise UserError(
                f"the text cache {cache_dir} was made with another encoder: its fingerprint is {found}, not {fingerprint}. "
                f"{self.features.remedy}"
            )
        self.output_dim: int = self.features.output_dim
        self.model_max_length: int = self.features.model_max_length

    def encode(self, texts: list[str]) -> TextCondition:
        """B captions -> y [B, 1, L, D] (fp32, or int64 for classes), mask [B, L]; a UserError for one not in the cache."""
        y, mask = self.features.many(texts)
        return TextCondition(y.float() if y.is_floating_point() else y, mask)

    def fingerprint(self) -> str:
        """That of the encoder which wrote the cache."""
        return str(self.features.settings["encoder"])


def condition(
    text_encoder: Any, texts: Sequence[str], numbers: dict[str, float], device: torch.device
) -> dict[str, Tensor]:
    """Text features `y [B, 1, L, D]`, their `mask [B, L]`, and each number (such as the frame rate) as [B], fp32."""
    text = text_encoder.encode(list(texts))
    vectors = {name: torch.full((len(texts),), float(value), device=device) for name, value in numbers.items()}
    return {"y": text.y.to(device), "mask": text.mask.to(device), **vectors}


def null_condition(
    model: Any, text_encoder: Any, cond: dict[str, Tensor], negative_prompts: Sequence[str | None]
) -> dict[str, Tensor]:
    """What guidance steers away from.

    Two things are called "no text". A model that was trained with dropped captions has features of its own for it, which take
    the caption's mask: that is what a sample without a negative prompt gets. A negative prompt is encoded like a prompt,
    with its own mask; "" is the encoder's "no text". A model whose weights came without features of their own (diffusers'
    PixArt and Latte) gets that where no negative prompt is given, as in diffusers: with PixArt under its own mask, with Latte
    as many tokens of it, padding too, as the caption has.

    Args:
        cond: of the samples, as `condition` gives it.
        negative_prompts: for each of B samples; None: the model's own.

    Raises:
        UserError: there are negative prompts for classes; or the text encoder has no features of "".
    """
    given = [b for b, prompt in enumerate(negative_prompts) if prompt is not None]
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
