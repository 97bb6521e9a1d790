"""PixArt, the text-to-image transformer, over videos as in Open-Sora 1.0.

PixArt-alpha (Chen et al. 2023, arXiv:2310.00426) and PixArt-Sigma (Chen et al. 2024, arXiv:2403.04692). Each block
attends over all T * S tokens of a video at once, then over the caption, then applies an MLP; all blocks are modulated
through one linear layer of the timestep (adaLN-single).

Positions are sine-cosine tables, row and column `i / space_scale * base_size / length` for `length` rows or columns,
and frame `i / time_scale`. In their authors' code all released weights see rows and columns from 0 to 32, whatever the image's
size (base_size 32 * space_scale, space_scale 0.5, 1, 2 or 4 for 256, 512, 1024 or 2K); but alpha's for 256 go to 16 (16, 1).
They are weights for images: build the model with `no_temporal_pos_emb=True` to sample images from them.

Deviations from the released code: positions follow the input's size and are not saved; captions are padded and masked
instead of packed; the model does not drop text by itself (see `opensora.training.batch_encoder`).

Weights are recognised by content: our own checkpoints and PixArt's .pth (the same names, its patch kernel 2-D), and diffusers'
`PixArtTransformer2DModel`, which does not store the table of "no text" and encodes an empty prompt instead, as sampling from
such weights does here.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.models import key_map
from opensora.models.denoiser import AdaLNSingleDenoiser
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.blocks import AdaLNSingleBlock
from opensora.models.layers.embedders import ScalarEmbedder
from opensora.models.layers.positions import grid_coordinates, sincos_1d, sincos_grid
from opensora.models.loading import NO_NULL_TEXT, NULL_TEXT, Conversion
from opensora.registry import MODELS
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)
SIZE_EMBEDDERS = ("csize_embedder", "ar_embedder")
FACTOR = 2  # rows, and columns, of keys that become one


class KVCompressAttention(Attention):
    """Self-attention among all tokens with fewer keys, for large images (PixArt-Sigma, section 3.3).

    Each window of 2 x 2 neighbouring keys, and of values, becomes one, by learned weights for each channel, the mean at
    first, and LayerNorm; queries stay as they are. Frames are compressed one by one. Windows that reach over the last row or
    column repeat it, so that they hold the mean of what is there. Names: also `sr`, `norm`.

    Deviations from the released code: there an odd last row or column is dropped; `qk_norm` is this package's, by head and
    after compression.
    """

    def __init__(self, dim: int, num_heads: int, *, qk_norm: bool = False, kernel: str = "auto") -> None:
        super().__init__(dim, num_heads, axis="all", qk_norm=qk_norm, kernel=kernel)
        self.sr = nn.Conv2d(dim, dim, kernel_size=FACTOR, stride=FACTOR, groups=dim)
        self.sr.outside_autocast = True  # type: ignore[assignment]  # `compress` does not call it
        self.norm = nn.LayerNorm(dim)
        nn.init.constant_(self.sr.weight, 1 / FACTOR**2)
        nn.init.zeros_(self.sr.bias)  # type: ignore[arg-type]  # the layer above has a bias

    def reduce_keys(self, k: Tensor, v: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """`k, v [B, H, T * rows * columns, d]` -> a quarter of them; `grid` is rows and columns of a frame."""
        assert grid is not None, "compressed attention needs to know the rows and columns of a frame"
        return self._reduce(k, grid), self._reduce(v, grid)

    def num_keys(self, grid: tuple[int, int]) -> int:
        """See `Attention.num_keys`."""
        return -(-grid[0] // FACTOR) * -(-grid[1] // FACTOR)

    def _reduce(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        batch = x.shape[0]
        planes = self.compress(rearrange(x, "B H (T R C) d -> (B T) (H d) R C", R=grid[0], C=grid[1]))
        tokens = rearrange(planes, "(B T) D R C -> B (T R C) D", B=batch)
        tokens = self.norm(tokens).to(x.dtype)  # autocast would leave LayerNorm's fp32
        return rearrange(tokens, "B N (H d) -> B H N d", H=self.num_heads)

    def compress(self, planes: Tensor) -> Tensor:
        """`[B, D, rows, columns]` -> half the rows and columns, rounded up; before the LayerNorm."""
        # always padded, then cropped to whole windows: a test for odd sizes would compile two programs, and padding in
        # PyTorch's "replicate" mode has no deterministic gradient on a GPU
        rows, columns = (-(-n // FACTOR) for n in planes.shape[-2:])
        planes = torch.cat([planes, planes[..., -1:, :]], dim=-2)[..., : FACTOR * rows, :]
        planes = torch.cat([planes, planes[..., -1:]], dim=-1)[..., : FACTOR * columns]
        windows = planes.unflatten(-2, (rows, FACTOR)).unflatten(-1, (columns, FACTOR))  # [B, D, rows, 2, columns, 2]
        # as a sum, not a convolution, whose memory layout PyTorch 2.11 gets wrong when compiled
        weighted = windows * self.sr.weight.unsqueeze(3)  # [D, 1, FACTOR, 1, FACTOR]
        return (weighted.sum(dim=(-3, -1)) + self.sr.bias[:, None, None]).to(planes.dtype)  # type: ignore[index]


@MODELS.register_module()
class PixArt(AdaLNSingleDenoiser):
    """PixArt-alpha for one image size (see the module's docstring).

    Args:
        model_max_length: text tokens, the length of the table that stands for "no text"; None = what the released
            weights have, 120 (PixArt-Sigma: 300).
        space_scale, time_scale: positions are divided by these.
        base_size: tokens along the side of the training images, which then set the range of positions whatever
            the input's size. None = `int(sqrt(rows * columns))` of the input, as in Open-Sora. PixArt's own code and
            diffusers sample the released multi-size weights with `32 * space_scale` tokens at every size: set it for these.
            Open-Sora counts latent cells: twice that number is read as such.
        qk_norm: RMS-normalise queries and keys of the self-attention; no released weights have it.
        kv_compress: "conv" makes four keys of a frame one, see `KVCompressAttention`; None = do not.
        kv_compress_layers: in which blocks; None = in the second half, as in PixArt-Sigma's paper.
        freeze: "text" trains all but cross-attention and text.
        common: see `AdaLNSingleDenoiser`. The released weights need `no_temporal_pos_emb`.
    """

    text_len: ClassVar[int] = 120

    def __init__(
        self,
        *,
        model_max_length: int | None = None,
        space_scale: float = 1.0,
        time_scale: float = 1.0,
        base_size: float | None = None,
        qk_norm: bool = False,
        kv_compress: Literal["conv"] | None = None,
        kv_compress_layers: Sequence[int] | None = None,
        freeze: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(model_max_length=model_max_length or self.text_len, **common)
        self.space_scale = space_scale
        self.time_scale = time_scale
        tokens = 32 * space_scale
        if base_size == tokens * self.patch_size[1] > tokens:  # as in Open-Sora 1.2's configs for 2K: 2048 // 8
            logger.warning("base_size=%g counts latent cells, as in Open-Sora: as tokens, %g.", base_size, tokens)
            base_size = tokens
        self.base_size = base_size
        self.qk_norm = qk_norm
        self.kv_compress = kv_compress
        if kv_compress not in (None, "conv"):
            raise ValueError(f"kv_compress={kv_compress!r} is not 'conv' or None, the ways that released weights have.")
        if kv_compress is None and kv_compress_layers is not None:
            raise ValueError(f"kv_compress_layers={kv_compress_layers!r} says where, but kv_compress does not say how.")
        second_half = range(self.depth // 2, self.depth)
        compressed = set(second_half if kv_compress_layers is None else kv_compress_layers)
        if wrong := sorted(compressed - set(range(self.depth))):
            raise ValueError(f"kv_compress_layers: {wrong} are not blocks; there are 0 to {self.depth - 1}.")

        def make_block(i: int) -> AdaLNSingleBlock:
            dim, heads, kernel = self.hidden_size, self.num_heads, self.kernel
            if kv_compress is not None and i in compressed:
                attn: Attention = KVCompressAttention(dim, heads, qk_norm=qk_norm, kernel=kernel)
            else:
                attn = Attention(dim, heads, axis="all", qk_norm=qk_norm, kernel=kernel)
            cross_attn = CrossAttention(dim, heads, kernel=kernel)
            return AdaLNSingleBlock(attn, cross_attn, self.mlp_ratio, fused_norm=self.fused_norm)

        self.y_embedder = self.caption_embedder()
        self.blocks = nn.ModuleList(make_block(i) for i in range(self.depth))
        self.final_layer = self.output_layer()
        size_embedders = self._add_size_embedders()

        # the text branch and the output start at zero; the gates do not, unlike DiT's
        self.initialize(
            small=[self.t_embedder, self.t_block, self.y_embedder, *size_embedders],
            zero=[*(block.cross_attn.proj for block in self.blocks), self.final_layer.linear],
        )
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
        """See `Denoiser.forward`; fps and num_frames are not used, height and width by PixArtMS alone."""
        latent_size = x.shape[2:]
        T, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        x = self.enter_blocks(x + self._positions(T, H, W, x.device).to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        t, t0 = self.embed_timestep(timestep, x_mask, self._embed_sizes(sizes))  # [B, D]
        t_mod, t0_mod = self.t_block(t), None if t0 is None else self.t_block(t0)  # [B, 6, D]
        y = self.y_embedder(y)  # [B, L, D]

        for block in self.blocks:
            x = block(x, y, t_mod, mask, x_mask, t0_mod, None, (H, W))
        return self.unpatchify(self.final_layer(x, t, x_mask, t0), latent_size)

    def to_diffusers(  # type: ignore[override]
        self, *, sample_size: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The `config.json` and the state dict of the same model in diffusers, a `PixArtTransformer2DModel`.

        Its positions are `i / interpolation_scale * base / length` with `base = sample_size // patch`, a whole number. Ours
        are the same where `self.base_size` is set: any range is that of a whole base and a matching scale. A model
        without it agrees at one size, squares of `sample_size`. The table of "no text" is left out.

        Args:
            sample_size: the side of the latent at which a model without `base_size` shall agree; None = that of a model
                with positions from 0 to 32.
        """
        pt, ph, pw = self.patch_size
        needed = {
            "no_temporal_pos_emb=True, as it makes images": self.no_temporal_pos_emb,
            f"square patches of one frame, not {self.patch_size}": pt == 1 and ph == pw,
            f"no compressed keys (kv_compress={self.kv_compress!r})": self.kv_compress is None,
            "qk_norm=False": not self.qk_norm,
            "mlp_ratio=4": self.mlp_ratio == 4,
        }
        key_map.refuse_unmet("PixArtTransformer2DModel", needed)
        scale, base = self.space_scale, self.base_size
        if sample_size is None:
            tokens = max(1, round(32 * scale if base is None else base))
            scale = scale if base is None else tokens * scale / base
        elif base is None:
            tokens = key_map.patches_along(sample_size, ph)
        else:
            raise UserError("sample_size has no effect on this model's positions, as base_size is set. Leave it out.")
        config = key_map.diffusers_config(
            self,
            "PixArtTransformer2DModel",
            tokens * ph,
            interpolation_scale=int(scale) if scale == int(scale) else scale,
            use_additional_conditions=any(name.startswith(SIZE_EMBEDDERS) for name in self.state_dict()),
        )
        state = key_map.to_theirs(key_map.pixart_rules(len(self.blocks)), self.state_dict())
        del state["caption_projection.y_embedding"]
        return config, state

    def _add_size_embedders(self) -> list[ScalarEmbedder]:
        """For PixArtMS: further modules, created before weights are loaded."""
        return []

    def _embed_sizes(self, sizes: dict[str, Tensor | None]) -> Tensor | float:
        """For PixArtMS: what is added to the timestep's embedding, [B, D]."""
        return 0.0

    def _positions(self, frames: int, rows: int, columns: int, device: torch.device) -> Tensor:
        """`[frames or 1, rows * columns, D]` fp32."""
        grid, dim = (rows, columns), self.hidden_size
        base = math.isqrt(rows * columns) if self.base_size is None else self.base_size
        positions = sincos_grid(dim, grid, scale=self.space_scale, base=base, device=device)[None]
        if self.no_temporal_pos_emb:
            return positions
        at_frame = grid_coordinates(frames, scale=self.time_scale, device=device)
        return positions + sincos_1d(dim, at_frame)[:, None]


@MODELS.register_module()
class PixArtMS(PixArt):
    """PixArt-alpha for many image sizes: also conditioned on height, width (pixels) and their ratio."""

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


@MODELS.register_module(name=["PixArtSigma", "PixArt_Sigma"])
class PixArtSigma(PixArt):
    """PixArt-Sigma: longer captions, no micro-conditions."""

    text_len = 300


def convert(state: Mapping[str, Tensor], model: nn.Module) -> Conversion:
    """A released state dict -> that of a PixArt, PixArtMS or PixArtSigma; of another kind a UserError that names the kind."""
    result = Conversion(dict(state), "PixArt")
    if "adaln_single.linear.weight" in state:
        result.format = "PixArt, diffusers"
        result.tensors = key_map.to_ours(key_map.pixart_rules(key_map.diffusers_depth(state)), state)
        result.initial[NULL_TEXT] = NO_NULL_TEXT
    result.fit_shapes(model)

    own = model.state_dict()
    in_file = any(name.startswith(SIZE_EMBEDDERS) for name in result.tensors)
    in_model = [name for name in own if name.startswith(SIZE_EMBEDDERS)]
    if in_file and not in_model:
        raise UserError(
            f"the weights have micro-conditions (csize_embedder, ar_embedder), which {type(model).__name__} does not: set "
            'model.type to "PixArtMS-XL/2".'
        )
    for name in [] if in_file else in_model:  # PixArtMS may start without them: the output is then the same
        if ".mlp.2." in name:
            result.tensors[name] = own[name].new_zeros(own[name].shape)
            result.converted[name] = "the file has no micro-conditions: zero, so that they start by adding nothing"
        else:
            result.initial[name] = "the file has no micro-conditions"

    compressed, own_compressed = (
        {int(name.split(".")[1]) for name in names if ".attn.sr." in name} for names in (result.tensors, own)
    )
    if compressed and compressed != own_compressed:
        layers = tuple(sorted(compressed))
        raise UserError(
            f'the weights compress keys in blocks {layers}: set model.kv_compress="conv" and '
            f"model.kv_compress_layers={layers}."
        )
    if not compressed:  # it may be added: it starts as the mean, as in PixArt-Sigma's own fine-tuning
        result.may_miss(model, "the file does not compress keys", ".attn.sr.", ".attn.norm.")
    return result


_XL = {"depth": 28, "hidden_size": 1152, "num_heads": 16, "patch_size": (1, 2, 2)}
MODELS.register_variant("PixArt-XL/2", PixArt, **_XL)
MODELS.register_variant("PixArt-1B/2", PixArt, **{**_XL, "hidden_size": 1872, "num_heads": 26})
MODELS.register_variant("PixArtMS-XL/2", PixArtMS, **_XL)
MODELS.register_variant("PixArt-Sigma-XL/2", PixArtSigma, **_XL)
