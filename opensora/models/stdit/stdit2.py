"""STDiT2, the diffusion transformer of Open-Sora 1.1, for videos of any size, length and frame rate.

Against STDiT, the temporal branch has a normalisation and a modulation of its own; frames have rotary positions; queries
and keys are normalised; and the model is conditioned on the size in pixels, the aspect ratio, the number of frames and the
frame rate. With t the timestep's embedding, the spatial branch and the MLP are modulated by
`t + [csize(height, width), ar(height / width)]`, the temporal branch by `t + fl(num_frames) + fps(fps)`.

Deviations from the released code:
- The aspect ratio is computed from height and width instead of being passed.
- Positions depend on each sample's own size, there on the first sample's.
- The final layer sees the timestep without the size, for all frames. There, conditioning frames see it with the size;
  their output is never used, so the released weights do not care.
- `no_temporal_pos_emb`, without effect there, leaves out the rotation; `freeze="not_temporal"` trains the whole
  temporal branch with its modulation, there its attention alone.
- As in STDiT: padded and masked captions, no random text drop, no saved position tables.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import layer_norm
from opensora.models.denoiser import AdaLNSingleDenoiser
from opensora.models.layers.attention import NormOrder
from opensora.models.layers.embedders import ScalarEmbedder
from opensora.models.layers.modulation import AdaLN, frame_modulation, gated, norm_modulate
from opensora.models.layers.positions import sincos_grid
from opensora.models.loading import Conversion
from opensora.models.stdit.stdit import STDiTBlock
from opensora.registry import MODELS


class STDiT2Block(STDiTBlock):
    """STDiT's block, with all branches but cross-attention modulated and gated. Name: also `scale_shift_table_temporal`."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, *, fused_norm: bool, **attention: Any) -> None:
        super().__init__(dim, num_heads, mlp_ratio, fused_norm=fused_norm, **attention)
        self.norm_temp = layer_norm(dim, fused=fused_norm)
        self.scale_shift_table_temporal = nn.Parameter(torch.randn(3, dim) / dim**0.5)

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
        """See `AdaLNSingleBlock.forward`; `t, t0 [B, 9, D]`: six vectors for spatial attention and MLP, three for time."""
        table = torch.cat([self.scale_shift_table, self.scale_shift_table_temporal])  # [9, D]
        modulation = frame_modulation(x_mask, table + t, None if t0 is None else table + t0)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp, shift_tmp, scale_tmp, gate_tmp = modulation
        x, h = norm_modulate(self.norm1, x, shift_msa, scale_msa)
        dtype = x.dtype
        x = gated(x, gate_msa, self.attn(h, None, grid))
        x, h = norm_modulate(self.norm_temp, x, shift_tmp, scale_tmp, dtype)
        x = gated(x, gate_tmp, self.attn_temp(h, rope))
        x = x + self.cross_attn(x.to(dtype), y, mask)
        x, h = norm_modulate(self.norm2, x, shift_mlp, scale_mlp, dtype)
        return gated(x, gate_mlp, self.mlp(h)).to(dtype)


SIZES = ("csize_embedder.", "ar_embedder.")


@MODELS.register_module()
class STDiT2(AdaLNSingleDenoiser):
    """Spatial-temporal diffusion transformer, second version (see the module's docstring).

    Args:
        input_sq_size: side in pixels of the square at which positions count patches one by one.
        qk_norm: RMS-normalise queries and keys of both self-attentions, as all released weights do.
        norm_order: "norm_then_rope" (None), or "rope_then_norm", with which the weights of Open-Sora 1.1 were trained.
        qk_norm_legacy: another spelling of norm_order: True is "rope_then_norm", False "norm_then_rope".
        freeze: "not_temporal" trains the temporal branch alone, "text" trains all but cross-attention and text.
        common: see `AdaLNSingleDenoiser`; hidden_size is a multiple of 3.
    """

    temporal_parts = (".attn_temp.", ".scale_shift_table_temporal", "t_block_temp.", "fl_embedder.", "fps_embedder.")

    def __init__(
        self,
        *,
        input_sq_size: float = 512,
        qk_norm: bool = True,
        norm_order: NormOrder | None = None,
        qk_norm_legacy: bool | None = None,
        freeze: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        dim = self.hidden_size
        if dim % 3:
            raise ValueError(f"hidden_size={dim}: height, width and aspect ratio share it; take a multiple of 3.")
        self.input_sq_size = input_sq_size
        self.norm_order = resolve_norm_order(norm_order, qk_norm_legacy=qk_norm_legacy)
        self.t_block_temp = AdaLN(dim, 3)
        self.csize_embedder = ScalarEmbedder(dim // 3)
        self.ar_embedder = ScalarEmbedder(dim // 3)
        self.fl_embedder = ScalarEmbedder(dim)
        self.fps_embedder = ScalarEmbedder(dim)
        self.y_embedder = self.caption_embedder()
        options: dict[str, Any] = {"qk_norm": qk_norm, "norm_order": self.norm_order, "kernel": self.kernel}
        self.blocks = nn.ModuleList(
            STDiT2Block(dim, self.num_heads, self.mlp_ratio, fused_norm=self.fused_norm, **options)
            for _ in range(self.depth)
        )
        self.final_layer = self.output_layer()

        # zero is what makes a PixArt initialisation unchanged at step 0, and the output 0 without one
        small = [self.t_embedder, self.t_block, self.t_block_temp, self.y_embedder]
        small += [self.csize_embedder, self.ar_embedder, self.fl_embedder, self.fps_embedder]
        zero = [layer for block in self.blocks for layer in (block.attn_temp.proj, block.cross_attn.proj)]
        self.initialize(small=small, zero=[*zero, self.final_layer.linear])
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
        """See `Denoiser.forward`; fps, height, width and num_frames are all needed."""
        height, width, num_frames, fps = self.required(sizes, "height", "width", "num_frames", "fps")
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        positions = size_positions(self.hidden_size, (H, W), height, width, self.input_sq_size)  # [B, S, D]
        x = self.enter_blocks(x + positions[:, None].to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        size = self.csize_embedder(torch.stack([height, width], dim=1))  # [B, 2 D / 3]
        size = torch.cat([size, self.ar_embedder(height / width)], dim=1)  # [B, D]
        clip = self.fl_embedder(num_frames) + self.fps_embedder(fps)  # [B, D]

        def modulation(t: Tensor) -> Tensor:  # [B, D] -> [B, 6 + 3, D]
            return torch.cat([self.t_block(t + size), self.t_block_temp(t + clip)], dim=1)

        t, t0 = self.embed_timestep(timestep, x_mask)  # [B, D]
        t_mod, t0_mod = modulation(t), None if t0 is None else modulation(t0)
        y = self.y_embedder(y)  # [B, L, D]

        rope = None if self.no_temporal_pos_emb else self.frame_rotations(x)
        for block in self.blocks:
            x = block(x, y, t_mod, mask, x_mask, t0_mod, rope, (H, W))
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)


def size_positions(dim: int, grid: tuple[int, int], height: Tensor, width: Tensor, input_sq_size: float) -> Tensor:
    """Sine-cosine positions that know the size in pixels: an image spans the same range at any resolution.

    The coordinate of row i of H is `i / H * round(sqrt(H W)) / (sqrt(height * width) / input_sq_size)`, columns alike;
    `grid` is the tokens' (H, W), `height, width [B]` are in pixels. Returns [B, H * W, dim] fp32.
    """
    scale = (height.double() * width.double()).sqrt() / input_sq_size
    return sincos_grid(dim, grid, scale=scale, base=round((grid[0] * grid[1]) ** 0.5), device=height.device)


def resolve_norm_order(norm_order: NormOrder | None, *, qk_norm_legacy: bool | None) -> NormOrder:
    """One order from its two spellings, see `STDiT2`; a ValueError where they contradict each other."""
    if qk_norm_legacy is None:
        return norm_order or "norm_then_rope"
    legacy: NormOrder = "rope_then_norm" if qk_norm_legacy else "norm_then_rope"
    if norm_order not in (None, legacy):
        raise ValueError(f"norm_order={norm_order!r} contradicts qk_norm_legacy={qk_norm_legacy}: set one of them.")
    return legacy


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT2's; a warning where Open-Sora 1.1 needs another `norm_order`."""
    result = Conversion(dict(state), "STDiT2")
    if not any(".attn_temp." in name for name in state):
        result.format = "PixArt-alpha"
        result.may_miss(model, "PixArt has no temporal branch", *STDiT2.temporal_parts)
        result.may_miss(model, "PixArt does not normalise queries and keys", ".attn.q_norm.", ".attn.k_norm.")
        if not any(name.startswith(SIZES) for name in state):
            result.may_miss(model, "these weights know no sizes", *SIZES)
    elif not any(".scale_shift_table_temporal" in name for name in state):
        result.format = "STDiT"
        result.may_miss(model, "STDiT has no such part", *STDiT2.temporal_parts[1:], *SIZES, ".q_norm.", ".k_norm.")
    result.fit_shapes(model)
    # no tensor shows the order; saved rotary frequencies show that the file is Open-Sora's
    if "rope.freqs" in state and getattr(model, "norm_order", None) == "norm_then_rope":
        warnings.warn(
            "the weights are Open-Sora's, whose release 1.1 turns queries and keys before it normalises them: "
            "set norm_order='rope_then_norm' in the model's config for it.",
            stacklevel=2,
        )
    return result


MODELS.register_variant("STDiT2-XL/2", STDiT2, depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT2-XS/2", STDiT2, depth=8, hidden_size=192, num_heads=3, patch_size=(1, 2, 2))
