"""Shared layers against formulas written out another way."""

import math

import pytest
import torch
from einops import rearrange
from torch import nn

from opensora.acceleration.kernels.attention import layer_norm
from opensora.models.layers.attention import Attention, CrossAttention, RMSNorm, join_heads, split_heads
from opensora.models.layers.embedders import (
    CaptionEmbedder,
    LabelEmbedder,
    PatchEmbed3D,
    ScalarEmbedder,
    timestep_sinusoid,
)
from opensora.models.layers.mlp import Mlp
from opensora.models.layers.modulation import frame_modulation
from opensora.models.layers.positions import apply_rotary, grid_coordinates, rotary_table, sincos_1d, sincos_2d


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
    ours = sincos_2d(32, torch.arange(5), torch.arange(7)).reshape(5, 7, 32)
    torch.testing.assert_close(ours[..., :16], columns.float(), atol=1e-5, rtol=0)
    rows = sincos_1d(16, torch.arange(5))
    torch.testing.assert_close(ours[..., 16:], rows[:, None].expand(5, 7, 16))


def test_coordinates_with_a_scale_and_a_base():
    torch.testing.assert_close(grid_coordinates(3, scale=0.5).tolist(), [0.0, 2.0, 4.0])
    torch.testing.assert_close(grid_coordinates(4, scale=2.0, base=8).tolist(), [0.0, 1.0, 2.0, 3.0])
    each = grid_coordinates(2, scale=torch.tensor([1.0, 4.0]), base=4)
    torch.testing.assert_close(each.tolist(), [[0.0, 2.0], [0.0, 0.5]])


def test_patch_embed_pads_at_the_end():
    embed = PatchEmbed3D((1, 2, 2), 4, 8)
    x = torch.randn(1, 4, 1, 3, 5)
    padded = torch.zeros(1, 4, 1, 4, 6)
    padded[..., :3, :5] = x
    torch.testing.assert_close(embed(x), embed.proj(padded))


def pytorchs_attention(in_weight, in_bias, proj) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data.copy_(in_weight)
    theirs.in_proj_bias.data.copy_(in_bias)
    theirs.out_proj.load_state_dict(proj.state_dict())
    return theirs


@pytest.mark.parametrize(
    ("axis", "apart", "together"),
    [
        ("all", "B T S D -> B (T S) D", "B (T S) D -> B T S D"),
        ("space", "B T S D -> (B T) S D", "(B T) S D -> B T S D"),
        ("time", "B T S D -> (B S) T D", "(B S) T D -> B T S D"),
    ],
)
def test_self_attention_equals_pytorchs_module_along_each_axis(axis, apart, together):
    ours = Attention(16, 4, axis=axis)
    theirs = pytorchs_attention(ours.qkv.weight, ours.qkv.bias, ours.proj)
    x = torch.randn(2, 3, 5, 16)
    tokens = rearrange(x, apart)
    expected = rearrange(theirs(tokens, tokens, tokens)[0], together, B=2, T=3, S=5)
    torch.testing.assert_close(ours(x), expected, atol=1e-6, rtol=1e-5)


def test_cross_attention_equals_pytorchs_module_with_padding():
    ours = CrossAttention(16, 4)
    weight = torch.cat([ours.q_linear.weight, ours.kv_linear.weight])
    theirs = pytorchs_attention(weight, torch.cat([ours.q_linear.bias, ours.kv_linear.bias]), ours.proj)
    x, y = torch.randn(2, 1, 5, 16), torch.randn(2, 6, 16)
    mask = torch.arange(6)[None] < torch.tensor([[2], [6]])
    expected = theirs(x[:, 0], y, y, key_padding_mask=~mask)[0]
    torch.testing.assert_close(ours(x, y, mask)[:, 0], expected, atol=1e-6, rtol=1e-5)


def test_qk_norm_makes_the_scores_independent_of_the_tokens_scale():
    layer = Attention(16, 4, qk_norm=True)
    x = 30 * torch.randn(1, 1, 5, 16)  # so large that the norm's eps does not matter
    with torch.no_grad():
        layer.qkv.bias.zero_()
        layer.proj.bias.zero_()
    torch.testing.assert_close(layer(10 * x), 10 * layer(x), atol=1e-4, rtol=1e-4)  # only the values scale


def test_the_order_of_norm_and_rotation_matters_and_is_named():
    torch.manual_seed(0)
    new, legacy = Attention(16, 4, qk_norm=True), Attention(16, 4, qk_norm=True, norm_order="rope_then_norm")
    with torch.no_grad():
        new.q_norm.weight.normal_()  # equal weights commute with a rotation
    legacy.load_state_dict(new.state_dict())
    x, rope = torch.randn(1, 1, 5, 16), rotary_table(4, torch.arange(5))
    torch.testing.assert_close(new(x), legacy(x))
    assert not torch.allclose(new(x, rope), legacy(x, rope), atol=1e-4)
    with pytest.raises(ValueError, match="rope_then_norm"):
        Attention(16, 4, norm_order="legacy")


@pytest.mark.parametrize("axis", ["space", "time", "all"])
@pytest.mark.parametrize("order", ["norm_then_rope", "rope_then_norm"])
def test_positions_along_every_axis_are_those_of_its_sequences(axis, order):
    """`attend_qkv` normalises and rotates tokens before they become sequences, `attend` the sequences."""
    torch.manual_seed(0)
    attn, (B, T, S) = Attention(16, 4, axis=axis, qk_norm=True, norm_order=order), (2, 3, 5)
    with torch.no_grad():
        attn.q_norm.weight.normal_()
        attn.k_norm.weight.normal_()
    qkv = torch.randn(B, T, S, 48)
    rope = rotary_table(4, torch.arange({"space": S, "time": T, "all": T * S}[axis]))
    q, k, v = (split_heads(part, 4, axis) for part in qkv.chunk(3, dim=-1))
    assert torch.equal(attn.attend_qkv(qkv, rope), join_heads(attn.attend(q, k, v, rope), (B, T, S), axis))


def test_rms_norm_equals_pytorchs():
    ours, theirs = RMSNorm(8), nn.RMSNorm(8, eps=1e-6)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.normal_())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_rotary_positions_are_complex_rotations():
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    pairs = torch.view_as_complex(x.unflatten(-1, (6, 2)))
    turns = torch.polar(
        torch.ones(7, 6, dtype=torch.float64),
        torch.arange(7.0, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(6, dtype=torch.float64) / 6),
    )
    expected = torch.view_as_real(pairs * turns).flatten(-2)
    ours = apply_rotary(x, rotary_table(12, torch.arange(7)))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(1, 12), torch.randn(1, 12)
    scores = [
        (
            apply_rotary(q, rotary_table(12, torch.tensor([p + 4])))
            * apply_rotary(k, rotary_table(12, torch.tensor([p])))
        ).sum()
        for p in (0, 3, 50)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), atol=1e-4, rtol=1e-4)


def test_diffusers_agrees_on_rotary_positions():
    from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed

    x = torch.randn(1, 2, 9, 16)
    cos, sin = get_1d_rotary_pos_embed(16, 9, use_real=True)  # pairs (0, 1), (2, 3), ... like ours
    torch.testing.assert_close(apply_rotary(x, rotary_table(16, torch.arange(9))), apply_rotary_emb(x, (cos, sin)))


def test_scalars_are_embedded_one_by_one_and_outside_autocast():
    embedder = ScalarEmbedder(8)
    sizes = torch.tensor([[513.0, 514.0], [1080.0, 1920.0]])
    together = embedder(sizes)
    torch.testing.assert_close(together[:, 8:], embedder(sizes[:, 1]))
    for short in (torch.bfloat16, torch.float16):  # 513 and 514 are one number in the first; the second ends at 65504
        with torch.autocast("cpu", short):
            assert torch.equal(embedder(sizes), together)


def test_labels_and_the_row_of_no_class():
    embedder = LabelEmbedder(10, 8)
    assert embedder.embedding_table.weight.shape == (11, 8)
    classes = torch.tensor([3, 10])
    torch.testing.assert_close(embedder(classes[:, None, None, None]), embedder.embedding_table(classes))
    torch.testing.assert_close(embedder(embedder.null(1))[0], embedder.embedding_table.weight[10])
    with pytest.raises(ValueError, match="class_dropout_prob=0"):
        LabelEmbedder(10, 8, with_null=False).null(1)


def test_layer_norm_keeps_the_dtype_under_autocast():
    x = torch.randn(2, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        short = layer_norm(16)(x.bfloat16())
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), nn.functional.layer_norm(x, (16,), eps=1e-6), atol=3e-2, rtol=2e-2)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads=3"):
        Attention(16, 3)


def test_caption_embedder_names_and_null():
    embedder = CaptionEmbedder(6, 8, 3)
    assert isinstance(embedder.y_proj, Mlp)
    assert embedder.null(2).shape == (2, 1, 3, 6)
    assert not embedder.y_embedding.requires_grad
    assert "y_embedding" in embedder.state_dict()


def test_frame_modulation_picks_the_timestep_of_each_frame():
    at_t, at_0 = torch.full((2, 6, 4), 1.0), torch.full((2, 6, 4), -1.0)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    out = frame_modulation(mask, at_t, at_0)
    assert out.shape == (6, 2, 3, 1, 4)
    assert torch.equal(out[0, :, :, 0, 0] > 0, mask)
