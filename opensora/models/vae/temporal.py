"""The temporal VAE of Open-Sora 1.2: 3-D convolutions, causal in time, over the latents of a picture VAE.

After MAGVIT-v2 (Yu et al. 2023, arXiv:2310.05737): residual blocks of group normalisation, SiLU and causal convolution;
time is halved by strided convolutions, and doubled by convolutions to twice the channels that become frames. Space keeps
its size. A convolution sees zeros before the first frame. Names of layers are those of the published weights.

A video whose number of frames is no multiple of the stride gets zeros in front, which decoding drops again.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.checkpoint.load import load_strictly, read_weights
from opensora.models.vae.base import MemoryFormat, Posterior, VideoVAE
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype


class CausalConv3d(nn.Module):
    """A convolution over frames up to the present one, [B, C, T, H, W] -> [B, C', T / stride, H, W]."""

    def __init__(self, channels: int, out_channels: int, kernel: int, *, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        space = kernel // 2
        self.padding = (space, space, space, space, kernel - stride, 0)  # width, height, time; time in front only
        self.conv = nn.Conv3d(channels, out_channels, kernel, stride=(stride, 1, 1), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.conv(F.pad(x, self.padding))


class ResBlock(nn.Module):
    """x + conv(act(norm(conv(act(norm(x)))))); a 1x1x1 convolution fits x where the channels change."""

    def __init__(self, channels: int, out_channels: int, num_groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(num_groups, channels)
        self.conv1 = CausalConv3d(channels, out_channels, 3, bias=False)
        self.norm2 = nn.GroupNorm(num_groups, out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels, 3, bias=False)
        if channels != out_channels:
            self.conv3 = CausalConv3d(channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W] -> [B, C', T, H, W]."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (self.conv3(x) if hasattr(self, "conv3") else x) + h


class Encoder(nn.Module):
    """[B, C, T, H, W] -> [B, embed_channels, T / stride, H, W]."""

    def __init__(
        self,
        channels: int,
        embed_channels: int,
        widths: Sequence[int],
        num_res_blocks: int,
        downsample: Sequence[bool],
        num_groups: int,
    ) -> None:
        super().__init__()
        self.conv_in = CausalConv3d(channels, widths[0], 3, bias=False)
        ins = [widths[0], *widths[:-1]]
        self.block_res_blocks = nn.ModuleList(
            _res_blocks(before, width, num_res_blocks, num_groups) for before, width in zip(ins, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, width, 3, stride=2) if halve else nn.Identity()
            for width, halve in zip(widths[:-1], downsample, strict=False)
        )
        self.res_blocks = _res_blocks(widths[-1], widths[-1], num_res_blocks, num_groups)
        self.norm1 = nn.GroupNorm(num_groups, widths[-1])
        self.conv2 = CausalConv3d(widths[-1], embed_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        x = self.conv_in(x)
        for i, blocks in enumerate(self.block_res_blocks):
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
            if i < len(self.conv_blocks):
                x = self.conv_blocks[i](x)
        for block in self.res_blocks:
            x = block(x)
        return self.conv2(F.silu(self.norm1(x)))


class Decoder(nn.Module):
    """[B, embed_channels, T, H, W] -> [B, C, T stride, H, W]."""

    def __init__(
        self,
        channels: int,
        embed_channels: int,
        widths: Sequence[int],
        num_res_blocks: int,
        downsample: Sequence[bool],
        num_groups: int,
    ) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(embed_channels, widths[-1], 3)
        self.res_blocks = _res_blocks(widths[-1], widths[-1], num_res_blocks, num_groups)
        ins = [*widths[1:], widths[-1]]
        self.block_res_blocks = nn.ModuleList(
            _res_blocks(before, width, num_res_blocks, num_groups) for before, width in zip(ins, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, 2 * width, 3) if double else nn.Identity()
            for width, double in zip(widths[1:], downsample, strict=False)
        )
        self.norm1 = nn.GroupNorm(num_groups, widths[0])
        self.conv_out = CausalConv3d(widths[0], channels, 3)

    def forward(self, z: Tensor) -> Tensor:
        """See the class."""
        x = self.conv1(z)
        for block in self.res_blocks:
            x = block(x)
        for i in reversed(range(len(self.block_res_blocks))):
            for block in self.block_res_blocks[i]:  # type: ignore[attr-defined]
                x = block(x)
            if i > 0 and isinstance(self.conv_blocks[i - 1], CausalConv3d):
                x = rearrange(self.conv_blocks[i - 1](x), "B (C two) T H W -> B C (T two) H W", two=2)
        return self.conv_out(F.silu(self.norm1(x)))


@MODELS.register_module()
class VAE_Temporal(VideoVAE):
    """Compresses time by 2 for each True of `temporal_downsample`; works on a picture VAE's latents [B, C, T, h, w].

    Args:
        in_out_channels: Of what it compresses.
        latent_embed_dim: Channels between the encoder or decoder and the 1x1x1 convolutions next to the latents.
        embed_dim: Channels of its latents.
        filters: Width of the first level.
        num_res_blocks: A level.
        channel_multipliers: Width of each level, in `filters`.
        temporal_downsample: For each level but the last, whether time is halved after it.
        num_groups: Of the group normalisations.
        from_pretrained: Weights in these names; None: untrained.
        posterior: "sample" draws latents from N(mean, var); "mode" takes the mean.
        micro_batch_size: At most so many videos at a time; None: all at once.
        scale, shift: Of its latents, z = (raw - shift) / scale: a number, or one a channel.
        dtype: Number format of the weights.
        memory_format: "channels_last" is the layout in which GPUs convolve fastest, in bf16 and fp16.
        compile: Compile encoder and decoder.
    """

    def __init__(
        self,
        in_out_channels: int = 4,
        latent_embed_dim: int = 4,
        embed_dim: int = 4,
        filters: int = 128,
        num_res_blocks: int = 4,
        channel_multipliers: Sequence[int] = (1, 2, 2, 4),
        temporal_downsample: Sequence[bool] = (True, True, False),
        num_groups: int = 32,
        from_pretrained: str | None = None,
        posterior: Posterior = "sample",
        micro_batch_size: int | None = None,
        scale: float | Sequence[float] = 1.0,
        shift: float | Sequence[float] = 0.0,
        dtype: str | torch.dtype = "fp32",
        memory_format: MemoryFormat = "contiguous",
        compile: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__(
            posterior=posterior, micro_batch_size=micro_batch_size, memory_format=memory_format, compile=compile
        )
        if len(temporal_downsample) != len(channel_multipliers) - 1:
            raise self._complaint(
                f"temporal_downsample={tuple(temporal_downsample)} needs one entry less than "
                f"channel_multipliers={tuple(channel_multipliers)}."
            )
        self.in_channels, self.out_channels = in_out_channels, embed_dim
        self.strides = (2 ** sum(temporal_downsample), 1, 1)
        widths = [filters * multiplier for multiplier in channel_multipliers]
        shape = (widths, num_res_blocks, tuple(temporal_downsample), num_groups)
        self.encoder = Encoder(in_out_channels, 2 * latent_embed_dim, *shape)
        self.quant_conv = CausalConv3d(2 * latent_embed_dim, 2 * embed_dim, 1)
        self.post_quant_conv = CausalConv3d(embed_dim, latent_embed_dim, 1)
        self.decoder = Decoder(in_out_channels, latent_embed_dim, *shape)
        self.values: dict[str, Any] = {
            "type": "VAE_Temporal",
            "widths": widths,
            "num_res_blocks": num_res_blocks,
            "temporal_downsample": list(temporal_downsample),
            "num_groups": num_groups,
        }
        self._write_config(**statistics_of(scale, shift, embed_dim))
        if from_pretrained is not None:
            load_strictly(self, read_weights(from_pretrained), from_pretrained)
        self._ready(to_torch_dtype(dtype))

    def latent_frames(self, num_frames: int) -> int:
        """ceil(T / stride)."""
        return -(-num_frames // self.strides[0])

    def video_frames(self, latent_frames: int) -> int:
        """The longest of the `stride` lengths that have so many latent frames."""
        return latent_frames * self.strides[0]

    def legal_num_frames(self, num_frames: int) -> int:
        """Any number of frames, from 1."""
        return max(int(num_frames), 1)

    def _padding(self, num_frames: int) -> int:
        return -num_frames % self.strides[0]

    def _encode(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, self._padding(x.shape[2]), 0))
        return self.quant_conv(self.encoder(self._layout(x)))

    def _decode(self, z: Tensor, num_frames: int) -> Tensor:
        return self.decoder(self.post_quant_conv(self._layout(z)))[:, :, self._padding(num_frames) :]

    def _layout(self, x: Tensor) -> Tensor:
        last = self.memory_format == "channels_last"
        return x.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)

    def _network(self) -> nn.Module:
        return self

    def _config(self) -> Mapping[str, Any]:
        return self.values

    def _write_config(self, **values: Any) -> None:
        self.values.update(values)


def statistics_of(scale: float | Sequence[float], shift: float | Sequence[float], channels: int) -> dict[str, Any]:
    """Open-Sora's z = (raw - shift) / scale as entries of `STATISTICS`."""
    mean, std = (
        [float(value)] * channels if isinstance(value, int | float) else [float(v) for v in value]
        for value in (shift, scale)
    )
    return {"latents_mean": mean, "latents_std": std}


def _res_blocks(channels: int, width: int, count: int, num_groups: int) -> nn.ModuleList:
    ins = [channels] + [width] * count
    return nn.ModuleList(ResBlock(before, after, num_groups) for before, after in pairwise(ins))


MODELS.register_variant("VAE_Temporal_SD", VAE_Temporal, temporal_downsample=(False, True, True))
