"""LatteT2V, the text-to-video model of Latte: a PixArt-alpha of spatial blocks with a temporal block after each.

Ma et al. 2024, arXiv:2401.03048 (the interleaved variant), in the form of the released text-to-video weights. A spatial
block attends within a frame and to the caption, a temporal block over the frames at a place, without the caption; both
are modulated by the timestep (adaLN-single, Chen et al. 2023, arXiv:2310.00426, section 2.3). The frame's number enters
once, as a sine-cosine table added to the tokens before the first temporal block, and not at all for a single frame.

Deviations from the released code: the number of frames is free, tables are not saved; captions may be masked; temporal
blocks start as the identity, so that a PixArt initialisation is a PixArt model at first (but for the table, where
there are several frames). Without the size and aspect conditions of models above 512x512, none of which was released.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import kernel_from_flag
from opensora.models.denoiser import Denoiser, Size, train_only
from opensora.models.latte.weights_t2v import convert, to_diffusers
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.layers.init import init_linears, init_small, init_zero
from opensora.models.layers.mlp import linear_flops
from opensora.models.layers.modulation import AdaLN, FinalLayer
from opensora.models.layers.pos_embed import grid_coordinates, sincos_1d, sincos_2d
from opensora.models.loading import load_weights
from opensora.registry import MODELS

Mode = Literal["video", "images"]


@MODELS.register_module()
class LatteT2V(Denoiser):
    """Alternating spatial and temporal transformer with captions (see the module's docstring).

    Weights without a table of "no text" are guided by an encoded empty prompt as long as the caption, as Latte's pipeline does.

    Names: `blocks.N` are the spatial blocks, as in PixArt, `temporal_blocks.N` the temporal ones.

    Args:
        in_channels: channels of the latent.
        caption_channels: channels of the text features.
        model_max_length: text tokens, the length of the table that stands for "no text".
        hidden_size, num_heads, mlp_ratio: the transformer's size.
        depth: pairs of a spatial and a temporal block.
        patch_size: latent frames, rows and columns in one token.
        pred_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        class_dropout_prob: how often training drops the caption.
        mode: "images" leaves out the temporal blocks, which are then frozen: each frame is an image of its own.
        space_scale: spatial positions are divided by it.
        base_size: tokens along the side of the pictures of the training: rows and columns span the positions from 0 to
            `base_size / space_scale`, however many there are. None = `32 * space_scale`: any resolution spans the
            range of the released 512x512 model, whatever `space_scale`.
        time_scale: temporal positions are divided by it.
        no_temporal_pos_emb: leave out temporal positions (frames are then a set).
        freeze: "not_temporal" trains the temporal blocks alone, "text" trains all but cross-attention and text.
        from_pretrained: weights to start from: a checkpoint folder, a .safetensors or a .pth file, or the folder
            `transformer` of diffusers' Latte-1.
        enable_flash_attn: None or True = fastest attention kernel, False = the plain formula.
        enable_layernorm_kernel: apex's fused LayerNorm if installed.
        input_size: accepted from older configs; the model takes any size.
    """

    empty_prompt_mask: ClassVar[Literal["caption", "own"]] = "caption"
    """Which tokens of an empty prompt count, where it stands for "no text"; see `opensora.inference.conditions`."""

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
        mode: Mode = "video",
        space_scale: float = 1.0,
        base_size: float | None = None,
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
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}.")
        self.caption_channels = caption_channels
        self.mode = mode
        self.space_scale = space_scale
        self.base_size = 32 * space_scale if base_size is None else base_size
        self.time_scale = time_scale
        self.no_temporal_pos_emb = no_temporal_pos_emb
        kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)
        fused = enable_layernorm_kernel
        pt, ph, pw = self.patch_size

        self.t_block = AdaLN(hidden_size, 6)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length)
        spatial, temporal = [], []
        for _ in range(depth):
            in_space = Attention(hidden_size, num_heads, axis="space", kernel=kernel)
            in_time = Attention(hidden_size, num_heads, axis="time", kernel=kernel)
            to_text = CrossAttention(hidden_size, num_heads, kernel=kernel)
            spatial.append(AdaLNSingleBlock(in_space, to_text, mlp_ratio, fused_norm=fused))
            temporal.append(AdaLNSingleBlock(in_time, None, mlp_ratio, fused_norm=fused))
        self.blocks = nn.ModuleList(spatial)
        self.temporal_blocks = nn.ModuleList(temporal)
        self.final_layer = FinalLayer(hidden_size, pt * ph * pw, self.out_channels, fused_norm=fused)

        self._initialize(spatial, temporal)
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
        """See `Denoiser.forward`; fps, height, width and num_frames are not used by LatteT2V."""
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        x = self.enter_blocks(x + self._spatial_positions(x, (H, W)))

        x_mask = self.patch_mask(x_mask)
        t = self.t_embedder(timestep)  # [B, D]
        t_mod = self.t_block(t)  # [B, 6, D]
        t0 = None if x_mask is None else self.t_embedder(torch.zeros_like(timestep))
        t0_mod = None if t0 is None else self.t_block(t0)
        y = self.y_embedder(y)  # [B, L, D]

        for i, (spatial, temporal) in enumerate(zip(self.blocks, self.temporal_blocks, strict=True)):
            x = spatial(x, y, t_mod, mask, x_mask, t0_mod, None, (H, W))
            if self.mode == "images":
                continue
            if i == 0 and x.shape[1] > 1 and not self.no_temporal_pos_emb:
                x = x + self._temporal_positions(x)
            x = temporal(x, y, t_mod, None, x_mask, t0_mod)
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def null_condition(self, batch: int) -> Tensor:
        """The text features of "no text": `[batch, 1, L, C_text]`."""
        return self.y_embedder.null(batch)

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`: a spatial block, its temporal block, the next spatial block, ..."""
        if self.mode == "images":
            return list(self.blocks)
        return [block for pair in zip(self.blocks, self.temporal_blocks, strict=True) for block in pair]

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Denoiser.to_diffusers`."""
        config, state = to_diffusers(self, **options)
        return {"_class_name": "LatteTransformer3DModel", **config}, state

    def flops(self, latent_size: Size, text_len: int) -> int:
        """See `Denoiser.flops`."""
        T, H, W = self.grid(latent_size)
        blocks = cast(list[AdaLNSingleBlock], self.transformer_blocks())
        embed = linear_flops(self.t_block, 1) + linear_flops(self.y_embedder, text_len)
        return sum(block.flops(T, H * W, text_len) for block in blocks) + embed + self.embed_flops(latent_size)

    def _initialize(self, spatial: Sequence[AdaLNSingleBlock], temporal: Sequence[AdaLNSingleBlock]) -> None:
        """PixArt's, and temporal blocks that add nothing at first: their gates are random, so both branches end in 0."""
        init_linears(self, self.x_embedder.proj)
        init_small(self.t_embedder, self.t_block, self.y_embedder)
        init_zero(block.cross_attn.proj for block in spatial if block.cross_attn is not None)
        init_zero(layer for block in temporal for layer in (block.attn.proj, block.mlp.fc2))
        init_zero([self.final_layer.linear])

    def _spatial_positions(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        rows, columns = (
            grid_coordinates(n, scale=self.space_scale, base=self.base_size, device=x.device) for n in grid
        )
        return sincos_2d(self.hidden_size, rows, columns).to(x.dtype)  # [S, D]

    def _temporal_positions(self, x: Tensor) -> Tensor:
        positions = grid_coordinates(x.shape[1], scale=self.time_scale, device=x.device)
        return sincos_1d(self.hidden_size, positions).to(x.dtype)[:, None]  # [T, 1, D]

    def _freeze(self, freeze: str | None) -> None:
        if freeze not in (None, "not_temporal", "text"):
            raise ValueError(f"freeze={freeze!r} is not one of 'not_temporal', 'text', None.")
        if freeze == "not_temporal":
            train_only(self, lambda name: name.startswith("temporal_blocks."))
        elif freeze == "text":
            train_only(self, lambda name: ".cross_attn." not in name and not name.startswith("y_embedder."))
        if self.mode == "images":
            if freeze == "not_temporal":
                raise ValueError("mode='images' leaves out the temporal blocks, and freeze='not_temporal' all others.")
            self.temporal_blocks.requires_grad_(False)


MODELS.register_variant("LatteT2V-XL/2", LatteT2V, depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
