"""Inception v3 as FID is defined with it (2015-12-05, 1008 classes), and the features that the ADM evaluator takes of it.

Weights: `pt_inception-2015-12-05-6726825d.pth`, the TensorFlow graph's in torchvision's names, from the releases of
github.com/mseitzer/pytorch-fid (tag fid_weights). TensorFlow's pooling leaves padding out, and takes a maximum in the last
block; its resizing has no half-pixel offset.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torchvision.models import inception_v3

from opensora.checkpoint.weight_files import read_file
from opensora.utils.errors import UserError

SIDE, POOLED = 299, 2048


class Inception(nn.Module):
    """Frames -> `POOLED` features and, for sFID, 7 channels of mixed_6/conv [17, 17, 7] in TensorFlow's order."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.net = inception_v3(num_classes=1008, aux_logits=False, init_weights=False)
        for block in self.net.children():
            if hasattr(block, "branch_pool"):
                block.register_forward_hook(partial(_pool_again, maximum=block is self.net.Mixed_7c))
        try:
            self.net.load_state_dict(read_file(weights))
        except RuntimeError as error:
            why = str(error).splitlines()[1].strip()[:200]
            raise UserError(f"{weights} is not pt_inception-2015-12-05-6726825d.pth of pytorch-fid: {why}") from error
        self.classes, self.net.fc = self.net.fc.weight, nn.Identity()
        self.requires_grad_(False).eval()

    def forward(self, videos: Tensor) -> Tensor:
        """`[B, 3, T, H, W]` in [-1, 1] -> `[B T, POOLED + 17 * 17 * 7]`."""
        x, maps = rearrange(videos, "B C T H W -> (B T) C H W") * 127.5 + 127.5, []
        for dim in (3, 2):
            at = torch.arange(SIDE, device=x.device) * (x.shape[dim] / SIDE)
            low, high = at.long(), (at.long() + 1).clamp(max=x.shape[dim] - 1)
            share = (at - low).unflatten(0, (-1, *[1] * (3 - dim)))
            x = torch.lerp(x.index_select(dim, low), x.index_select(dim, high), share)
        hook = self.net.Mixed_6d.branch1x1.register_forward_hook(lambda module, args, out: maps.append(out[:, :7]))
        pooled = self.net((x - 128) / 128)
        hook.remove()
        return torch.cat([pooled, rearrange(maps[0], "N C H W -> N (H W C)")], dim=1)

    def probabilities(self, pooled: Tensor) -> Tensor:
        """Of the classes, `[N, POOLED] -> [N, 1008]`, as the Inception Score takes them: without biases."""
        return (pooled.to(self.classes) @ self.classes.T).softmax(dim=1)


def _pool_again(block: Any, args: tuple[Tensor], out: Tensor, *, maximum: bool) -> Tensor:
    """The output of a block with its last branch, which pools, as TensorFlow's."""
    pooled = F.max_pool2d(args[0], 3, 1, 1) if maximum else F.avg_pool2d(args[0], 3, 1, 1, count_include_pad=False)
    branch = block.branch_pool(pooled)
    return torch.cat([out[:, : -branch.shape[1]], branch], dim=1)
