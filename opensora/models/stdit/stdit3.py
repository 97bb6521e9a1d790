"""STDiT3, the diffusion transformer of Open-Sora 1.2: spatial and temporal blocks take turns.

Each block is PixArt's (self-attention, cross-attention, MLP; Chen et al. 2023, section 2.3) with normalised queries and
keys. Spatial blocks attend within a frame, temporal blocks over the frames at each spatial
position, with rotary positions. The model is conditioned on the frame rate, whose embedding is added to the timestep's;
height and width only scale the positions, as in STDiT2.

All branches of the temporal blocks give zero at first, and so does the frame rate's embedding: without `qk_norm`, an
STDiT3 that starts from PixArt-Sigma gives for every frame what PixArt-Sigma gives for it, if their positions agree. The
normalisation of queries and keys changes that, and is learned anew.

Deviations from the released code:
- Cross-attention of the spatial blocks and the final layer start at zero, as in PixArt and STDiT; there they do not.
- As in STDiT2: positions for each sample, padded and masked captions, no random text drop, no saved tables.
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from opensora.models.denoiser import AdaLNSingleDenoiser
from opensora.models.layers.attention import Attention, CrossAttention, NormOrder
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.embedders import ScalarEmbedder
from opensora.models.loading import Conversion
from opensora.models.stdit.stdit2 import resolve_norm_order, size_positions
from opensora.registry import MODELS


@MODELS.register_module()
class STDiT3(AdaLNSingleDenoiser):
    """Spatial-temporal diffusion transformer, third version (see the module's docstring).

    Args:
        model_max_length: text tokens, the length of the table that stands for "no text".
        input_sq_size: side in pixels of the square at which positions count patches one by one.
        qk_norm: RMS-normalise queries and keys of self-attention, as the released weights do.
        norm_order: "norm_then_rope" (None), as in the released weights, or "rope_then_norm".
        qk_norm_legacy: another spelling of norm_order: True is "rope_then_norm", False "norm_then_rope".
        only_train_temporal: freeze all but the temporal blocks.
        freeze_y_embedder: freeze the text's projection.
        skip_y_embedder: accepted from Open-Sora's configs where it is False.
        common: see `AdaLNSingleDenoiser`.
    """

    temporal_parts = ("temporal_blocks.",)

    def __init__(
        self,
        *,
        model_max_length: int = 300,
        input_sq_size: float = 512,
        qk_norm: bool = True,
        norm_order: NormOrder | None = None,
        qk_norm_legacy: bool | None = None,
        only_train_temporal: bool = False,
        freeze_y_embedder: bool = False,
        skip_y_embedder: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(model_max_length=model_max_length, **common)
        self.input_sq_size = input_sq_size
        if skip_y_embedder:
            raise ValueError("skip_y_embedder=True is not supported: `y` is projected by the model. Leave it out.")
        self.norm_order = order = resolve_norm_order(norm_order, qk_norm_legacy=qk_norm_legacy)

        def make_block(axis: Literal["space", "time"]) -> AdaLNSingleBlock:
            dim, heads, kernel = self.hidden_size, self.num_heads, self.kernel
            attn = Attention(dim, heads, axis=axis, qk_norm=qk_norm, norm_order=order, kernel=kernel)
            cross_attn = CrossAttention(dim, heads, kernel=kernel)
            return AdaLNSingleBlock(attn, cross_attn, self.mlp_ratio, fused_norm=self.fused_norm)

        self.fps_embedder = ScalarEmbedder(self.hidden_size)
        self.y_embedder = self.caption_embedder()
        self.spatial_blocks = nn.ModuleList(make_block("space") for _ in range(self.depth))
        self.temporal_blocks = nn.ModuleList(make_block("time") for _ in range(self.depth))
        self.final_layer = self.output_layer()

        # zero is what makes a PixArt-Sigma initialisation unchanged at step 0, and the output 0 without one
        blocks: list[Any] = self.transformer_blocks()
        zero = [self.fps_embedder.mlp[2], self.final_layer.linear, *(block.cross_attn.proj for block in blocks)]
        zero += [layer for block in blocks[1::2] for layer in (block.attn.proj, block.mlp.fc2)]  # of the temporal ones
        self.initialize(small=[self.t_embedder, self.t_block, self.y_embedder, self.fps_embedder], zero=zero)
        self.load_and_freeze(convert, "not_temporal" if only_train_temporal else None)
        if freeze_y_embedder:
            self.y_embedder.requires_grad_(False)

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
        """See `Denoiser.forward`; fps, height and width are needed, num_frames is not used."""
        height, width, fps = self.required(sizes, "height", "width", "fps")
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        positions = size_positions(self.hidden_size, (H, W), height, width, self.input_sq_size)  # [B, S, D]
        x = self.enter_blocks(x + positions[:, None].to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        t, t0 = self.embed_timestep(timestep, x_mask, self.fps_embedder(fps))  # [B, D]
        t_mod, t0_mod = self.t_block(t), None if t0 is None else self.t_block(t0)  # [B, 6, D]
        y = self.y_embedder(y)  # [B, L, D]

        rope = None if self.no_temporal_pos_emb else self.frame_rotations(x)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            x = spatial(x, y, t_mod, mask, x_mask, t0_mod, None, (H, W))
            x = temporal(x, y, t_mod, mask, x_mask, t0_mod, rope)
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return [block for pair in zip(self.spatial_blocks, self.temporal_blocks, strict=True) for block in pair]


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> an STDiT3's."""
    result = Conversion(dict(state), "STDiT3")
    # LatteT2V has `blocks` too, and temporal ones: as it is, a strict load refuses it
    if any(name.startswith("blocks.") for name in state) and not any("temporal_blocks." in name for name in state):
        result.format = "PixArt-Sigma"
        result.tensors = {f"spatial_{k}" if k.startswith("blocks.") else k: v for k, v in state.items()}
        result.may_miss(model, "PixArt does not normalise queries and keys", ".q_norm.", ".k_norm.")
        result.may_miss(model, "PixArt has no temporal blocks", "temporal_blocks.")
        result.may_miss(model, "PixArt knows no frame rate", "fps_embedder.")
    result.fit_shapes(model)
    return result


MODELS.register_variant("STDiT3-XL/2", STDiT3, depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT3-3B/2", STDiT3, depth=28, hidden_size=1872, num_heads=26, patch_size=(1, 2, 2))
MODELS.register_variant("STDiT3-XS/2", STDiT3, depth=8, hidden_size=192, num_heads=3, patch_size=(1, 2, 2))
