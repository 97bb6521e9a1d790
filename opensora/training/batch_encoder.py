"""A batch of videos and captions -> what a denoiser is trained on: latents and conditions.

Videos come as pixels or as the VAE's stored moments, captions as words or as stored features, and some are dropped.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.offload import offload_between_calls
from opensora.config.schema import TrainConfig
from opensora.contracts import VAE, Denoiser, TextEncoder
from opensora.datasets.buckets.bucket import Buckets
from opensora.models.image_encoder import required_frames_of
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.text_encoder.classes import check_classes
from opensora.models.text_encoder.condition import TextCondition
from opensora.models.vae.base import VideoVAE
from opensora.schedulers.mask_ratios import KINDS, MaskRatios
from opensora.utils.errors import UserError
from opensora.utils.seed import rand

logger = logging.getLogger(__name__)

ENCODING = ("moments", "sliced_moments", "sample", "mode", "encode", "decode", "encode_images")
"""What is called of a VAE, a text encoder or an image encoder, and may use its weights."""


class BatchEncoder:
    """Encodes batches with frozen encoders.

    Args:
        vae: needed also for stored moments, since it scales the latents.
        text_encoder: encodes the captions.
        denoiser: gives the "no text" features and says how often captions are dropped for classifier-free guidance
            (Ho & Salimans 2022).
        device: where the results are wanted.
        image_encoder: for denoisers that read features of images.
        masks: draws the conditioning frames; None: there are none.
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
        image_encoder: Any = None,
        masks: MaskRatios | None = None,
        class_dropout_prob: float | None = None,
    ) -> None:
        check_classes(text_encoder, denoiser)
        if hasattr(denoiser, "check_parts"):
            denoiser.check_parts(vae, image_encoder)
        self.vae: Any = vae  # of those with `image_condition` more than the contract is used
        self.denoiser: Any = denoiser
        self.text_encoder = text_encoder
        self.image_encoder, self.masks = image_encoder, masks or MaskRatios(None)
        self.condition_channels = getattr(denoiser, "condition_channels", 0)
        self.device, self.class_dropout_prob = device, class_dropout_prob
        self._empty_prompt = cache(partial(null_text, text_encoder, 1))

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
            Latents z [B, C, T, h, w] fp32, and the denoiser's conditions (y, mask, fps, height, width, num_frames; and of
            conditioning frames, where they are channels of the denoiser's input).

        Raises:
            UserError: the data lack a number that the denoiser needs, such as NOVA's motion, or pixels for its condition.
        """
        moments = batch["moments"] if "moments" in batch else self.vae.sliced_moments(batch["video"].to(self.device))
        z = self.vae.sample(moments.to(self.device), generators).float()
        if "y" in batch:
            y = batch["y"].to(self.device)
            text = TextCondition(y.float() if y.is_floating_point() else y, batch["mask"].to(self.device))
        else:
            text = TextCondition(*self.text_encoder.encode(batch["text"]))
        text = drop_text(text, self.denoiser, generators, self.class_dropout_prob, self._empty_prompt)
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
        if self.condition_channels:
            mask = self.masks(z, generators)
            given = torch.zeros(len(z), z.shape[2], dtype=torch.bool, device=z.device) if mask is None else ~mask
            frames = pixel_frames(given, self.vae.strides[0])
            if "video" in batch:
                video = batch["video"].to(self.device)
                cond |= self.denoiser.image_condition(self.vae, video, frames, self.image_encoder)
            else:
                features = batch["image_features"].to(self.device).float() if "image_features" in batch else None
                latents = stored_condition(batch, given)
                cond |= self.denoiser.condition_of(latents, frames, features)
        return z, cond

    def conditioning_frames(self, z: Tensor, generators: Sequence[torch.Generator]) -> Tensor | None:
        """The scheduler's mask [B, T], False at frames that stay clean; None: all are noised, as where conditioning frames are channels."""
        return None if self.condition_channels else self.masks(z, generators)


def condition_settings(model: Mapping[str, Any], masks: MaskRatios, image_encoder: Any) -> dict[str, Any] | None:
    """What a cache of a config's conditioning frames depends on, next to the VAE; None: its denoiser takes none as channels."""
    if (frames := required_frames_of(model)) is None:
        return None
    if image_encoder is not None and not hasattr(image_encoder, "fingerprint"):
        raise UserError(
            f"{type(image_encoder).__name__} has no fingerprint(), by which its features in a cache are known: add one, or train from the "
            "videos."
        )
    return {
        "kinds": masks.kinds,
        "frames": list(frames),
        "image_encoder": None if image_encoder is None else image_encoder.fingerprint(),
    }


def stored_parts(cfg: TrainConfig, vae: VAE, masks: MaskRatios, image_encoder: Any) -> dict[str, Any]:
    """What a dataset of stored features compares with its cache."""
    conditions = condition_settings(cfg.model, masks, image_encoder) if "cache_dir" in cfg.dataset else None
    return {"vae_fingerprint": vae.fingerprint(), "conditions": conditions}


def stored_condition(batch: Mapping[str, Any], given: Tensor) -> Tensor:
    """The latents [B, C, T, h, w] of the conditioning frames `given` [B, T], of those that a cache has for each sample.

    Raises:
        UserError: it has none, or not of these frames.
    """
    remedy = (
        "`python -m tools.cache_features` stores them for a config with buckets, whose dataset is then a "
        "CachedVariableVideoTextDataset; or train from the videos, with data_path naming their table."
    )
    if "condition_latents" not in batch:
        raise UserError(
            f"the denoiser reads conditioning frames as channels, which are encoded by themselves, and the cache has none: {remedy}"
        )
    is_it = (batch["condition_given"].to(given.device) == given[:, None]).all(dim=2)  # [B, K]
    if not is_it.any(dim=1).all():
        raise UserError(f"the cache has no latents of the conditioning frames that mask_ratios drew: {remedy}")
    latents = batch["condition_latents"][torch.arange(len(given)), is_it.int().argmax(dim=1).cpu()]
    return latents.to(given.device).float()


def pixel_frames(given: Tensor, stride: int) -> Tensor:
    """Latent frames [B, T] bool -> the frames [B, 1 + stride (T - 1)] that they stand for.

    n latent frames in a row are a clip of 1 + stride (n - 1) frames that ends where they end, so that one of them is an image.
    """
    between = (given[:, 1:] & given[:, :-1]).unsqueeze(2).expand(-1, -1, stride - 1)
    return torch.cat([given[:, :1], torch.cat([between, given[:, 1:, None]], dim=2).flatten(1)], dim=1)


def mask_ratios_of(
    model: Mapping[str, Any], ratios: Mapping[str, float] | None, lengths: Collection[int] = ()
) -> Mapping[str, float] | None:
    """The `mask_ratios` with which a config's denoiser is trained: by default those of a denoiser that takes frames as channels.

    Args:
        lengths: frames of the clips.

    Raises:
        UserError: some of them do not give the frames that the denoiser needs, or single images are to be trained on.
    """
    required = required_frames_of(model)
    if required is None:
        return ratios
    ends = ["head", "tail"][: len(required)]
    if ends and 1 in lengths:
        raise UserError(
            f"{model['type']} makes videos from images, and cannot train on single images, of which no frame would be left to "
            "make: take the buckets of 1 frame out of bucket_config, or set num_frames to more than 1."
        )
    if not ratios:
        ratios = {"image_head_tail" if "tail" in ends else "image_head": 1.0}
        logger.info("%s is conditioned on frames of the clip: mask_ratios=%s.", model["type"], ratios)
    fitting = [kind for kind in KINDS if all(end in kind.split("_") for end in ends)]
    if ends and MaskRatios(ratios) and sum(ratios.get(kind, 0) for kind in fitting) < 1 - 1e-6:
        raise UserError(
            f"mask_ratios={dict(ratios)}: {model['type']} needs {' and '.join(ends)} of every clip: only "
            f"{', '.join(fitting)} give that, and must add up to 1."
        )
    return ratios


def masks_of(cfg: TrainConfig) -> MaskRatios:
    """What draws the conditioning frames of a batch.

    Raises:
        UserError: see `mask_ratios_of`.
    """
    buckets = () if cfg.bucket_config is None else Buckets(cfg.bucket_config)
    lengths = {bucket.num_frames for bucket in buckets if bucket.batch_size} or {cfg.num_frames}
    return MaskRatios(mask_ratios_of(cfg.model, cfg.mask_ratios, lengths))


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
    empty_prompt: Callable[[], TextCondition] | None = None,
) -> TextCondition:
    """Replace each caption by "no text" with probability `prob`, by default the denoiser's `class_dropout_prob`.

    The caption's mask stays, as in Open-Sora: "no text" is as long as the caption was, in training and in sampling. The denoiser
    learns here what "no text" means, whatever file its weights came from, and may be guided from then on. For a denoiser that has
    none of its own (`has_null_text`) it is the encoded `empty_prompt`, with its mask.
    """
    prob = denoiser.class_dropout_prob if prob is None else prob
    if prob == 0:
        return text
    dropped = rand(generators, text.y.device) < prob  # [B]
    if not getattr(denoiser, "has_null_text", True):
        assert empty_prompt is not None
        y, mask = empty_prompt()
        if y.shape[1:] != text.y.shape[1:]:
            raise UserError(
                f"an empty prompt has {y.shape[2]} tokens, the captions {text.y.shape[2]}: set "
                'text_encoder.padding="max_length", or model.class_dropout_prob=0.'
            )
        y = torch.where(dropped[:, None, None, None], y.to(text.y), text.y)
        return TextCondition(y, torch.where(dropped[:, None], mask.to(text.mask), text.mask))
    null = denoiser.null_condition(len(dropped)).to(text.y)
    if isinstance(embedder := getattr(denoiser, "y_embedder", None), CaptionEmbedder):
        embedder.null_known = True
    return TextCondition(torch.where(dropped[:, None, None, None], null, text.y), text.mask)


def freeze(module: Any, device: torch.device) -> Any:
    """A frozen encoder in eval mode on `device`, in its own dtype; sharded if it can be."""
    module = module.requires_grad_(False).eval().to(device)
    return module.shard() if hasattr(module, "shard") else module


def freeze_encoder(encoder: Any, device: torch.device, *, stored: bool = False, offload: bool = False) -> Any:
    """A frozen VAE, text encoder or image encoder that works on `device`.

    Args:
        encoder: freshly built, on the CPU.
        stored: the data hold what it would encode, so that only an empty prompt or a validation calls it.
        offload: its weights are to be on the device only while it works.

    With either, the weights stay in the CPU's memory between calls, with `offload` in pinned memory. Sharded weights and those
    with an order of their own (`between_uses`) are left to themselves.
    """
    sharded = getattr(encoder, "shards", hasattr(encoder, "shard"))
    has_own_order = sharded or getattr(encoder, "between_uses", "keep") != "keep"
    if offload and sharded:
        logger.warning("encoder_offload=True does not move a %s whose weights are sharded.", type(encoder).__name__)
    if has_own_order or not (stored or offload) or not isinstance(encoder, nn.Module):
        return freeze(encoder, device)
    encoder.requires_grad_(False).eval()
    scaling = (VideoVAE.sample, VideoVAE.mode)  # need no weights, so that stored moments never load them
    names = [n for n in ENCODING if hasattr(encoder, n) and getattr(type(encoder), n, None) not in scaling]
    offload_between_calls(encoder, names, device, pin=offload)
    return encoder
