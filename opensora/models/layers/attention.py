"""Self-attention and cross-attention, with the parameter names of DiT and PixArt checkpoints."""

from einops import rearrange
from torch import Tensor, nn

from opensora.acceleration.attention import attention


class Attention(nn.Module):
    """Multi-head self-attention. Names: `qkv`, `proj`."""

    def __init__(self, dim: int, num_heads: int, *, kernel: str = "auto") -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"hidden_size={dim} is not divisible by num_heads={num_heads}.")
        self.num_heads = num_heads
        self.kernel = kernel
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """`x [B, N, D] -> [B, N, D]`; every token sees every token."""
        q, k, v = rearrange(self.qkv(x), "B N (K H D) -> K B H N D", K=3, H=self.num_heads)
        x = attention(q, k, v, kernel=self.kernel)
        return self.proj(rearrange(x, "B H N D -> B N (H D)"))


class CrossAttention(nn.Module):
    """Multi-head attention from tokens to text. Names: `q_linear`, `kv_linear`, `proj`."""

    def __init__(self, dim: int, num_heads: int, *, kernel: str = "auto") -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kernel = kernel
        self.q_linear = nn.Linear(dim, dim)
        self.kv_linear = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """`x [B, N, D]`, text `y [B, L, D]`, `mask [B, L]` (True = real token) -> `[B, N, D]`.

        A padded text token changes nothing: captions of different length may share a batch.
        """
        q = rearrange(self.q_linear(x), "B N (H D) -> B H N D", H=self.num_heads)
        k, v = rearrange(self.kv_linear(y), "B L (K H D) -> K B H L D", K=2, H=self.num_heads)
        x = attention(q, k, v, mask, kernel=self.kernel)
        return self.proj(rearrange(x, "B H N D -> B N (H D)"))
