"""Networks that tell videos from reconstructions: patch by patch, or a whole video at once.

PatchGAN of Isola et al. 2017 (arXiv:1611.07004), as VQGAN uses it (Esser et al. 2021, arXiv:2012.09841), in two or three
dimensions. GroupNorm takes the place of BatchNorm: scores then do not depend on what else is in the batch, and there
is no running state to save or to share between processes. The other is StyleGAN's in three dimensions, as MAGVIT (Yu et al.
2023, arXiv:2212.05199) uses it, blurred before it is downsampled (Zhang 2019, arXiv:1904.11486). Open-Sora 1.2 registers both.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from opensora.checkpoint.load import load_strictly, read_weights
from opensora.registry import MODELS
from opensora.utils.errors import UserError


@MODELS.register_module()
class PatchDiscriminator(nn.Module):
    """Real or not, for every patch of about 70 pixels (with 3 layers).

    Args:
        dims: 2 judges every frame alone; 3 judges motion too, and takes images (T = 1) as well.
        channels: Of the first layer; each next one has twice as many, up to eight times.
        num_layers: Layers that halve the size. In time the first one does not, so 3 layers see 4 frames as one.
        from_pretrained: weights, such as a checkpoint's folder `discriminator`; not read with `use_pretrained=False`.
        inflate_from_2d: they are of a 2-D network, whose kernels become the middle frame's.
    """

    def __init__(
        self,
        dims: Literal[2, 3] = 3,
        channels: int = 64,
        num_layers: int = 3,
        *,
        from_pretrained: str | None = None,
        inflate_from_2d: bool = False,
        use_pretrained: bool = True,
    ) -> None:
        super().__init__()
        if dims not in (2, 3) or channels % 8 or channels < 8 or num_layers < 1:
            raise UserError(
                f"PatchDiscriminator: dims={dims}, channels={channels}, num_layers={num_layers}: dims is 2 or 3, channels a "
                "multiple of 8, num_layers at least 1."
            )
        self.dims = dims
        widths = [channels * min(2**i, 8) for i in range(num_layers + 1)]

        def conv(before: int, after: int, stride: int, stride_in_time: int, *, bias: bool = True) -> nn.Module:
            if dims == 2:
                return nn.Conv2d(before, after, 4, stride, padding=1, bias=bias)
            # an odd kernel in time, so that one frame gives one
            strides = (stride_in_time, stride, stride)
            return nn.Conv3d(before, after, (3, 4, 4), strides, padding=1, bias=bias)

        layers: list[nn.Module] = [conv(3, widths[0], 2, 1), nn.LeakyReLU(0.2)]
        for number, (before, after) in enumerate(itertools.pairwise(widths), start=1):
            stride = 2 if number < num_layers else 1
            layers += [conv(before, after, stride, stride, bias=False), nn.GroupNorm(8, after), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, conv(widths[-1], 1, 1, 1))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                nn.init.normal_(module.weight, 0.0, 0.02)  # as in DCGAN and pix2pix
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        _load(self, from_pretrained if use_pretrained else None, inflate_from_2d=inflate_from_2d)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> scores, > 0 for real: [B, 1, t, h, w], with t = T when `dims` is 2."""
        if self.dims == 3:
            return self.layers(x)
        scores = self.layers(rearrange(x, "B C T H W -> (B T) C H W"))
        return rearrange(scores, "(B T) C H W -> B C T H W", B=len(x))


class DownBlock(nn.Module):
    """A residual block that halves frames, rows and columns, rounded up: `[B, C_in, T, H, W] -> [B, C_out, T/2, H/2, W/2]`."""

    def __init__(self, before: int, after: int, num_groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(before, before, 3, padding=1)
        self.norm1 = nn.GroupNorm(num_groups, before)
        self.conv2 = nn.Conv3d(before, after, 1, bias=False)
        self.conv3 = nn.Conv3d(before, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(num_groups, after)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        h = F.leaky_relu(self.norm1(self.conv1(x)), 0.2)
        h = F.leaky_relu(self.norm2(self.conv3(blur_and_halve(h))), 0.2)
        return (self.conv2(blur_and_halve(x)) + h) / math.sqrt(2)


def blur_and_halve(x: Tensor) -> Tensor:
    """Every second value of x `[B, C, T, H, W]` along each axis after the filter [1, 2, 1] / 4; borders are reflected."""
    taps = torch.tensor([0.25, 0.5, 0.25], dtype=x.dtype, device=x.device)
    kernel = taps[:, None, None] * taps[:, None] * taps
    padded = F.pad(x, (1,) * 6, mode="reflect")
    return F.conv3d(padded, kernel.expand(x.shape[1], 1, 3, 3, 3), stride=2, groups=x.shape[1])


@MODELS.register_module(name="DISCRIMINATOR_3D")
class StyleGANDiscriminator(nn.Module):
    """Real or not, for a whole video, of one length and size.

    Args:
        image_size: Height and width, or one number for both; multiples of 2 ** number of blocks.
        num_frames: Of the videos.
        in_channels: Of the videos.
        filters: Channels of the first layer.
        channel_multipliers: Of each block; its channels are `filters` times that.
        num_groups: Of GroupNorm.
        from_pretrained, inflate_from_2d, use_pretrained: see `PatchDiscriminator`.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = (128, 128),
        num_frames: int = 17,
        in_channels: int = 3,
        filters: int = 128,
        channel_multipliers: Sequence[int] = (2, 4, 4, 4, 4),
        num_groups: int = 32,
        *,
        from_pretrained: str | None = None,
        inflate_from_2d: bool = False,
        use_pretrained: bool = True,
    ) -> None:
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        shrink = 2 ** len(channel_multipliers)
        if (
            height % shrink or width % shrink or filters % num_groups or num_frames <= shrink // 2
        ):  # to reflect 2 frames
            raise UserError(
                f"DISCRIMINATOR_3D: image_size={image_size} must be multiples of {shrink}, 2 for each block; filters={filters} of "
                f"num_groups={num_groups}; num_frames={num_frames} at least {shrink // 2 + 1}."
            )
        self.size = (num_frames, height, width)
        widths = [filters, *(filters * factor for factor in channel_multipliers)]
        self.conv1 = nn.Conv3d(in_channels, filters, 3, padding=1)
        self.blocks = nn.ModuleList(DownBlock(*pair, num_groups) for pair in itertools.pairwise(widths))
        self.conv2 = nn.Conv3d(widths[-1], widths[-1], 3, padding=1)
        self.norm1 = nn.GroupNorm(num_groups, widths[-1])
        cells = -(-num_frames // shrink) * (height // shrink) * (width // shrink)
        self.linear1 = nn.Linear(widths[-1] * cells, widths[-1])
        self.linear2 = nn.Linear(widths[-1], 1)
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=nn.init.calculate_gain("relu"))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        _load(self, from_pretrained if use_pretrained else None, inflate_from_2d=inflate_from_2d)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> scores [B, 1], > 0 for real."""
        if x.shape[2:] != self.size:
            raise UserError(
                f"DISCRIMINATOR_3D judges videos of {self.size} (frames, height, width), not of {tuple(x.shape[2:])}: set its "
                "num_frames and image_size to the training's."
            )
        x = F.leaky_relu(self.conv1(x), 0.2)
        for block in self.blocks:
            x = block(x)
        x = F.leaky_relu(self.norm1(self.conv2(x)), 0.2).flatten(1)
        return self.linear2(F.leaky_relu(self.linear1(x), 0.2))


def _load(model: nn.Module, path: str | None, *, inflate_from_2d: bool) -> None:
    """Load weights, such as a checkpoint's folder `discriminator`; kernels of a 2-D network become the middle frame's."""
    if path is None:
        return
    state = dict(read_weights(path))
    for name, own in model.state_dict().items() if inflate_from_2d else ():
        if name in state and state[name].ndim + 1 == own.ndim:
            inflated = torch.zeros_like(own)
            inflated[:, :, own.shape[2] // 2] = state[name]
            state[name] = inflated
    load_strictly(model, state, path)


MODELS.register_variant("N_Layer_DISCRIMINATOR_3D", PatchDiscriminator)  # Open-Sora 1.2's, which has BatchNorm
