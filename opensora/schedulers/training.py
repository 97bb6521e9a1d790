"""What the training losses of all schedulers share: dtype, conditioning frames, the mean over frames."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opensora.schedulers.frame_mask import expand_frames
from opensora.schedulers.guidance import Condition, Denoiser
from opensora.utils.errors import UserError


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or fp64 where it is that already: diffusion in half precision loses the last steps."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def generators_to_draw(
    generators: Sequence[torch.Generator] | None, *values: Tensor | None
) -> Sequence[torch.Generator]:
    """The generators; a ValueError when one of the values has to be drawn and there are none."""
    if generators is None and any(value is None for value in values):
        raise ValueError("training_losses draws t and noise: pass one generator per sample, or both of them.")
    return generators or ()


def keep_conditioning_frames(x_t: Tensor, x_0: Tensor, mask: Tensor | None) -> Tensor:
    """x_t with the conditioning frames (mask [B, T] bool, False) clean."""
    return x_t if mask is None else torch.where(expand_frames(mask), x_t, x_0)


def predict(model: Denoiser, x_t: Tensor, t: Tensor, cond: Condition, x_mask: Tensor | None) -> Tensor:
    """The model's output in x_t's dtype; x_mask is passed on where there is one."""
    mask = {} if x_mask is None else {"x_mask": x_mask}
    return model(x_t, t, **cond, **mask).to(x_t.dtype)


def without_variance(output: Tensor, num_channels: int) -> Tensor:
    """The first C channels of a model's output; a learned variance behind them is not used.

    Raises:
        UserError: there are neither C nor 2C channels.
    """
    if output.shape[1] not in (num_channels, 2 * num_channels):
        raise UserError(
            f"the model returned {output.shape[1]} channels for {num_channels}-channel latents; this scheduler expects "
            f"{num_channels}, or {2 * num_channels} with a variance, which is not used."
        )
    return output[:, :num_channels]


def frame_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """[B, C, T, H, W] -> [B] fp32: the mean, over the True frames only when there is a mask [B, T]."""
    frames = x.float().mean(dim=(1, 3, 4))  # [B, T]
    if mask is None:
        return frames.mean(dim=1)
    return (frames * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
