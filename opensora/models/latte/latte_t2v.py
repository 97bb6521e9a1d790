"""LatteT2V, the text-to-video model of Latte: a PixArt-alpha of spatial blocks with a temporal block after each.

Ma et al. 2024, arXiv:2401.03048 (the interleaved variant), in the form of the released text-to-video weights. A spatial
block attends within a frame and to the caption, a temporal block over the frames at each spatial position,
without the caption; both are modulated by the timestep (adaLN-single, Chen et al. 2023, arXiv:2310.00426, section 2.3). The frame's index enters
once, as a sine-cosine table added to the tokens before the first temporal block, and not at all for a single frame.

Deviations from the released code: the number of frames is free, tables are not saved; captions may be masked; temporal
blocks start as the identity, so that a PixArt initialisation is a PixArt model at first (but for the table, where
there are several frames). Without the size and aspect conditions of models above 512x512, none of which was released.
"""

from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn

from opensora.models.denoiser import AdaLNSingleDenoiser
from opensora.models.latte.weights import convert, to_diffusers
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.init import init_linears, init_small, init_zero
from opensora.models.layers.pos_embed import sincos_grid
from opensora.registry import MODELS

Mode = Literal["video", "images"]


@MODELS.register_module()
class LatteT2V(AdaLNSingleDenoiser):
    """Alternating spatial and temporal transformer with captions (see the module's docstring).

    Weights without a table of "no text" are guided by an encoded empty prompt as long as the caption, as Latte's pipeline does.

    Names: `blocks.N` are the spatial blocks, as in PixArt, `temporal_blocks.N` the temporal ones.

    Args:
        mode: "images" leaves out the temporal blocks, which are then frozen: each frame is an image of its own.
        space_scale: spatial positions are divided by it.
        base_size: tokens along the side of the training images: rows and columns span the positions from 0 to
            `base_size / space_scale`, however many there are. None = `32 * space_scale`: any resolution spans the
            range of the released 512x512 model, whatever `space_scale`.
        time_scale: temporal positions are divided by it.
        freeze: "not_temporal" trains the temporal blocks alone, "text" trains all but cross-attention and text.
        common: see `AdaLNSingleDenoiser`.
    """

    empty_prompt_mask: ClassVar[Literal["caption", "own"]] = "caption"
    """Which tokens of an empty prompt count, where it stands for "no text"; see `opensora.inference.text`."""

    temporal_parts = ("temporal_blocks.",)

    def __init__(
        self,
        *,
        mode: Mode = "video",
        space_scale: float = 1.0,
        base_size: float | None = None,
        time_scale: float = 1.0,
        freeze: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}.")
        if mode == "images" and freeze == "not_temporal":
            raise ValueError("mode='images' leaves out the temporal blocks, and freeze='not_temporal' all others.")
        self.mode = mode
        self.space_scale = space_scale
        self.base_size = 32 * space_scale if base_size is None else base_size
        self.time_scale = time_scale
        self.y_embedder = self.caption_embedder()
        spatial, temporal = [], []
        for _ in range(self.depth):
            dim, heads, kernel = self.hidden_size, self.num_heads, self.kernel
            in_space = Attention(dim, heads, axis="space", kernel=kernel)
            in_time = Attention(dim, heads, axis="time", kernel=kernel)
            to_text = CrossAttention(dim, heads, kernel=kernel)
            spatial.append(AdaLNSingleBlock(in_space, to_text, self.mlp_ratio, fused_norm=self.fused_norm))
            temporal.append(AdaLNSingleBlock(in_time, None, self.mlp_ratio, fused_norm=self.fused_norm))
        self.blocks = nn.ModuleList(spatial)
        self.temporal_blocks = nn.ModuleList(temporal)
        self.final_layer = self.output_layer()

        # PixArt's, and temporal blocks that add nothing at first: their gates are random, so both branches end in 0
        init_linears(self, self.x_embedder.proj)
        init_small(self.t_embedder, self.t_block, self.y_embedder)
        init_zero(block.cross_attn.proj for block in self.blocks)
        init_zero(layer for block in temporal for layer in (block.attn.proj, block.mlp.fc2))
        init_zero([self.final_layer.linear])
        self.load_and_freeze(convert, freeze)
        if mode == "images":
            self.temporal_blocks.requires_grad_(False)

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
        """See `Denoiser.forward`; fps, height, width and num_frames are not used by LatteT2V."""
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        positions = sincos_grid(
            self.hidden_size, (H, W), scale=self.space_scale, base=self.base_size, device=x.device
        )  # [S, D]
        x = self.enter_blocks(x + positions.to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        t, t0 = self.embed_timestep(timestep, x_mask)  # [B, D]
        t_mod, t0_mod = self.t_block(t), None if t0 is None else self.t_block(t0)  # [B, 6, D]
        y = self.y_embedder(y)  # [B, L, D]

        for i, (spatial, temporal) in enumerate(zip(self.blocks, self.temporal_blocks, strict=True)):
            x = spatial(x, y, t_mod, mask, x_mask, t0_mod, None, (H, W))
            if self.mode == "images":
                continue
            if i == 0 and x.shape[1] > 1 and not self.no_temporal_pos_emb:
                x = x + self.temporal_positions(x, self.time_scale)
            x = temporal(x, y, t_mod, None, x_mask, t0_mod)
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`: a spatial block, its temporal block, the next spatial block, ..."""
        if self.mode == "images":
            return list(self.blocks)
        return [block for pair in zip(self.blocks, self.temporal_blocks, strict=True) for block in pair]

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Denoiser.to_diffusers`."""
        return to_diffusers(self, **options)


MODELS.register_variant("LatteT2V-XL/2", LatteT2V, depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
