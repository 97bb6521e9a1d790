"""Wan 2.1 and 2.2 (Wan Team 2025, arXiv:2503.20314): diffusers' `WanTransformer3DModel` as a denoiser.

Each block attends over all tokens of the video with rotary positions of frame, row and column, then over the text (and, in 2.1's
image-to-video models, over CLIP's features of the image), then applies an MLP; a timestep, one for the sample or one for each frame,
modulates it. Conventions that differ from this package's, and are translated here: the network predicts noise - x_0; padding tokens of
the text are zeros and attended to; "no text" is an encoded prompt.

The timestep's and the text's embeddings are computed in fp32, as by the authors, also under autocast.
"""

import math
from typing import Any, Literal

import torch
from diffusers import WanTransformer3DModel
from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import kernel_from_flag
from opensora.models.diffusers_denoiser import DiffusersDenoiser, weights_on
from opensora.models.image_encoder import required_frames
from opensora.models.wan.attention import set_processors
from opensora.models.wan.condition import IMAGE_TOKENS, ImageConditions
from opensora.models.wan.convert import load_wan, original_name
from opensora.registry import MODELS
from opensora.utils.errors import UserError


@MODELS.register_module()
class Wan(ImageConditions, DiffusersDenoiser):
    """A network of Wan's (see the module's docstring). Names of the variants: `python -m opensora.registry`.

    Args:
        in_channels: channels of the latent.
        condition_channels: further channels that the network reads: 20 for image-to-video (4 of mask, 16 of latent), else 0.
        hidden_size, depth, num_heads, ffn_dim: the transformer's size.
        caption_channels, model_max_length: channels of the text features, and their number, to which shorter texts are padded.
        boundary: from this part of the training time on the high-noise expert works, below it the low-noise one (2.2's A14B);
            None = there is one network.
        expert: of the two, "high" or "low" to train one of them; "both" to sample.
        image_dim: channels of the image's CLIP features (2.1's image-to-video: 1280); None = none.
        pos_embed_seq_len: positions of the features of a first and a last image (514); None = one image.
        class_dropout_prob: how often training replaces the caption by the empty prompt.
        from_pretrained: weights to start from, see docs/how-to/weights.md.
        from_pretrained_2: of two experts, the low-noise one's, where `from_pretrained` has only the high-noise one's.
        enable_flash_attn: None or True = fastest kernel, False = the plain formula.
        frozen_weights: "fp32", "bf16", "fp8" or "int8", see `opensora.models.loading.store_frozen`.
        device: where random initial weights are made; None = PyTorch's default.
    """

    blocks_name = "blocks"
    whole_cells = (2, 2)
    """Latent cells (rows, columns) of which sizes are multiples: others would be padded, which Wan has not seen in training."""
    conditions_on_mode = True
    """Conditioning frames are the mode of the VAE's posterior, not a sample of it."""
    original_name = staticmethod(original_name)

    def __init__(
        self,
        *,
        in_channels: int = 16,
        condition_channels: int = 0,
        hidden_size: int = 5120,
        depth: int = 40,
        num_heads: int = 40,
        ffn_dim: int = 13824,
        caption_channels: int = 4096,
        model_max_length: int = 512,
        boundary: float | None = None,
        expert: Literal["both", "high", "low"] = "both",
        image_dim: int | None = None,
        pos_embed_seq_len: int | None = None,
        class_dropout_prob: float = 0.1,
        from_pretrained: str | None = None,
        from_pretrained_2: str | None = None,
        enable_flash_attn: bool | None = None,
        frozen_weights: str = "fp32",
        device: torch.device | str | None = None,
    ) -> None:
        if hidden_size % num_heads or hidden_size // num_heads % 2:
            raise ValueError(f"hidden_size={hidden_size} of num_heads={num_heads}: a head has an even size.")
        if expert not in ("both", "high", "low") or (boundary is None and expert != "both"):
            raise ValueError(f"expert={expert!r} is not 'both', 'high' or 'low', or there is no boundary.")
        config = {
            "in_channels": in_channels + condition_channels,
            "out_channels": in_channels,
            "num_layers": depth,
            "num_attention_heads": num_heads,
            "attention_head_dim": hidden_size // num_heads,
            "ffn_dim": ffn_dim,
            "text_dim": caption_channels,
            "image_dim": image_dim,
            "added_kv_proj_dim": None if image_dim is None else hidden_size,
            "pos_embed_seq_len": pos_embed_seq_len,
        }
        with weights_on(device, from_pretrained):
            net = WanTransformer3DModel(**config)
            net_2 = WanTransformer3DModel(**config) if boundary is not None and expert == "both" else None
        for expert_net in (net,) if net_2 is None else (net, net_2):
            expert_net.condition_embedder.outside_autocast = True  # see `forward`
        super().__init__(
            net,
            patch_size=(1, 2, 2),
            channels=in_channels,
            text_dim=caption_channels,
            text_len=model_max_length,
            class_dropout_prob=class_dropout_prob,
        )
        self.net_2 = net_2
        self.boundary: Any = boundary
        self.expert = expert
        self.condition_channels, self.image_dim = condition_channels, image_dim
        self.required_frames = required_frames(condition_channels, image_dim, pos_embed_seq_len)
        self.hidden_size, self.depth, self.num_heads = hidden_size, depth, num_heads
        kernel = kernel_from_flag(enable_flash_attn=enable_flash_attn)
        self.image_tokens = 0 if image_dim is None else pos_embed_seq_len or IMAGE_TOKENS
        for block in self.transformer_blocks():
            set_processors(block, kernel, self.image_tokens)
        load_wan(self, from_pretrained, from_pretrained_2, frozen_weights=frozen_weights)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        *,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        condition: Tensor | None = None,
        image_features: Tensor | None = None,
        **sizes: Tensor | None,
    ) -> Tensor:
        """See `Denoiser.forward`; `sizes` are not used, as Wan's positions count frames, rows and columns.

        Args:
            condition: [B, condition_channels, T, H, W], behind the latent's channels.
            image_features: CLIP's [B, 257, image_dim], or [B, 514, image_dim] of a first and a last image.
        """
        net, latent_size = self.expert_at(timestep), x.shape[2:]
        if (0 if condition is None else condition.shape[1]) != self.condition_channels:
            given = None if condition is None else list(condition.shape)
            raise ValueError(f"condition={given}: expected [B, {self.condition_channels}, T, H, W].")
        T, H, W = self.grid(latent_size)
        x = self.pad_to_patches(x if condition is None else torch.cat([x, condition.to(x.dtype)], dim=1))
        rotary = net.rope(x)  # cosines and sines, each [1, N, 1, d]
        x = rearrange(net.patch_embedding(x), "B D T H W -> B (T H W) D").contiguous()
        t = timestep.float()
        if x_mask is not None:  # conditioning frames are clean
            t = torch.where(x_mask.bool(), t[:, None], 0.0)  # [B, T]
        if image_features is not None:  # two images of a sample are two rows for diffusers
            image_features = image_features.reshape(-1, IMAGE_TOKENS, image_features.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            temb, t_mod, text, image = net.condition_embedder(
                t.flatten(),
                self.text(y, mask, self.text_len),
                None if image_features is None else image_features.float(),
                timestep_seq_len=None if x_mask is None else T,
            )  # [B, D] or [B, T, D], [.., 6 D], [B, L, D], [B, M, D]
        text = (text if image is None else torch.cat([image, text], dim=1)).to(x.dtype)
        t_mod = t_mod.unflatten(-1, (6, -1))
        if x_mask is not None:  # of each token
            temb, t_mod = (part.repeat_interleave(H * W, dim=1) for part in (temb, t_mod))  # [B, N, D], [B, N, 6, D]
            temb, t_mod = self.own_tokens(temb), self.own_tokens(t_mod)
        else:
            temb = temb.unsqueeze(1)
        x, positions = self.own_tokens(x), (*map(self.own_tokens, rotary), T * H * W)
        for block in net.blocks:
            x = block(x, text, t_mod, positions)
        shift, scale = (net.scale_shift_table.unsqueeze(1) + temb.unsqueeze(2)).unbind(2)  # [B, 1 or N, D] each
        x = net.proj_out((net.norm_out(x.float()) * (1 + scale) + shift).to(x.dtype))
        if self.sp_ranks is not None:
            x = self.sp_ranks.gather(x.unsqueeze(1), T * H * W).squeeze(1)
        return -self.unpatchify(x, latent_size)

    def expert_at(self, timestep: Tensor) -> Any:
        """The network for these timesteps [B]."""
        if self.net_2 is None:
            return self.net
        if torch.is_grad_enabled() and self.training:
            raise UserError("Wan 2.2's experts are trained one at a time: set model.expert to 'high' or 'low'.")
        high = {*(timestep >= 1000 * self.boundary).tolist()}
        if len(high) > 1:
            raise ValueError("a batch is for one of the two experts: its timesteps lie on both sides of the boundary.")
        return self.net if True in high else self.net_2

    def transformer_blocks(self) -> list[nn.Module]:
        """See `Denoiser.transformer_blocks`."""
        return [*self.net.blocks, *(() if self.net_2 is None else self.net_2.blocks)]

    def flops(self, latent_size: tuple[int, int, int], text_len: int) -> int:
        """See `Denoiser.flops`. A text is padded to `model_max_length`, whatever `text_len` is."""
        config, N = self.net.config, math.prod(self.grid(latent_size))
        D, F, L, M = self.hidden_size, config.ffn_dim, self.text_len, self.image_tokens
        block = N * (4 * D * D + 2 * N * D) + 2 * N * D * F  # self-attention and MLP
        block += N * 2 * D * D + (L + M) * 2 * D * D + 2 * N * (L + M) * D  # cross-attention
        patch = 4 * N * (config.in_channels + config.out_channels) * D
        embedders = L * (self.text_dim * D + D * D) + config.freq_dim * D + D * D + 6 * D * D
        if self.image_dim is not None:
            embedders += M * (self.image_dim**2 + self.image_dim * D)
        return 2 * (self.depth * block + patch + embedders)
