"""What the training losses of all schedulers share: number format, given frames, the mean over frames."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opensora.schedulers.frame_mask import per_frame
from opensora.schedulers.guidance import Condition, Denoiser
from opensora.utils.seed import randn_like


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or fp64 where it is that already: diffusion in half precision loses the last steps."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_draws(t: Tensor | None, noise: Tensor | None, generators: Sequence[torch.Generator] | None) -> None:
    """Raise a ValueError when something has to be drawn and there are no generators."""
    if generators is None and (t is None or noise is None):
        raise ValueError("training_losses draws t and noise: pass one generator per sample, or both of them.")


def draw_noise(x_0: Tensor, noise: Tensor | None, generators: Sequence[torch.Generator] | None) -> Tensor:
    """The noise that is given, or one drawn for each sample, in x_0's format."""
    return randn_like(x_0, generators) if noise is None else noise.to(x_0.dtype)


def keep_given(x_t: Tensor, x_0: Tensor, mask: Tensor | None) -> Tensor:
    """x_t with the frames that are given (mask [B, T] bool, False) clean."""
    return x_t if mask is None else torch.where(per_frame(mask), x_t, x_0)


def predict(model: Denoiser, x_t: Tensor, t: Tensor, cond: Condition, x_mask: Tensor | None) -> Tensor:
    """The model's output in x_t's format; the model is told x_mask where there is one."""
    given = {} if x_mask is None else {"x_mask": x_mask}
    return model(x_t, t, **cond, **given).to(x_t.dtype)


def frame_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """[B, C, T, H, W] -> [B] fp32: the mean, over the True frames only when there is a mask [B, T]."""
    frames = x.float().mean(dim=(1, 3, 4))  # [B, T]
    if mask is None:
        return frames.mean(dim=1)
    return (frames * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
