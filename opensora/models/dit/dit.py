"""DiT, the diffusion transformer (Peebles & Xie 2023, arXiv:2212.09748), for images and videos.

All tokens of a video attend to each other. The condition, timestep plus class or pooled caption, enters every block
through adaLN-zero; a new model predicts zero, and each of its blocks is the identity.

For videos, Open-Sora (2024) adds a table of temporal positions to the spatial one, also for a single frame, although row 0
of the table is not zero and the released image weights do not know it. Here a single frame, or patch of frames, never gets
temporal positions: one frame is DiT's image, and several frames are Open-Sora's video.

Further deviations from the released codes: position tables follow the input's size and are not saved; the model does
not drop the condition by itself (see `opensora.training.batch_encoder`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opensora.models.denoiser import Denoiser, Size
from opensora.models.dit.weights import convert, to_diffusers
from opensora.models.layers.attention import Attention, Axis
from opensora.models.layers.blocks import AdaLNZeroBlock
from opensora.models.layers.embedders import CaptionEmbedder, LabelEmbedder
from opensora.models.layers.modulation import AdaLNFinalLayer
from opensora.models.layers.positions import sincos_grid
from opensora.models.loading import load_weights, written_by
from opensora.registry import MODELS


@MODELS.register_module()
class DiT(Denoiser):
    """Diffusion transformer (see the module's docstring).

    Args:
        condition: "label_N" = N classes, "text" = one vector per caption, such as CLIP's, "unconditional" = none.
        caption_channels: channels of the caption's vector; used by "text" only.
        model_max_length: what the text encoder reads of a caption; accepted, as the caption is one vector here.
        learn_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        common: see `Denoiser`; class_dropout_prob=0 leaves the table without a row for "no class".
    """

    axes: ClassVar[tuple[Axis, ...]] = ("all",)
    """What the blocks attend over, in turn."""

    y_embedder: CaptionEmbedder | LabelEmbedder | None

    def __init__(
        self,
        *,
        condition: str = "text",
        caption_channels: int = 512,
        model_max_length: int = 77,
        learn_sigma: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        dim, axes, (pt, ph, pw) = self.hidden_size, self.axes, self.patch_size
        if self.depth % len(axes):
            raise ValueError(f"depth={self.depth} is not a multiple of {len(axes)}: blocks alternate over {axes}.")
        self.condition = condition
        self.out_channels = 2 * self.in_channels if learn_sigma else self.in_channels
        kind, _, number = condition.partition("_")
        if kind == "label" and number.isdecimal() and int(number) > 0:
            self.y_embedder = LabelEmbedder(int(number), dim, with_null=self.class_dropout_prob > 0)
        elif condition == "text":
            self.y_embedder = CaptionEmbedder(caption_channels, dim, 1)
        elif condition == "unconditional":
            self.y_embedder = None
        else:
            raise ValueError(f"condition={condition!r} is not 'text', 'label_N' (N classes) or 'unconditional'.")
        attentions = [
            Attention(dim, self.num_heads, axis=axes[i % len(axes)], kernel=self.kernel) for i in range(self.depth)
        ]
        self.blocks = nn.ModuleList(
            AdaLNZeroBlock(attn, self.mlp_ratio, fused_norm=self.fused_norm) for attn in attentions
        )
        self.final_layer = AdaLNFinalLayer(dim, pt * ph * pw, self.out_channels, fused_norm=self.fused_norm)

        # zero makes each block the identity and the output 0 at first (section 3.2, "adaLN-Zero block")
        self.initialize(
            small=filter(None, (self.t_embedder, self.y_embedder)),
            zero=[
                *(block.adaLN_modulation for block in self.blocks),
                self.final_layer.adaLN_modulation,
                self.final_layer.linear,
            ],
        )
        if (path := self.from_pretrained) is not None:
            load_weights(self, path, lambda state, _: convert(state, self, written_by(path)))

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
        """See `Denoiser.forward`.

        `y` is `[B, 1, 1, C_text]`, or class labels `[B, 1, 1, 1]` (the number of classes itself = "no class"); an
        unconditional model ignores it. mask, fps, height, width and num_frames are not used.

        Raises:
            ValueError: `y` is of the wrong kind, such as one vector per token.
        """
        latent_size = x.shape[2:]
        _, H, W = self.grid(latent_size)
        x = self.patchify(x)  # [B, T, S, D]
        x = self.enter_blocks(x + sincos_grid(self.hidden_size, (H, W), device=x.device).to(x.dtype))

        x_mask = self.patch_mask(x_mask)
        c, c0 = self.embed_timestep(timestep, x_mask, self._embed_condition(y))  # [B, D]
        x = self._transform(x, c, x_mask, c0, (H, W))
        return self.unpatchify(self.final_layer(x, c, x_mask, c0), latent_size)

    def null_condition(self, batch: int) -> Tensor:
        """The `y` of "no text" `[batch, 1, 1, C_text]`, or of "no class" `[batch, 1, 1, 1]`; zeros if there is no `y`."""
        if self.y_embedder is None:
            return torch.zeros(batch, 1, 1, 1, device=self.x_embedder.proj.weight.device)
        return super().null_condition(batch)

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Denoiser.to_diffusers`."""
        return to_diffusers(self, **options)

    def flops(self, latent_size: Size, text_len: int) -> int:
        """See `Denoiser.flops`; the condition is one token, whatever `text_len`."""
        return super().flops(latent_size, 1)

    def _transform(
        self, x: Tensor, c: Tensor, x_mask: Tensor | None, c0: Tensor | None, grid: tuple[int, int]
    ) -> Tensor:
        """The blocks, and when temporal positions enter: `x [B, T, S, D] -> [B, T, S, D]`."""
        if x.shape[1] > 1 and not self.no_temporal_pos_emb:
            x = x + self.temporal_positions(x)
        for block in self.blocks:
            x = block(x, c, x_mask, c0, grid)
        return x

    def _embed_condition(self, y: Tensor) -> Tensor | float:
        if self.y_embedder is None:
            return 0.0
        if isinstance(self.y_embedder, LabelEmbedder):
            fits, wanted = (
                not y.is_floating_point() and y.numel() == len(y),
                "label per sample: use the text encoder 'classes'",
            )
        else:
            fits, wanted = (
                y.is_floating_point() and y.shape[1:-1] == (1, 1),
                "vector per caption: use the text encoder 'clip'",
            )
        if not fits:
            raise ValueError(
                f"{type(self).__name__} with condition={self.condition!r} takes one {wanted}. y is {tuple(y.shape)}, {y.dtype}."
            )
        embedded = self.y_embedder(y)
        return embedded if embedded.ndim == 2 else embedded.squeeze(1)  # [B, D]


SIZES = {
    "XL": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
    "L": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "B": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "S": {"depth": 12, "hidden_size": 384, "num_heads": 6},
}
"""Table 1 of the paper."""

for _size, _preset in SIZES.items():
    for _p in (2, 4, 8):
        MODELS.register_variant(f"DiT-{_size}/{_p}", DiT, **_preset, patch_size=(1, _p, _p))
MODELS.register_variant("DiT-XL/2x2", DiT, **SIZES["XL"], patch_size=(2, 2, 2))
