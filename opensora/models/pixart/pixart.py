"""PixArt, the text-to-image transformer, over videos as in Open-Sora 1.0.

PixArt-alpha (Chen et al. 2023, arXiv:2310.00426) and PixArt-Sigma (Chen et al. 2024, arXiv:2403.04692). Each block
attends over all T * S tokens of a video at once, then over the caption, then applies an MLP; all blocks are modulated
through one linear layer of the timestep (adaLN-single).

Positions are sine-cosine tables, row and column `i / space_scale * base_size / length` for `length` rows or columns,
and frame `i / time_scale`. All released weights but one see rows and columns from 0 to 32, whatever the image's size:

| weights | space_scale | base_size |
|---|---|---|
| alpha and Sigma, 512 | 1 | 32 |
| Sigma, 256 | 0.5 | 16 |
| alpha and Sigma, 1024 | 2 | 64 |
| Sigma, 2K | 4 | 128 |
| alpha, 256 | 1 | 16, so from 0 to 16 |

They are weights for images: build the model with `no_temporal_pos_emb=True` to sample images from them.

Deviations from the released code: positions follow the input's size and are not saved; captions are padded and masked
instead of packed; the model does not drop text by itself (see `opensora.training.batch_encoder`).
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opensora.models.denoiser import AdaLNSingleDenoiser, Size
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.embedders import ScalarEmbedder
from opensora.models.layers.init import init_linears, init_small, init_zero
from opensora.models.layers.mlp import linear_flops
from opensora.models.layers.pos_embed import grid_coordinates, sincos_1d, sincos_grid
from opensora.models.pixart.kv_compress import KVCompressAttention, Mode
from opensora.models.pixart.weights import convert, to_diffusers
from opensora.registry import MODELS


@MODELS.register_module()
class PixArt(AdaLNSingleDenoiser):
    """PixArt-alpha for one image size (see the module's docstring).

    Args:
        model_max_length: text tokens, the length of the table that stands for "no text"; None = what the released
            weights have, 120 (PixArt-Sigma: 300).
        space_scale, time_scale: positions are divided by these.
        base_size: tokens along the side of the training images, which then set the range of positions whatever
            the input's size. None = the input's own, `int(sqrt(rows * columns))`: those of a square just count.
            PixArtMS and PixArtSigma: `32 * space_scale`, so that without a `base_size` any `space_scale` is the same.
        qk_norm: RMS-normalise queries and keys of the self-attention; no released weights have it.
        kv_compress: "conv", "ave" or "uniform" make four keys of a frame one, see `KVCompressAttention`; None = do not.
        kv_compress_layers: in which blocks; None = in the second half, as in PixArt-Sigma's paper.
        freeze: "text" trains all but cross-attention and text.
        common: see `AdaLNSingleDenoiser`. The released weights need `no_temporal_pos_emb`.
    """

    text_len: ClassVar[int] = 120
    span: ClassVar[int | None] = None
    """The range of positions where `base_size` is not given; None = it grows with the input."""

    def __init__(
        self,
        *,
        model_max_length: int | None = None,
        space_scale: float = 1.0,
        time_scale: float = 1.0,
        base_size: float | None = None,
        qk_norm: bool = False,
        kv_compress: Mode | None = None,
        kv_compress_layers: Sequence[int] | None = None,
        freeze: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(model_max_length=model_max_length or self.text_len, **common)
        self.space_scale = space_scale
        self.time_scale = time_scale
        self.base_size = self.span * space_scale if base_size is None and self.span is not None else base_size
        self.qk_norm = qk_norm
        self.kv_compress = kv_compress
        compressed = _compressed_layers(kv_compress, kv_compress_layers, self.depth)

        def make_block(i: int) -> AdaLNSingleBlock:
            dim, heads, kernel = self.hidden_size, self.num_heads, self.kernel
            if kv_compress is not None and i in compressed:
                attn: Attention = KVCompressAttention(dim, heads, mode=kv_compress, qk_norm=qk_norm, kernel=kernel)
            else:
                attn = Attention(dim, heads, axis="all", qk_norm=qk_norm, kernel=kernel)
            cross_attn = CrossAttention(dim, heads, kernel=kernel)
            return AdaLNSingleBlock(attn, cross_attn, self.mlp_ratio, fused_norm=self.fused_norm)

        self.y_embedder = self.caption_embedder()
        self.blocks = nn.ModuleList(make_block(i) for i in range(self.depth))
        self.final_layer = self.output_layer()
        size_embedders = self._add_size_embedders()

        # the text branch and the output start at zero; the gates do not, unlike DiT's
        init_linears(self, self.x_embedder.proj)
        init_small(self.t_embedder, self.t_block, self.y_embedder, *size_embedders)
        init_zero(block.cross_attn.proj for block in self.blocks)
        init_zero([self.final_layer.linear])
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
        """See `Denoiser.forward`; fps and num_frames are not used, height and width by PixArtMS alone.

        Raises:
            ValueError: PixArtMS misses height or width.
        """
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        x = self.enter_blocks(x + self._positions(x.shape[1], H, W, x.device).to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        t, t0 = self.embed_timestep(timestep, x_mask, self._embed_sizes(sizes))  # [B, D]
        t_mod, t0_mod = self.t_block(t), None if t0 is None else self.t_block(t0)  # [B, 6, D]
        y = self.y_embedder(y)  # [B, L, D]

        for block in self.blocks:
            x = block(x, y, t_mod, mask, x_mask, t0_mod, None, (H, W))
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Denoiser.to_diffusers`."""
        return to_diffusers(self, **options)

    def _add_size_embedders(self) -> list[ScalarEmbedder]:
        """For PixArtMS: further modules, created before weights are loaded."""
        return []

    def _embed_sizes(self, sizes: dict[str, Tensor | None]) -> Tensor | float:
        """For PixArtMS: what is added to the timestep's embedding, [B, D]."""
        return 0.0

    def _positions(self, frames: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """`[frames or 1, rows * columns, D]` fp32."""
        base = math.isqrt(rows * columns) if self.base_size is None else self.base_size
        positions = sincos_grid(self.hidden_size, (rows, columns), scale=self.space_scale, base=base, device=device)[
            None
        ]
        if self.no_temporal_pos_emb:
            return positions
        at_frame = grid_coordinates(frames, scale=self.time_scale, device=device)
        return positions + sincos_1d(self.hidden_size, at_frame)[:, None]


@MODELS.register_module()
class PixArtMS(PixArt):
    """PixArt-alpha for many image sizes: also conditioned on height, width (pixels) and their ratio.

    Names: also `csize_embedder`, `ar_embedder`.
    """

    span = 32

    def _add_size_embedders(self) -> list[ScalarEmbedder]:
        if self.hidden_size % 3:
            raise ValueError(f"hidden_size={self.hidden_size} is not divisible by 3, as PixArtMS needs.")
        self.csize_embedder = ScalarEmbedder(self.hidden_size // 3)
        self.ar_embedder = ScalarEmbedder(self.hidden_size // 3)
        return [self.csize_embedder, self.ar_embedder]

    def _embed_sizes(self, sizes: dict[str, Tensor | None]) -> Tensor:
        size = torch.stack(self.required(sizes, "height", "width"), dim=1)  # [B, 2]
        ratio = size[:, :1] / size[:, 1:]
        return torch.cat([self.csize_embedder(size), self.ar_embedder(ratio)], dim=1)  # D / 3 for each of the three

    def flops(self, latent_size: Size, text_len: int) -> int:
        """See `Denoiser.flops`."""
        sizes = linear_flops(self.csize_embedder, 2) + linear_flops(self.ar_embedder, 1)
        return super().flops(latent_size, text_len) + sizes


@MODELS.register_module()
class PixArtSigma(PixArt):
    """PixArt-Sigma: longer captions, no micro-conditions, any size within the range of positions of its training."""

    text_len = 300
    span = 32


def _compressed_layers(mode: str | None, layers: Sequence[int] | None, depth: int) -> set[int]:
    """The blocks whose keys are compressed."""
    if mode is None:
        if layers is not None:
            raise ValueError(f"kv_compress_layers={layers!r} says where, but kv_compress does not say how.")
        return set()
    if layers is None:
        return set(range(depth // 2, depth))
    if wrong := [i for i in layers if not 0 <= i < depth]:
        raise ValueError(f"kv_compress_layers: {wrong} are not blocks; there are 0 to {depth - 1}.")
    return set(layers)


_XL = {"depth": 28, "hidden_size": 1152, "num_heads": 16, "patch_size": (1, 2, 2)}
MODELS.register_variant("PixArt-XL/2", PixArt, **_XL)
MODELS.register_variant("PixArt-1B/2", PixArt, **{**_XL, "hidden_size": 1872, "num_heads": 26})
MODELS.register_variant("PixArtMS-XL/2", PixArtMS, **_XL)
MODELS.register_variant("PixArt-Sigma-XL/2", PixArtSigma, **_XL)
