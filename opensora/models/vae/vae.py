"""Picture VAEs over videos: frame by frame, and with a decoder that looks across frames.

`VideoAutoencoderKL` is what Open-Sora 1.0 and 1.1 train on (Rombach et al. 2022, arXiv:2112.10752); the other is Stable
Video Diffusion's (Blattmann et al. 2023, arXiv:2311.15127), with the same latents and steadier videos.
"""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from einops import rearrange
from torch import Tensor

from opensora.models.vae.base import MemoryFormat, Posterior
from opensora.models.vae.diffusers_vae import DiffusersVAE, strides_of_levels
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype


class FrameVAE(DiffusersVAE):
    """A VAE that encodes each frame by itself: any number of frames, and a latent frame for each."""

    def latent_frames(self, num_frames: int) -> int:
        """As many."""
        return num_frames

    def video_frames(self, latent_frames: int) -> int:
        """As many."""
        return latent_frames

    def legal_num_frames(self, num_frames: int) -> int:
        """Any number of frames, from 1."""
        return max(int(num_frames), 1)

    @property
    def chunk_latent_frames(self) -> int | None:
        """Each frame is encoded by itself."""
        return 1

    def units_of(self, pictures: int, num_frames: int) -> int:
        """A unit is a picture."""
        return pictures

    def _units(self, x: Tensor, *, decoding: bool) -> Tensor:
        return rearrange(x, "B C T H W -> (B T) C 1 H W")

    def _videos(self, units: Tensor, batch: int, *, decoding: bool) -> Tensor:
        return rearrange(units, "(B T) C 1 H W -> B C T H W", B=batch)

    def _pictures(self, units: Tensor) -> Tensor:
        """[N, C, 1, H, W] -> [N, C, H, W] in the network's layout."""
        last = self.memory_format == "channels_last"
        return units.squeeze(2).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@MODELS.register_module()
class VideoAutoencoderKL(FrameVAE):
    """Diffusers' `AutoencoderKL`, applied to every frame.

    Args:
        from_pretrained: Folder in diffusers' format, `package:PACKAGE/folder`, or hub id. Exactly one of this and
            `architecture`.
        micro_batch_size: Encode and decode at most so many frames at a time; None: all at once.
        subfolder: The folder's or hub repository's part that holds the VAE.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        scaling_factor: Replaces the config's `scaling_factor`.
        architecture: Arguments of `AutoencoderKL`: an untrained VAE. Block types may be left out.
        dtype: Number format of the weights, and so of the computation outside autocast. Files may hold any.
        tile_size: Encode and decode pictures larger than this (pixels) in overlapping square tiles; None: whole.
        tile_overlap: Overlap of neighbouring tiles, as a part of a tile.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile encoder and decoder; a last, smaller micro-batch is filled up to the others' size.
    """

    def __init__(
        self,
        from_pretrained: str | None = None,
        micro_batch_size: int | None = None,
        subfolder: str | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        posterior: Posterior = "sample",
        scaling_factor: float | None = None,
        architecture: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "fp32",
        tile_size: int | None = None,
        tile_overlap: float = 0.25,
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(
            from_pretrained,
            architecture,
            subfolder=subfolder,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            dtype=dtype,
            posterior=posterior,
            micro_batch_size=micro_batch_size,
            tile_size=tile_size,
            tile_overlap=tile_overlap,
            memory_format=memory_format,
            compile=compile,
        )
        self.out_channels = self.autoencoder.config["latent_channels"]
        self.strides = (1, *strides_of_levels(self.autoencoder.config["block_out_channels"]))
        self._ready(to_torch_dtype(dtype), scaling_factor)

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

    def _encode(self, x: Tensor) -> Tensor:
        return self.autoencoder._encode(self._pictures(x)).unsqueeze(2)

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        return self.autoencoder._decode(self._pictures(z), return_dict=False)[0].unsqueeze(2)


@MODELS.register_module()
class VideoAutoencoderKLTemporalDecoder(FrameVAE):
    """Diffusers' `AutoencoderKLTemporalDecoder`: encodes frame by frame, decodes the frames of a video together.

    Args:
        from_pretrained: Folder in diffusers' format, `package:PACKAGE/folder`, or hub id. Exactly one of this and
            `architecture`.
        micro_batch_size: Encode at most so many frames at a time, and decode one video at a time; None: all at once.
        decode_chunk_size: Decode so many frames together, without looking at the frames before and after: less memory, and
            a jump between the pieces. None: all frames of a video.
        subfolder: The folder's or hub repository's part that holds the VAE.
        cache_dir: Where the hub's files are kept.
        local_files_only: Do not ask the hub.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        scaling_factor: Replaces the config's `scaling_factor`.
        architecture: Arguments of `AutoencoderKLTemporalDecoder`: an untrained VAE. Block types may be left out.
        dtype: Number format of the weights, and so of the computation outside autocast. Files may hold any.
        tile_size: Encode and decode pictures larger than this (pixels) in overlapping square tiles; None: whole.
        tile_overlap: Overlap of neighbouring tiles, as a part of a tile.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile encoder and decoder.
    """

    def __init__(
        self,
        from_pretrained: str | None = None,
        micro_batch_size: int | None = None,
        subfolder: str | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,  # noqa: FBT001, FBT002  (Open-Sora's signature)
        posterior: Posterior = "sample",
        scaling_factor: float | None = None,
        architecture: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "fp32",
        decode_chunk_size: int | None = None,
        tile_size: int | None = None,
        tile_overlap: float = 0.25,
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(
            from_pretrained,
            architecture,
            subfolder=subfolder,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            dtype=dtype,
            posterior=posterior,
            micro_batch_size=micro_batch_size,
            tile_size=tile_size,
            tile_overlap=tile_overlap,
            memory_format=memory_format,
            compile=compile,
        )
        if decode_chunk_size is not None and decode_chunk_size < 1:
            raise self._complaint(f"decode_chunk_size={decode_chunk_size}; use a positive number or None.")
        self.decode_chunk_size = decode_chunk_size
        self.out_channels = self.autoencoder.config["latent_channels"]
        self.strides = (1, *strides_of_levels(self.autoencoder.config["block_out_channels"]))
        self._ready(to_torch_dtype(dtype), scaling_factor)

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        return {"AutoencoderKLTemporalDecoder": diffusers.AutoencoderKLTemporalDecoder}

    @classmethod
    def _complete(cls, architecture: dict[str, Any]) -> dict[str, Any]:
        levels = len(architecture.get("block_out_channels", (64,)))
        return {"down_block_types": ("DownEncoderBlock2D",) * levels, **architecture}

    def _units(self, x: Tensor, *, decoding: bool) -> Tensor:
        return x if decoding else super()._units(x, decoding=False)

    def _videos(self, units: Tensor, batch: int, *, decoding: bool) -> Tensor:
        return units if decoding else super()._videos(units, batch, decoding=False)

    def _decoding_batch(self) -> int | None:
        return 1 if self.micro_batch_size else None

    def _encode(self, x: Tensor) -> Tensor:
        # not its `encode`, which builds a distribution to take it apart again
        return self.autoencoder.quant_conv(self.autoencoder.encoder(self._pictures(x))).unsqueeze(2)

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        pieces = z.split(self.decode_chunk_size or num_frames, dim=2)  # each [N, C, t, h, w]
        return torch.cat([self._decode_together(piece) for piece in pieces], dim=2)

    def _decode_together(self, z: Tensor) -> Tensor:
        pictures = self._pictures(FrameVAE._units(self, z, decoding=True))
        decoded = self.autoencoder.decode(pictures, num_frames=z.shape[2], return_dict=False)[0]
        return FrameVAE._videos(self, decoded.unsqueeze(2), len(z), decoding=True)
