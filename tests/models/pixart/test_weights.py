"""PixArt's weights: released pickles, diffusers both ways with equal results, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from opensora.checkpoint.load import save_checkpoint
from opensora.models.loading import NULL_TEXT, load_weights
from opensora.models.pixart.pixart import convert
from opensora.utils.errors import UserError
from tests.models.denoisers import C_TEXT, L, build, inputs
from tests.models.pixart.theirs import SIDE, their_output, theirs

IMAGES = {"no_temporal_pos_emb": True}


def assert_same(ours, other, size, **changes):
    cond = {**inputs(ours, size=(1, *size)), **changes}
    with torch.no_grad():
        out, expected = ours(**cond)[:, :, 0], their_output(other, cond)
    assert (out - expected).abs().max() < 1e-4 * expected.abs().max()


FAMILY = pytest.mark.parametrize(("family", "micro"), [("PixArt", False), ("PixArtMS", True), ("PixArt-Sigma", False)])
SIZE = pytest.mark.parametrize("size", [(8, 8), (16, 16), (6, 10), (12, 4)])


class TestDiffusers:
    @FAMILY
    @SIZE
    @pytest.mark.parametrize("scale", [0.5, 2])
    def test_their_folder_gives_the_same_output(self, family, micro, size, scale, tmp_path):
        other = theirs(micro, scale)
        other.save_pretrained(tmp_path / "transformer")
        ours = build(
            family,
            **IMAGES,
            base_size=SIDE / 2,
            space_scale=scale,
            from_pretrained=str(tmp_path / "transformer"),
        )
        assert_same(ours, other, size)

    @pytest.mark.parametrize("scale", [1, 2])
    def test_a_one_size_model_needs_no_base_size_for_squares(self, scale):
        other = theirs(False, scale)
        ours = build("PixArt", **IMAGES, space_scale=scale)
        ours.load_state_dict(convert(other.state_dict(), ours).tensors, strict=False)
        assert_same(ours, other, (SIDE, SIDE))

    @FAMILY
    @SIZE
    @pytest.mark.parametrize("scale", [0.5, 1, 2])
    def test_ours_in_diffusers_gives_the_same_output(self, family, micro, size, scale):
        from diffusers import PixArtTransformer2DModel

        ours = build(family, **IMAGES, base_size=5, space_scale=scale)
        config, state = ours.to_diffusers()
        other = PixArtTransformer2DModel.from_config(json.loads(json.dumps(config))).eval()
        other.load_state_dict(state)
        assert other.config.use_additional_conditions is micro
        assert_same(ours, other, size)

    @pytest.mark.parametrize(
        ("family", "settings", "size"),
        [
            ("PixArt-Sigma", {"base_size": 16.5}, (8, 12)),
            ("PixArt-Sigma", {"base_size": 0.3}, (8, 12)),
            ("PixArt-Sigma", {"base_size": 32 * 0.3, "space_scale": 0.3}, (8, 12)),
            ("PixArt-Sigma", {"base_size": 32 * 0.7, "space_scale": 0.7}, (8, 12)),
            ("PixArt-Sigma", {"base_size": 32 * 1.55, "space_scale": 1.55}, (8, 12)),
            ("PixArtMS", {"patch_size": (1, 4, 4), "base_size": 32 * 1.3, "space_scale": 1.3}, (12, 8)),
            ("PixArt-Sigma", {"patch_size": (1, 3, 3), "base_size": 32 * 0.55, "space_scale": 0.55}, (9, 15)),
        ],
    )
    def test_a_range_that_is_no_whole_number_of_patches_is_exact(self, family, settings, size):
        """diffusers divides `sample_size // patch_size`, so that a remainder would be lost (13 % of the output)."""
        from diffusers import PixArtTransformer2DModel

        ours = build(family, **IMAGES, **settings)
        config, state = ours.to_diffusers()
        assert config["sample_size"] % config["patch_size"] == 0
        other = PixArtTransformer2DModel.from_config(json.loads(json.dumps(config))).eval()
        other.load_state_dict(state)
        assert_same(ours, other, size)

    @pytest.mark.parametrize(("sample_size", "patch_size"), [(9, 2), (1, 2), (0, 2), (-2, 2), (34, 4)])
    def test_a_sample_size_that_is_no_multiple_of_the_patch_is_refused(self, sample_size, patch_size):
        model = build("PixArt", **IMAGES, patch_size=(1, patch_size, patch_size))
        with pytest.raises(UserError, match=f"sample_size={sample_size} must be a multiple of the patch, {patch_size}"):
            model.to_diffusers(sample_size=sample_size)

    @pytest.mark.parametrize(
        ("family", "settings", "size", "expected"),
        [
            ("PixArt", {"space_scale": 1.0}, None, (64, 1)),
            ("PixArt", {"space_scale": 1.0}, 32, (32, 1)),
            ("PixArtMS", {"space_scale": 2.0}, None, (128, 2)),
            ("PixArt-Sigma", {"space_scale": 0.5}, None, (32, 0.5)),
            ("PixArt-Sigma", {"space_scale": 4.0}, None, (256, 4)),
        ],
    )
    def test_config_of_the_released_models(self, family, settings, size, expected):
        config, _ = build(family, **IMAGES, **settings).to_diffusers(sample_size=size)
        assert (config["sample_size"], config["interpolation_scale"]) == expected

    @FAMILY
    def test_round_trip_is_exact_but_for_the_table_of_no_text(self, family, micro):
        model = build(family, **IMAGES)
        _, state = model.to_diffusers()
        conversion = convert(state, model)
        kept = {name: tensor for name, tensor in model.state_dict().items() if "y_embedding" not in name}
        assert conversion.tensors.keys() == kept.keys()
        assert all(torch.equal(conversion.tensors[name], tensor) for name, tensor in kept.items())
        assert conversion.initial.keys() == {NULL_TEXT}
        assert model.to_diffusers()[1].keys() == theirs(micro, 1).state_dict().keys()

    def test_first_releases_had_that_table(self):
        model = build("PixArt", **IMAGES)
        _, state = model.to_diffusers()
        state["caption_projection.y_embedding"] = torch.ones(L + 2, C_TEXT)
        state["pos_embed.pos_embed"] = torch.zeros(1, 16, 48)
        conversion = convert(state, model)
        assert torch.equal(conversion.tensors["y_embedder.y_embedding"], torch.ones(L, C_TEXT))
        assert "pos_embed.pos_embed" in conversion.dropped

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"no_temporal_pos_emb": False}, "no_temporal_pos_emb=True"),
            ({"patch_size": (2, 2, 2)}, r"one frame, not \(2, 2, 2\)"),
            ({"kv_compress": "conv"}, "kv_compress='conv'"),
            ({"qk_norm": True}, "qk_norm=False"),
            ({"mlp_ratio": 2.0}, "mlp_ratio=4"),
        ],
    )
    def test_what_diffusers_cannot_say_is_refused(self, settings, why):
        with pytest.raises(UserError, match=why):
            build("PixArt-Sigma", **{**IMAGES, **settings}).to_diffusers()

    def test_a_sample_size_without_effect_is_refused(self):
        with pytest.raises(UserError, match="base_size is set"):
            build("PixArt-Sigma", **IMAGES, base_size=32).to_diffusers(sample_size=32)


def released(family: str, rows: int = L) -> dict[str, torch.Tensor]:
    """A state dict as PixArt's own code writes it."""
    state = dict(build(family).state_dict())
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].squeeze(2)
    state["y_embedder.y_embedding"] = torch.randn(rows, C_TEXT, generator=torch.Generator().manual_seed(5))
    return {**state, "pos_embed": torch.zeros(1, 16, 48)}


class TestReleased:
    @pytest.mark.parametrize("family", ["PixArt", "PixArtMS", "PixArt-Sigma", "PixArt-Sigma-compressed"])
    @pytest.mark.parametrize("rows", [3, L, 12])
    def test_pickles_load_whatever_their_file_is_called(self, family, rows, tmp_path):
        state = released(family, rows)
        torch.save({"state_dict": state, "epoch": 3}, tmp_path / "renamed.pth")
        model = build(family, from_pretrained=str(tmp_path / "renamed.pth"))
        table, expected = model.y_embedder.y_embedding, state["y_embedder.y_embedding"]
        shared = min(rows, L)
        assert torch.equal(table[:shared], expected[:shared])
        assert torch.equal(table[shared:], table[shared - 1 : shared].expand(L - shared, -1))
        assert torch.equal(model.x_embedder.proj.weight.squeeze(2), state["x_embedder.proj.weight"])
        assert torch.equal(model.blocks[1].attn.qkv.weight, state["blocks.1.attn.qkv.weight"])

    def test_our_own_checkpoint_loads_exactly(self, tmp_path):
        model = build("PixArtMS")
        path = save_checkpoint(tmp_path / "c", {"model": model.state_dict()}, state={}, manifest={"step": 1})
        loaded = build("PixArtMS", from_pretrained=str(path))
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)

    def test_another_depth_is_refused(self, tmp_path):
        save_file(build("PixArt", depth=3).state_dict(), tmp_path / "w.safetensors")
        with pytest.raises(UserError, match=r"(?s)does not fit this PixArt.*blocks\.2\."):
            build("PixArt", from_pretrained=str(tmp_path / "w.safetensors"))


class TestMicroConditions:
    @pytest.mark.parametrize("family", ["PixArt", "PixArt-Sigma"])
    @pytest.mark.parametrize("diffusers", [False, True])
    def test_a_file_with_them_names_the_model_that_has_them(self, family, diffusers):
        state = theirs(True, 1).state_dict() if diffusers else released("PixArtMS")
        with pytest.raises(UserError, match=r'which PixArt\w* does not: set model.type to "PixArtMS-XL/2"'):
            convert(state, build(family))

    @pytest.mark.parametrize("diffusers", [False, True])
    def test_a_file_without_them_starts_a_model_that_gives_the_same(self, diffusers, tmp_path):
        state = theirs(False, 1).state_dict() if diffusers else released("PixArt")
        torch.save(state, tmp_path / "w.pth")
        plain, sized = (build(family, base_size=4) for family in ("PixArt", "PixArtMS"))
        table = [load_weights(model, tmp_path / "w.pth", convert) for model in (plain, sized)][1]
        cond = inputs(sized)
        torch.testing.assert_close(plain(**cond), sized(**cond))
        assert "4 converted (the file has no micro-conditions: zero" in table
        assert "4 left as is (the file has no micro-conditions)" in table

    def test_a_file_with_a_part_of_them_is_refused(self, tmp_path):
        state = released("PixArtMS")
        del state["ar_embedder.mlp.0.weight"]
        torch.save(state, tmp_path / "w.pth")
        with pytest.raises(UserError, match=r"(?s)missing in the file.*ar_embedder\.mlp\.0\.weight"):
            build("PixArtMS", from_pretrained=str(tmp_path / "w.pth"))


class TestCompression:
    def test_weights_without_start_as_the_mean(self, tmp_path):
        torch.save(released("PixArt-Sigma"), tmp_path / "w.pth")
        model = build("PixArt-Sigma-compressed")
        table = load_weights(model, tmp_path / "w.pth", convert)
        assert "4 left as is (the file does not compress keys)" in table
        assert bool((model.blocks[1].attn.sr.weight == 0.25).all())

    @pytest.mark.parametrize("settings", [{}, {"kv_compress": "conv", "kv_compress_layers": (0,)}])
    def test_weights_with_name_the_settings_they_need(self, settings):
        with pytest.raises(UserError, match=r'kv_compress="conv" and model.kv_compress_layers=\(1,\)'):
            convert(released("PixArt-Sigma-compressed"), build("PixArt-Sigma", **settings))
