"""Wan's VAE over a whole clip at once, equal to diffusers' loop over chunks of four frames.

diffusers' `AutoencoderKLWan` encodes 1 + 4 + 4 + ... frames in a loop, and keeps the last frames of every layer for the next
turn: little memory, but five times as many kernels for 17 frames, each a quarter as large. All its layers are causal, so one
pass over the clip gives the same values, if the two layers that change the number of frames treat the first one as the
loop does:

    halving    y_0 = x_0,  y_k = conv(x_{2k-2}, x_{2k-1}, x_{2k})
    doubling   y_0 = x_0,  (y_{2k-1}, y_{2k}) = conv(x_{k-2}, x_{k-1}, x_k)  with x_0 = 0 inside the convolution

A single frame meets only the last of a kernel's three taps in time: it is convolved in 2D, at a third of the work.
"""

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample, patchify, unpatchify
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F


def enable_whole(autoencoder: nn.Module) -> None:
    """Give the layers of an `AutoencoderKLWan` a pass without a cache; with a cache they stay what they were."""
    for module in autoencoder.modules():
        if type(module) is WanCausalConv3d:
            module.__class__ = WholeCausalConv3d
        elif type(module) is WanResample:
            module.__class__ = WholeResample


def encode_whole(autoencoder: Any, x: Tensor) -> Tensor:
    """x [B, 3, 4k + 1, H, W] -> moments [B, 2C, t, h, w], after `enable_whole`."""
    patch = autoencoder.config.patch_size
    return autoencoder.quant_conv(autoencoder.encoder(x if patch is None else patchify(x, patch)))


def decode_whole(autoencoder: Any, z: Tensor) -> Tensor:
    """z [B, C, t, h, w] -> x [B, 3, T, H, W], not clamped, after `enable_whole`."""
    x = autoencoder.decoder(autoencoder.post_quant_conv(z), first_chunk=True)
    patch = autoencoder.config.patch_size
    return x if patch is None else unpatchify(x, patch)


class WholeCausalConv3d(WanCausalConv3d):
    """A causal convolution whose kernel meets no frame that is nothing but padding."""

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        """x [B, C, T, H, W], after the frames `cache_x`, if any -> [B, C', T', H', W']."""
        if cache_x is not None:
            return super().forward(x, cache_x)
        columns, _, rows, _, before, _ = (int(n) for n in self._padding)
        if x.shape[2] == 1 and self.kernel_size[0] == before + 1:
            frame = F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], (rows, columns))
            return frame.unsqueeze(2)
        if before:
            x = F.pad(x, (0, 0, 0, 0, before, 0))
        return F.conv3d(x, self.weight, self.bias, self.stride, (0, rows, columns))


class WholeResample(WanResample):
    """A change of size of a whole clip, which begins with the frame that stands alone."""

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = (0,)) -> Tensor:
        """x [B, C, T, H, W] -> [B, C', T', H', W']."""
        if feat_cache is not None:
            return super().forward(x, feat_cache, feat_idx)
        frames = x.shape[2]
        if self.mode == "upsample3d" and frames > 1:
            pairs = rearrange(self.time_conv(x[:, :, 1:]), "B (two C) T H W -> B T two H W C", two=2)
            # channels stay innermost where they were: the layout in which GPUs convolve fastest
            x = torch.cat([rearrange(x[:, :, :1], "B C T H W -> B T H W C"), pairs.flatten(1, 2)], dim=1)
            x = rearrange(x, "B T H W C -> B C T H W")
        x = self._by_frame(x)
        if self.mode == "downsample3d" and frames > 1:
            x = torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)
        return x

    def _by_frame(self, x: Tensor) -> Tensor:
        batch = len(x)
        return rearrange(self.resample(rearrange(x, "B C T H W -> (B T) C H W")), "(B T) C H W -> B C T H W", B=batch)
