"""Weights from one form to another and back."""

import json
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from opensora.checkpoint.load import read_weights, save_checkpoint
from opensora.models.loading import null_text_known
from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS
from opensora.training.batch_encoder import drop_text
from opensora.utils.errors import UserError
from tests.models.denoisers import FAMILIES, TOY, awake
from tools.convert import convert, main
from tools.export_weights import export_weights

CASES = {  # family -> arguments without which diffusers cannot express the model
    "DiT-class": {},
    "PixArt": {"no_temporal_pos_emb": True, "base_size": 32},
    "PixArtMS": {"no_temporal_pos_emb": True},
    "PixArt-Sigma": {"no_temporal_pos_emb": True},
    "LatteT2V": {"base_size": 32},
}
NOT_IN_DIFFUSERS = {"y_embedder.y_embedding"}  # the table of "no text"


def config(family):
    return {**TOY, **FAMILIES[family], **CASES.get(family, {})}


@pytest.fixture
def made(tmp_path):
    """Family -> a file of its weights, nothing of which is zero, and the weights."""

    def make(family):
        torch.manual_seed(5)
        state = awake(MODELS.build(config(family))).state_dict()
        save_file(state, tmp_path / "w.safetensors")
        return str(tmp_path / "w.safetensors"), state

    return make


@pytest.mark.parametrize("family", CASES)
def test_to_diffusers_and_back_is_exact(made, tmp_path, family):
    source, state = made(family)
    folder = convert(source, tmp_path / "theirs", config(family), to="diffusers")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    back = convert(str(folder), tmp_path / "ours.safetensors", config(family), to="safetensors")
    found = read_weights(back)
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == sorted(
        NOT_IN_DIFFUSERS & state.keys()
    )


@pytest.mark.parametrize("family", CASES)
def test_diffusers_reads_the_folder(made, tmp_path, family):
    import diffusers

    folder = convert(made(family)[0], tmp_path / "theirs", config(family), to="diffusers")
    written = json.loads((folder / "config.json").read_text())
    theirs, info = getattr(diffusers, written["_class_name"]).from_pretrained(
        folder, output_loading_info=True, low_cpu_mem_usage=False
    )
    assert {key: list(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")} == {
        "missing_keys": [], "unexpected_keys": [], "mismatched_keys": [],
    }  # fmt: skip
    assert len(theirs.transformer_blocks) == TOY["depth"]


@pytest.mark.parametrize("family", FAMILIES)
def test_to_one_file_of_ours(made, tmp_path, family):
    source, state = made(family)
    out = convert(source, tmp_path / "o.safetensors", config(family), to="safetensors")
    found = read_weights(out)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    with safe_open(out, "pt") as file:
        header = file.metadata()
    assert header["model"] == FAMILIES[family]["type"]
    assert json.loads(header["config"])["hidden_size"] == TOY["hidden_size"]
    assert header["source"] == source


@pytest.mark.parametrize("family", ["PixArt", "PixArtMS", "PixArt-Sigma", "LatteT2V"])
def test_a_table_of_no_text_that_was_never_there_is_not_written_as_a_real_one(made, tmp_path, family):
    source, _ = made(family)
    folder = convert(source, tmp_path / "theirs", config(family), to="diffusers")
    once = convert(str(folder), tmp_path / "once.safetensors", config(family), to="safetensors")
    twice = convert(str(once), tmp_path / "twice.safetensors", config(family), to="safetensors")
    for file in (once, twice):
        assert not read_weights(file)["y_embedder.y_embedding"].any()
        model = MODELS.build({**config(family), "from_pretrained": str(file)})
        assert not null_text_known(model)
        assert model.null_condition(1).any()  # a training can use it
    assert null_text_known(MODELS.build({**config(family), "from_pretrained": source}))


def test_a_table_that_a_training_gave_a_meaning_is_written(made, tmp_path):
    folder = convert(made("PixArt")[0], tmp_path / "theirs", config("PixArt"), to="diffusers")
    model = MODELS.build({**config("PixArt"), "from_pretrained": str(folder)}).train()
    text = TextCondition(torch.zeros_like(model.y_embedder.y_embedding)[None, None], torch.ones(1, 7, dtype=torch.bool))
    drop_text(text, model, [torch.Generator().manual_seed(0)])
    assert null_text_known(model)
    save_file(model.state_dict(), tmp_path / "trained.safetensors")
    out = convert(str(tmp_path / "trained.safetensors"), tmp_path / "out", config("PixArt"), to="safetensors")
    assert torch.equal(read_weights(out)["y_embedder.y_embedding"], model.y_embedder.y_embedding)


@pytest.mark.parametrize("to", ["diffusers", "safetensors"])
def test_numbers_that_the_format_cannot_hold_are_refused(made, tmp_path, to):
    source, state = made("DiT-class")
    state["blocks.1.mlp.fc2.bias"][3] = -70000.0
    save_file(state, source)
    with pytest.raises(UserError, match=r"(mlp\.fc2|ff\.net\.2)\.bias has .*70000.*fp16 ends at 65504.*bf16 or fp32"):
        convert(source, tmp_path / "out", config("DiT-class"), to=to, dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert convert(source, tmp_path / "out", config("DiT-class"), to=to, dtype="bf16").exists()


def test_options_of_diffusers_and_number_format(made, tmp_path):
    source, _ = made("DiT-class")
    folder = convert(
        source, tmp_path / "t", config("DiT-class"), to="diffusers", dtype="bf16", options={"sample_size": 64}
    )
    assert json.loads((folder / "config.json").read_text())["sample_size"] == 64
    assert {tensor.dtype for tensor in read_weights(folder).values()} == {torch.bfloat16}
    with pytest.raises(UserError, match=r"--option size=64: .*unexpected keyword argument 'size'"):
        convert(source, tmp_path / "u", config("DiT-class"), to="diffusers", options={"size": 64})


@pytest.mark.parametrize("family", ["STDiT", "STDiT2", "STDiT3", "Latte-class", "DiT-text", "DiT-2x2"])
def test_what_diffusers_has_not_is_told_and_leaves_nothing(made, tmp_path, family):
    source, _ = made(family)
    with pytest.raises(UserError, match="diffusers"):
        convert(source, tmp_path / "t", config(family), to="diffusers")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_model_of_images_is_no_video_model_of_diffusers(made, tmp_path):
    source, _ = made("LatteT2V")
    with pytest.raises(UserError, match="mode='video', as it runs the temporal blocks"):
        convert(source, tmp_path / "t", {**config("LatteT2V"), "mode": "images"}, to="diffusers")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_sample_size_of_diffusers_is_a_multiple_of_the_patch(made, tmp_path):
    source, _ = made("DiT-class")
    with pytest.raises(UserError, match="sample_size=9 must be a multiple of the patch, 2"):
        convert(source, tmp_path / "t", config("DiT-class"), to="diffusers", options={"sample_size": 9})


def test_other_heads_than_the_files_are_refused(made, tmp_path):
    source, _ = made("PixArt")
    folder = convert(source, tmp_path / "theirs", config("PixArt"), to="diffusers")
    with pytest.raises(UserError, match=r"config\.json says 2 attention heads, the model has num_heads=4"):
        convert(str(folder), tmp_path / "ours", {**config("PixArt"), "num_heads": 4}, to="safetensors")


def test_what_a_file_lacks_by_nature_is_the_same_each_time(made, tmp_path):
    source, _ = made("PixArt")
    model = config("STDiT")
    one, two = (read_weights(convert(source, tmp_path / name, model, to="safetensors")) for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("to", ["diffusers", "safetensors"])
def test_nothing_is_overwritten(made, tmp_path, to):
    source, _ = made("DiT-class")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="is there already"):
        convert(source, tmp_path / "out", config("DiT-class"), to=to)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "DiTXL/2"}, r"Did you mean 'DiT-XL/2'\?"),
        ({"dept": 2}, r"takes no argument 'dept'. Did you mean 'depth'"),
        ({"hidden_size": 49}, "DiT-XL/2: "),
        ({"hidden_size": 0}, "DiT-XL/2: hidden_size=0 must be a whole number from 1"),
        ({"num_heads": 0}, "DiT-XL/2: num_heads=0 must be a whole number from 1"),
        ({"hidden_size": -48, "num_heads": -2}, "hidden_size=-48, num_heads=-2 must be"),
        ({"depth": 3}, "does not fit"),
        ({"condition": "label_x"}, "label_x"),
    ],
)
def test_mistakes_in_the_model(made, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        convert(made("DiT-class")[0], tmp_path / "out", {**config("DiT-class"), **changes}, to="safetensors")


def test_only_denoisers(tmp_path):
    with pytest.raises(UserError, match="is no denoiser"):
        convert("x", tmp_path / "out", {"type": "classes", "num_classes": 3}, to="safetensors")


class TestCommandLine:
    def run(self, monkeypatch, *argv):
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, argv)])
        main()

    def test_whole(self, made, tmp_path, monkeypatch, capsys):
        source, _ = made("DiT-class")
        sizes = [f"{key}={value}" for key, value in TOY.items()]
        self.run(
            monkeypatch, source, tmp_path / "out", "--model", "DiT-XL/2", "--set", *sizes, "--set", "condition=label_10",
            "--to", "diffusers", "--dtype", "fp16", "--option", "sample_size=8",
        )  # fmt: skip
        printed = capsys.readouterr()
        assert printed.out == f"{tmp_path / 'out'}: 0.2 MB\n"
        assert " tensors in float32" in printed.err

    def test_a_model_of_ones_own(self, made, tmp_path, monkeypatch):
        source, state = made("DiT-class")
        (tmp_path / "own_dit.py").write_text(
            "from opensora.models.dit import DiT\nfrom opensora.registry import MODELS\n"
            f"MODELS.register_variant('own-dit', DiT, condition='label_10', **{TOY})\n"
        )
        path = list(sys.path)
        try:
            command = [source, tmp_path / "out", "--model", "own-dit", "--to", "safetensors"]
            self.run(monkeypatch, *command, "--imports", tmp_path / "own_dit.py")
        finally:
            sys.path[:] = path
            MODELS.module_dict.pop("own-dit", None)
        assert read_weights(tmp_path / "out").keys() == state.keys()

    @pytest.mark.parametrize("what", ["checkpoint", "run", "file"])
    def test_of_ours_nothing_needs_to_be_said(self, tmp_path, monkeypatch, capsys, what):
        """Neither the model, nor its arguments, nor the length of its table of "no text" and what else the tensors show."""
        model = {**TOY, **FAMILIES["STDiT"], "space_scale": 0.5, "pred_sigma": False}
        built = awake(MODELS.build(model))
        stated = {
            key: value
            for key, value in model.items()
            if key not in ("caption_channels", "model_max_length", "pred_sigma")
        }
        manifest = {"config": {"model": {**stated, "enable_flashattn": False}}, "step": 3}
        source = save_checkpoint(tmp_path / "run" / "step3", {"model": built.state_dict()}, state={}, manifest=manifest)
        if what == "run":
            source = source.parent
        elif what == "file":
            export_weights(source, tmp_path / "w.safetensors", part="model", dtype="fp32")
            source = tmp_path / "w.safetensors"
        self.run(monkeypatch, source, tmp_path / "out.safetensors")
        assert ("newest checkpoint of the run is step3" in capsys.readouterr().err) == (what == "run")
        found = read_weights(tmp_path / "out.safetensors")
        assert found.keys() == built.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in built.state_dict().items())
        with safe_open(tmp_path / "out.safetensors", "pt") as file:
            assert json.loads(file.metadata()["config"])["space_scale"] == 0.5

    def test_a_folder_of_diffusers_is_made_where_the_output_is_no_safetensors(self, made, tmp_path, monkeypatch):
        ours = convert(made("PixArt")[0], tmp_path / "ours.safetensors", config("PixArt"), to="safetensors")
        self.run(monkeypatch, ours, tmp_path / "theirs", "--set", "num_heads=2")
        assert json.loads((tmp_path / "theirs" / "config.json").read_text())["num_attention_heads"] == 2

    @pytest.mark.parametrize(
        ("manifest", "message"),
        [
            ({}, "does not state of which model it is: name it with --model"),
            ({"model": {"type": "mine"}, "imports": ["my_parts"]}, "if you trust it: --imports my_parts"),
            ({"model": {"type": "STDiT-XS/2"}, "lora": {"rank": 2}}, "python -m tools.lora merge"),
        ],
    )
    def test_what_a_checkpoint_does_not_give(self, tmp_path, monkeypatch, capsys, manifest, message):
        parts = {"model": {"w": torch.ones(1)}}
        source = save_checkpoint(tmp_path / "c", parts, state={}, manifest={"config": manifest, "step": 3})
        with pytest.raises(SystemExit):
            self.run(monkeypatch, source, tmp_path / "out.safetensors")
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--to", "diffusers", "--set", "depth"], "--set depth: write key=value"),
            (["--to", "safetensors", "--option", "sample_size=8"], "--option is for --to diffusers only"),
            (["--to", "safetensors"], "no weights at nowhere"),
        ],
    )
    def test_mistakes_end_with_code_2(self, tmp_path, monkeypatch, capsys, options, message):
        with pytest.raises(SystemExit) as exit_:
            self.run(monkeypatch, "nowhere", tmp_path / "out", "--model", "STDiT-XXS/2", *options)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err
