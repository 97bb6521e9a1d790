"""Do the samples show what their prompts say? Measured against the clips that the prompts describe.

Two figures, both in pixels: whether the sample's nearest clip, among all clips, is its own; and how near the sample's
frames come to frames of its own clip (PSNR), compared with the ceiling that the VAE sets by reconstructing those frames.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora.models.vae.metrics import psnr_of_error as psnr

POOL = 8
"""Clips are compared after averaging over so many pixels a side: layout and colour, not texture."""


def nearest(sample: Tensor, clips: list[Tensor], frame_interval: int) -> int:
    """The index of the clip that has the window most like the sample.

    Args:
        sample: [3, T, H, W] in [-1, 1].
        clips: whole clips at the sample's height and width, [3, T_i, H, W].
        frame_interval: source frames from one frame of a window to the next.
    """
    distances = [float(distance(sample, clip, frame_interval)) for clip in clips]
    return min(range(len(clips)), key=distances.__getitem__)


def distance(sample: Tensor, clip: Tensor, frame_interval: int) -> Tensor:
    """The least mean squared error, over all windows of the clip, of pooled images."""
    x, frames = _pooled(sample), _pooled(clip)  # [T, K], [T_clip, K]
    length = len(x)
    starts = range(0, len(frames) - (length - 1) * frame_interval)
    if not starts:
        raise ValueError(f"a clip of {len(frames)} frames has no window of {length} at interval {frame_interval}")
    windows = torch.stack([frames[s : s + (length - 1) * frame_interval + 1 : frame_interval] for s in starts])
    return (windows - x).square().mean(dim=(1, 2)).min()


def best_frame_psnr(sample: Tensor, clip: Tensor) -> float:
    """PSNR in dB of each frame of the sample [3, T, H, W] to its best match in the clip, averaged over frames."""
    x = sample.transpose(0, 1).flatten(1)  # [T, 3 H W]
    frames = clip.transpose(0, 1).flatten(1)
    errors = torch.cdist(x, frames).square() / x.shape[1]  # [T, T_clip]
    return float(psnr(errors.min(dim=1).values).mean())


def _pooled(video: Tensor) -> Tensor:
    """[3, T, H, W] -> [T, K], averaged over squares of POOL pixels."""
    return F.avg_pool2d(video.transpose(0, 1), POOL).flatten(1)
