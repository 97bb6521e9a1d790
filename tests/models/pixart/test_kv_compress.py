"""Key compression: what each mode computes, at even and odd sizes, and what it costs."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch.utils.flop_counter import FlopCounterMode

from opensora.models.layers.attention import Attention
from opensora.models.pixart.pixart import KVCompressAttention

DIM, HEADS, T = 24, 2, 3


def build() -> KVCompressAttention:
    torch.manual_seed(0)
    return KVCompressAttention(DIM, HEADS, kernel="math")


def planes(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(2, DIM, rows, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [(4, 6), (2, 2)])
def test_conv_starts_as_average_pooling_before_its_norm(size):
    x = planes(*size)
    torch.testing.assert_close(build().compress(x), F.avg_pool2d(x, 2))


@pytest.mark.parametrize("size", [(5, 4), (4, 3), (5, 7), (1, 3), (1, 1)])
def test_odd_sizes_are_the_mean_of_what_is_there(size):
    x = planes(*size)
    expected = F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)
    torch.testing.assert_close(build().compress(x), expected)


def test_attention_equals_the_formula():
    attn, rows, columns = build(), 3, 4
    x = torch.randn(2, T, rows * columns, DIM, generator=torch.Generator().manual_seed(2))
    q, k, v = attn.qkv(rearrange(x, "B T S D -> B (T S) D")).chunk(3, dim=-1)

    def reduced(keys):
        frames = rearrange(keys, "B (T R C) D -> B T R C D", T=T, R=rows)
        kept = []
        for t in range(T):
            for r in range(0, rows, 2):
                for c in range(0, columns, 2):
                    window = frames[:, t, r : r + 2, c : c + 2].flatten(1, 2)
                    kept.append(window.mean(1))
        return F.layer_norm(torch.stack(kept, dim=1), (DIM,))

    q, k, v = (rearrange(part, "B N (H d) -> B H N d", H=HEADS) for part in (q, reduced(k), reduced(v)))
    expected = attn.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "B H (T S) d -> B T S (H d)", T=T))
    torch.testing.assert_close(attn(x, grid=(rows, columns)), expected, atol=1e-6, rtol=1e-5)


def test_frames_are_not_mixed_by_compression():
    attn = build()
    k = torch.randn(1, HEADS, T * 4, DIM // HEADS)
    other = k.clone()
    other[:, :, 4:8] = 5.0
    changed = (attn.reduce_keys(k, k, (2, 2))[0] != attn.reduce_keys(other, k, (2, 2))[0]).any(dim=(0, 1, 3))
    assert changed.tolist() == [False, True, False]


def test_conv_has_the_published_number_of_further_parameters():
    with torch.device("meta"):
        plain, conv = Attention(1152, 16), KVCompressAttention(1152, 16)
    count = [sum(p.numel() for p in attn.parameters()) for attn in (plain, conv)]
    assert count[1] - count[0] == 8064


@pytest.mark.parametrize("size", [(4, 6), (3, 5)])
def test_flops_equal_the_counters(size):
    attn, S = build(), size[0] * size[1]
    with FlopCounterMode(display=False) as counter:
        attn(torch.randn(1, T, S, DIM), grid=size)
    assert attn.flops(T, S, size) == counter.get_total_flops()


def test_short_floats_keep_their_format():
    attn = build()
    with torch.autocast("cpu", torch.bfloat16):
        out = attn(torch.randn(1, 1, 6, DIM), grid=(2, 3))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert attn.sr.weight.grad.any()
