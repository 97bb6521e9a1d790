"""Latte, the latent diffusion transformer for videos (Ma et al. 2024, arXiv:2401.03048): of classes, and of captions.

`Latte` is variant 1 of the paper's section 3.1: DiT's blocks, in turn over the tokens of a frame (even blocks) and over the
frames at each spatial position (odd blocks).

`LatteT2V` is the text-to-video model in the form of its released weights: a PixArt-alpha of spatial blocks with a temporal block
after each. A spatial block attends within a frame and to the caption, a temporal block over the frames at each spatial position,
without the caption; both are modulated by the timestep (adaLN-single, Chen et al. 2023, arXiv:2310.00426, section 2.3).

In both, temporal positions are added once, right before the first temporal block, as in the released code and in Open-Sora; in
`LatteT2V` not at all for a single frame. Deviations of `LatteT2V` from the released code: the number of frames is free, tables are
not saved; captions may be masked; temporal blocks start as the identity, so that a PixArt initialisation is a PixArt model at
first (but for the table, where there are several frames).

Weights of `LatteT2V` are recognised by content: our own checkpoints; diffusers' `LatteTransformer3DModel` (Latte-1) and the .pt
files of Latte's repository (the same names); and PixArt-alpha, in its repository's names or in diffusers', which are the spatial
half.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn

from opensora.models import key_map
from opensora.models.denoiser import AdaLNSingleDenoiser
from opensora.models.dit.dit import SIZES, DiT
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.positions import sincos_grid
from opensora.models.loading import NO_NULL_TEXT, NULL_TEXT, Conversion
from opensora.registry import MODELS

Mode = Literal["video", "images"]


@MODELS.register_module()
class Latte(DiT):
    """Latent diffusion transformer for videos (see the module's docstring).

    The arguments are DiT's; depth is even. A single frame gets its temporal position too, as in training.
    """

    axes = ("space", "time")

    def _transform(
        self, x: Tensor, c: Tensor, x_mask: Tensor | None, c0: Tensor | None, grid: tuple[int, int]
    ) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 1 and not self.no_temporal_pos_emb:
                x = x + self.temporal_positions(x)
            x = block(x, c, x_mask, c0, grid)
        return x


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
        zero = [block.cross_attn.proj for block in self.blocks]
        zero += [layer for block in temporal for layer in (block.attn.proj, block.mlp.fc2)]
        self.initialize(small=[self.t_embedder, self.t_block, self.y_embedder], zero=[*zero, self.final_layer.linear])
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

    def to_diffusers(self, *, num_frames: int = 16) -> tuple[dict[str, Any], dict[str, Tensor]]:  # type: ignore[override]
        """The `config.json` and the state dict of the same model in diffusers, a `LatteTransformer3DModel`.

        The table of "no text" is left out, as diffusers has none: its pipeline encodes an empty prompt instead.

        `num_frames` is of the videos: diffusers' model takes no other number, except 1.
        """
        frames, rows, columns = self.patch_size
        span = self.base_size / self.space_scale
        # the side of diffusers' base latent, that of the training if possible, which stands for the range of positions
        sides = [round(size * rows) for size in (self.base_size, span)]
        fitting = [side for side in sides if side // rows / max(side // 64, 1) == span]  # // 64 is diffusers' scale
        needed = {
            "mode='video', as it runs the temporal blocks; for images convert with mode='video' and call it with "
            "enable_temporal_attentions=False": self.mode == "video",
            f"patches of one frame, not {frames}": frames == 1,
            f"square patches, not {rows} x {columns}": rows == columns,
            f"another range of spatial positions than base_size / space_scale = {span:g}": bool(fitting),
            f"time_scale=1, not {self.time_scale}": self.time_scale == 1,
            "temporal positions": not self.no_temporal_pos_emb,
            "mlp_ratio=4": self.mlp_ratio == 4,
        }
        key_map.refuse_unmet("LatteTransformer3DModel", needed)
        config = key_map.diffusers_config(self, "LatteTransformer3DModel", fitting[0], video_length=num_frames)
        state = key_map.to_theirs(_rules(len(self.blocks)), self.state_dict())
        del state["caption_projection.y_embedding"]
        return config, state


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> a LatteT2V's."""
    result, suffix = Conversion(dict(state), ""), ""
    if "adaln_single.linear.weight" in state:
        suffix = ", diffusers"
        result.tensors = key_map.to_ours(_rules(key_map.diffusers_depth(state)), state)
        result.initial[NULL_TEXT] = NO_NULL_TEXT
    result.format = f"LatteT2V{suffix}"
    result.drop("LatteT2V takes no size or aspect ratio", "csize_embedder.", "ar_embedder.")
    if not any(name.startswith("temporal_blocks.") for name in result.tensors):
        result.format = f"PixArt-alpha{suffix}"
        why = "PixArt has no temporal blocks; they add nothing at first, but the frames' positions are added"
        result.may_miss(model, why, "temporal_blocks.")
    result.fit_shapes(model)
    return result


def _rules(depth: int) -> list[key_map.Rule]:
    rules = key_map.pixart_rules(depth)
    for i in range(depth):
        ours, theirs = f"temporal_blocks.{i}", f"temporal_transformer_blocks.{i}"
        rules += [
            *key_map.block_rules(ours, theirs),
            key_map.tensor(f"{ours}.scale_shift_table", f"{theirs}.scale_shift_table"),
        ]
    return rules


MODELS.register_variant("LatteT2V-XL/2", LatteT2V, depth=28, hidden_size=1152, num_heads=16, patch_size=(1, 2, 2))
for _size, _preset in SIZES.items():
    for _p in (2, 4, 8):
        MODELS.register_variant(f"Latte-{_size}/{_p}", Latte, **_preset, patch_size=(1, _p, _p))
MODELS.register_variant("Latte-XL/2x2", Latte, **SIZES["XL"], patch_size=(2, 2, 2))
