"""DiT, the diffusion transformer (Peebles & Xie 2023, arXiv:2212.09748), for images and videos.

All tokens of a video attend to each other. The condition, timestep plus class or pooled caption, enters every block
through adaLN-zero; a new model predicts zero, and each of its blocks is the identity.

For videos, Open-Sora (2024) adds a table of temporal positions to the spatial one, also for a single frame, although row 0
of the table is not zero and the released image weights do not know it. Here a single frame, or patch of frames, never gets
temporal positions: one frame is DiT's image, and several frames are Open-Sora's video.

Position tables follow the input's size and are not saved; the model does not drop the condition by itself (see
`opensora.training.batch_encoder`).

Weights are recognised by content: the official .pt (2-D patch kernels, stored position tables, of which Latte's has
`temp_embed`), our own checkpoints and Open-Sora's (3-D kernels), and diffusers' `DiTTransformer2DModel`, which holds the
timestep's MLP and the classes once per block. Latte also starts from DiT's image weights: block i becomes block i, so that half
of the blocks that saw images become temporal. DiT and Latte have the same names and shapes: of our own files, the model type
that they are written with tells which it is.
"""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opensora.models import key_map
from opensora.models.denoiser import Denoiser, Size
from opensora.models.layers.attention import Attention, Axis
from opensora.models.layers.blocks import AdaLNZeroBlock
from opensora.models.layers.embedders import CaptionEmbedder, LabelEmbedder
from opensora.models.layers.modulation import AdaLNFinalLayer
from opensora.models.layers.positions import sincos_grid
from opensora.models.loading import PATCHES, Conversion, load_weights, written_by
from opensora.registry import MODELS
from opensora.utils.errors import UserError

CLASSES = "y_embedder.embedding_table.weight"


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
        """See `Denoiser.forward`; mask, fps, height, width and num_frames are not used.

        `y` is `[B, 1, 1, C_text]`, or class labels `[B, 1, 1, 1]` (the number of classes itself = "no class"); an
        unconditional model ignores it.
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

    def to_diffusers(self, *, sample_size: int = 32) -> tuple[dict[str, Any], dict[str, Tensor]]:  # type: ignore[override]
        """A class-conditional DiT as diffusers' `DiTTransformer2DModel`: the content of its config.json, and the state dict.

        diffusers spaces the timestep's frequencies over 127 steps, DiT over 128: only with DiT's
        (`time_proj.downscale_freq_shift` of its blocks 0) are the outputs equal.

        `sample_size` is rows, and columns, of the latent: diffusers' positions are for one size.
        """
        pt, ph, pw = self.patch_size
        classes = self.y_embedder if isinstance(self.y_embedder, LabelEmbedder) else None
        needed = {
            f"classes, not condition={self.condition!r}": classes is not None,
            "a row for 'no class', not class_dropout_prob=0": classes is None or classes.with_null,
            f"patches of one frame, not {pt}": pt == 1,
            f"square patches, not {ph} x {pw}": ph == pw,
            "attention among all tokens, not Latte's": self.axes == ("all",),
            "mlp_ratio=4": self.mlp_ratio == 4,
        }
        key_map.refuse_unmet("DiTTransformer2DModel", needed)
        key_map.patches_along(sample_size, ph)
        own = {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": classes and classes.num_classes}
        config = key_map.diffusers_config(self, "DiTTransformer2DModel", sample_size, **own)
        return config, key_map.to_theirs(rules(len(self.blocks)), self.state_dict())

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


def convert(state: Mapping[str, Tensor], model: DiT, source_type: str | None = None) -> Conversion:
    """A released state dict -> a DiT's or a Latte's; `source_type`: the `model.type` that the file says it is of."""
    axes = None
    if source_type in MODELS.choices():  # a header may say anything
        axes = getattr(inspect.unwrap(MODELS.get(source_type)), "axes", None)
    official_latte, is_latte = "temp_embed" in state, model.axes != ("all",)
    if not is_latte and (official_latte or axes not in (None, model.axes)):
        raise UserError(
            "these are weights of Latte, not of DiT, whose blocks all attend to everything: use a model type 'Latte-...'."
        )
    kernel = state.get(PATCHES)
    if any(".norm1.emb." in name for name in state):
        result = Conversion(key_map.to_ours(rules(key_map.diffusers_depth(state)), state), "DiT, diffusers")
    else:
        result = Conversion(dict(state), "DiT, official" if kernel is not None and kernel.ndim == 4 else "DiT")
    if official_latte:
        result.format = "Latte, official"
    elif is_latte and kernel is not None and kernel.ndim == 5 and axes in (None, model.axes):
        result.format = "Latte"
    elif is_latte:
        result.format = f"{result.format}; every second block becomes temporal"
        _drop_classes(result, model, "the classes are those of DiT's images")
    result.fit_shapes(model)

    embedder, table = model.y_embedder, result.tensors.get(CLASSES)
    if embedder is None:
        result.drop("the model is unconditional", "y_embedder.")
    elif not isinstance(embedder, LabelEmbedder):
        _drop_classes(result, model, "the file has classes, the model takes text")
    elif any(name.startswith("y_embedder.y_proj") for name in result.tensors):
        raise UserError("the weights are a text model's, but the model takes classes: set condition='text'.")
    elif table is not None and len(table) == embedder.num_classes + 1 and not embedder.with_null:
        result.tensors[CLASSES] = table[:-1]
        result.converted[CLASSES] = "the last row, 'no class', left out (class_dropout_prob=0)"
    elif table is not None and len(table) != (rows := embedder.embedding_table.num_embeddings):
        why = f"the file's table has {len(table)} rows, the model's {rows}: other classes, learned anew"
        _drop_classes(result, model, why)
    return result


def _drop_classes(result: Conversion, model: nn.Module, why: str) -> None:
    """Leave the file's class table out, and the model's condition embedder at its initial values."""
    if CLASSES in result.tensors:
        result.drop(why, CLASSES)
        result.may_miss(model, why, "y_embedder.")


def rules(depth: int) -> list[key_map.Rule]:
    """Our names <-> diffusers', for a DiT of `depth` blocks."""
    embeds = [f"transformer_blocks.{i}.norm1.emb" for i in range(depth)]
    result = [
        *key_map.layer("x_embedder.proj", "pos_embed.proj", kind="patch"),
        *key_map.layer("t_embedder.mlp.0", *(f"{emb}.timestep_embedder.linear_1" for emb in embeds), kind="copies"),
        *key_map.layer("t_embedder.mlp.2", *(f"{emb}.timestep_embedder.linear_2" for emb in embeds), kind="copies"),
        key_map.tensor(CLASSES, *(f"{emb}.class_embedder.embedding_table.weight" for emb in embeds), kind="copies"),
        *key_map.layer("final_layer.adaLN_modulation.1", "proj_out_1"),
        *key_map.layer("final_layer.linear", "proj_out_2"),
    ]
    for i in range(depth):
        result += key_map.layer(f"blocks.{i}.adaLN_modulation.1", f"transformer_blocks.{i}.norm1.linear")
        result += key_map.block_rules(f"blocks.{i}", f"transformer_blocks.{i}")
    return result


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
