"""The two transformer blocks that the whole field is built from, over tokens [B, T, S, D]."""

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import layer_norm
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.mlp import Mlp, linear_flops
from opensora.models.layers.modulation import AdaLN, frame_modulation, gated, norm_modulate


class ModulatedBlock(nn.Module):
    """Self-attention, cross-attention to the text if there is one, MLP; all but the text modulated and gated.

    Names: `attn`, `cross_attn`, `mlp`.

    Args:
        attn: over space, time or all tokens.
        cross_attn: None makes a block that does not see the text.
        mlp_ratio: width of the MLP's hidden layer / width.
        fused_norm: ask for apex's LayerNorm.
    """

    def __init__(
        self, attn: Attention, cross_attn: CrossAttention | None, mlp_ratio: float, *, fused_norm: bool = False
    ) -> None:
        super().__init__()
        dim = attn.proj.in_features
        self.norm1 = layer_norm(dim, fused=fused_norm)
        self.attn = attn
        self.cross_attn = cross_attn
        self.norm2 = layer_norm(dim, fused=fused_norm)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def run(
        self,
        x: Tensor,
        modulation: Tensor,
        y: Tensor | None,
        mask: Tensor | None,
        rope: Tensor | None,
        grid: tuple[int, int] | None,
    ) -> Tensor:
        """The branches, with six modulation vectors `[6, B, 1 or T, 1, D]`; else as `AdaLNSingleBlock.forward`."""
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        x, h = norm_modulate(self.norm1, x, shift_msa, scale_msa)
        dtype = x.dtype
        x = gated(x, gate_msa, self.attn(h, rope, grid))
        if self.cross_attn is not None:
            x = x + self.cross_attn(x.to(dtype), y, mask)
        x, h = norm_modulate(self.norm2, x, shift_mlp, scale_mlp, dtype)
        return gated(x, gate_mlp, self.mlp(h)).to(dtype)

    def flops(self, T: int, S: int, text_len: int, grid: tuple[int, int] | None = None) -> int:
        """Floating-point operations for one sample; `grid` as in `Attention.flops`."""
        text = 0 if self.cross_attn is None else self.cross_attn.flops(T * S, text_len)
        return self.attn.flops(T, S, grid) + text + linear_flops(self.mlp, T * S)


class AdaLNZeroBlock(ModulatedBlock):
    """Self-attention and MLP, modulated by the condition (DiT, Peebles & Xie 2023, figure 3). Name: `adaLN_modulation.1`."""

    def __init__(self, attn: Attention, mlp_ratio: float, *, fused_norm: bool = False) -> None:
        super().__init__(attn, None, mlp_ratio, fused_norm=fused_norm)
        self.adaLN_modulation = AdaLN(attn.proj.in_features, 6)

    def forward(
        self,
        x: Tensor,
        c: Tensor,
        x_mask: Tensor | None = None,
        c0: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """One block: tokens `x [B, T, S, D]`, conditions `c, c0 [B, D]`; else as `AdaLNSingleBlock.forward`."""
        at_0 = None if c0 is None else self.adaLN_modulation(c0)
        return self.run(x, frame_modulation(x_mask, self.adaLN_modulation(c), at_0), None, None, None, grid)

    def flops(self, T: int, S: int, text_len: int, grid: tuple[int, int] | None = None) -> int:
        """Floating-point operations for one sample."""
        return super().flops(T, S, text_len, grid) + linear_flops(self.adaLN_modulation, 1)


class AdaLNSingleBlock(ModulatedBlock):
    """A block that is modulated through a table of its own (PixArt-alpha, section 2.3). Name: `scale_shift_table`."""

    def __init__(
        self, attn: Attention, cross_attn: CrossAttention | None, mlp_ratio: float, *, fused_norm: bool = False
    ) -> None:
        super().__init__(attn, cross_attn, mlp_ratio, fused_norm=fused_norm)
        dim = attn.proj.in_features
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        t0: Tensor | None = None,
        rope: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """One block, `[B, T, S, D] -> [B, T, S, D]`.

        Args:
            x: tokens.
            y, mask: text [B, L, D], and [B, L] bool, True at real tokens.
            t: modulation of the timestep, [B, 6, D].
            x_mask, t0: True at denoised frames [B, T], and the modulation of timestep 0 for conditioning frames.
            rope, grid: see `Attention`.
        """
        at_0 = None if t0 is None else self.scale_shift_table + t0
        return self.run(x, frame_modulation(x_mask, self.scale_shift_table + t, at_0), y, mask, rope, grid)
