"""Dynamic thresholding (Saharia et al. 2022, "Imagen", section 2.3): large guidance without saturated pixels."""

import math

import torch
from torch import Tensor


def dynamic_thresholding(x_0: Tensor, ratio: float, max_value: float) -> Tensor:
    """x_0 [B, ...] clamped to [-s, s] and divided by s / max_value, where s >= max_value is a quantile of |x_0|.

    So every value lies in [-max_value, max_value], and a sample whose |x_0| stays below max_value in all but 1 - `ratio` of
    its places is only clamped.
    """
    magnitudes = x_0.abs().flatten(1)
    position = ratio * (magnitudes.shape[1] - 1)
    # torch.quantile refuses more than 16 M values, and sorts those that do not matter
    largest = magnitudes.topk(magnitudes.shape[1] - math.floor(position), dim=1).values  # falling; the last is `below`
    below, above = largest[:, -1], largest[:, -1 if position == math.floor(position) else -2]
    quantile = torch.lerp(below, above, position - math.floor(position))
    s = quantile.clamp(min=max_value).reshape(-1, *[1] * (x_0.ndim - 1))
    scaled = x_0.clamp(-s, s).div_(s)
    return scaled if max_value == 1 else scaled.mul_(max_value)
