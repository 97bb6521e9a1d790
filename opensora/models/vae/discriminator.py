"""A network that tells videos from reconstructions, patch by patch.

PatchGAN of Isola et al. 2017 (arXiv:1611.07004), as VQGAN uses it (Esser et al. 2021, arXiv:2012.09841), in two or three
dimensions. GroupNorm takes the place of BatchNorm: scores then do not depend on what else is in the batch, and there
is no running state to save or to share between processes.
"""

import itertools
from typing import Literal

from einops import rearrange
from torch import Tensor, nn

from opensora.registry import MODELS
from opensora.utils.errors import UserError


@MODELS.register_module()
class PatchDiscriminator(nn.Module):
    """Real or not, for every patch of about 70 pixels (with 3 layers).

    Args:
        dims: 2 judges every frame alone; 3 judges motion too, and takes images (T = 1) as well.
        channels: Of the first layer; each next one has twice as many, up to eight times.
        num_layers: Layers that halve the size. In time the first one does not, so 3 layers see 4 frames as one.
    """

    def __init__(self, dims: Literal[2, 3] = 3, channels: int = 64, num_layers: int = 3) -> None:
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

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 3, T, H, W] in [-1, 1] -> scores, > 0 for real: [B, 1, t, h, w], with t = T when `dims` is 2."""
        if self.dims == 3:
            return self.layers(x)
        scores = self.layers(rearrange(x, "B C T H W -> (B T) C H W"))
        return rearrange(scores, "(B T) C H W -> B C T H W", B=len(x))
