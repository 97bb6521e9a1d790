"""PixArt, the text-to-image transformer, over videos as in Open-Sora 1.0.

PixArt-alpha (Chen et al. 2023, arXiv:2310.00426) and PixArt-Sigma (Chen et al. 2024, arXiv:2403.04692). Each block
attends over all T * S tokens of a video at once, then over the caption, then applies an MLP; all blocks are modulated
through one linear layer of the timestep (adaLN-single).

Positions are sine-cosine tables, row and column `i / space_scale * base_size / length` for `length` rows or columns,
and frame `i / time_scale`. All released weights but one see rows and columns from 0 to 32, whatever the picture's size:

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
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import kernel_from_flag
from opensora.models.denoiser import Denoiser, Size, required, train_only
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.embedders import CaptionEmbedder, ScalarEmbedder
from opensora.models.layers.init import init_linears, init_small, init_zero
from opensora.models.layers.mlp import linear_flops
from opensora.models.layers.modulation import AdaLN, FinalLayer
from opensora.models.layers.pos_embed import grid_coordinates, sincos_1d, sincos_2d
from opensora.models.loading import load_weights
from opensora.models.pixart.kv_compress import KVCompressAttention, Mode
from opensora.models.pixart.weights import convert, to_diffusers
from opensora.registry import MODELS


@MODELS.register_module()
class PixArt(Denoiser):
    """PixArt-alpha for one size of picture (see the module's docstring).

    Args:
        in_channels: channels of the latent.
        caption_channels: channels of the text features.
        model_max_length: text tokens, the length of the table that stands for "no text"; None = what the released
            weights have, 120 (PixArt-Sigma: 300).
        hidden_size, depth, num_heads, mlp_ratio: the transformer's size.
        patch_size: latent frames, rows and columns in one token.
        pred_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        class_dropout_prob: how often training drops the caption.
        space_scale, time_scale: positions are divided by these.
        base_size: tokens along the side of the pictures of the training, which then set the range of positions whatever
            the input's size. None = the input's own, `int(sqrt(rows * columns))`: those of a square just count.
            PixArtMS and PixArtSigma: `32 * space_scale`, so that without a `base_size` any `space_scale` is the same.
        no_temporal_pos_emb: leave out temporal positions (frames are then a set), as the released weights need.
        qk_norm: RMS-normalise queries and keys of the self-attention; no released weights have it.
        kv_compress: "conv", "ave" or "uniform" make four keys of a frame one, see `KVCompressAttention`; None = do not.
        kv_compress_layers: in which blocks; None = in the second half, as in PixArt-Sigma's paper.
        freeze: "text" trains all but cross-attention and text.
        from_pretrained: weights to start from: a checkpoint folder, a folder of diffusers' transformer, a .safetensors
            or a .pth file.
        enable_flash_attn: None or True = fastest attention kernel, False = the plain formula.
        enable_layernorm_kernel: apex's fused LayerNorm if installed.
        input_size: accepted from older configs; the model takes any size.
    """

    text_len: ClassVar[int] = 120
    span: ClassVar[int | None] = None
    """The range of positions where `base_size` is not given; None = it grows with the input."""

    def __init__(
        self,
        *,
        in_channels: int = 4,
        caption_channels: int = 4096,
        model_max_length: int | None = None,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        patch_size: Sequence[int] = (1, 2, 2),
        pred_sigma: bool = True,
        class_dropout_prob: float = 0.1,
        space_scale: float = 1.0,
        time_scale: float = 1.0,
        base_size: float | None = None,
        no_temporal_pos_emb: bool = False,
        qk_norm: bool = False,
        kv_compress: Mode | None = None,
        kv_compress_layers: Sequence[int] | None = None,
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
        self.num_heads = num_heads
        self.mlp_ratio = mlp_ratio
        self.space_scale = space_scale
        self.time_scale = time_scale
        self.base_size = self.span * space_scale if base_size is None and self.span is not None else base_size
        self.no_temporal_pos_emb = no_temporal_pos_emb
        self.qk_norm = qk_norm
        self.kv_compress = kv_compress
        kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)
        compressed = _compressed_layers(kv_compress, kv_compress_layers, depth)
        pt, ph, pw = self.patch_size

        def attention(i: int) -> Attention:
            if kv_compress is not None and i in compressed:
                return KVCompressAttention(hidden_size, num_heads, mode=kv_compress, qk_norm=qk_norm, kernel=kernel)
            return Attention(hidden_size, num_heads, axis="all", qk_norm=qk_norm, kernel=kernel)

        self.t_block = AdaLN(hidden_size, 6)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length or self.text_len)
        blocks = [
            AdaLNSingleBlock(
                attention(i),
                CrossAttention(hidden_size, num_heads, kernel=kernel),
                mlp_ratio,
                fused_norm=enable_layernorm_kernel,
            )
            for i in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.final_layer = FinalLayer(hidden_size, pt * ph * pw, self.out_channels, fused_norm=enable_layernorm_kernel)
        self._add_size_embedders()

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
        """See `Denoiser.forward`; fps and num_frames are not used, height and width by PixArtMS only."""
        latent_size = x.shape[2:]
        _, rows, columns = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        x = self.enter_blocks(x + self._positions(x.shape[1], rows, columns, x.device).to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        sizes = self._embed_sizes(height, width)
        t = self._embed_time(timestep, sizes)  # [B, D]
        t0 = None if x_mask is None else self._embed_time(torch.zeros_like(timestep), sizes)
        t_mod = self.t_block(t)  # [B, 6, D]
        t0_mod = None if t0 is None else self.t_block(t0)
        y = self.y_embedder(y)  # [B, L, D]

        for block in self.blocks:
            x = block(x, y, t_mod, mask, x_mask, t0_mod, None, (rows, columns))
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def null_condition(self, batch: int) -> Tensor:
        """The text features of "no text": `[batch, 1, L, C_text]`."""
        return self.y_embedder.null(batch)

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return list(self.blocks)

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Denoiser.to_diffusers`."""
        return to_diffusers(self, **options)

    def flops(self, latent_size: Size, text_len: int) -> int:
        """See `Denoiser.flops`."""
        T, rows, columns = self.grid(latent_size)
        blocks = cast(list[AdaLNSingleBlock], self.transformer_blocks())
        in_blocks = sum(block.flops(T, rows * columns, text_len, (rows, columns)) for block in blocks)
        embed = linear_flops(self.t_block, 1) + linear_flops(self.y_embedder, text_len)
        return in_blocks + embed + self.embed_flops(latent_size)

    def _add_size_embedders(self) -> None:
        """For PixArtMS: further modules that must be there before weights are loaded."""

    def _embed_sizes(self, height: Tensor | None, width: Tensor | None) -> Tensor | None:
        """For PixArtMS: what the picture's size adds to the timestep's embedding, [B, D]."""
        return None

    def _embed_time(self, timestep: Tensor, sizes: Tensor | None) -> Tensor:
        t = self.t_embedder(timestep)
        return t if sizes is None else t + sizes

    def _positions(self, frames: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """`[frames or 1, rows * columns, D]` fp32."""
        base = math.isqrt(rows * columns) if self.base_size is None else self.base_size
        at_row, at_column = (
            grid_coordinates(n, scale=self.space_scale, base=base, device=device) for n in (rows, columns)
        )
        positions = sincos_2d(self.hidden_size, at_row, at_column)[None]
        if self.no_temporal_pos_emb:
            return positions
        at_frame = grid_coordinates(frames, scale=self.time_scale, device=device)
        return positions + sincos_1d(self.hidden_size, at_frame)[:, None]

    def _initialize(self, blocks: Sequence[AdaLNSingleBlock]) -> None:
        """The text branch and the output start at zero; the gates do not, unlike DiT's."""
        init_linears(self, self.x_embedder.proj)
        init_small(self.t_embedder, self.t_block, self.y_embedder)
        init_zero(cast(CrossAttention, block.cross_attn).proj for block in blocks)
        init_zero([self.final_layer.linear])

    def _freeze(self, freeze: str | None) -> None:
        if freeze not in (None, "text"):
            raise ValueError(f"freeze={freeze!r} is not one of 'text', None.")
        if freeze == "text":
            train_only(self, lambda name: ".cross_attn." not in name and not name.startswith("y_embedder."))


@MODELS.register_module()
class PixArtMS(PixArt):
    """PixArt-alpha for many sizes of picture: it also sees height, width (pixels) and their ratio, as micro-conditions.

    Names: also `csize_embedder`, `ar_embedder`.
    """

    span = 32

    def _add_size_embedders(self) -> None:
        if self.hidden_size % 3:
            raise ValueError(f"hidden_size={self.hidden_size} is not divisible by 3, as PixArtMS needs.")
        self.csize_embedder = ScalarEmbedder(self.hidden_size // 3)
        self.ar_embedder = ScalarEmbedder(self.hidden_size // 3)

    def _initialize(self, blocks: Sequence[AdaLNSingleBlock]) -> None:
        super()._initialize(blocks)
        init_small(self.csize_embedder, self.ar_embedder)

    def _embed_sizes(self, height: Tensor | None, width: Tensor | None) -> Tensor:
        size = torch.stack([required(height, "height", self), required(width, "width", self)], dim=1)  # [B, 2]
        ratio = size[:, :1] / size[:, 1:]
        return torch.cat([self.csize_embedder(size), self.ar_embedder(ratio)], dim=1)  # each number D / 3

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
