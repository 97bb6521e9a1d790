"""STDiT, the spatial-temporal diffusion transformer of Open-Sora 1.0.

Open-Sora 1.0 (2024), built on PixArt-alpha (Chen et al. 2023). Each block attends over the S tokens of a frame, then
over the T frames at each spatial position, then over the caption, then applies an MLP. Spatial attention and MLP are
modulated by the timestep (adaLN-single); the temporal branch is not, and shares the spatial branch's gate. Its output
projection starts at zero, so a PixArt initialisation is unchanged at step 0.

Deviations from the released code: position tables follow the input's size and are not saved; captions are padded and
masked instead of packed; the model does not drop text by itself (see `opensora.training.batch_encoder`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import layer_norm
from opensora.models.denoiser import AdaLNSingleDenoiser
from opensora.models.layers.attention import Attention, CrossAttention, NormOrder
from opensora.models.layers.mlp import Mlp, linear_flops
from opensora.models.layers.modulation import frame_modulation, gated, norm_modulate
from opensora.models.layers.positions import sincos_grid
from opensora.models.loading import Conversion
from opensora.registry import MODELS


class STDiTBlock(nn.Module):
    """Spatial attention, temporal attention, cross-attention, MLP."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        *,
        qk_norm: bool = False,
        norm_order: NormOrder = "norm_then_rope",
        kernel: str,
        fused_norm: bool,
    ) -> None:
        super().__init__()
        self.norm1 = layer_norm(dim, fused=fused_norm)
        self.attn = Attention(dim, num_heads, axis="space", qk_norm=qk_norm, kernel=kernel)
        self.attn_temp = Attention(dim, num_heads, axis="time", qk_norm=qk_norm, norm_order=norm_order, kernel=kernel)
        self.cross_attn = CrossAttention(dim, num_heads, kernel=kernel)
        self.norm2 = layer_norm(dim, fused=fused_norm)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        t0: Tensor | None = None,
        temporal_positions: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `AdaLNSingleBlock.forward`; `temporal_positions [T, 1, D]`."""
        at_0 = None if t0 is None else self.scale_shift_table + t0
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = frame_modulation(
            x_mask, self.scale_shift_table + t, at_0
        )
        x, h = norm_modulate(self.norm1, x, shift_msa, scale_msa)
        dtype = x.dtype
        x = gated(x, gate_msa, self.attn(h, None, grid))
        x_t = x if temporal_positions is None else x + temporal_positions
        x = gated(x, gate_msa, self.attn_temp(x_t.to(dtype)))
        x = x + self.cross_attn(x.to(dtype), y, mask)
        x, h = norm_modulate(self.norm2, x, shift_mlp, scale_mlp, dtype)
        return gated(x, gate_mlp, self.mlp(h)).to(dtype)

    def flops(self, T: int, S: int, text_len: int, grid: tuple[int, int] | None = None) -> int:
        """Floating-point operations for one sample."""
        attention = self.attn.flops(T, S) + self.attn_temp.flops(T, S) + self.cross_attn.flops(T * S, text_len)
        return attention + linear_flops(self.mlp, T * S)


@MODELS.register_module()
class STDiT(AdaLNSingleDenoiser):
    """Spatial-temporal diffusion transformer (see the module's docstring).

    Args:
        space_scale, time_scale: positions are divided by these (1.0 = the 512x512, 16-frame base model).
        freeze: "not_temporal" trains the temporal attention alone, "text" trains all but cross-attention and text.
        common: see `AdaLNSingleDenoiser`.
    """

    temporal_parts = (".attn_temp.",)

    def __init__(
        self, *, space_scale: float = 1.0, time_scale: float = 1.0, freeze: str | None = None, **common: Any
    ) -> None:
        super().__init__(**common)
        self.space_scale = space_scale
        self.time_scale = time_scale
        self.y_embedder = self.caption_embedder()
        self.blocks = nn.ModuleList(
            STDiTBlock(self.hidden_size, self.num_heads, self.mlp_ratio, kernel=self.kernel, fused_norm=self.fused_norm)
            for _ in range(self.depth)
        )
        self.final_layer = self.output_layer()

        # zero is what makes a PixArt initialisation unchanged at step 0, and the output 0 without one
        zero = [layer for block in self.blocks for layer in (block.attn_temp.proj, block.cross_attn.proj)]
        self.initialize(small=[self.t_embedder, self.t_block, self.y_embedder], zero=[*zero, self.final_layer.linear])
        self.load_and_freeze(convert, freeze)

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
        """See `Denoiser.forward`; fps, height, width and num_frames are not used by STDiT 1.0."""
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        positions = sincos_grid(self.hidden_size, (H, W), scale=self.space_scale, device=x.device)  # [S, D]
        x = self.enter_blocks(x + positions.to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        t, t0 = self.embed_timestep(timestep, x_mask)  # [B, D]
        t_mod, t0_mod = self.t_block(t), None if t0 is None else self.t_block(t0)  # [B, 6, D]
        y = self.y_embedder(y)  # [B, L, D]

        time = None if self.no_temporal_pos_emb else self.temporal_positions(x, self.time_scale)  # [T, 1, D]
        for i, block in enumerate(self.blocks):
            # the temporal positions enter once: before the first temporal attention
            x = block(x, y, t_mod, mask, x_mask, t0_mod, time if i == 0 else None, (H, W))
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT's."""
    result = Conversion(dict(state), "STDiT")
    if not any(".attn_temp." in name for name in state):
        result.format = "PixArt-alpha"
        result.may_miss(model, "PixArt has no temporal attention", ".attn_temp.")
    result.fit_shapes(model)
    return result


MODELS.register_variant("STDiT-XL/2", STDiT, depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT-L/2", STDiT, depth=24, hidden_size=1024, num_heads=16, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT-B/2", STDiT, depth=12, hidden_size=768, num_heads=12, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT-S/2", STDiT, depth=12, hidden_size=384, num_heads=6, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT-XS/2", STDiT, depth=8, hidden_size=192, num_heads=3, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT-XS/4", STDiT, depth=8, hidden_size=192, num_heads=3, patch_size=(1, 4, 4))
MODELS.register_variant("STDiT-XXS/2", STDiT, depth=2, hidden_size=48, num_heads=2, patch_size=(1, 2, 2))
