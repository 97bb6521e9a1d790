"""A batch of videos and captions -> what a denoiser is trained on: latents and conditions.

Videos come as pixels or as the VAE's stored moments, captions as words or as stored features, and some are dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opensora.contracts import VAE, Denoiser, TextEncoder
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.text_encoder.classes import check_classes
from opensora.models.text_encoder.condition import TextCondition
from opensora.utils.errors import UserError
from opensora.utils.seed import rand


class BatchEncoder:
    """Encodes batches with frozen encoders.

    Args:
        vae: needed also for stored moments, since it scales the latents.
        text_encoder: encodes the captions.
        denoiser: gives the "no text" features and says how often captions are dropped for classifier-free guidance
            (Ho & Salimans 2022).
        device: where the results are wanted.
        class_dropout_prob: how often captions are dropped; None: as the denoiser says.

    Raises:
        UserError: one means classes and the other text, or another number of classes.
    """

    def __init__(
        self,
        vae: VAE,
        text_encoder: TextEncoder,
        denoiser: Denoiser,
        device: torch.device,
        *,
        class_dropout_prob: float | None = None,
    ) -> None:
        check_classes(text_encoder, denoiser)
        self.vae, self.text_encoder, self.denoiser = vae, text_encoder, denoiser
        self.device, self.class_dropout_prob = device, class_dropout_prob

    @torch.no_grad()
    def __call__(
        self, batch: Mapping[str, Any], generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Encode a batch of `opensora.datasets`.

        Args:
            batch: with `video [B, 3, T, H, W]` or `moments [B, 2 C, T, h, w]`; `text`, or its stored features `y [B, 1, L, D]`
                and `mask [B, L]`; `fps`, `height`, `width`, `num_frames`.
            generators: one for each sample.

        Returns:
            Latents z [B, C, T, h, w] fp32, and the denoiser's conditions (y, mask, fps, height, width, num_frames).

        Raises:
            UserError: the data lack a number that the denoiser needs, such as NOVA's motion.
        """
        moments = batch["moments"] if "moments" in batch else self.vae.sliced_moments(batch["video"].to(self.device))
        z = self.vae.sample(moments.to(self.device), generators).float()
        if "y" in batch:
            y = batch["y"].to(self.device)
            text = TextCondition(y.float() if y.is_floating_point() else y, batch["mask"].to(self.device))
        else:
            text = TextCondition(*self.text_encoder.encode(batch["text"]))
        text = drop_text(text, self.denoiser, generators, self.class_dropout_prob)
        cond = {"y": text.y.to(self.device), "mask": text.mask.to(self.device)}
        for name in self.denoiser.micro_conditions:
            if name not in batch:
                raise UserError(
                    f"the denoiser needs each video's {name}, and the data have none: add a column {name!r} to the table with "
                    f"`python -m tools.scoring TABLE --scorers {name} --out SCORED`, or to a cache with `python -m "
                    f"tools.cache_features TRAIN_CONFIG --what {name}`; a NOVA without motion tokens (model.motion=False) "
                    "needs none."
                )
            values = batch[name]  # [B]
            if values.isnan().any():
                unknown = [p for p, value in zip(batch["path"], values.tolist(), strict=True) if value != value]
                raise UserError(f"the denoiser needs each video's {name}, and it is not known of {', '.join(unknown)}.")
            cond[name] = values.to(self.device)
        return z, cond


def null_text(text_encoder: Any, batch: int, negative_prompt: str = "") -> TextCondition:
    """The encoder's own "no text", or a negative prompt, for guidance: y [batch, 1, L, D] and its mask [batch, L].

    For models whose null table was never trained (diffusers' PixArt and Latte folders): `null={**null_text(...)._asdict()}`
    replaces `model.null_condition`.

    Raises:
        UserError: the encoder reads class numbers, and has no "no text" of its own: use `model.null_condition`.
    """
    y, mask = text_encoder.encode([negative_prompt])
    return TextCondition(y.expand(batch, -1, -1, -1), mask.expand(batch, -1))


def drop_text(
    text: TextCondition,
    denoiser: Denoiser,
    generators: Sequence[torch.Generator],
    prob: float | None = None,
) -> TextCondition:
    """Replace each caption by "no text" with probability `prob`, by default the denoiser's `class_dropout_prob`.

    The caption's mask stays, as in Open-Sora: "no text" is as long as the caption was, in training and in sampling. The denoiser
    learns here what "no text" means, whatever file its weights came from, and may be guided from then on.
    """
    prob = denoiser.class_dropout_prob if prob is None else prob
    if prob == 0:
        return text
    dropped = rand(generators, text.y.device) < prob  # [B]
    null = denoiser.null_condition(len(dropped)).to(text.y)
    if isinstance(embedder := getattr(denoiser, "y_embedder", None), CaptionEmbedder):
        embedder.null_known = True
    return TextCondition(torch.where(dropped[:, None, None, None], null, text.y), text.mask)


def freeze(module: Any, device: torch.device) -> Any:
    """A frozen encoder in eval mode on `device`, in its own dtype; sharded if it can be."""
    module = module.requires_grad_(False).eval().to(device)
    return module.shard() if hasattr(module, "shard") else module
