"""The short-attention kernel against the formula."""

from collections.abc import Callable

import torch

SIZES = [(2, 3, 2, 5, 24), (1, 2, 3, 16, 72), (1, 2, 3, 1, 72), (1, 2, 2, 17, 40)]  # B, S, H, N, d


def compare(size: tuple[int, ...], device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Kernel against formula, forwards and backwards, on views into one tensor of tokens."""
    from opensora.acceleration.kernels.short_attention import short_attention, short_attention_packed

    B, S, H, N, d = size
    torch.manual_seed(0)
    tokens = torch.randn(B, N, S, 3 * H * d, device=device, dtype=dtype)
    grad = torch.linspace(-1, 1, B * N * S * H * d, device=device, dtype=dtype).reshape(B, N, S, H * d)
    expected = with_gradient(lambda x: on_parts(formula, x, H), tokens, grad)
    for attend in (lambda x: on_parts(short_attention, x, H), lambda x: short_attention_packed(x, H)):
        for ours, right in zip(with_gradient(attend, tokens, grad), expected, strict=True):
            torch.testing.assert_close(ours, right, atol=tolerance, rtol=tolerance)


def with_gradient(
    attend: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = tokens.clone().requires_grad_()
    out = attend(leaf)
    out.backward(grad)
    return out.detach().float(), leaf.grad.float()


def on_parts(attend: Callable[..., torch.Tensor], tokens: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[B, N, S, 3 H d] -> [B, N, S, H d]` through views of q, k and v, each [B, S, H, N, d]."""
    q, k, v = tokens.unflatten(-1, (3, num_heads, -1)).permute(3, 0, 2, 4, 1, 5).unbind(0)
    return attend(q, k, v).permute(0, 3, 1, 2, 4).flatten(-2)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v.float()).to(v.dtype)
