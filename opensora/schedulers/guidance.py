"""Classifier-free guidance (Ho & Salimans 2022) as a wrapper of the denoiser, so that no sampler knows about it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from opensora.utils.errors import UserError

Denoiser = Callable[..., Tensor]  # model(x, timestep, **cond) -> [B, C or 2C, T, H, W]
Condition = Mapping[str, Tensor | None]


def classifier_free_guidance(
    model: Denoiser, null: Condition | None, scale: float, channels: int | None = None
) -> Denoiser:
    """A denoiser with the model's call signature that returns `null + scale * (cond - null)`.

    One call of the model on the doubled batch [cond; null]. Only the first `channels` of the C prediction channels are
    guided (None: all C, where C is the number of channels of x; 3 reproduces DiT's published numbers). All other
    output channels - a prediction beyond `channels`, the learned variance - are those of the conditional half.

    Args:
        null: the entries of the condition that the unconditional half replaces, such as `{"y": null_y}`; entries that
            are not in it are repeated. None, like a scale of 1, returns the model itself: no doubled batch.
        scale: 1 is the conditional model, 0 the unconditional one.

    The condition is given by keyword; each entry is None or a tensor [B, ...].
    """
    if channels is not None and channels < 1:
        raise UserError(f"cfg_channel={channels}: guide at least 1 channel, or all with cfg_channel=None.")
    if null is None or scale == 1:
        return model

    def guided(x: Tensor, timestep: Tensor, **cond: Tensor | None) -> Tensor:
        num_guided = x.shape[1] if channels is None else channels
        if num_guided > x.shape[1]:
            raise UserError(f"cfg_channel={channels}, but x has {x.shape[1]} channels; None guides all of them.")
        if stray := sorted(null.keys() - cond.keys()):
            raise ValueError(f"the null condition has {stray}, which the condition lacks; it has {sorted(cond)}.")
        both = {key: _pair(key, value, null.get(key, value), len(x)) for key, value in cond.items()}
        output = model(torch.cat([x, x]), torch.cat([timestep, timestep]), **both)
        with_cond, without = output.chunk(2)  # each [B, C or 2C, T, H, W]
        start = without[:, :num_guided]
        combined = start + scale * (with_cond[:, :num_guided] - start)
        return torch.cat([combined, with_cond[:, num_guided:]], dim=1)

    return guided


def _pair(key: str, cond: Tensor | None, null: Tensor | None, batch: int) -> Tensor | None:
    if cond is None and null is None:
        return None
    if cond is None or null is None:
        raise ValueError(f"{key}: one of the condition and the null condition is None, the other is not.")
    for name, value in (("condition", cond), ("null condition", null)):
        if value.ndim == 0 or len(value) != batch:
            raise ValueError(f"{key}: the {name} has shape {tuple(value.shape)}, expected [{batch}, ...].")
    return torch.cat([cond, null])
