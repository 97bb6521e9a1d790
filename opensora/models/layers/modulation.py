"""adaLN: the condition shifts and scales normalised tokens and gates residual branches (Peebles & Xie 2023, section 3.2).

Two forms are in use. adaLN-zero (DiT, Latte): each block maps the condition to its six vectors by its own linear layer.
adaLN-single (PixArt-alpha, section 2.3, and all of STDiT): one linear layer serves the whole model, and each block adds
its own learned table. With frame masking (`x_mask`), conditioning frames are modulated as at timestep 0.

The sums of residual paths are the largest source of rounding errors in bf16. Compiled, they are fp32 within a block, where
the compiler keeps them in registers or recomputes them; between blocks, where they would be stored, they are rounded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import HAS_TRITON, LayerNorm, layer_norm, without_autocast

if HAS_TRITON:
    from opensora.acceleration.kernels import adaln

SHORT = (torch.bfloat16, torch.float16)
_kernels = [True]  # whether they are used where possible; the last entry counts


@contextmanager
def plain_modulation() -> Iterator[None]:
    """Inside, PyTorch's own operations in place of our kernels: to compare with others' code. Not for compiled blocks."""
    _kernels.append(False)
    try:
        yield
    finally:
        _kernels.pop()


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`x * (1 + scale) + shift` in x's dtype; `x [B, T, S, D]`, the others broadcast over T and S."""
    return x * (1 + scale).to(x.dtype) + shift.to(x.dtype)


def norm_modulate(
    norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`x`, and `_modulate(norm(x), shift, scale)` in `dtype` (None: x's).

    The residual path takes the `x` that is returned: in half precision on a GPU one kernel sums its gradient with the others.
    """
    dtype = x.dtype if dtype is None else dtype
    if type(norm) is LayerNorm and _is_fused(x, dtype, shift, scale):
        return adaln.norm_modulate(x, shift, scale, norm.eps, dtype)
    return x, _modulate(norm(x), shift, scale).to(dtype)


def gated(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """`x + gate * branch`, in x's dtype, or compiled in fp32, which costs little there; `gate` broadcasts over T and S."""
    wide = torch.float32 if torch.compiler.is_compiling() and x.dtype in SHORT else x.dtype
    if branch.shape == x.shape and _is_fused(x, branch.dtype, gate):
        return adaln.gate_residual(x, gate, branch, wide)
    return x.to(wide) + gate.to(wide) * branch


def _is_fused(x: Tensor, dtype: torch.dtype, *vectors: Tensor) -> bool:
    """Whether the kernels take this: tokens in `dtype`, or in fp32 next to others in `dtype`."""
    if not (HAS_TRITON and x.is_cuda and _kernels[-1] and torch.is_grad_enabled() and dtype in SHORT):
        return False
    B, T, _, D = x.shape
    return D <= adaln.MAX_CHANNELS and all(
        each.shape[0] == B and each.shape[1] in (1, T) and each.shape[2] == 1 for each in vectors
    )


def frame_modulation(x_mask: Tensor | None, at_t: Tensor, at_0: Tensor | None) -> Tensor:
    """Modulation vectors for each frame, `[K, B, 1 or T, 1, D]`.

    Args:
        x_mask: [B, T] bool, True at denoised frames, False at conditioning frames; None = all are denoised.
        at_t, at_0: vectors for the sample's timestep and, with `x_mask`, for timestep 0, [B, K, D].
    """
    at_t = at_t.transpose(0, 1)[:, :, None, None]  # B K D -> K B 1 1 D
    if x_mask is None or at_0 is None:
        return at_t
    return torch.where(x_mask.bool()[None, :, :, None, None], at_t, at_0.transpose(0, 1)[:, :, None, None])


class AdaLN(nn.Sequential):
    """SiLU, then a linear layer from the condition to `num_vectors` modulation vectors. Name: `1`.

    Outside autocast: for one row a sample, rounding the weights costs more than it saves.
    """

    outside_autocast = True

    def __init__(self, dim: int, num_vectors: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(dim, num_vectors * dim))
        self.num_vectors = num_vectors

    def forward(self, c: Tensor) -> Tensor:
        """`c [B, D] -> [B, num_vectors, D]`."""
        with without_autocast(c.device.type):
            vectors = super().forward(c.to(next(self[1].parameters()).dtype))
        return vectors.unflatten(1, (self.num_vectors, -1))  # B (K D) -> B K D


class FinalLayer(nn.Module):
    """Tokens -> patches, PixArt's form with a shared table. Names: `linear`, `scale_shift_table`."""

    def __init__(self, dim: int, patch_volume: int, out_channels: int, *, fused_norm: bool = False) -> None:
        super().__init__()
        self.norm_final = layer_norm(dim, fused=fused_norm)
        self.linear = nn.Linear(dim, patch_volume * out_channels)
        self._add_modulation(dim)

    def forward(self, x: Tensor, t: Tensor, x_mask: Tensor | None = None, t0: Tensor | None = None) -> Tensor:
        """`x [B, T, S, D]`, conditions `t, t0 [B, D]` -> `[B, T, S, patch_volume * out_channels]`."""
        shift, scale = frame_modulation(x_mask, self._vectors(t), None if t0 is None else self._vectors(t0))
        return self.linear(norm_modulate(self.norm_final, x, shift, scale)[1])

    def _add_modulation(self, dim: int) -> None:
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)

    def _vectors(self, t: Tensor) -> Tensor:
        """Shift and scale, `[B, D] -> [B, 2, D]`."""
        return self.scale_shift_table + t[:, None]


class AdaLNFinalLayer(FinalLayer):
    """Tokens -> patches, DiT's form. Names: `linear`, `adaLN_modulation.1`."""

    def _add_modulation(self, dim: int) -> None:
        self.adaLN_modulation = AdaLN(dim, 2)

    def _vectors(self, t: Tensor) -> Tensor:
        return self.adaLN_modulation(t)
