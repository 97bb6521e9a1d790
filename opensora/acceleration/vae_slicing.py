"""Encoding with a VAE, ours or diffusers', in micro-batches chosen by the size of an image.

An encoder's activations at full resolution are far larger than the denoiser's. The micro-batch does not change the result.
It is here because `optix` encodes with diffusers' VAEs, as is how a VAE's config scales latents, which `models.vae` shares.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.utils.errors import UserError
from opensora.utils.seed import randn_like

Generators = Sequence[torch.Generator] | torch.Generator | None

LOGVAR_RANGE = (-30.0, 20.0)  # diffusers' own clamp
# an image whose shorter side has more pixels -> images at a time
MICRO_BATCHES = ((1000, 1), (700, 2), (500, 8), (0, 16))


def images_at_a_time(height: int, width: int) -> int:
    """How many images of this size (pixels) are encoded at a time."""
    return next(count for side, count in MICRO_BATCHES if min(height, width) > side)


@torch.no_grad()
def sliced_vae(
    vae: Any,
    x: Tensor,
    micro_bs: int | None = None,
    use_autocast: bool | torch.dtype = False,  # noqa: FBT001, FBT002  (the signature that users of Optix know)
    nhwc: bool = False,  # noqa: FBT001, FBT002
    *,
    generators: Generators = None,
) -> Tensor:
    """Encode images or videos in micro-batches with a VAE of ours or an `AutoencoderKL` of diffusers, and scale the latents.

    Args:
        x: Images [B, 3, H, W], or videos [B, T, 3, H, W] - frames before channels, unlike the result.
        micro_bs: Images at a time; None: by their size (`images_at_a_time`). A VAE that encodes videos as a whole takes
            as many videos as have so many frames, at least one.
        use_autocast: Compute in bf16 (True) or in the given dtype. (In fp16 the widely used VAEs overflow.)
        nhwc: Lay the encoder and its input out with channels last. The encoder keeps that layout.
        generators: For the posterior: one, or one for each of the B entries; None draws from torch's own.

    Returns:
        Latents [B, C, h, w] or [B, C, t, h, w], fp32. UserError: they are not finite.
    """
    if x.dim() not in (4, 5):
        raise ValueError(f"sliced_vae takes [B, 3, H, W] or [B, T, 3, H, W], got {tuple(x.shape)}")
    video = rearrange(x, "B T C H W -> B C T H W") if x.dim() == 5 else x.unsqueeze(2)
    if nhwc:
        for encoder in encoders_of(vae):
            to_channels_last(encoder)
    if hasattr(vae, "sliced_moments"):  # ours
        z = vae.sample(vae.sliced_moments(video, micro_bs, use_autocast, nhwc), generators)
    elif any(isinstance(module, nn.Conv3d) for module in vae.encoder.modules()):
        raise UserError(
            f"sliced_vae: {type(vae).__name__} encodes videos as a whole; load its folder as our DiffusersVideoVAE."
        )
    else:  # frame by frame
        layout = torch.channels_last if nhwc else torch.contiguous_format
        frames = rearrange(video, "B C T H W -> (B T) C H W").to(vae.dtype)
        size = micro_bs or images_at_a_time(*frames.shape[-2:])
        count = len(frames)
        if count > size and getattr(vae.encoder, "_compiled_call_impl", None) is not None:
            # a shorter last part would be a second program
            frames = torch.cat([frames, frames[-1:].expand(-count % size, -1, -1, -1)])
        with autocast_to(video.device, use_autocast):
            parts = [
                vae.encode(part.contiguous(memory_format=layout)).latent_dist.parameters for part in frames.split(size)
            ]
        moments = rearrange(torch.cat(parts)[:count].float(), "(B T) C H W -> B C T H W", B=len(video))
        mean, logvar = moments.chunk(2, dim=1)
        z = mean + (0.5 * logvar.clamp(*LOGVAR_RANGE)).exp() * randn_like(mean, generators)
        scale, shift = scale_and_shift(vae.config, z.shape[1], whose=type(vae).__name__)
        z = (z - per_frame(shift, z)) * per_frame(scale, z)
    if not z.isfinite().all():
        how = "use_autocast=torch.bfloat16, or without autocast" if use_autocast else "weights in fp32 or bf16"
        raise UserError(f"sliced_vae: the latents are not finite; try {how}.")
    return z if x.dim() == 5 else z.squeeze(2)


def scale_and_shift(config: Mapping[str, Any], channels: int, *, whose: str) -> tuple[Tensor, Tensor]:
    """Of z_scaled = (z - shift) * scale: fp32 on the CPU, each [C], or [C, t] where each latent frame has its own.

    shift = shift_factor or latents_mean, scale = scaling_factor [/ latents_std]; `latents_mean` and `latents_std` count where
    both are present, and `shift_factor` is then ignored.

    Raises:
        UserError: The numbers do not fit the channels, or the scale is not positive; `whose` they are begins the message.
    """
    scale = torch.full((channels,), float(config.get("scaling_factor") or 1.0), device="cpu")
    shift = torch.full((channels,), float(config.get("shift_factor") or 0.0), device="cpu")
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        shift, std = (torch.tensor(values, dtype=torch.float32, device="cpu").flatten() for values in (mean, std))
        if len(std) > channels and len(std) % channels == 0:  # one number a channel and frame
            scale, shift, std = scale[:, None], *(v.view(channels, -1) for v in (shift, std))
        if shift.shape != std.shape or len(std) != channels:
            raise UserError(f"{whose}: latents_mean and latents_std do not fit {channels} channels.")
        scale = scale / std
    if not (scale > 0).all():
        raise UserError(f"{whose}: scale {scale.tolist()} is not positive.")
    return scale, shift


def per_frame(values: Tensor, like: Tensor) -> Tensor:
    """[C] -> [1, C, 1, 1, 1]; [C, N] -> [1, C, t, 1, 1], the first t frames."""
    values = values.to(like.device)
    if values.dim() == 1:
        return values.view(1, -1, 1, 1, 1)
    if like.shape[2] > values.shape[1]:
        raise UserError(f"the VAE's statistics cover {values.shape[1]} latent frames; there are {like.shape[2]}.")
    return values[None, :, : like.shape[2], None, None]


def encoders_of(vae: nn.Module) -> list[nn.Module]:
    """Of a VAE, or of the VAEs that it is made of."""
    return [module.encoder for module in vae.modules() if isinstance(getattr(module, "encoder", None), nn.Module)]  # type: ignore[misc]


def to_channels_last(module: nn.Module) -> None:
    """Lay out every convolution's kernel as [.., H, W, C]."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])


def autocast_to(device: torch.device, chosen: bool | torch.dtype) -> torch.autocast:  # noqa: FBT001
    dtype = chosen if isinstance(chosen, torch.dtype) else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=chosen is not False)
