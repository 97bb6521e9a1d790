"""Attention with fewer keys than queries, for large images (PixArt-Sigma, Chen et al. 2024, section 3.3).

Each window of 2 x 2 neighbouring keys, and of values, becomes one; queries stay as they are. Frames are compressed one
by one. Windows that reach over the last row or column repeat it, so that they hold the mean of what is there; the
released code drops that row or column instead.
"""

from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora.models.layers.attention import Attention

Mode = Literal["conv", "ave", "uniform"]

FACTOR = 2
"""Rows, and columns, of keys that become one."""


class KVCompressAttention(Attention):
    """Self-attention among all tokens with compressed keys and values. Names: with "conv" also `sr`, `norm`.

    Deviations from the released code: "ave" is the mean (there it takes one key of each window, as "uniform" does), and
    `qk_norm` is this package's, by head and after compression.

    Args:
        dim, num_heads, qk_norm, kernel: see `Attention`.
        mode: "conv" = learned weights for each channel of the window, the mean at first, then LayerNorm; "ave" = the
            mean; "uniform" = the first of the window.
    """

    def __init__(self, dim: int, num_heads: int, *, mode: Mode, qk_norm: bool = False, kernel: str = "auto") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"kv_compress={mode!r} is not one of {', '.join(get_args(Mode))}, or None.")
        super().__init__(dim, num_heads, axis="all", qk_norm=qk_norm, kernel=kernel)
        self.mode = mode
        if mode == "conv":
            self.sr = nn.Conv2d(dim, dim, kernel_size=FACTOR, stride=FACTOR, groups=dim)
            self.norm = nn.LayerNorm(dim)
            nn.init.constant_(self.sr.weight, 1 / FACTOR**2)
            nn.init.zeros_(self.sr.bias)  # type: ignore[arg-type]  # the layer above has a bias

    def reduce_keys(self, k: Tensor, v: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """`k, v [B, H, T * rows * columns, d]` -> a quarter of them; `grid` is rows and columns of a frame."""
        assert grid is not None, "compressed attention needs to know the rows and columns of a frame"
        return self._reduce(k, grid), self._reduce(v, grid)

    def num_keys(self, grid: tuple[int, int]) -> int:
        """See `Attention.num_keys`."""
        return -(-grid[0] // FACTOR) * -(-grid[1] // FACTOR)

    def _reduce(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        batch = x.shape[0]
        planes = rearrange(x, "B H (T R C) d -> (B T) (H d) R C", R=grid[0], C=grid[1])
        planes = self.compress(planes)
        tokens = rearrange(planes, "(B T) D R C -> B (T R C) D", B=batch)
        if self.mode == "conv":
            tokens = self.norm(tokens).to(x.dtype)  # autocast would leave LayerNorm's fp32
        return rearrange(tokens, "B N (H d) -> B H N d", H=self.num_heads)

    def compress(self, planes: Tensor) -> Tensor:
        """`[B, D, rows, columns]` -> half the rows and columns, rounded up; before the LayerNorm of "conv"."""
        if self.mode == "uniform":
            return planes[..., ::FACTOR, ::FACTOR]
        windows = _windows(planes)
        if self.mode == "ave":
            return windows.mean(dim=(-3, -1))
        # as a sum, not a convolution, whose memory layout PyTorch 2.11 gets wrong when compiled
        weighted = windows * self.sr.weight.unsqueeze(3)  # [D, 1, FACTOR, 1, FACTOR]
        return (weighted.sum(dim=(-3, -1)) + self.sr.bias[:, None, None]).to(planes.dtype)  # type: ignore[index]


def _windows(planes: Tensor) -> Tensor:
    """`[B, D, rows, columns] -> [B, D, rows / FACTOR, FACTOR, columns / FACTOR, FACTOR]`; the last row and column are repeated where needed.

    Always padded, then cropped to whole windows: a test for odd sizes would compile one program for them and one for even ones. Padding in PyTorch's "replicate" mode has no deterministic gradient on a GPU.
    """
    rows, columns = (-(-n // FACTOR) for n in planes.shape[-2:])
    planes = torch.cat([planes, planes[..., -1:, :]], dim=-2)[..., : FACTOR * rows, :]
    planes = torch.cat([planes, planes[..., -1:]], dim=-1)[..., : FACTOR * columns]
    return planes.unflatten(-2, (rows, FACTOR)).unflatten(-1, (columns, FACTOR))
