"""Every VAE at toy size, by name: what `tests/models/test_vaes.py` and the GPU tests walk over."""

from typing import Any

import torch
from torch import Tensor

from opensora.models.vae.base import VideoVAE
from opensora.registry import MODELS
from opensora.utils.seed import generator

IMAGES = {"block_out_channels": (8, 8, 16), "layers_per_block": 1, "norm_num_groups": 4}
KL = {**IMAGES, "mid_block_add_attention": False}
SVD = {"block_out_channels": (32, 32), "layers_per_block": 2}
COG = {
    "block_out_channels": (8, 8, 8, 8),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 2,
}
LTX = {
    "latent_channels": 8,
    "block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1),
    "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False, False, False),
    "down_block_types": ("LTXVideoDownBlock3D",) * 2,
    "downsample_type": ("conv",) * 2,
    "upsample_residual": (False, False),
    "upsample_factor": (1, 1),
    "patch_size": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "AutoencoderKLWan": {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [2.0, 1.5, 1.0, 0.5],
    },
    "AutoencoderKLQwenImage": {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [2.0, 1.5, 1.0, 0.5],
    },
    "AutoencoderKLHunyuanVideo": {
        "latent_channels": 4,
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    },
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": 4,
        "block_out_channels": (8, 8, 8),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
        "temporal_compression_ratio": 4,
    },
    "AutoencoderKLCogVideoX": COG,
    "AutoencoderKLLTXVideo": LTX,
    "AutoencoderKLLTX2Video": {
        "latent_channels": 8,
        "block_out_channels": (8, 8),
        "decoder_block_out_channels": (8,),
        "layers_per_block": (1, 1, 1),
        "decoder_layers_per_block": (1, 1),
        "spatio_temporal_scaling": (True, False),
        "decoder_spatio_temporal_scaling": (True,),
        "decoder_inject_noise": (False, False),
        "down_block_types": ("LTX2VideoDownBlock3D",) * 2,
        "downsample_type": ("conv",) * 2,
        "upsample_residual": (False,),
        "upsample_factor": (1,),
        "upsample_type": ("spatiotemporal",),
        "patch_size": 2,
    },
    "AutoencoderKLMochi": {
        "latent_channels": 4,
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "add_attention_block": (False, False, False, False, False),
        "latents_mean": (0.1, -0.2, 0.3, 0.0),
        "latents_std": (2.0, 1.5, 1.0, 0.5),
    },
    "AutoencoderKLAllegro": {
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "latent_channels": 4,
        "sample_size": 128,
    },
    "AutoencoderKLCosmos": {
        "latent_channels": 16,
        "encoder_block_out_channels": (8, 8, 8, 8),
        "decode_block_out_channels": (8, 8, 8, 8),
        "attention_resolutions": (8,),
        "resolution": 64,
        "num_layers": 1,
    },
}

VAES: dict[str, dict[str, Any]] = {
    "VideoAutoencoderKL": {"type": "VideoAutoencoderKL", "architecture": KL},
    "VideoAutoencoderKLTemporalDecoder": {"type": "VideoAutoencoderKLTemporalDecoder", "architecture": SVD},
    **{
        name.removeprefix("Autoencoder"): {"type": "DiffusersVideoVAE", "architecture": {"type": name, **arguments}}
        for name, arguments in ARCHITECTURES.items()
    },
    "VAE_Temporal": {"type": "VAE_Temporal", "filters": 8, "num_res_blocks": 1, "num_groups": 4},
    "VAE_Temporal_SD": {"type": "VAE_Temporal_SD", "filters": 8, "num_res_blocks": 1, "num_groups": 4},
}
PARTS = {"vae_2d": VAES["VideoAutoencoderKL"], "vae_temporal": VAES["VAE_Temporal_SD"]}
VAES |= {
    "VideoAutoencoderPipeline": {"type": "VideoAutoencoderPipeline", "scale": 2.0, "shift": 0.5, **PARTS},
    "OpenSoraVAE_V1_2": {"type": "OpenSoraVAE_V1_2", "micro_frame_size": 9, **PARTS},
}


def build(name: str, **settings: Any) -> VideoVAE:
    """A toy VAE with the same random weights every time, frozen."""
    torch.manual_seed(0)
    return MODELS.build({**VAES[name], **settings}).requires_grad_(False).eval()


def video_of(vae: VideoVAE, frames: int | None = None, size: tuple[int, int] | None = None, batch: int = 2) -> Tensor:
    """Videos [B, 3, T, H, W] that the VAE takes; None: as many frames as make two latent frames, two by three cells."""
    _, height, width = vae.strides
    if frames is None:
        frames = vae.legal_num_frames(2 * vae.strides[0])
    size = (2 * height, 3 * width) if size is None else size
    return torch.rand(batch, vae.in_channels, frames, *size, generator=generator(1)) * 2 - 1
