"""STDiT3, the diffusion transformer of Open-Sora 1.2: spatial and temporal blocks take turns.

Each block is PixArt's (self-attention, cross-attention, MLP; Chen et al. 2023, section 2.3) with normalised queries and
keys. Spatial blocks attend within a frame, temporal blocks over the frames at a place, with rotary positions. The model
is told the frame rate, which is added to the timestep's embedding; height and width only scale the positions, as in
STDiT2.

All branches of the temporal blocks give zero at first, and so does the frame rate's embedding: without `qk_norm`, an
STDiT3 that starts from PixArt-Sigma gives for every frame what PixArt-Sigma gives for it, if their positions agree. The
normalisation of queries and keys changes that, and is learnt anew.

Deviations from the released code:
- Cross-attention of the spatial blocks and the final layer start at zero, as in PixArt and STDiT. There they do not,
  as training always starts from PixArt-Sigma, which replaces both.
- `skip_y_embedder` keeps the unused embedder, for its names in files, but freezes it.
- As in STDiT2: positions for each sample, padded and masked captions, no random text drop, no saved tables.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Literal, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import kernel_from_flag
from opensora.models.denoiser import Denoiser, Size, required, train_only
from opensora.models.layers.attention import Attention, CrossAttention, NormOrder
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.embedders import CaptionEmbedder, ScalarEmbedder
from opensora.models.layers.init import init_linears, init_small, init_zero
from opensora.models.layers.mlp import linear_flops
from opensora.models.layers.modulation import AdaLN, FinalLayer
from opensora.models.loading import load_weights
from opensora.models.stdit.stdit2 import frame_rotations, resolve_norm_order, size_positions
from opensora.models.stdit.weights3 import convert
from opensora.registry import MODELS


@MODELS.register_module()
class STDiT3(Denoiser):
    """Spatial-temporal diffusion transformer, third version (see the module's docstring).

    Args:
        in_channels: channels of the latent.
        caption_channels: channels of the text features.
        model_max_length: text tokens, the length of the table that stands for "no text".
        hidden_size, num_heads, mlp_ratio: the transformer's size.
        depth: pairs of a spatial and a temporal block.
        patch_size: latent frames, rows and columns in one token.
        pred_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        class_dropout_prob: how often training drops the caption.
        input_sq_size: side in pixels of the square at which positions count patches one by one.
        qk_norm: RMS-normalise queries and keys of self-attention, as the released weights do.
        norm_order: "norm_then_rope" (None), as in the released weights, or "rope_then_norm".
        qk_norm_legacy: another spelling of norm_order: True is "rope_then_norm", False "norm_then_rope".
        no_temporal_pos_emb: leave out temporal positions (frames are then a set).
        only_train_temporal: freeze all but the temporal blocks.
        freeze_y_embedder: freeze the text's projection.
        skip_y_embedder: `y` is projected already, [B, 1, L, hidden_size].
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
        model_max_length: int = 300,
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
        only_train_temporal: bool = False,
        freeze_y_embedder: bool = False,
        skip_y_embedder: bool = False,
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
        self.input_sq_size = input_sq_size
        self.head_dim = hidden_size // num_heads
        self.no_temporal_pos_emb = no_temporal_pos_emb
        self.skip_y_embedder = skip_y_embedder
        order = resolve_norm_order(norm_order, qk_norm_legacy=qk_norm_legacy)
        kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)
        pt, ph, pw = self.patch_size

        def make_block(axis: Literal["space", "time"]) -> AdaLNSingleBlock:
            attn = Attention(hidden_size, num_heads, axis=axis, qk_norm=qk_norm, norm_order=order, kernel=kernel)
            cross_attn = CrossAttention(hidden_size, num_heads, kernel=kernel)
            return AdaLNSingleBlock(attn, cross_attn, mlp_ratio, fused_norm=enable_layernorm_kernel)

        self.t_block = AdaLN(hidden_size, 6)
        self.fps_embedder = ScalarEmbedder(hidden_size)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length)
        self.spatial_blocks = nn.ModuleList(make_block("space") for _ in range(depth))
        self.temporal_blocks = nn.ModuleList(make_block("time") for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, pt * ph * pw, self.out_channels, fused_norm=enable_layernorm_kernel)

        self._initialize()
        if from_pretrained is not None:
            load_weights(self, from_pretrained, convert)
        if only_train_temporal:
            train_only(self, lambda name: name.startswith("temporal_blocks."))
        if freeze_y_embedder or skip_y_embedder:
            self.y_embedder.requires_grad_(False)

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
        """See `Denoiser.forward`; fps, height and width are needed, num_frames is not used.

        Raises:
            ValueError: one of them is missing.
        """
        height, width = required(height, "height", self), required(width, "width", self)
        fps = required(fps, "fps", self)
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        positions = size_positions(self.hidden_size, (H, W), height, width, self.input_sq_size)  # [B, S, D]
        x = self.enter_blocks(x + positions[:, None].to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        rate = self.fps_embedder(fps)  # [B, D]
        t = self.t_embedder(timestep) + rate  # [B, D]
        t_mod = self.t_block(t)  # [B, 6, D]
        t0 = None if x_mask is None else self.t_embedder(torch.zeros_like(timestep)) + rate
        t0_mod = None if t0 is None else self.t_block(t0)
        y = self._embed_text(y)  # [B, L, D]

        rope = None if self.no_temporal_pos_emb else frame_rotations(self.head_dim, x)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            x = spatial(x, y, t_mod, mask, x_mask, t0_mod, None, (H, W))
            x = temporal(x, y, t_mod, mask, x_mask, t0_mod, rope)
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def null_condition(self, batch: int) -> Tensor:
        """The text features of "no text": `[batch, 1, L, C_text]`, with `skip_y_embedder` `[batch, 1, L, hidden_size]`."""
        null = self.y_embedder.null(batch)
        return self.y_embedder(null)[:, None] if self.skip_y_embedder else null

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return list(chain.from_iterable(zip(self.spatial_blocks, self.temporal_blocks, strict=True)))

    def flops(self, latent_size: Size, text_len: int) -> int:
        """See `Denoiser.flops`."""
        T, H, W = self.grid(latent_size)
        blocks = (cast(AdaLNSingleBlock, block) for block in self.transformer_blocks())
        embed = linear_flops(self.t_block, 1) + linear_flops(self.fps_embedder, 1)
        text = 0 if self.skip_y_embedder else linear_flops(self.y_embedder, text_len)
        return sum(block.flops(T, H * W, text_len) for block in blocks) + embed + text + self.embed_flops(latent_size)

    def _embed_text(self, y: Tensor) -> Tensor:
        if not self.skip_y_embedder:
            return self.y_embedder(y)
        if y.shape[-1] != self.hidden_size:
            raise ValueError(
                f"y has {y.shape[-1]} channels; with skip_y_embedder it must have hidden_size={self.hidden_size}."
            )
        return rearrange(y, "B 1 L D -> B L D")

    def _initialize(self) -> None:
        """Zero is what makes a PixArt-Sigma initialisation unchanged at step 0, and the output 0 without one."""
        init_linears(self, self.x_embedder.proj)
        init_small(self.t_embedder, self.t_block, self.y_embedder, self.fps_embedder)
        init_zero([self.fps_embedder.mlp[2], self.final_layer.linear])
        for block in (cast(AdaLNSingleBlock, block) for block in self.transformer_blocks()):
            assert block.cross_attn is not None, "every block of STDiT3 sees the text"
            init_zero([block.cross_attn.proj])
            if block.attn.axis == "time":
                init_zero([block.attn.proj, block.mlp.fc2])


for _name, _preset in {
    "STDiT3-XL/2": {"depth": 28, "hidden_size": 1152, "num_heads": 16, "patch_size": (1, 2, 2)},
    "STDiT3-3B/2": {"depth": 28, "hidden_size": 1872, "num_heads": 26, "patch_size": (1, 2, 2)},
    "STDiT3-XS/2": {"depth": 8, "hidden_size": 192, "num_heads": 3, "patch_size": (1, 2, 2)},
}.items():
    MODELS.register_variant(_name, STDiT3, **_preset)
