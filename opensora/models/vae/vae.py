"""Image VAEs over videos: frame by frame, and with a decoder that looks across frames.

`VideoAutoencoderKL` is what Open-Sora 1.0 and 1.1 train on (Rombach et al. 2022, arXiv:2112.10752); the other is Stable
Video Diffusion's (Blattmann et al. 2023, arXiv:2311.15127), with the same latents and steadier videos.
"""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from einops import rearrange
from torch import Tensor

from opensora.models.vae.diffusers_vae import DiffusersVAE
from opensora.registry import MODELS


@MODELS.register_module()
class VideoAutoencoderKL(DiffusersVAE):
    """Diffusers' `AutoencoderKL`, applied to every frame. Block types of its `architecture` may be left out.

    Arguments: those of `DiffusersVAE`; docs/vae.md says what each does. `micro_batch_size` counts frames.
    """

    encodes_frames = decodes_frames = True

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        return {"AutoencoderKL": diffusers.AutoencoderKL}

    @classmethod
    def _complete(cls, architecture: dict[str, Any]) -> dict[str, Any]:
        levels = len(architecture.get("block_out_channels", (64,)))
        blocks = {
            "down_block_types": ("DownEncoderBlock2D",) * levels,
            "up_block_types": ("UpDecoderBlock2D",) * levels,
        }
        return {**blocks, **architecture}

    def _set_up(self, config: Mapping[str, Any]) -> None:
        self.out_channels = config["latent_channels"]
        side = 2 ** (len(config["block_out_channels"]) - 1)
        self.strides = (1, side, side)

    def _encode(self, x: Tensor) -> Tensor:
        return self.autoencoder._encode(x)

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        return self.autoencoder._decode(z, return_dict=False)[0]


@MODELS.register_module()
class VideoAutoencoderKLTemporalDecoder(VideoAutoencoderKL):
    """Diffusers' `AutoencoderKLTemporalDecoder`: encodes frame by frame, decodes the frames of a video together.

    `micro_batch_size`: encode at most so many frames at a time, and decode one video at a time.

    Args:
        from_pretrained: See `DiffusersVAE`.
        decode_chunk_size: Decode so many frames together, without looking at the frames before and after: less memory, and
            a jump between the chunks. None: all frames of a video.
        **options: See `DiffusersVAE`; docs/vae.md says what each does.
    """

    decodes_frames = False

    def __init__(
        self, from_pretrained: str | None = None, *, decode_chunk_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(from_pretrained, **options)
        if decode_chunk_size is not None and decode_chunk_size < 1:
            raise self._error(f"decode_chunk_size={decode_chunk_size}; use a positive number or None.")
        self.decode_chunk_size = decode_chunk_size

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        return {"AutoencoderKLTemporalDecoder": diffusers.AutoencoderKLTemporalDecoder}

    def _encode(self, x: Tensor) -> Tensor:
        # not its `encode`, which builds a distribution to take it apart again
        return self.autoencoder.quant_conv(self.autoencoder.encoder(x))

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        decoded = []
        for chunk in z.split(self.decode_chunk_size or num_frames, dim=2):  # [N, C, t, h, w]
            frames = self._layout(rearrange(chunk, "N C t h w -> (N t) C h w"))
            x = self.autoencoder.decode(frames, num_frames=chunk.shape[2], return_dict=False)[0]
            decoded.append(rearrange(x, "(N t) C H W -> N C t H W", N=len(z)))
        return torch.cat(decoded, dim=2)
