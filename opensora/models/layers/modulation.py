"""adaLN: the timestep shifts and scales normalised tokens and gates residual branches (Peebles & Xie 2023, section 3.2).

With frame masking (`x_mask`), frames that are only conditions are modulated as at timestep 0.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.attention import layer_norm


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`x * (1 + scale) + shift`; `x [B, T, S, D]`, the others broadcast over T and S."""
    return x * (1 + scale) + shift


def per_frame(x_mask: Tensor | None, at_t: Tensor, at_0: Tensor | None) -> Tensor:
    """Modulation parameters for each frame.

    Args:
        x_mask: [B, T] bool, True where a frame is being denoised; None = all of them.
        at_t: parameters for the sample's timestep, [B, K, D].
        at_0: parameters for timestep 0, [B, K, D]; needed with `x_mask` only.

    Returns:
        [K, B, 1 or T, 1, D].
    """
    params = rearrange(at_t, "B K D -> K B 1 1 D")
    if x_mask is None or at_0 is None:
        return params
    return torch.where(x_mask[None, :, :, None, None], params, rearrange(at_0, "B K D -> K B 1 1 D"))


class FinalLayer(nn.Module):
    """Tokens -> patches, PixArt's form with a shared table. Names: `linear`, `scale_shift_table`."""

    def __init__(self, dim: int, patch_volume: int, out_channels: int, *, fused_norm: bool = False) -> None:
        super().__init__()
        self.norm_final = layer_norm(dim, fused=fused_norm)
        self.linear = nn.Linear(dim, patch_volume * out_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)

    def forward(self, x: Tensor, t: Tensor, x_mask: Tensor | None = None, t0: Tensor | None = None) -> Tensor:
        """`x [B, T, S, D]`, timestep embeddings `t, t0 [B, D]` -> `[B, T, S, patch_volume * out_channels]`."""
        at_0 = None if t0 is None else self.scale_shift_table[None] + t0[:, None]
        shift, scale = per_frame(x_mask, self.scale_shift_table[None] + t[:, None], at_0)
        return self.linear(modulate(self.norm_final(x), shift, scale))
