"""A "VAE" without loss terms or training: each square of 4 x 4 pixels becomes one cell of its mean colour."""

import torch
from torch import nn

from opensora.models.vae.base import VideoVAE
from opensora.registry import MODELS


@MODELS.register_module()
class MeanColourVAE(VideoVAE):
    out_channels, strides = 3, (1, 4, 4)  # of the latents; pixels of a cell along time, height, width

    def __init__(self, scaling_factor=1.0, **options):
        super().__init__(**options)
        self.encoder = nn.Conv3d(3, 3, self.strides, self.strides, groups=3, bias=False)
        nn.init.constant_(self.encoder.weight, 1 / 16)
        self.config = {"scaling_factor": scaling_factor}
        self._ready()

    def _encode(self, x):  # [N, 3, T, H, W] -> mean and log variance [N, 2C, t, h, w]
        mean = self.encoder(x)
        return torch.cat([mean, torch.full_like(mean, -30.0)], dim=1)

    def _decode(self, z, num_frames):  # [N, C, t, h, w] -> [N, 3, T, H, W]
        return z.repeat_interleave(4, dim=3).repeat_interleave(4, dim=4)
