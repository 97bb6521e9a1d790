"""PixArt: sizes, names, initialisation, positions, micro-conditions, compression. Invariances: test_denoisers.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from opensora.models.layers.attention import CrossAttention
from opensora.models.pixart.pixart import KVCompressAttention, PixArt, PixArtMS, PixArtSigma
from opensora.registry import MODELS
from tests.models.denoisers import C_TEXT, TOY, L, build, inputs


@pytest.mark.parametrize(
    ("cfg", "count"),
    [
        ({"type": "PixArt-XL/2"}, 610_856_096),
        ({"type": "PixArtMS-XL/2"}, 611_349_152),
        ({"type": "PixArt-Sigma-XL/2"}, 610_856_096),
        ({"type": "PixArt-Sigma-XL/2", "kv_compress": "conv"}, 610_856_096 + 14 * 8064),
        ({"type": "PixArt-Sigma-XL/2", "qk_norm": True}, 610_856_096 + 28 * 2 * 72),
    ],
)
def test_number_of_parameters(cfg, count):
    with torch.device("meta"):
        model = MODELS.build(cfg)
    assert sum(p.numel() for p in model.parameters()) == count


def test_1b_is_wider_with_the_same_heads():
    with torch.device("meta"):
        model = MODELS.build({"type": "PixArt-1B/2"})
    assert model.hidden_size / model.num_heads == 72
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.6e9, rel=0.01)


def test_state_dict_names_are_those_of_released_checkpoints():
    layers = ["attn.qkv", "attn.proj", "cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj"]
    block = ["scale_shift_table"]
    block += [f"{name}.{part}" for name in [*layers, "mlp.fc1", "mlp.fc2"] for part in ("weight", "bias")]
    outer = ["x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "t_block.1", "final_layer.linear"]
    outer += ["y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2"]
    sizes = ["csize_embedder.mlp.0", "csize_embedder.mlp.2", "ar_embedder.mlp.0", "ar_embedder.mlp.2"]
    expected = {f"blocks.{i}.{name}" for i in range(2) for name in block}
    expected |= {f"{name}.{part}" for name in outer for part in ("weight", "bias")}
    expected |= {"y_embedder.y_embedding", "final_layer.scale_shift_table"}
    assert build("PixArt").state_dict().keys() == expected
    with_sizes = expected | {f"{name}.{part}" for name in sizes for part in ("weight", "bias")}
    assert build("PixArtMS").state_dict().keys() == with_sizes
    compressed = {f"blocks.1.attn.{name}.{part}" for name in ("sr", "norm") for part in ("weight", "bias")}
    assert build("PixArt-Sigma-compressed").state_dict().keys() == expected | compressed


def test_initialisation_makes_text_and_output_zero_but_not_the_gates():
    model = MODELS.build({"type": "PixArtMS-XL/2", **TOY})
    assert model(**inputs(model)).abs().max() == 0
    for block in model.blocks:
        assert not block.cross_attn.proj.weight.any()
        assert float(block.scale_shift_table.detach().std()) == pytest.approx(48**-0.5, rel=0.15)
    for layer in (model.t_block[1], model.csize_embedder.mlp[2], model.ar_embedder.mlp[0]):
        assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_text_lengths_are_those_of_the_released_weights():
    small = {name: value for name, value in TOY.items() if name != "model_max_length"}
    lengths = [cls(**small).null_condition(1).shape[2] for cls in (PixArt, PixArtMS, PixArtSigma)]
    assert lengths == [120, 120, 300]


def test_null_condition_is_the_saved_table():
    model = build("PixArt")
    null = model.null_condition(2)
    assert null.shape == (2, 1, L, C_TEXT)
    assert torch.equal(null[1, 0], model.state_dict()["y_embedder.y_embedding"])


def test_padded_text_equals_packed_text():
    """PixArt's own code packs the real tokens of a batch into one row, with a block-diagonal mask."""
    torch.manual_seed(0)
    attn, lengths = CrossAttention(24, 2), torch.tensor([2, 5])
    x, y = torch.randn(2, 1, 6, 24), torch.randn(2, 5, 24)
    mask = torch.arange(5)[None] < lengths[:, None]
    q = rearrange(attn.q_linear(x), "B 1 N (H d) -> H (B N) d", H=2)
    k, v = (rearrange(part, "N (H d) -> H N d", H=2) for part in attn.kv_linear(y[mask]).chunk(2, dim=-1))
    of_query, of_key = torch.arange(2).repeat_interleave(6), torch.arange(2).repeat_interleave(lengths)
    packed = F.scaled_dot_product_attention(q, k, v, attn_mask=of_query[:, None] == of_key[None])
    packed = attn.proj(rearrange(packed, "H (B N) d -> B 1 N (H d)", B=2))
    torch.testing.assert_close(attn(x, y, mask), packed, atol=1e-6, rtol=1e-5)


class TestPositions:
    @pytest.mark.parametrize("cls", [PixArt, PixArtMS, PixArtSigma])
    @pytest.mark.parametrize(("space_scale", "side"), [(0.5, 16), (1.0, 32), (2.0, 64), (4.0, 128)])
    def test_released_sizes_see_positions_0_to_32(self, cls, space_scale, side):
        """A table of 48 channels: the first 12 are the sines of the column, of which the first has frequency 1."""
        model = cls(**TOY, space_scale=space_scale, no_temporal_pos_emb=True)
        table = model._positions(1, side, side, torch.device("cpu")).reshape(side, side, 48)
        steps = torch.arange(side, dtype=torch.float64) / space_scale
        torch.testing.assert_close(table[3, :, 0].double(), steps.sin(), atol=1e-6, rtol=0)
        torch.testing.assert_close(table[:, 5, 24].double(), steps.sin(), atol=1e-6, rtol=0)

    @pytest.mark.parametrize("cls", [PixArt, PixArtMS, PixArtSigma])
    @pytest.mark.parametrize(("rows", "columns"), [(64, 96), (120, 32), (2, 8)])
    def test_the_range_follows_the_inputs_area(self, cls, rows, columns):
        """Open-Sora's rule: a patch is at i / (length / base) / scale, with the root of their number, rounded down, as base."""
        table = cls(**TOY, space_scale=2.0, no_temporal_pos_emb=True)._positions(1, rows, columns, torch.device("cpu"))
        base = int((rows * columns) ** 0.5)
        for value, length in ((table[0, :columns, 0], columns), (table[0, ::columns, 24], rows)):
            expected = [math.sin(i / (length / base) / 2.0) for i in range(length)]
            torch.testing.assert_close(value.double(), torch.tensor(expected).double(), atol=1e-6, rtol=0)

    def test_many_sizes_span_the_same_with_a_base_size(self):
        """PixArt's own code keeps base_size 64 / scale 2 = 32 for 48 x 80 patches."""
        model = PixArtMS(**TOY, space_scale=2.0, base_size=64, no_temporal_pos_emb=True)
        table = model._positions(1, 48, 80, torch.device("cpu")).reshape(48, 80, 48)
        columns, rows = (torch.arange(n, dtype=torch.float64) / (n / 64) / 2.0 for n in (80, 48))
        torch.testing.assert_close(table[0, :, 0].double(), columns.sin(), atol=1e-6, rtol=0)
        torch.testing.assert_close(table[:, 0, 24].double(), rows.sin(), atol=1e-6, rtol=0)

    def test_open_soras_base_size_counts_latent_cells(self, caplog):
        """Its configs for 2K write 2048 // 8 cells and scale 4: 160 x 96 patches then see positions to 32."""
        model = PixArt(**TOY, space_scale=4, base_size=2048 // 8, no_temporal_pos_emb=True)
        table = model._positions(1, 160, 96, torch.device("cpu")).reshape(160, 96, 48)
        expected = (torch.arange(96, dtype=torch.float64) * 32 / 96).sin()
        torch.testing.assert_close(table[0, :, 0].double(), expected, atol=1e-6, rtol=0)
        assert "base_size=256 counts latent cells, as in Open-Sora: as tokens, 128." in caplog.text

    def test_base_size_rules_where_given(self):
        table = PixArtSigma(**TOY, base_size=8, no_temporal_pos_emb=True)._positions(1, 4, 4, torch.device("cpu"))
        torch.testing.assert_close(table[0, :4, 0], (torch.arange(4) * 2.0).sin())

    def test_time_adds_its_own_table(self):
        timed, timeless = PixArt(**TOY, time_scale=2.0), PixArt(**TOY, no_temporal_pos_emb=True)
        cpu = torch.device("cpu")
        time = timed._positions(3, 2, 2, cpu) - timeless._positions(3, 2, 2, cpu)
        torch.testing.assert_close(time[:, 1, 0], (torch.arange(3) / 2).sin())

    def test_without_temporal_positions_frames_are_a_set(self):
        model = build("PixArt", no_temporal_pos_emb=True)
        cond = inputs(model)
        flipped = model(**{**cond, "x": cond["x"].flip(2)})
        torch.testing.assert_close(model(**cond).flip(2), flipped, atol=1e-5, rtol=1e-5)

    def test_frames_see_each_other(self):
        model = build("PixArt")
        cond = inputs(model)
        other = {**cond, "x": cond["x"].clone()}
        other["x"][:, :, 2] = 0.0
        assert not torch.allclose(model(**cond)[:, :, 0], model(**other)[:, :, 0], atol=1e-5)


class TestMicroConditions:
    @pytest.mark.parametrize("name", ["height", "width"])
    def test_each_matters_and_none_may_be_missing(self, name):
        model = build("PixArtMS")
        cond = inputs(model)
        assert not torch.allclose(model(**cond), model(**{**cond, name: cond[name] * 2}), atol=1e-5)
        del cond[name]
        with pytest.raises(ValueError, match=f"PixArtMS needs {name}="):
            model(**cond)

    def test_the_ratio_is_height_over_width(self):
        model, seen = build("PixArtMS"), []
        model.ar_embedder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        cond = {**inputs(model), "height": torch.tensor([480.0, 512.0]), "width": torch.tensor([960.0, 256.0])}
        model(**cond)
        assert seen[0].tolist() == [[0.5], [2.0]]

    def test_other_pixarts_do_not_look(self):
        model = build("PixArt-Sigma")
        cond = inputs(model)
        assert torch.equal(model(**cond), model(**{**cond, "height": None, "width": None}))

    def test_the_width_must_be_a_multiple_of_three(self):
        with pytest.raises(ValueError, match="hidden_size=32 is not divisible by 3"):
            PixArtMS(**{**TOY, "hidden_size": 32})


class TestCompression:
    def test_it_is_in_the_second_half_if_nothing_is_said(self):
        with torch.device("meta"):
            model = MODELS.build({"type": "PixArt-Sigma-XL/2", "kv_compress": "conv"})
        where = [i for i, block in enumerate(model.blocks) if isinstance(block.attn, KVCompressAttention)]
        assert where == list(range(14, 28))

    def test_it_changes_the_output_and_saves_flops(self):
        plain, compressed = build("PixArt-Sigma"), build("PixArt-Sigma", kv_compress="conv", kv_compress_layers=[0, 1])
        compressed.load_state_dict(plain.state_dict(), strict=False)
        cond = inputs(plain)
        assert not torch.allclose(plain(**cond), compressed(**cond), atol=1e-5)
        assert compressed.flops((3, 16, 16), L) < plain.flops((3, 16, 16), L)

    def test_wrong_settings_say_why(self):
        with pytest.raises(ValueError, match=r"\[2\] are not blocks; there are 0 to 1"):
            PixArtSigma(**TOY, kv_compress="conv", kv_compress_layers=(1, 2))
        with pytest.raises(ValueError, match="kv_compress does not say how"):
            PixArtSigma(**TOY, kv_compress_layers=(1,))
        with pytest.raises(ValueError, match="kv_compress='ave' is not 'conv' or None"):
            PixArtSigma(**TOY, kv_compress="ave")


def test_freeze_text_trains_the_rest():
    trained = [name for name, p in build("PixArt", freeze="text").named_parameters() if p.requires_grad]
    assert any(".attn." in name for name in trained)
    assert not any("cross_attn" in name or name.startswith("y_embedder") for name in trained)
    with pytest.raises(ValueError, match="freeze='all' is not one of 'text'"):
        build("PixArt", freeze="all")
