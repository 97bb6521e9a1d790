"""What Wan's image-to-video models read of conditioning frames: channels behind the latent's, and in 2.1 CLIP's features of the images."""

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from opensora.utils.errors import UserError

IMAGE_TOKENS = 257  # CLIP's, of 16 x 16 patches and the class


class ImageConditions:
    """Methods of `Wan`; `required_frames` are the pixel frames that it cannot do without, or None."""

    condition_channels: int
    image_dim: int | None
    required_frames: tuple[int, ...] | None

    def check_parts(self, vae: Any, image_encoder: Any) -> None:
        """Raise a `UserError` where the network does not take the latents' or the image encoder's channels as its condition."""
        if self.condition_channels and self.condition_channels != vae.strides[0] + vae.out_channels:
            raise UserError(
                f"model.condition_channels={self.condition_channels} does not fit the VAE: a mask of {vae.strides[0]} channels (the "
                f"frames in a latent frame) and {vae.out_channels} of the latent."
            )
        given = None if image_encoder is None else image_encoder.output_dim
        if given != self.image_dim:
            raise UserError(
                f"model.image_dim={self.image_dim}, but the image encoder's features have {given} channels."
            )

    def check_given(self, given: Tensor) -> None:
        """Raise a `UserError` unless the pixel frames `given [B, F]` are there that the network needs."""
        needed = self.required_frames or ()
        if given.shape[1] < len(needed) or not given[:, list(needed)].all():
            raise UserError(
                f"this model makes videos from {'a first and a last image' if -1 in needed else 'a first image'}, and "
                "a video lacks it, or a segment of --loop. In sampling set --image (and --last-image); a training takes it from "
                "clips of several frames, by mask_ratios."
            )

    def image_condition(self, vae: Any, video: Tensor, given: Tensor, image_encoder: Any = None) -> dict[str, Tensor]:
        """What `forward` takes for conditioning frames; equals the condition of diffusers' `WanImageToVideoPipeline`.

        Args:
            vae, image_encoder: that `check_parts` accepts, where they work.
            video: pixels [B, 3, F, H, W] in [-1, 1]; of frames that are not given they do not matter.
            given: [B, F] bool.

        Raises:
            UserError: a frame that the model needs is not given, or the VAE does not encode the first frame by itself.
        """
        features = None
        if self.image_dim is not None:
            features = image_features(image_encoder, video, self.required_frames or ())
        return self.condition_of(condition_latents(vae, video, given), given, features)

    def condition_of(self, z: Tensor, given: Tensor, features: Tensor | None = None) -> dict[str, Tensor]:
        """`image_condition` of what was encoded before: `condition_latents` [B, C, T, h, w] of the frames `given` [B, F], and
        `image_features` [B, n L, D]; a `UserError` where a frame that the model needs is not given, or features are missing."""
        self.check_given(given)
        stride = self.condition_channels - z.shape[1]
        # the first frame is a latent frame by itself, and counts for as many as the others hold
        mask = torch.cat([given[:, :1].expand(-1, stride), given[:, 1:]], dim=1)
        mask = rearrange(mask, "B (T C) -> B C T 1 1", C=stride).expand(-1, -1, -1, *z.shape[3:])
        condition = {"condition": torch.cat([mask.to(z), z], dim=1)}
        if self.image_dim is not None:
            tokens = IMAGE_TOKENS * len(self.required_frames or ())
            if features is None or features.shape[1] != tokens:
                found = 0 if features is None else features.shape[1]
                raise UserError(f"Wan takes {tokens} tokens of features of a clip's images, and there are {found}.")
            condition["image_features"] = features
        return condition


@torch.no_grad()
def condition_latents(vae: Any, video: Tensor, given: Tensor) -> Tensor:
    """The latents [B, C, T, h, w] of a video [B, 3, F, H, W] that is grey but for the frames `given` [B, F]: the posterior's mode.

    Raises:
        UserError: the VAE does not encode the first frame by itself.
    """
    stride, F = vae.strides[0], video.shape[2]
    if stride * (vae.latent_frames(F) - 1) + 1 != F:
        raise UserError(
            f"conditioning frames as channels: the VAE makes {vae.latent_frames(F)} latent frames of {F}, not 1 + 1/{stride}."
        )
    return vae.mode(vae.sliced_moments(torch.where(given[:, None, :, None, None], video, 0.0)))  # 0 is mid grey


@torch.no_grad()
def image_features(image_encoder: Any, video: Tensor, frames: Sequence[int]) -> Tensor:
    """CLIP's features [B, n L, D] of n frames of a video [B, 3, F, H, W]."""
    images = torch.stack([video[:, :, i] for i in frames], dim=1)
    features = image_encoder.encode_images(images.flatten(0, 1)).to(video.device)  # [B n, L, D]
    return rearrange(features, "(B n) L D -> B (n L) D", B=len(video))
