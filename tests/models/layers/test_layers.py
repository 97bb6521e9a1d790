"""Shared layers against formulas written out another way."""

import math

import pytest
import torch
from timm.layers import Mlp
from torch import nn

from opensora.models.layers.attention import Attention, CrossAttention
from opensora.models.layers.embedders import CaptionEmbedder, PatchEmbed3D, timestep_sinusoid
from opensora.models.layers.modulation import per_frame
from opensora.models.layers.pos_embed import sincos_1d, sincos_2d


def test_timestep_sinusoid_has_cosines_first():
    out = timestep_sinusoid(torch.tensor([0, 7, 999]), 8)
    for row, t in zip(out, (0, 7, 999), strict=True):
        angles = [t * 10000 ** (-k / 4) for k in range(4)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        torch.testing.assert_close(row, torch.tensor(expected), atol=2e-4, rtol=0)


def test_all_thousand_timesteps_stay_distinct():
    out = timestep_sinusoid(torch.arange(1000), 256)
    assert len(torch.unique(out, dim=0)) == 1000


def test_diffusers_agrees_on_the_timestep_embedding():
    from diffusers.models.embeddings import get_timestep_embedding

    t = torch.tensor([0.0, 12.5, 321.0, 999.0])
    theirs = get_timestep_embedding(t, 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    torch.testing.assert_close(timestep_sinusoid(t, 256), theirs, atol=1e-4, rtol=0)


def test_sincos_1d_by_hand():
    out = sincos_1d(6, torch.tensor([0.0, 1.5]))
    angles = [1.5 * 10000 ** (-k / 3) for k in range(3)]
    expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    torch.testing.assert_close(out[1], torch.tensor(expected))
    torch.testing.assert_close(out[0], torch.tensor([0.0] * 3 + [1.0] * 3))


def test_sincos_2d_equals_diffusers():
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    theirs = get_2d_sincos_pos_embed(32, (5, 7), base_size=7, output_type="pt")
    # diffusers rescales rows by base_size / height and columns by base_size / width: undo that for rows
    columns = theirs.reshape(5, 7, 32)[..., :16]
    ours = sincos_2d(32, 5, 7).reshape(5, 7, 32)
    torch.testing.assert_close(ours[..., :16], columns.float(), atol=1e-5, rtol=0)
    rows = sincos_1d(16, torch.arange(5))
    torch.testing.assert_close(ours[..., 16:], rows[:, None].expand(5, 7, 16))


def test_sincos_2d_scale_divides_coordinates():
    torch.testing.assert_close(
        sincos_2d(16, 2, 2, scale=0.5).reshape(2, 2, 16)[1, 1, :8], sincos_1d(8, torch.tensor([2.0]))[0]
    )


def test_patch_embed_pads_at_the_end():
    embed = PatchEmbed3D((1, 2, 2), 4, 8)
    x = torch.randn(1, 4, 1, 3, 5)
    padded = torch.zeros(1, 4, 1, 4, 6)
    padded[..., :3, :5] = x
    torch.testing.assert_close(embed(x), embed.proj(padded))


def test_self_attention_equals_pytorchs_module():
    ours = Attention(16, 4)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data.copy_(ours.qkv.weight)
    theirs.in_proj_bias.data.copy_(ours.qkv.bias)
    theirs.out_proj.weight.data.copy_(ours.proj.weight)
    theirs.out_proj.bias.data.copy_(ours.proj.bias)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], atol=1e-6, rtol=1e-5)


def test_cross_attention_equals_pytorchs_module_with_padding():
    ours = CrossAttention(16, 4)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data.copy_(torch.cat([ours.q_linear.weight, ours.kv_linear.weight]))
    theirs.in_proj_bias.data.copy_(torch.cat([ours.q_linear.bias, ours.kv_linear.bias]))
    theirs.out_proj.weight.data.copy_(ours.proj.weight)
    theirs.out_proj.bias.data.copy_(ours.proj.bias)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    mask = torch.arange(6)[None] < torch.tensor([[2], [6]])
    expected = theirs(x, y, y, key_padding_mask=~mask)[0]
    torch.testing.assert_close(ours(x, y, mask), expected, atol=1e-6, rtol=1e-5)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=3"):
        Attention(16, 3)


def test_caption_embedder_names_and_null():
    embedder = CaptionEmbedder(6, 8, 3)
    assert isinstance(embedder.y_proj, Mlp)
    assert embedder.null(2).shape == (2, 1, 3, 6)
    assert not embedder.y_embedding.requires_grad
    assert "y_embedding" in embedder.state_dict()


def test_per_frame_picks_the_timestep_of_each_frame():
    at_t, at_0 = torch.full((2, 6, 4), 1.0), torch.full((2, 6, 4), -1.0)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    out = per_frame(mask, at_t, at_0)
    assert out.shape == (6, 2, 3, 1, 4)
    assert torch.equal(out[0, :, :, 0, 0] > 0, mask)
