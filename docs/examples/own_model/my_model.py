"""A denoiser in a file outside the package: see docs/get-started/own-model.md.

DiT's blocks in turn over the tokens of a frame and over time; the condition is the timestep plus the mean of the caption's tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from opensora.checkpoint.load import load_strictly, read_weights
from opensora.models.denoiser import Denoiser
from opensora.models.layers.attention import Attention
from opensora.models.layers.blocks import AdaLNZeroBlock
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.layers.modulation import AdaLNFinalLayer
from opensora.models.layers.positions import sincos_grid
from opensora.registry import MODELS


@MODELS.register_module()
class MeanTextDiT(Denoiser):
    """A factorised DiT with one vector per caption; `common`: see `Denoiser`."""

    def __init__(self, *, caption_channels: int = 384, model_max_length: int = 48, **common: Any) -> None:
        super().__init__(**common)  # in_channels, hidden_size, depth, num_heads, ...; x_embedder, t_embedder
        dim, axes = self.hidden_size, ("space", "time")
        self.y_embedder = CaptionEmbedder(caption_channels, dim, model_max_length)
        self.blocks = nn.ModuleList(
            AdaLNZeroBlock(Attention(dim, self.num_heads, axis=axes[i % 2], kernel=self.kernel), self.mlp_ratio)
            for i in range(self.depth)
        )
        self.final_layer = AdaLNFinalLayer(dim, math.prod(self.patch_size), self.out_channels)
        gates = [block.adaLN_modulation for block in self.blocks]
        self.initialize(
            small=[self.t_embedder, self.y_embedder],
            zero=[*gates, self.final_layer.adaLN_modulation, self.final_layer.linear],
        )
        if self.from_pretrained is not None:
            load_strictly(self, read_weights(self.from_pretrained), self.from_pretrained)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        *,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        **sizes: Tensor | None,
    ) -> Tensor:
        """x [B, C, T, H, W], timestep [B], y [B, 1, L, C_text] and its mask [B, L] -> [B, C, T, H, W]; see `Denoiser.forward`."""
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        text = self.y_embedder(y).squeeze(1)  # [B, L, D]
        real = torch.ones_like(text[..., :1]) if mask is None else mask[..., None].to(text)
        mean = (text * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)  # [B, D]

        x = self.patchify(x)  # [B, T, S, D]
        x = self.enter_blocks(x + sincos_grid(self.hidden_size, (H, W), device=x.device).to(x.dtype))
        x = x + self.temporal_positions(x)
        x_mask = self.patch_mask(x_mask)
        c, c0 = self.embed_timestep(timestep, x_mask, mean)  # c0: of conditioning frames, which are at timestep 0
        for block in self.blocks:
            x = block(x, c, x_mask, c0, (H, W))
        return self.unpatchify(self.final_layer(x, c, x_mask, c0), latent_size)
