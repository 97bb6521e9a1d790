"""The attention of Wan's blocks: diffusers' layers, with this package's kernels and sequence parallelism."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora.acceleration.kernels.attention import attention


def set_processors(block: Any, kernel: str, image_tokens: int) -> None:
    """Let a block's two attentions compute with `Processor`, and say what `opensora.acceleration.sequence_parallel` looks for."""
    block.attn1.exchange, block.attn1.axis, block.attn1.keeps_keys = None, "all", True
    block.attn1.num_heads = block.attn1.heads
    block.attn1.set_processor(Processor(kernel))
    block.attn2.set_processor(Processor(kernel, image_tokens))


class Processor:
    """diffusers' attention processor of Wan with this package's kernels, and with the exchange of tokens for heads of sequence
    parallelism (Ulysses), see `opensora.acceleration.sequence_parallel.exchange`.

    Args:
        kernel: see `opensora.acceleration.kernels.attention`.
        image_tokens: how many image tokens precede the text in cross-attention.
    """

    def __init__(self, kernel: str, image_tokens: int = 0) -> None:
        self.kernel, self.image_tokens = kernel, image_tokens

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        attention_mask: None,
        rotary_emb: tuple[Tensor, Tensor, int] | None,
    ) -> Tensor:
        """Tokens of this process `[B, n, D] -> [B, n, D]`.

        Self-attention without `encoder_hidden_states [B, M + L, D]`; it has `rotary_emb`: cosines, sines and the number N of all
        tokens.
        """
        heads: Callable[[Tensor], Tensor] = partial(torch.unflatten, dim=2, sizes=(attn.heads, -1))
        x = hidden_states
        context, image = x if encoder_hidden_states is None else encoder_hidden_states, None
        if self.image_tokens:
            image, context = context[:, : self.image_tokens], context[:, self.image_tokens :]
        q, k, v = (
            heads(norm(attn.norm_q, attn.to_q(x))),
            heads(norm(attn.norm_k, attn.to_k(context))),
            heads(attn.to_v(context)),
        )
        if rotary_emb is None:
            out = self.attend(q, k, v)
            if image is not None:
                out = out + self.attend(
                    q, heads(norm(attn.norm_added_k, attn.add_k_proj(image))), heads(attn.add_v_proj(image))
                )
            return attn.to_out[0](out.flatten(2))
        cos, sin, num_tokens = rotary_emb
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # [B, n, H, d]
        if attn.exchange is None:
            return attn.to_out[0](self.attend(q, k, v).flatten(2))
        ranks = attn.exchange.ranks
        qkv = torch.stack((q, k, v), dim=2).unsqueeze(1)  # [B, 1, n, 3, H, d]
        qkv = ranks.all_to_all(qkv, scatter=4, gather=2, length=num_tokens).squeeze(1)  # [B, N, 3, H / p, d]
        out = self.attend(*qkv.unbind(2)).unsqueeze(1)
        out = ranks.all_to_all(out, scatter=2, gather=3, length=attn.heads).squeeze(1)  # [B, n, H, d]
        return attn.to_out[0](out.flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [B, N, H, d]`, `k, v [B, L, H, d]` -> `[B, N, H, d]`."""
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return attention(q, k, v, kernel=self.kernel).transpose(1, 2)


def norm(layer: Any, x: Tensor) -> Tensor:
    """An RMS norm with its weight in x's dtype: with bf16 and an fp32 weight PyTorch runs no fused kernel, and returns fp32."""
    return F.rms_norm(x, layer.normalized_shape, layer.weight.to(x.dtype), layer.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of interleaved pairs: `x [B, N, H, d]`, tables [1, N, 1, d] with each value twice."""
    pairs = x.float().unflatten(-1, (-1, 2))
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    return (x.float() * cos + turned * sin).to(x.dtype)
