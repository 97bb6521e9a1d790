"""STDiT, the spatial-temporal diffusion transformer of Open-Sora 1.0.

Open-Sora 1.0 (2024), built on PixArt-alpha (Chen et al. 2023). Each block attends over the S tokens of a frame, then
over the T frames at a place, then over the caption, then applies an MLP. Spatial attention and MLP are modulated by
the timestep (adaLN-single); the temporal branch is not, and shares the spatial branch's gate. Its output projection
starts at zero, so a PixArt initialisation is unchanged at step 0.

Deviations from the released code: position tables follow the input's size and are not saved; captions are padded and
masked instead of packed; the model does not drop text by itself (see `opensora.models.encode`).
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.attention import kernel_from_flag, layer_norm
from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.embedders import CaptionEmbedder, PatchEmbed3D, TimestepEmbedder
from opensora.models.layers.mlp import tanh_mlp
from opensora.models.layers.modulation import FinalLayer, modulate, per_frame
from opensora.models.layers.pos_embed import sincos_1d, sincos_2d
from opensora.models.stdit.weights import load_weights
from opensora.registry import MODELS


class STDiTBlock(nn.Module):
    """Spatial attention, temporal attention, cross-attention, MLP."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, *, kernel: str, fused_norm: bool) -> None:
        super().__init__()
        self.norm1 = layer_norm(dim, fused=fused_norm)
        self.attn = Attention(dim, num_heads, kernel=kernel)
        self.attn_temp = Attention(dim, num_heads, kernel=kernel)
        self.cross_attn = CrossAttention(dim, num_heads, kernel=kernel)
        self.norm2 = layer_norm(dim, fused=fused_norm)
        self.mlp = tanh_mlp(dim, int(dim * mlp_ratio))
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        t0: Tensor | None = None,
        temporal_positions: Tensor | None = None,
    ) -> Tensor:
        """`x [B, T, S, D]`, text `y [B, L, D]`, modulation `t, t0 [B, 6, D]`, `temporal_positions [T, D]`."""
        _, T, S, _ = x.shape
        at_0 = None if t0 is None else self.scale_shift_table + t0
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = per_frame(
            x_mask, self.scale_shift_table + t, at_0
        )

        x_s = rearrange(modulate(self.norm1(x), shift_msa, scale_msa), "B T S D -> (B T) S D")
        x = x + gate_msa * rearrange(self.attn(x_s), "(B T) S D -> B T S D", T=T)

        x_t = x if temporal_positions is None else x + temporal_positions[:, None]
        x_t = rearrange(x_t, "B T S D -> (B S) T D")
        x = x + gate_msa * rearrange(self.attn_temp(x_t), "(B S) T D -> B T S D", S=S)

        tokens = rearrange(x, "B T S D -> B (T S) D")
        x = x + rearrange(self.cross_attn(tokens, y, mask), "B (T S) D -> B T S D", T=T)
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


@MODELS.register_module()
class STDiT(nn.Module):
    """Spatial-temporal diffusion transformer (see the module's docstring).

    Args:
        in_channels: channels of the latent.
        caption_channels: channels of the text features.
        model_max_length: text tokens, the length of the table that stands for "no text".
        hidden_size, depth, num_heads, mlp_ratio: the transformer's size.
        patch_size: latent frames, rows and columns in one token.
        pred_sigma: predict `2 * in_channels` channels (mean and variance) instead of `in_channels`.
        class_dropout_prob: how often training drops the caption.
        space_scale, time_scale: positions are divided by these (1.0 = the 512x512, 16-frame base model).
        no_temporal_pos_emb: leave out temporal positions (frames are then a set).
        freeze: "not_temporal" trains the temporal attention alone, "text" trains all but cross-attention and text.
        from_pretrained: weights to start from: a checkpoint folder, a .safetensors or a .pth file.
        enable_flash_attn: None or True = fastest attention kernel, False = the plain formula.
        enable_layernorm_kernel: apex's fused LayerNorm if installed.
        input_size: accepted from older configs; the model takes any size.
    """

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
        patch_size: tuple[int, int, int] = (1, 2, 2),
        pred_sigma: bool = True,
        class_dropout_prob: float = 0.1,
        space_scale: float = 1.0,
        time_scale: float = 1.0,
        no_temporal_pos_emb: bool = False,
        freeze: str | None = None,
        from_pretrained: str | None = None,
        enable_flash_attn: bool | None = None,
        enable_layernorm_kernel: bool = False,
        input_size: tuple[int | None, int | None, int | None] | None = None,
    ) -> None:
        super().__init__()
        if input_size is not None and len(input_size) != 3:
            raise ValueError(f"input_size={input_size!r}: expected (T, H, W) of the latent, or leave it out.")
        if not 0 <= class_dropout_prob < 1:
            raise ValueError(f"class_dropout_prob={class_dropout_prob} is not in [0, 1).")
        self.in_channels = in_channels
        self.out_channels = 2 * in_channels if pred_sigma else in_channels
        self.hidden_size = hidden_size
        self.mlp_ratio = mlp_ratio
        self.caption_channels = caption_channels
        self.patch_size = patch_size = (patch_size[0], patch_size[1], patch_size[2])
        self.class_dropout_prob = class_dropout_prob
        self.space_scale = space_scale
        self.time_scale = time_scale
        self.no_temporal_pos_emb = no_temporal_pos_emb
        kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)

        self.x_embedder = PatchEmbed3D(self.patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length)
        self.blocks = nn.ModuleList(
            STDiTBlock(hidden_size, num_heads, mlp_ratio, kernel=kernel, fused_norm=enable_layernorm_kernel)
            for _ in range(depth)
        )
        pt, ph, pw = self.patch_size
        self.final_layer = FinalLayer(hidden_size, pt * ph * pw, self.out_channels, fused_norm=enable_layernorm_kernel)

        self.initialize_weights()
        if from_pretrained is not None:
            load_weights(self, from_pretrained)
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
        """Predict noise (or v, or x_0) from a noisy latent.

        Args:
            x: latent [B, C, T, H, W], any size.
            timestep: [B], in [0, 1000).
            y: text features [B, 1, L, C_text].
            mask: [B, L] bool, True at real text tokens; None = all.
            x_mask: [B, T] bool, True at latent frames being denoised; the others count as clean. None = all.
            fps, height, width, num_frames: part of every denoiser's contract; STDiT 1.0 does not use them.

        Returns:
            [B, C_out, T, H, W] fp32, C_out = 2 C with `pred_sigma`.
        """
        size = x.shape[2:]
        x = self.x_embedder(x)  # [B, D, T, H, W], now in patches
        T, H, W = x.shape[2:]
        x = rearrange(x, "B D T H W -> B T (H W) D")
        x = x + sincos_2d(self.hidden_size, H, W, scale=self.space_scale, device=x.device).to(x.dtype)
        frame_mask = None if x_mask is None else self._mask_of_patches(x_mask, T)

        t, t_mod = self._embed_timestep(timestep)
        t0, t0_mod = (None, None) if x_mask is None else self._embed_timestep(torch.zeros_like(timestep))
        y = self.y_embedder(y)  # [B, L, D]

        positions = None if self.no_temporal_pos_emb else self._temporal_positions(T, x)
        for i, block in enumerate(self.blocks):
            # the temporal positions enter once: before the first temporal attention
            x = block(x, y, t_mod, mask, frame_mask, t0_mod, positions if i == 0 else None)

        x = self.final_layer(x, t, frame_mask, t0)  # [B, T, S, patch * C_out]
        return self.unpatchify(x, (T, H, W), size).float()

    def null_condition(self, batch: int) -> Tensor:
        """The text features of "no text": `[batch, 1, L, C_text]`."""
        return self.y_embedder.null(batch)

    def transformer_blocks(self) -> list[nn.Module]:
        """The blocks in forward order, for compilation, activation checkpointing and sharding."""
        return list(self.blocks)

    def flops(self, latent_size: tuple[int, int, int], text_len: int) -> int:
        """Floating-point operations (2 per multiply-add, matrix products only) of one forward of one sample."""
        pt, ph, pw = self.patch_size
        T, H, W = -(-latent_size[0] // pt), -(-latent_size[1] // ph), -(-latent_size[2] // pw)
        N, S, D, L = T * H * W, H * W, self.hidden_size, text_len
        hidden = int(D * self.mlp_ratio)
        block = 2 * N * 4 * D * D + N * 2 * D * D + L * 2 * D * D + 2 * N * D * hidden  # linear layers
        block += 2 * N * S * D + 2 * N * T * D + 2 * N * L * D  # q k^T and attention times v: spatial, temporal, text
        embed = N * pt * ph * pw * self.in_channels * D + L * (self.caption_channels * D + D * D)
        embed += 256 * D + D * D + 6 * D * D  # timestep
        final = N * D * pt * ph * pw * self.out_channels
        return 2 * (len(self.blocks) * block + embed + final)

    def unpatchify(self, x: Tensor, patches: tuple[int, int, int], size: tuple[int, ...]) -> Tensor:
        """`x [B, T, S, patch * C] -> [B, C, *size]`; padding is cut off."""
        pt, ph, pw = self.patch_size
        x = rearrange(
            x,
            "B T (H W) (pt ph pw C) -> B C (T pt) (H ph) (W pw)",
            H=patches[1],
            W=patches[2],
            pt=pt,
            ph=ph,
            pw=pw,
        )
        return x[:, :, : size[0], : size[1], : size[2]]

    def initialize_weights(self) -> None:
        """Xavier for linear layers; zero for what must start as identity (specification A.1)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # a patch embedding is a linear layer over flattened patches
        patches = self.x_embedder.proj
        nn.init.xavier_uniform_(patches.weight.view(self.hidden_size, -1))
        for name, parameter in self.named_parameters():
            if name == "x_embedder.proj.bias" or name.endswith(("attn_temp.proj.weight", "cross_attn.proj.weight")):
                nn.init.zeros_(parameter)
            elif name.startswith(("t_embedder.", "t_block.", "y_embedder.")) and name.endswith(".weight"):
                nn.init.normal_(parameter, std=0.02)
        nn.init.zeros_(self.final_layer.linear.weight)

    def _embed_timestep(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        t = self.t_embedder(timestep)  # [B, D]
        return t, rearrange(self.t_block(t), "B (K D) -> B K D", K=6)

    def _temporal_positions(self, num_frames: int, x: Tensor) -> Tensor:
        positions = torch.arange(num_frames, device=x.device) / self.time_scale
        return sincos_1d(self.hidden_size, positions).to(x.dtype)  # [T, D]

    def _mask_of_patches(self, x_mask: Tensor, num_patches: int) -> Tensor:
        """`[B, frames] -> [B, T]`: a patch of several frames is denoised when any of its frames is."""
        pt = self.patch_size[0]
        if pt == 1:
            return x_mask
        padded = torch.zeros(len(x_mask), num_patches * pt, dtype=torch.bool, device=x_mask.device)
        padded[:, : x_mask.shape[1]] = x_mask
        return rearrange(padded, "B (T pt) -> B T pt", pt=pt).any(dim=2)

    def _freeze(self, freeze: str | None) -> None:
        if freeze is None:
            return
        if freeze not in ("not_temporal", "text"):
            raise ValueError(f"freeze={freeze!r} is not one of 'not_temporal', 'text', None.")
        for name, parameter in self.named_parameters():
            temporal = ".attn_temp." in name
            text = ".cross_attn." in name or name.startswith("y_embedder.")
            parameter.requires_grad_(temporal if freeze == "not_temporal" else not text)


for _name, _preset in {
    "STDiT-XL/2": {"depth": 28, "hidden_size": 1152, "num_heads": 16, "patch_size": (1, 2, 2)},
    "STDiT-L/2": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "patch_size": (1, 2, 2)},
    "STDiT-B/2": {"depth": 12, "hidden_size": 768, "num_heads": 12, "patch_size": (1, 2, 2)},
    "STDiT-S/2": {"depth": 12, "hidden_size": 384, "num_heads": 6, "patch_size": (1, 2, 2)},
    "STDiT-XS/2": {"depth": 8, "hidden_size": 192, "num_heads": 3, "patch_size": (1, 2, 2)},
    "STDiT-XS/4": {"depth": 8, "hidden_size": 192, "num_heads": 3, "patch_size": (1, 4, 4)},
    "STDiT-XXS/2": {"depth": 2, "hidden_size": 48, "num_heads": 2, "patch_size": (1, 2, 2)},
}.items():
    MODELS.register_variant(_name, STDiT, **_preset)
