"""STDiT2, the diffusion transformer of Open-Sora 1.1, for videos of any size, length and frame rate.

Against STDiT, the temporal branch has a normalisation and a modulation of its own; frames are placed by rotary
positions; queries and keys are normalised; and the model is told the size in pixels, the aspect ratio, the number of
frames and the frame rate. With t the timestep's embedding, the spatial branch and the MLP are modulated by
`t + [csize(height, width), ar(height / width)]`, the temporal branch by `t + fl(num_frames) + fps(fps)`.

Deviations from the released code:
- The aspect ratio is computed from height and width instead of being passed.
- Positions depend on each sample's own size, there on the first sample's.
- The final layer sees the timestep without the size, for all frames. There, frames that are only conditions see it
  with the size; their output is never used, so the released weights do not care.
- `no_temporal_pos_emb`, without effect there, leaves out the rotation; `freeze="not_temporal"` trains the whole
  temporal branch with its modulation, there its attention alone.
- As in STDiT: padded and masked captions, no random text drop, no saved position tables.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import kernel_from_flag, layer_norm
from opensora.models.denoiser import Denoiser, Size, required, train_only
from opensora.models.layers.attention import Attention, CrossAttention, NormOrder
from opensora.models.layers.embedders import CaptionEmbedder, ScalarEmbedder
from opensora.models.layers.init import init_linears, init_small, init_zero
from opensora.models.layers.mlp import linear_flops, tanh_mlp
from opensora.models.layers.modulation import AdaLN, FinalLayer, gated, norm_modulate, per_frame
from opensora.models.layers.pos_embed import grid_coordinates, sincos_2d
from opensora.models.layers.rope import rotary_table
from opensora.models.loading import load_weights
from opensora.models.stdit.weights2 import convert
from opensora.registry import MODELS

TEMPORAL = (".attn_temp.", ".scale_shift_table_temporal", "t_block_temp.", "fl_embedder.", "fps_embedder.")
"""Parts of the names of what only the temporal branch uses."""


class STDiT2Block(nn.Module):
    """Spatial attention, temporal attention, cross-attention, MLP; all but cross-attention modulated and gated.

    Names: STDiT's, and `scale_shift_table_temporal`, `{attn,attn_temp}.{q_norm,k_norm}`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        *,
        qk_norm: bool,
        norm_order: NormOrder,
        kernel: str,
        fused_norm: bool,
    ) -> None:
        super().__init__()
        self.norm1 = layer_norm(dim, fused=fused_norm)
        self.attn = Attention(dim, num_heads, axis="space", qk_norm=qk_norm, kernel=kernel)
        self.norm_temp = layer_norm(dim, fused=fused_norm)
        self.attn_temp = Attention(
            dim, num_heads, axis="time", qk_norm=qk_norm, norm_order=norm_order, kernel=kernel
        )  # only here are there rotary positions, and an order to choose
        self.cross_attn = CrossAttention(dim, num_heads, kernel=kernel)
        self.norm2 = layer_norm(dim, fused=fused_norm)
        self.mlp = tanh_mlp(dim, int(dim * mlp_ratio))
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)
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
        """One block.

        Args:
            x: tokens [B, T, S, D].
            y, mask: text [B, L, D], and [B, L] bool, True at real tokens.
            t: modulation of the timestep, [B, 9, D]: six vectors for spatial attention and MLP, three for time.
            x_mask, t0: frames being denoised [B, T], and the modulation of timestep 0 for the others.
            rope: rotary table of the T frames; None = frames have no order.
            grid: see `Attention`.

        Returns:
            [B, T, S, D].
        """
        table = torch.cat([self.scale_shift_table, self.scale_shift_table_temporal])  # [9, D]
        modulation = per_frame(x_mask, table + t, None if t0 is None else table + t0)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp, shift_tmp, scale_tmp, gate_tmp = modulation
        x, h = norm_modulate(self.norm1, x, shift_msa, scale_msa)
        dtype = x.dtype
        x = gated(x, gate_msa, self.attn(h, None, grid))
        x, h = norm_modulate(self.norm_temp, x, shift_tmp, scale_tmp, dtype)
        x = gated(x, gate_tmp, self.attn_temp(h, rope))
        x = x + self.cross_attn(x.to(dtype), y, mask)
        x, h = norm_modulate(self.norm2, x, shift_mlp, scale_mlp, dtype)
        return gated(x, gate_mlp, self.mlp(h)).to(dtype)

    def flops(self, T: int, S: int, text_len: int) -> int:
        """Floating-point operations for one sample."""
        attention = self.attn.flops(T, S) + self.attn_temp.flops(T, S) + self.cross_attn.flops(T * S, text_len)
        return attention + linear_flops(self.mlp, T * S)


@MODELS.register_module()
class STDiT2(Denoiser):
    """Spatial-temporal diffusion transformer, second version (see the module's docstring).

    Args:
        in_channels: channels of the latent.
        caption_channels: channels of the text features.
        model_max_length: text tokens, the length of the table that stands for "no text".
        hidden_size, depth, num_heads, mlp_ratio: the transformer's size; hidden_size is a multiple of 3.
        patch_size: latent frames, rows and columns in one token.
        pred_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        class_dropout_prob: how often training drops the caption.
        input_sq_size: side in pixels of the square at which positions count patches one by one.
        qk_norm: RMS-normalise queries and keys of both self-attentions, as all released weights do.
        norm_order: "norm_then_rope" (None), or "rope_then_norm", with which the weights of Open-Sora 1.1 were trained.
        qk_norm_legacy: another spelling of norm_order: True is "rope_then_norm", False "norm_then_rope".
        no_temporal_pos_emb: leave out temporal positions (frames are then a set).
        freeze: "not_temporal" trains the temporal branch alone, "text" trains all but cross-attention and text.
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
        input_sq_size: float = 512,
        qk_norm: bool = True,
        norm_order: NormOrder | None = None,
        qk_norm_legacy: bool | None = None,
        no_temporal_pos_emb: bool = False,
        freeze: str | None = None,
        from_pretrained: str | None = None,
        enable_flash_attn: bool | None = None,
        enable_layernorm_kernel: bool = False,
        input_size: Sequence[int | None] | None = None,
    ) -> None:
        if hidden_size % 3:
            raise ValueError(
                f"hidden_size={hidden_size}: height, width and aspect ratio share it; take a multiple of 3."
            )
        super().__init__(
            in_channels=in_channels,
            predicts_sigma=pred_sigma,
            hidden_size=hidden_size,
            patch_size=patch_size,
            class_dropout_prob=class_dropout_prob,
            input_size=input_size,
        )
        self.caption_channels = caption_channels
        self.input_sq_size = input_sq_size
        self.head_dim = hidden_size // num_heads
        self.norm_order = resolve_norm_order(norm_order, qk_norm_legacy=qk_norm_legacy)
        self.no_temporal_pos_emb = no_temporal_pos_emb
        kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)
        pt, ph, pw = self.patch_size

        self.t_block = AdaLN(hidden_size, 6)
        self.t_block_temp = AdaLN(hidden_size, 3)
        self.csize_embedder = ScalarEmbedder(hidden_size // 3)
        self.ar_embedder = ScalarEmbedder(hidden_size // 3)
        self.fl_embedder = ScalarEmbedder(hidden_size)
        self.fps_embedder = ScalarEmbedder(hidden_size)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length)
        blocks = [
            STDiT2Block(
                hidden_size,
                num_heads,
                mlp_ratio,
                qk_norm=qk_norm,
                norm_order=self.norm_order,
                kernel=kernel,
                fused_norm=enable_layernorm_kernel,
            )
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
        """See `Denoiser.forward`; fps, height, width and num_frames are needed.

        Raises:
            ValueError: one of them is missing.
        """
        height, width = required(height, "height", self), required(width, "width", self)
        num_frames, fps = required(num_frames, "num_frames", self), required(fps, "fps", self)
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        positions = size_positions(self.hidden_size, (H, W), height, width, self.input_sq_size)  # [B, S, D]
        x = self.enter_blocks(x + positions[:, None].to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        size = self._embed_size(height, width)  # [B, D]
        clip = self.fl_embedder(num_frames) + self.fps_embedder(fps)  # [B, D]
        t = self.t_embedder(timestep)  # [B, D]
        t_mod = self._modulation(t, size, clip)  # [B, 9, D]
        t0 = None if x_mask is None else self.t_embedder(torch.zeros_like(timestep))
        t0_mod = None if t0 is None else self._modulation(t0, size, clip)
        y = self.y_embedder(y)  # [B, L, D]

        rope = None if self.no_temporal_pos_emb else frame_rotations(self.head_dim, x)
        for block in self.blocks:
            x = block(x, y, t_mod, mask, x_mask, t0_mod, rope, (H, W))
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
        block = cast(STDiT2Block, self.blocks[0])  # they are alike
        numbers = [self.csize_embedder, self.csize_embedder, self.ar_embedder, self.fl_embedder, self.fps_embedder]
        rows_of_one = [*numbers, self.t_block, self.t_block_temp]
        embed = sum(linear_flops(module, 1) for module in rows_of_one) + linear_flops(self.y_embedder, text_len)
        return len(self.blocks) * block.flops(T, H * W, text_len) + embed + self.embed_flops(latent_size)

    def _embed_size(self, height: Tensor, width: Tensor) -> Tensor:
        size = self.csize_embedder(torch.stack([height, width], dim=1))  # [B, 2 D / 3]
        return torch.cat([size, self.ar_embedder(height / width)], dim=1)

    def _modulation(self, t: Tensor, size: Tensor, clip: Tensor) -> Tensor:
        return torch.cat([self.t_block(t + size), self.t_block_temp(t + clip)], dim=1)  # [B, 6 + 3, D]

    def _initialize(self, blocks: Sequence[STDiT2Block]) -> None:
        """Zero is what makes a PixArt initialisation unchanged at step 0, and the output 0 without one."""
        init_linears(self, self.x_embedder.proj)
        init_small(self.t_embedder, self.t_block, self.t_block_temp, self.y_embedder)
        init_small(self.csize_embedder, self.ar_embedder, self.fl_embedder, self.fps_embedder)
        init_zero(layer for block in blocks for layer in (block.attn_temp.proj, block.cross_attn.proj))
        init_zero([self.final_layer.linear])

    def _freeze(self, freeze: str | None) -> None:
        if freeze not in (None, "not_temporal", "text"):
            raise ValueError(f"freeze={freeze!r} is not one of 'not_temporal', 'text', None.")
        if freeze == "not_temporal":
            train_only(self, lambda name: any(part in name for part in TEMPORAL))
        elif freeze == "text":
            train_only(self, lambda name: ".cross_attn." not in name and not name.startswith("y_embedder."))


def size_positions(dim: int, grid: tuple[int, int], height: Tensor, width: Tensor, input_sq_size: float) -> Tensor:
    """Sine-cosine positions that know the size in pixels: a picture spans the same range at any resolution.

    The coordinate of row i of H is `i / H * round(sqrt(H W)) / (sqrt(height * width) / input_sq_size)`, columns alike.

    Args:
        dim: width D of the tokens.
        grid: rows H and columns W of tokens.
        height, width: [B], in pixels.
        input_sq_size: side of the square at which positions count patches one by one.

    Returns:
        [B, H * W, dim] fp32.
    """
    scale = (height.double() * width.double()).sqrt() / input_sq_size
    base = round((grid[0] * grid[1]) ** 0.5)
    rows, columns = (grid_coordinates(n, scale=scale, base=base, device=height.device) for n in grid)
    return sincos_2d(dim, rows, columns)


def frame_rotations(head_dim: int, x: Tensor) -> Tensor:
    """Rotary table `[2, T, head_dim]` for the frames of tokens `x [B, T, S, D]`, which count 0, 1, 2, ..."""
    return rotary_table(head_dim, grid_coordinates(x.shape[1], device=x.device))


def resolve_norm_order(norm_order: NormOrder | None, *, qk_norm_legacy: bool | None) -> NormOrder:
    """One order from its two spellings, see `STDiT2`.

    Raises:
        ValueError: they contradict each other.
    """
    if qk_norm_legacy is None:
        return norm_order or "norm_then_rope"
    legacy: NormOrder = "rope_then_norm" if qk_norm_legacy else "norm_then_rope"
    if norm_order not in (None, legacy):
        raise ValueError(f"norm_order={norm_order!r} contradicts qk_norm_legacy={qk_norm_legacy}: set one of them.")
    return legacy


for _name, _preset in {
    "STDiT2-XL/2": {"depth": 28, "hidden_size": 1152, "num_heads": 16, "patch_size": (1, 2, 2)},
    "STDiT2-XS/2": {"depth": 8, "hidden_size": 192, "num_heads": 3, "patch_size": (1, 2, 2)},
}.items():
    MODELS.register_variant(_name, STDiT2, **_preset)
