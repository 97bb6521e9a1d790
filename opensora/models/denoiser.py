"""What all denoisers share: the contract, patchify and unpatchify; and the base of those that grew from PixArt.

A denoiser obeys the contract of docs/architecture.md whatever is inside, so that any of them trains and samples with any
scheduler. It draws nothing at random, knows no process group, and treats the samples of a batch independently.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import kernel_from_flag
from opensora.models.layers.embedders import CaptionEmbedder, PatchEmbed3D, ScalarEmbedder
from opensora.models.layers.mlp import linear_flops
from opensora.models.layers.modulation import AdaLN, FinalLayer
from opensora.models.layers.positions import grid_coordinates, rotary_table, sincos_1d
from opensora.models.loading import Convert, load_weights
from opensora.registry import inherit_signature
from opensora.utils.errors import UserError

Size = tuple[int, int, int]

MICRO_CONDITIONS = ("fps", "height", "width", "num_frames")
"""What every denoiser may be conditioned on besides timestep and text, [B] each."""


class Denoiser(nn.Module, ABC):
    """Base of all denoisers. Names: `x_embedder`, `t_embedder`; expected of a subclass: `y_embedder`, `blocks`.

    Args:
        in_channels: channels of the latent.
        hidden_size, num_heads, mlp_ratio: the transformer's size.
        depth: blocks, or pairs of a spatial and a temporal block.
        patch_size: latent frames, rows and columns in one token.
        class_dropout_prob: how often training drops the caption or class.
        no_temporal_pos_emb: leave out temporal positions (frames are then a set).
        from_pretrained: weights to start from, see docs/how-to/weights.md.
        enable_flash_attn: None or True = fastest attention kernel, False = the plain formula.
        enable_layernorm_kernel: apex's fused LayerNorm if installed.
        input_size: accepted from older configs, without effect: positions follow the input.
    """

    micro_conditions: tuple[str, ...] = MICRO_CONDITIONS
    """The micro-conditions that training and sampling pass to `forward`."""

    has_null_text = True
    """Whether `null_condition` is the model's own; False: "no text" is the encoding of an empty prompt, in training too."""

    sp_ranks: Any = None
    """Set by `opensora.acceleration.sequence_parallel` where tokens are sharded over processes; None = all are here."""

    y_embedder: Any
    blocks: Any
    final_layer: FinalLayer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let `inspect.signature`, and so the registry, list the arguments that a subclass passes on as `**common`."""
        super().__init_subclass__(**kwargs)
        inherit_signature(cls)

    def __init__(
        self,
        *,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        patch_size: Sequence[int] = (1, 2, 2),
        class_dropout_prob: float = 0.1,
        no_temporal_pos_emb: bool = False,
        from_pretrained: str | None = None,
        enable_flash_attn: bool | None = None,
        enable_layernorm_kernel: bool = False,
        input_size: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= class_dropout_prob < 1:
            raise ValueError(f"class_dropout_prob={class_dropout_prob} is not in [0, 1).")
        if min(hidden_size, depth, num_heads, hidden_size * mlp_ratio) < 1 or hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size}, depth={depth}, num_heads={num_heads}, mlp_ratio={mlp_ratio}: all are above 0, and hidden_size "
                "is a multiple of num_heads."
            )
        if len(patch_size) != 3 or min(patch_size) < 1:
            raise ValueError(f"patch_size={patch_size!r}: expected (frames, rows, columns), each at least 1.")
        self.in_channels = self.out_channels = in_channels
        self.hidden_size, self.depth, self.num_heads, self.mlp_ratio = hidden_size, depth, num_heads, mlp_ratio
        self.head_dim = hidden_size // num_heads
        self.patch_size: Size = (patch_size[0], patch_size[1], patch_size[2])
        self.class_dropout_prob = class_dropout_prob
        self.no_temporal_pos_emb = no_temporal_pos_emb
        self.from_pretrained = from_pretrained
        self.kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)
        self.fused_norm = enable_layernorm_kernel
        self.x_embedder = PatchEmbed3D(self.patch_size, in_channels, hidden_size)
        self.t_embedder = ScalarEmbedder(hidden_size)

    def initialize(self, *, small: Iterable[nn.Module], zero: Iterable[nn.Module]) -> None:
        """Initial weights: Xavier for linear layers and patches, N(0, 0.02^2) inside `small`, nothing but zeros in `zero`.

        Zero layers end branches that must not disturb at first, and the output.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        patches = self.x_embedder.proj
        nn.init.xavier_uniform_(patches.weight.view(patches.out_channels, -1))
        nn.init.zeros_(patches.bias)  # type: ignore[arg-type]  # it has a bias
        for module in small:
            for layer in module.modules():
                if isinstance(layer, nn.Linear | nn.Embedding):
                    nn.init.normal_(layer.weight, std=0.02)
        for module in zero:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)

    @abstractmethod
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
        """Predict noise (or v, or x_0) from a noisy latent.

        Args:
            x: latent [B, C, T, H, W], any size.
            timestep: [B], integers or floats in [0, 1000].
            y: text features [B, 1, L, C_text], or class labels [B, 1, 1, 1].
            mask: [B, L], True at real text tokens; None = all. Bool, or 0 and 1 of any dtype, such as a tokenizer's int64.
            x_mask: [B, T], likewise, True at denoised frames, False at conditioning frames, which are clean. None = all True.
            sizes: fps, height, width, num_frames: [B], the video's frame rate and its size in pixels and frames.

        Returns:
            [B, C_out, T, H, W] fp32.
        """

    def flops(self, latent_size: Size, text_len: int) -> int:
        """Floating-point operations (2 per multiply-add, matrix products only) of one forward of one sample."""
        T, H, W = self.grid(latent_size)
        total = sum(block.flops(T, H * W, text_len, (H, W)) for block in self.transformer_blocks())  # type: ignore[operator]
        total += 2 * T * H * W * math.prod(self.patch_size) * self.in_channels * self.hidden_size
        rows = {"y_embedder": text_len, "csize_embedder": 2, "linear": T * H * W}  # others are applied once
        for name, part in [*self.named_children(), *self.final_layer.named_children()]:
            if part is not self.final_layer and not isinstance(part, nn.ModuleList):
                total += linear_flops(part, rows.get(name, 1))
        return total

    def null_condition(self, batch: int) -> Tensor:
        """The `y` of "no text" `[batch, 1, L, C_text]`, or of "no class" `[batch, 1, 1, 1]`."""
        return self.y_embedder.null(batch)

    def transformer_blocks(self) -> list[nn.Module]:
        """The blocks in forward order, for compilation, activation checkpointing and sharding."""
        return list(self.blocks)

    def to_diffusers(self, **options: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The same model in diffusers: the content of its config.json, with the class's name, and its state dict.

        `options` are what diffusers' model fixes and ours does not, see the model's own method.

        Raises:
            UserError: diffusers has no such architecture, or it cannot express this model.
        """
        raise UserError(f"diffusers has no {type(self).__name__}: keep its weights as safetensors.")

    def grid(self, latent_size: Sequence[int]) -> Size:
        """Patches along time, height and width for a latent of `latent_size`, rounded up."""
        T, H, W = (-(-n // p) for n, p in zip(latent_size, self.patch_size, strict=True))
        return T, H, W

    def patchify(self, x: Tensor) -> Tensor:
        """Latent `[B, C, T, H, W] -> [B, T', S, D]` tokens, without positions."""
        if x.ndim != 5 or x.shape[1] != self.in_channels:
            raise ValueError(f"the latent has shape {tuple(x.shape)}; expected [B, {self.in_channels}, T, H, W].")
        # a view would keep the convolution's layout, channels first, through all residual sums of all blocks
        return rearrange(self.x_embedder(x), "B D T H W -> B T (H W) D").contiguous()

    def enter_blocks(self, x: Tensor) -> Tensor:
        """Tokens `x [B, T', S, D]` with spatial positions -> this process' shard of them, until `unpatchify`."""
        return x if self.sp_ranks is None else self.sp_ranks.split(x)

    def unpatchify(self, x: Tensor, latent_size: Sequence[int]) -> Tensor:
        """`x [B, T', S, patch * C]`, or a process' shard of it, `-> [B, C, *latent_size]` fp32; padding is cropped."""
        pt, ph, pw = self.patch_size
        _, H, W = self.grid(latent_size)
        if self.sp_ranks is not None:
            x = self.sp_ranks.gather(x, H * W)
        x = rearrange(
            x, "B T (H W) (pt ph pw C) -> B C (T pt) (H ph) (W pw)", H=H, W=W, pt=pt, ph=ph, pw=pw
        )  # the channel is the fastest axis of a token's output, as in DiT
        return x[:, :, : latent_size[0], : latent_size[1], : latent_size[2]].float()

    def patch_mask(self, x_mask: Tensor | None) -> Tensor | None:
        """`x_mask [B, frames] -> [B, T']`: a patch of several frames is denoised when any of its frames is."""
        pt = self.patch_size[0]
        if x_mask is None or pt == 1:
            return x_mask
        frames = x_mask.shape[1]
        padded = x_mask.new_zeros(len(x_mask), -(-frames // pt) * pt)
        padded[:, :frames] = x_mask
        return rearrange(padded, "B (T pt) -> B T pt", pt=pt).any(dim=2)

    def embed_timestep(
        self, timestep: Tensor, x_mask: Tensor | None, extra: Tensor | float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        """`[B, D]` of the timestep and, with `x_mask`, of timestep 0 for conditioning frames; each plus `extra [B, D]`."""
        t0 = None if x_mask is None else self.t_embedder(torch.zeros_like(timestep)) + extra
        return self.t_embedder(timestep) + extra, t0

    def temporal_positions(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Sine-cosine positions `[T, 1, D]` of the frames of tokens `x [B, T, S, D]`, divided by `scale`; in x's dtype."""
        frames = grid_coordinates(x.shape[1], scale=scale, device=x.device)
        return sincos_1d(self.hidden_size, frames).to(x.dtype)[:, None]

    def frame_rotations(self, x: Tensor) -> Tensor:
        """Rotary table `[2, T, head_dim]` for the frames of tokens `x [B, T, S, D]`, which count 0, 1, 2, ..."""
        return rotary_table(self.head_dim, grid_coordinates(x.shape[1], device=x.device))

    def required(self, sizes: Mapping[str, Tensor | None], *names: str) -> list[Tensor]:
        """Micro-conditions that the model cannot do without, in fp32 [B] each; a ValueError where one is missing."""
        for name in names:
            if sizes.get(name) is None:
                raise ValueError(f"{type(self).__name__} needs {name}=: a tensor [B].")
        return [sizes[name].to(torch.float32) for name in names]  # type: ignore[union-attr]


class AdaLNSingleDenoiser(Denoiser):
    """Base of PixArt and what grew from it: captions by cross-attention, the timestep by adaLN-single.

    A subclass creates, in this order (initial weights depend on it): embedders of its own, `y_embedder`, its blocks and
    `final_layer`; then it calls `initialize` and `load_and_freeze`. Names: also `t_block`.

    Args:
        caption_channels: channels of the text features.
        model_max_length: text tokens, the length of the table that stands for "no text".
        pred_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        common: see `Denoiser`.
    """

    temporal_parts: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of what only the temporal branch uses: what `freeze="not_temporal"` trains."""

    def __init__(
        self, *, caption_channels: int = 4096, model_max_length: int = 120, pred_sigma: bool = True, **common: Any
    ) -> None:
        super().__init__(**common)
        self.out_channels = 2 * self.in_channels if pred_sigma else self.in_channels
        self.caption_channels, self.model_max_length = caption_channels, model_max_length
        self.t_block = AdaLN(self.hidden_size, 6)

    def caption_embedder(self) -> CaptionEmbedder:
        """A new `y_embedder`."""
        return CaptionEmbedder(self.caption_channels, self.hidden_size, self.model_max_length)

    def output_layer(self) -> FinalLayer:
        """A new `final_layer`."""
        pt, ph, pw = self.patch_size
        return FinalLayer(self.hidden_size, pt * ph * pw, self.out_channels, fused_norm=self.fused_norm)

    def load_and_freeze(self, convert: Convert, freeze: str | None = None) -> None:
        """Load `from_pretrained`, and freeze what `freeze` says.

        Args:
            convert: the model file's.
            freeze: "not_temporal" trains the temporal branch alone, where there is one; "text" trains all but
                cross-attention and text; None = everything is trained.
        """
        if self.from_pretrained is not None:
            load_weights(self, self.from_pretrained, convert)
        if freeze is None:
            return
        choices = ("not_temporal", "text") if self.temporal_parts else ("text",)
        if freeze not in choices:
            raise ValueError(f"freeze={freeze!r} is not one of {', '.join(map(repr, choices))}, None.")
        temporal = freeze == "not_temporal"
        parts = self.temporal_parts if temporal else (".cross_attn.", "y_embedder.")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts) == temporal)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError(f"freeze={freeze!r} leaves nothing to train.")
