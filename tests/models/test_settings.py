"""What a file states of its model, and no tensor shows: other heads are refused, other positions are a warning."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel
from safetensors.torch import save_file

from opensora.checkpoint.load import save_checkpoint
from opensora.registry import MODELS
from opensora.utils.errors import UserError
from tests.models.denoisers import C_TEXT, FAMILIES, TOY, build, inputs
from tests.models.pixart.theirs import their_output
from tools.convert import convert
from tools.export_weights import export_weights

IMAGES = {"no_temporal_pos_emb": True}
SIZES = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2}


def pixart(**changes) -> PixArtTransformer2DModel:
    torch.manual_seed(3)
    settings = {"sample_size": 64, "interpolation_scale": 2, "use_additional_conditions": False, **changes}
    return PixArtTransformer2DModel(**SIZES, cross_attention_dim=48, caption_channels=C_TEXT, **settings).eval()


def folder_of(model, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def component(family: str, **changes) -> dict:
    return {**TOY, **FAMILIES[family], **changes}


def converted(folder: Path, family: str, **changes) -> str:
    """A file of ours, written by `tools.convert`."""
    save_file(build(family, **changes).state_dict(), folder / "w.safetensors")
    source, out = str(folder / "w.safetensors"), folder / "converted.safetensors"
    return str(convert(source, out, component(family, **changes), to="safetensors"))


def checkpoint(folder: Path, family: str, **changes) -> str:
    """A checkpoint of a run."""
    manifest = {"model": FAMILIES[family]["type"], "config": {"model": component(family, **changes)}}
    parts = {"ema": build(family, **changes).state_dict()}
    return str(save_checkpoint(folder / "epoch0-global_step1", parts, state={}, manifest=manifest))


def exported(folder: Path, family: str, **changes) -> str:
    """A file of ours, taken out of a checkpoint."""
    out = folder / "exported.safetensors"
    export_weights(Path(checkpoint(folder, family, **changes)), out, dtype="fp32")
    return str(out)


NORMED = ("STDiT2", "STDiT2-legacy", "STDiT3")
OURS = pytest.mark.parametrize("write", [converted, checkpoint, exported])


def warnings(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")


class TestHeads:
    def test_those_of_diffusers_are_needed(self, tmp_path):
        """Loaded into 2 heads, 4 gave another output by 60 %, and nothing was said."""
        theirs = pixart()
        path = folder_of(theirs, tmp_path / "transformer")
        message = r"config\.json says 4 attention heads, the model has num_heads=2.* set model\.num_heads=4"
        with pytest.raises(UserError, match=message):
            build("PixArt-Sigma", **IMAGES, from_pretrained=path)
        ours = build("PixArt-Sigma", **IMAGES, num_heads=4, base_size=32, space_scale=2.0, from_pretrained=path)
        cond = inputs(ours, size=(1, 8, 12))
        with torch.no_grad():
            out, expected = ours(**cond)[:, :, 0], their_output(theirs, cond)
        assert (out - expected).abs().max() < 1e-5 * expected.abs().max()

    @pytest.mark.parametrize("name", ["folder", "pipeline", "file", "shards"])
    def test_wherever_the_config_lies(self, tmp_path, name):
        folder = tmp_path / "transformer"
        pixart().save_pretrained(folder, **({"max_shard_size": "100KB"} if name == "shards" else {}))
        (tmp_path / "model_index.json").write_text("{}")
        paths = {"pipeline": tmp_path, "file": folder / "diffusion_pytorch_model.safetensors"}
        with pytest.raises(UserError, match="says 4 attention heads"):
            build("PixArt", from_pretrained=str(paths.get(name, folder)))

    @pytest.mark.parametrize("family", ["DiT-class", "Latte-class"])
    def test_of_diffusers_dit(self, tmp_path, family):
        config, state = build("DiT-class", num_heads=4).to_diffusers()
        theirs = DiTTransformer2DModel.from_config(config)
        theirs.load_state_dict(state)
        path = folder_of(theirs, tmp_path / "transformer")
        with pytest.raises(UserError, match=r"set model\.num_heads=4"):
            build(family, from_pretrained=path)
        build(family, num_heads=4, from_pretrained=path)

    @OURS
    @pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NORMED])
    def test_of_our_files(self, tmp_path, write, family, caplog):
        path = write(tmp_path, family, num_heads=4)
        with pytest.raises(UserError, match=r"(header|manifest) says 4 attention heads, the model has num_heads=2"):
            build(family, from_pretrained=path)
        build(family, num_heads=4, from_pretrained=path)
        assert not warnings(caplog)

    @pytest.mark.parametrize("family", NORMED)
    def test_show_where_queries_are_normalised_head_by_head(self, tmp_path, family):
        path = converted(tmp_path, family, num_heads=4)
        with pytest.raises(UserError, match=r"q_norm\.weight: file \(12,\), model \(24,\)"):
            build(family, from_pretrained=path)

    def test_that_the_file_leaves_to_the_variant(self, tmp_path):
        small = {key: value for key, value in component("STDiT").items() if key != "num_heads"}
        save_file(build("STDiT").state_dict(), tmp_path / "w", metadata={"config": json.dumps(small)})
        with pytest.raises(UserError, match=r"set model\.num_heads=16"):
            build("STDiT", from_pretrained=str(tmp_path / "w"))

    def test_of_the_hub_which_is_asked_once(self, tmp_path, monkeypatch):
        folder_of(pixart(), tmp_path / "transformer")
        asked = []

        def find(name):
            asked.append(name)
            return tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"

        monkeypatch.setattr("opensora.models.loading.find_weights", find)
        with pytest.raises(UserError, match=r"owner/name: its config\.json says 4 attention heads"):
            build("PixArt", from_pretrained="owner/name")
        assert asked == ["owner/name"]

    def test_matter_from_one_architecture_to_another(self, tmp_path):
        path = converted(tmp_path, "PixArt", num_heads=4)
        with pytest.raises(UserError, match=r"set model\.num_heads=4"):
            build("STDiT", from_pretrained=path)

    def test_of_open_soras_folders(self, tmp_path):
        save_file(build("STDiT3").state_dict(), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "STDiT3", "num_heads": 4, "depth": 2}))
        with pytest.raises(UserError, match=r"config\.json says 4 attention heads"):
            build("STDiT3", from_pretrained=str(tmp_path))

    def test_a_file_of_other_sizes_is_reported_as_such(self, tmp_path):
        path = folder_of(pixart(), tmp_path / "transformer")
        with pytest.raises(UserError, match="does not fit this PixArt") as error:
            build("PixArt", hidden_size=96, from_pretrained=path)
        assert "num_heads" not in str(error.value)

    def test_a_refusal_leaves_the_model_as_it_was(self, tmp_path):
        from opensora.models.loading import load_weights
        from opensora.models.pixart.pixart import convert as to_ours

        model = build("PixArt")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(UserError, match="num_heads"):
            load_weights(model, folder_of(pixart(), tmp_path / "t"), to_ours)
        torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)


class TestOthers:
    @OURS
    @pytest.mark.parametrize(
        ("family", "settings", "to_set"),
        [
            ("STDiT", {"space_scale": 0.5, "time_scale": 2.0}, "model.space_scale=0.5, model.time_scale=2.0"),
            ("STDiT2", {"norm_order": "rope_then_norm"}, "model.norm_order='rope_then_norm'"),
            ("STDiT2", {"qk_norm_legacy": True}, "model.norm_order='rope_then_norm'"),
            ("STDiT3", {"norm_order": "rope_then_norm"}, "model.norm_order='rope_then_norm'"),
            ("STDiT3", {"input_sq_size": 256}, "model.input_sq_size=256"),
            ("LatteT2V", {"mode": "images"}, "model.mode='images'"),
            ("PixArt-Sigma", {"base_size": 16}, "model.base_size=16"),
            ("DiT-class", {"no_temporal_pos_emb": True}, "model.no_temporal_pos_emb=True"),
        ],
    )
    def test_of_our_files(self, tmp_path, write, family, settings, to_set, caplog):
        path = write(tmp_path, family, **settings)
        caplog.clear()
        build(family, **settings, from_pretrained=path)
        assert not warnings(caplog)
        build(family, from_pretrained=path)
        assert warnings(caplog).count(path) == 1
        assert f"set {to_set}." in warnings(caplog)

    def test_from_one_architecture_to_another_they_do_not_compare(self, tmp_path, caplog):
        path = converted(tmp_path, "PixArt-Sigma", base_size=16, time_scale=3.0)
        caplog.clear()
        build("LatteT2V", from_pretrained=path)
        assert not warnings(caplog)


class TestNothingSaid:
    @pytest.mark.parametrize(
        "config",
        ["", "no JSON", "[]", "3", '{"_class_name": "AutoencoderKL", "num_attention_heads": 5}', '{"num_heads": 64}',
         '{"model_type": "t5", "num_heads": "many"}', '{"_class_name": ["PixArtTransformer2DModel"], "model_type": {}}',
         '{"_class_name": "PixArtTransformer2DModel", "num_attention_heads": null, "sample_size": "x"}'],
    )  # fmt: skip
    def test_by_another_config_json(self, tmp_path, config, caplog):
        save_file(build("PixArt", **IMAGES).state_dict(), tmp_path / "w.safetensors")
        (tmp_path / "config.json").write_text(config)
        build("PixArt", **IMAGES, from_pretrained=str(tmp_path))
        assert not warnings(caplog)

    @pytest.mark.parametrize(
        "config", ["no JSON", "{}", '{"type": "t5"}', '{"type": 3}', '{"type": "nobody\'s", "num_heads": 2}',
                   '{"type": "STDiT-XL/2", "num_heads": 0}', '{"type": "STDiT-XL/2", "of_a_later_version": 1}'],
    )  # fmt: skip
    def test_by_another_header(self, tmp_path, config, caplog):
        save_file(build("STDiT").state_dict(), tmp_path / "w.safetensors", metadata={"config": config})
        build("STDiT", from_pretrained=str(tmp_path / "w.safetensors"))
        assert not warnings(caplog)

    def test_heads_of_a_model_that_is_not_known_here(self, tmp_path):
        config = json.dumps({"type": "nobody's", "num_heads": 4})
        save_file(build("STDiT").state_dict(), tmp_path / "w.safetensors", metadata={"config": config})
        with pytest.raises(UserError, match=r"set model\.num_heads=4"):
            build("STDiT", from_pretrained=str(tmp_path / "w.safetensors"))

    @pytest.mark.parametrize("config", [None, {}, {"model": None}, {"vae": {"type": "VideoAutoencoderKL"}}])
    def test_by_a_manifest(self, tmp_path, config, caplog):
        parts = {"model": build("STDiT").state_dict()}
        path = save_checkpoint(tmp_path / "c", parts, state={}, manifest={"config": config})
        build("STDiT", from_pretrained=str(path))
        assert not warnings(caplog)

    def test_a_header_fetches_and_draws_nothing(self, tmp_path):
        config = json.dumps(component("STDiT", from_pretrained="nobody/nothing"))
        save_file(build("STDiT").state_dict(), tmp_path / "w.safetensors", metadata={"config": config})
        state = torch.get_rng_state()
        built = MODELS.build({**component("STDiT"), "from_pretrained": str(tmp_path / "w.safetensors")})
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        MODELS.build(component("STDiT"))
        assert torch.equal(after, torch.get_rng_state())  # reading a header draws nothing
        assert next(built.parameters()).device.type == "cpu"


@pytest.mark.parametrize("where", ["folder", "header"])
def test_what_stands_there_of_a_text_encoder_says_nothing(tmp_path, where, caplog):
    """A folder may hold a T5's config.json next to the denoiser's file."""
    other = {"type": "t5", "model_type": "t5", "num_heads": 64}
    header = {"config": json.dumps(other)} if where == "header" else None
    (tmp_path / "config.json").write_text(json.dumps(other if where == "folder" else {}))
    save_file(build("PixArt").state_dict(), tmp_path / "weights.safetensors", header)
    build("PixArt", from_pretrained=str(tmp_path / "weights.safetensors"))
    assert not warnings(caplog)
