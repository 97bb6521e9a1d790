"""STDiT, the spatial-temporal diffusion transformer of Open-Sora 1.0.

Open-Sora 1.0 (2024), built on PixArt-alpha (Chen et al. 2023). Each block attends over the S tokens of a frame, then
over the T frames at a place, then over the caption, then applies an MLP. Spatial attention and MLP are modulated by
the timestep (adaLN-single); the temporal branch is not, and shares the spatial branch's gate. Its output projection
starts at zero, so a PixArt initialisation is unchanged at step 0.

Deviations from the released code: position tables follow the input's size and are not saved; captions are padded and
masked instead of packed; the model does not drop text by itself (see `opensora.training.batch_encoder`).
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import kernel_from_flag, layer_norm
from opensora.models.denoiser import Denoiser, Size, train_only
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.layers.init import init_linears, init_small, init_zero
from opensora.models.layers.mlp import linear_flops, tanh_mlp
from opensora.models.layers.modulation import AdaLN, FinalLayer, gated, norm_modulate, per_frame
from opensora.models.layers.pos_embed import grid_coordinates, sincos_1d, sincos_2d
from opensora.models.loading import load_weights
from opensora.models.stdit.weights import convert
from opensora.registry import MODELS


class STDiTBlock(nn.Module):
    """Spatial attention, temporal attention, cross-attention, MLP."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, *, kernel: str, fused_norm: bool) -> None:
        super().__init__()
        self.norm1 = layer_norm(dim, fused=fused_norm)
        self.attn = Attention(dim, num_heads, axis="space", kernel=kernel)
        self.attn_temp = Attention(dim, num_heads, axis="time", kernel=kernel)
        self.cross_attn = CrossAttention(dim, num_heads, kernel=kernel)
        self.norm2 = layer_norm(dim, fused=fused_norm)
        self.mlp = tanh_mlp(dim, int(dim * mlp_ratio))
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
        """`x [B, T, S, D]`, text `y [B, L, D]`, modulation `t, t0 [B, 6, D]`, `temporal_positions [T, D]`.

        `grid`: see `Attention`.
        """
        at_0 = None if t0 is None else self.scale_shift_table + t0
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = per_frame(
            x_mask, self.scale_shift_table + t, at_0
        )
        x, h = norm_modulate(self.norm1, x, shift_msa, scale_msa)
        dtype = x.dtype
        x = gated(x, gate_msa, self.attn(h, None, grid))
        x_t = x if temporal_positions is None else x + temporal_positions[:, None]
        x = gated(x, gate_msa, self.attn_temp(x_t.to(dtype)))
        x = x + self.cross_attn(x.to(dtype), y, mask)
        x, h = norm_modulate(self.norm2, x, shift_mlp, scale_mlp, dtype)
        return gated(x, gate_mlp, self.mlp(h)).to(dtype)

    def flops(self, T: int, S: int, text_len: int) -> int:
        """Floating-point operations for one sample."""
        attention = self.attn.flops(T, S) + self.attn_temp.flops(T, S) + self.cross_attn.flops(T * S, text_len)
        return attention + linear_flops(self.mlp, T * S)


@MODELS.register_module()
class STDiT(Denoiser):
    """Spatial-temporal diffusion transformer (see the module's docstring).

    Args:
        in_channels: channels of the latent.
        caption_channels: channels of the text features.
        model_max_length: text tokens, the length of the table that stands for "no text".
        hidden_size, depth, num_heads, mlp_ratio: the transformer's size.
        patch_size: latent frames, rows and columns in one token.
        pred_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        class_dropout_prob: how often training drops the caption.
        space_scale, time_scale: positions are divided by these (1.0 = the 512x512, 16-frame base model).
        no_temporal_pos_emb: leave out temporal positions (frames are then a set).
        freeze: "not_temporal" trains the temporal attention alone, "text" trains all but cross-attention and text.
        from_pretrained: weights to start from: a checkpoint folder, a .safetensors or a .pth file.
        enable_flash_attn: None or True = fastest attention kernel, False = the plain formula.
        enable_layernorm_kernel: apex's fused LayerNorm if installed.
        input_size: accepted from older configs; the model takes any size.
    """

    def __init__(
        self,
        *,
        in_channels: int = 4,
        caption_channels: int = 4096,
        model_max_length: int = 120,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        patch_size: Sequence[int] = (1, 2, 2),
        pred_sigma: bool = True,
        class_dropout_prob: float = 0.1,
        space_scale: float = 1.0,
        time_scale: float = 1.0,
        no_temporal_pos_emb: bool = False,
        freeze: str | None = None,
        from_pretrained: str | None = None,
        enable_flash_attn: bool | None = None,
        enable_layernorm_kernel: bool = False,
        input_size: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__(
            in_channels=in_channels,
            predicts_sigma=pred_sigma,
            hidden_size=hidden_size,
            patch_size=patch_size,
            class_dropout_prob=class_dropout_prob,
            input_size=input_size,
        )
        self.caption_channels = caption_channels
        self.space_scale = space_scale
        self.time_scale = time_scale
        self.no_temporal_pos_emb = no_temporal_pos_emb
        kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)
        pt, ph, pw = self.patch_size

        self.t_block = AdaLN(hidden_size, 6)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length)
        blocks = [
            STDiTBlock(hidden_size, num_heads, mlp_ratio, kernel=kernel, fused_norm=enable_layernorm_kernel)
            for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.final_layer = FinalLayer(hidden_size, pt * ph * pw, self.out_channels, fused_norm=enable_layernorm_kernel)

        self._initialize(blocks)
        if from_pretrained is not None:
            load_weights(self, from_pretrained, convert)
        self._freeze(freeze)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        *,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        fps: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        num_frames: Tensor | None = None,
    ) -> Tensor:
        """See `Denoiser.forward`; fps, height, width and num_frames are not used by STDiT 1.0."""
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        rows, columns = (grid_coordinates(n, scale=self.space_scale, device=x.device) for n in (H, W))
        x = self.enter_blocks(x + sincos_2d(self.hidden_size, rows, columns).to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        t = self.t_embedder(timestep)  # [B, D]
        t_mod = self.t_block(t)  # [B, 6, D]
        t0 = None if x_mask is None else self.t_embedder(torch.zeros_like(timestep))
        t0_mod = None if t0 is None else self.t_block(t0)
        y = self.y_embedder(y)  # [B, L, D]

        positions = None if self.no_temporal_pos_emb else self._temporal_positions(x)
        for i, block in enumerate(self.blocks):
            # the temporal positions enter once: before the first temporal attention
            x = block(x, y, t_mod, mask, x_mask, t0_mod, positions if i == 0 else None, (H, W))
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def null_condition(self, batch: int) -> Tensor:
        """The text features of "no text": `[batch, 1, L, C_text]`."""
        return self.y_embedder.null(batch)

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return list(self.blocks)

    def flops(self, latent_size: Size, text_len: int) -> int:
        """See `Denoiser.flops`."""
        T, H, W = self.grid(latent_size)
        block = cast(STDiTBlock, self.blocks[0])  # they are alike
        embed = linear_flops(self.t_block, 1) + linear_flops(self.y_embedder, text_len)
        return len(self.blocks) * block.flops(T, H * W, text_len) + embed + self.embed_flops(latent_size)

    def _initialize(self, blocks: Sequence[STDiTBlock]) -> None:
        """Zero is what makes a PixArt initialisation unchanged at step 0, and the output 0 without one."""
        init_linears(self, self.x_embedder.proj)
        init_small(self.t_embedder, self.t_block, self.y_embedder)
        init_zero(layer for block in blocks for layer in (block.attn_temp.proj, block.cross_attn.proj))
        init_zero([self.final_layer.linear])

    def _temporal_positions(self, x: Tensor) -> Tensor:
        positions = grid_coordinates(x.shape[1], scale=self.time_scale, device=x.device)
        return sincos_1d(self.hidden_size, positions).to(x.dtype)  # [T, D]

    def _freeze(self, freeze: str | None) -> None:
        if freeze not in (None, "not_temporal", "text"):
            raise ValueError(f"freeze={freeze!r} is not one of 'not_temporal', 'text', None.")
        if freeze == "not_temporal":
            train_only(self, lambda name: ".attn_temp." in name)
        elif freeze == "text":
            train_only(self, lambda name: ".cross_attn." not in name and not name.startswith("y_embedder."))


for _name, _preset in {
    "STDiT-XL/2": {"depth": 28, "hidden_size": 1152, "num_heads": 16, "patch_size": (1, 2, 2)},
    "STDiT-L/2": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "patch_size": (1, 2, 2)},
    "STDiT-B/2": {"depth": 12, "hidden_size": 768, "num_heads": 12, "patch_size": (1, 2, 2)},
    "STDiT-S/2": {"depth": 12, "hidden_size": 384, "num_heads": 6, "patch_size": (1, 2, 2)},
    "STDiT-XS/2": {"depth": 8, "hidden_size": 192, "num_heads": 3, "patch_size": (1, 2, 2)},
    "STDiT-XS/4": {"depth": 8, "hidden_size": 192, "num_heads": 3, "patch_size": (1, 4, 4)},
    "STDiT-XXS/2": {"depth": 2, "hidden_size": 48, "num_heads": 2, "patch_size": (1, 2, 2)},
}.items():
    MODELS.register_variant(_name, STDiT, **_preset)
