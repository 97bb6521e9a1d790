"""A toy denoiser without attention: each token sees the mean of all others."""

import torch
from torch import nn

from opensora.checkpoint.load import load_strictly, read_weights
from opensora.models.denoiser import Denoiser
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.registry import MODELS


@MODELS.register_module()
class TokenMLP(Denoiser):
    # in_channels, caption_channels and model_max_length are passed by training and sampling, which know VAE and text encoder
    def __init__(self, *, in_channels=4, caption_channels=384, model_max_length=48, depth=2, from_pretrained=None):
        super().__init__(in_channels=in_channels, hidden_size=64, depth=depth, num_heads=1)
        self.y_embedder = CaptionEmbedder(caption_channels, 64, model_max_length)
        mlp = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(depth)]
        self.blocks, self.final = nn.ModuleList(mlp), nn.Linear(64, 4 * in_channels)  # patches are 1 x 2 x 2
        if from_pretrained is not None:  # a file, or a checkpoint folder
            load_strictly(self, read_weights(from_pretrained), from_pretrained)

    def forward(self, x, timestep, y, *, mask=None, x_mask=None, **sizes):
        text = self.y_embedder(y).squeeze(1)  # [B, L, D]
        real = torch.ones_like(text[..., :1]) if mask is None else mask[..., None].to(text)
        condition = self.t_embedder(timestep) + (text * real).sum(1) / real.sum(1).clamp(min=1)  # [B, D]
        tokens = self.patchify(x) + condition[:, None, None]  # [B, T, S, D]
        for block in self.blocks:
            tokens = tokens + block(tokens + tokens.mean(dim=(1, 2), keepdim=True))
        return self.unpatchify(self.final(tokens), x.shape[2:])  # [B, C, T, H, W]

    def flops(self, latent_size, text_len):
        T, H, W = self.grid(latent_size)
        return T * H * W * 2 * (self.depth * 2 * 64 * 128 + 2 * 4 * self.in_channels * 64)
