"""One attention function for every model: softmax(q k^T / sqrt(d)) v, by the kernel that suits the shapes.

On a GPU `auto` takes a Triton kernel of our own for the very short sequences of temporal attention (every kernel made
for long sequences reaches only ~3 TFLOP/s there on an H100), and PyTorch's scaled_dot_product_attention, which itself
picks among cuDNN, flash, efficient and math, for the rest.
"""

import importlib.util
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# part of PyTorch's CUDA builds; without it short sequences take batched matrix products
HAS_TRITON = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from opensora.acceleration.kernels import head_norm, short_attention
    from opensora.acceleration.kernels.short_attention import MAX_HEAD_DIM, MAX_LENGTH

MATMUL_KEYS = 32
"""Up to so many keys batched matrix products are as good as PyTorch's fused kernels on a GPU."""
QUERY_PARTS, MIN_QUERIES, KEYS_OF_A_PROGRAM, BUSY_PROGRAMS = 8, 8192, 128, 264
"""See `_leaves_a_gpu_idle`; two programs for each of an H100's 132 multiprocessors."""


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, kernel: str = "auto") -> Tensor:
    """Scaled dot-product attention, not causal.

    Args:
        q: queries [B, H, N, D], or [B, S, H, N, D] for S sequences a sample, in any strides.
        k, v: keys and values [B, H, L, D], or [B, S, H, L, D].
        mask: [B, L] bool, or 0 and 1 of any dtype, True at the keys that may be seen. A row without any such key gives zeros. With [B, H, ...]
            only.
        kernel: "auto", "sdpa" or "math".

    Returns:
        q's shape, in v's dtype.
    """
    if kernel not in KERNELS:
        raise ValueError(f"attention kernel {kernel!r} is not one of {', '.join(KERNELS)}.")
    if mask is None:
        return KERNELS[kernel](q, k, v, None)
    mask = mask.bool()
    # a row without any key would give NaN: let it see all keys, with values of zero
    seen = mask.any(dim=1)  # [B]
    allowed = (mask | ~seen[:, None])[:, None, None, :]  # [B, 1, 1, L]
    return KERNELS[kernel](q, k, v * seen[:, None, None, None].to(v.dtype), allowed)


def packed_attention(qkv: Tensor, num_heads: int, axis: str, kernel: str = "auto") -> Tensor | None:
    """Self-attention straight from the output of one linear layer, where a kernel for that exists; else None.

    The gradient of qkv is then written as one tensor instead of being joined from three.

    Args:
        qkv: tokens [B, T, S, 3 D], the three parts one after the other, in each the heads.
        num_heads: H; the width of a head is D / H.
        axis: "space", "time" or "all": which tokens see each other.
        kernel: see `attention`.

    Returns:
        [B, T, S, D], or None.
    """
    _, T, _, width = qkv.shape
    if kernel != "auto" or not HAS_TRITON or not _on_gpu(qkv) or width // (3 * num_heads) > MAX_HEAD_DIM:
        return None
    return short_attention.short_attention_packed(qkv, num_heads) if axis == "time" and T <= MAX_LENGTH else None


def normed_heads(
    x: Tensor, weight: Tensor, eps: float, table: Tensor | None, every: int, kernel: str = "auto"
) -> Tensor | None:
    """`head_norm.norm_heads` with the same arguments, where that exists; else None. `kernel`: see `attention`."""
    return head_norm.norm_heads(x, weight, eps, table, every) if kernel == "auto" and _heads_fit(x) else None


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _heads_fit(x: Tensor) -> bool:
    return HAS_TRITON and _on_gpu(x) and x.shape[-1] <= head_norm.MAX_HEAD_DIM and x.dtype != torch.float64


def _math(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # [B, H, N, L]
    scores = scores.float()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    if q.ndim == 4:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    # the fused kernels know one batch axis
    q4, k4, v4 = (each.flatten(0, -4) for each in (q, k, v))
    return F.scaled_dot_product_attention(q4, k4, v4, attn_mask=allowed).reshape(q.shape)


def _leaves_a_gpu_idle(q: Tensor, k: Tensor) -> bool:
    """Whether the backward pass of PyTorch's kernels has few programs, each of which takes some keys of a head, but many queries."""
    if not _on_gpu(q) or q.ndim != 4 or not torch.is_grad_enabled():
        return False
    (B, H, N, _), L = q.shape, k.shape[2]
    # few keys, as they are copied: not in self-attention. In this order, so that short sequences do not ask what divides them
    if N < MIN_QUERIES or N < 2 * QUERY_PARTS * L or N % QUERY_PARTS:
        return False
    return B * H * ((L + KEYS_OF_A_PROGRAM - 1) // KEYS_OF_A_PROGRAM) < BUSY_PROGRAMS


def _sdpa_in_parts(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, parts: int = QUERY_PARTS) -> Tensor:
    """`_sdpa` of `q [B, H, N, D]`, N a multiple of `parts`, with the queries of a sample as those of so many samples."""
    B, H, N, D = q.shape

    def copies(x: Tensor) -> Tensor:
        return x.repeat_interleave(parts, dim=0)  # in memory: who knows which kernels take a stride of 0

    apart = q.transpose(1, 2).reshape(B * parts, N // parts, H, D).transpose(1, 2)
    mask = None if allowed is None else copies(allowed)
    out = F.scaled_dot_product_attention(apart, copies(k), copies(v), attn_mask=mask)
    return out.transpose(1, 2).reshape(B, N, H, D).transpose(1, 2)


def _auto(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    if _leaves_a_gpu_idle(q, k):
        return _sdpa_in_parts(q, k, v, allowed)
    if not _on_gpu(q) or q.ndim == 4:
        return _sdpa(q, k, v, allowed)
    if HAS_TRITON and q.shape[-2] <= MAX_LENGTH and q.shape[-1] <= MAX_HEAD_DIM:
        return short_attention.short_attention(q, k, v)
    return _math(q, k, v, allowed) if k.shape[-2] <= MATMUL_KEYS else _sdpa(q, k, v, allowed)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {
    "auto": _auto,
    "sdpa": _sdpa,
    "math": _math,
}


def kernel_from_flag(*, enable_flash_attn: bool | None) -> str:
    """The seed's `enable_flash_attn`: True or None is the fastest kernel there is, False the plain formula."""
    return "math" if enable_flash_attn is False else "auto"


def without_autocast(device_type: str) -> torch.autocast:
    """No autocast, inside of autocast; the weights that autocast has cast stay cast afterwards."""
    return torch.autocast(device_type, enabled=False)


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm without affine parameters that keeps its input's dtype under autocast; the statistics are fp32 either way.

    Autocast would make the result fp32: twice the memory for nothing, as the linear layer that follows rounds it.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps=eps, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., dim] -> [..., dim]`."""
        with without_autocast(x.device.type):
            return F.layer_norm(x, self.normalized_shape, eps=self.eps)


def layer_norm(dim: int, *, eps: float = 1e-6, fused: bool = False) -> torch.nn.Module:
    """A LayerNorm without affine parameters; `fused` (the seed's `enable_layernorm_kernel`) asks for apex's kernel."""
    if fused:
        try:
            from apex.normalization import FusedLayerNorm

            return FusedLayerNorm(dim, elementwise_affine=False, eps=eps)
        except ImportError:  # Python shows it once
            warnings.warn(
                "enable_layernorm_kernel=True, but apex is not installed: using PyTorch's LayerNorm.", stacklevel=2
            )
    return LayerNorm(dim, eps)
