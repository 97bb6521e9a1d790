"""Loading: strict, reported in one line, and the model as it was where the file does not fit."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from opensora.checkpoint.load import save_checkpoint
from opensora.models.loading import Conversion, load_weights, null_text_known, written_by
from opensora.models.text_encoder.condition import TextCondition
from opensora.training.batch_encoder import drop_text
from opensora.utils.errors import UserError
from tests.models.denoisers import FAMILIES, build


def plain(state, model):
    return Conversion(dict(state), "plain")


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": nn.Linear(2, 2), "attn_temp": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})
            for _ in range(3)
        )


def test_the_report_is_one_line_with_counts_and_reasons(tmp_path):
    state = Toy().state_dict()
    state["blocks.0.mlp.bias"] = state["blocks.0.mlp.bias"].half()
    for name in [name for name in state if ".attn_temp." in name]:
        del state[name]
    save_file(state | {"pos": torch.zeros(1), "tpos": torch.zeros(1)}, tmp_path / "w")

    def convert(state, model):
        conversion = plain(state, model)
        conversion.drop("made anew", "pos", "tpos")
        conversion.may_miss(model, "there is none", ".attn_temp.")
        conversion.may_miss(model, "may be missing, but is there", ".mlp.")
        return conversion

    assert load_weights(Toy(), tmp_path / "w", convert) == (
        f"Toy from {tmp_path / 'w'} (plain): 12 of 18 tensors in float16, float32; 2 dropped (made anew); "
        "6 left as is (there is none)"
    )


class TestLoading:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_float_formats_load_into_fp32(self, tmp_path, dtype, caplog):
        model, other = Toy(), Toy()
        save_file({name: value.to(dtype) for name, value in other.state_dict().items()}, tmp_path / "w")
        with caplog.at_level("INFO"):
            lines = load_weights(model, tmp_path / "w", plain)
        assert str(dtype).removeprefix("torch.") in lines
        assert lines in caplog.text
        assert all(p.dtype == torch.float32 for p in model.parameters())
        torch.testing.assert_close(model.state_dict(), other.state_dict(), atol=1e-2, rtol=1e-2)

    def test_integers_are_refused_where_the_model_has_floats(self, tmp_path):
        state = {name: value.to(torch.int8) for name, value in Toy().state_dict().items()}
        save_file(state, tmp_path / "w")
        with pytest.raises(UserError, match=r"(?s)18 of another dtype.*file int8, model float32"):
            load_weights(Toy(), tmp_path / "w", plain)

    def test_the_model_owns_its_weights(self, tmp_path):
        save_file(Toy().state_dict(), tmp_path / "w")
        model = Toy()
        load_weights(model, tmp_path / "w", plain)
        with torch.no_grad():
            model.blocks[0]["mlp"].weight.zero_()
        again = Toy()
        load_weights(again, tmp_path / "w", plain)
        assert again.blocks[0]["mlp"].weight.any()

    @pytest.mark.parametrize("file", ["DiT-class", "LatteT2V", "PixArtMS", "STDiT2", "STDiT3", "nothing", "diffusers"])
    def test_no_file_makes_a_converter_stumble(self, tmp_path, file):
        """Whatever the file, a model takes it or says why not."""
        state = {"transformer_blocks.0.x": torch.zeros(1), "pos_embed.proj.weight": torch.zeros(1)}
        if file == "nothing":
            state = {"weight": torch.zeros(1)}
        elif file != "diffusers":
            state = build(file).state_dict()
        torch.save(state, tmp_path / "w.pt")
        outcomes = []
        for family in FAMILIES:
            try:
                build(family, from_pretrained=str(tmp_path / "w.pt"))
                outcomes.append("loaded")
            except UserError:
                outcomes.append("refused")
        assert "refused" in outcomes
        assert ("loaded" in outcomes) == (file in FAMILIES)


class TestNoText:
    """Whether a model has a "no text" of its own, in all ways that weights come and go."""

    def without_table(self, tmp_path):
        """Weights of diffusers."""
        save_file(build("PixArt", no_temporal_pos_emb=True).to_diffusers()[1], tmp_path / "theirs.safetensors")
        return str(tmp_path / "theirs.safetensors")

    def train(self, model):
        model.train()
        text = TextCondition(torch.zeros(1, 1, 7, 16), torch.ones(1, 7, dtype=torch.bool))
        drop_text(text, model, [torch.Generator().manual_seed(0)])
        return model

    def saved(self, model, path):
        return str(save_checkpoint(path, {"ema": model.state_dict()}, state={}, manifest={"model": "PixArt-XL/2"}))

    @pytest.mark.parametrize(
        "family", [name for name in FAMILIES if not any(part in name for part in ("class", "uncond", "Wan"))]
    )
    def test_models_and_their_own_files_have_one(self, family, tmp_path):
        model = build(family)
        save_file(model.state_dict(), tmp_path / "w")
        assert null_text_known(model)
        assert null_text_known(build(family, from_pretrained=str(tmp_path / "w")))

    def test_models_of_classes_and_others_have_one(self):
        assert all(null_text_known(model) for model in (build("DiT-class"), build("Latte-unconditional"), Toy()))

    def test_training_with_dropped_captions_gives_a_meaning_which_checkpoints_keep(self, tmp_path):
        model = build("PixArt", from_pretrained=self.without_table(tmp_path))
        assert not null_text_known(model)
        model.null_condition(1)  # of sampling, in eval mode
        assert not null_text_known(model)
        again = build("PixArt", from_pretrained=self.saved(self.train(model), tmp_path / "c"))
        assert null_text_known(model)
        assert null_text_known(again)
        assert torch.equal(again.null_condition(1), model.null_condition(1))

    def test_training_without_does_not_and_checkpoints_say_so(self, tmp_path):
        model = self.train(build("PixArt", class_dropout_prob=0.0, from_pretrained=self.without_table(tmp_path)))
        again = build("PixArt", from_pretrained=self.saved(model, tmp_path / "c"))
        assert not null_text_known(model)
        assert not null_text_known(again)

    def test_a_table_of_zeros_is_reported_as_none(self, tmp_path):
        state = build("PixArt").state_dict()
        state["y_embedder.y_embedding"] = torch.zeros(7, 16)
        save_file(state, tmp_path / "w")
        table = load_weights(build("PixArt"), tmp_path / "w", plain)
        assert "1 dropped (zeros, which stand for none)" in table
        assert "guidance uses the encoding of an empty prompt" in table


class TestWrittenBy:
    def test_manifest_header_or_nothing(self, tmp_path):
        state = {"w": torch.ones(1)}
        folder = save_checkpoint(tmp_path / "c", {"model": state}, state={}, manifest={"model": "DiT-S/2"})
        save_file(state, tmp_path / "one", metadata={"model": "Latte-S/2"})
        save_file(state, tmp_path / "two")
        torch.save(state, tmp_path / "three.pt")
        found = [written_by(tmp_path / name) for name in ("c", "one", "two", "three.pt")]
        assert found == ["DiT-S/2", "Latte-S/2", None, None]
        assert written_by(next((folder / "model").glob("*.safetensors"))) == "DiT-S/2"


class TestConversion:
    def test_drop_and_may_miss(self):
        model, conversion = Toy(), Conversion({"a.x": torch.zeros(1), "b": torch.zeros(1)}, "x")
        conversion.drop("why", "a.", "c")
        conversion.may_miss(model, "new", ".attn_temp.bias")
        assert (list(conversion.tensors), conversion.dropped) == (["b"], {"a.x": "why"})
        assert conversion.initial == {f"blocks.{i}.attn_temp.bias": "new" for i in range(3)}

    @pytest.mark.parametrize("rows", [2, 5])
    def test_the_no_text_table_gets_the_models_length(self, rows):
        model, table = build("STDiT", model_max_length=rows), torch.arange(6.0).reshape(3, 2)
        conversion = Conversion({"y_embedder.y_embedding": table}, "x")
        conversion.fit_shapes(model)
        fitted = conversion.tensors["y_embedder.y_embedding"]
        assert torch.equal(fitted, table[[0, 1, 2, 2, 2][:rows]])
        assert "3 rows" in conversion.converted["y_embedder.y_embedding"]

    @pytest.mark.parametrize("frame_axis", [False, True])
    def test_grown_patches_see_the_mean_of_the_frames(self, frame_axis):
        model, weight, x = build("STDiT", patch_size=(4, 2, 2)), torch.randn(5, 3, 2, 2), torch.randn(1, 3, 4, 2, 2)
        linear = torch.randn(6, 8)
        kernel = weight[:, :, None] if frame_axis else weight
        conversion = Conversion({"x_embedder.proj.weight": kernel, "final_layer.linear.weight": linear}, "x")
        conversion.fit_shapes(model)
        out = nn.functional.conv3d(x, conversion.tensors["x_embedder.proj.weight"])[:, :, 0]
        torch.testing.assert_close(out, nn.functional.conv2d(x.mean(2), weight))
        assert torch.equal(conversion.tensors["final_layer.linear.weight"], linear.repeat(4, 1))
