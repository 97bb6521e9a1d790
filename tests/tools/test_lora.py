"""tools/lora.py: what it refuses, and the command line; a whole run is in tests/scripts/test_train_lora.py."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from opensora.registry import MODELS
from opensora.utils.ckpt import save_checkpoint
from opensora.utils.errors import UserError
from opensora.utils.lora import Adapter, LoraOptions, factors_of, read_adapter, write_adapter
from tools.lora import export, main, merge

TOY = {"type": "STDiT-XXS/2", "caption_channels": 16, "model_max_length": 7}
LAYER = "blocks.0.attn.qkv"


@pytest.fixture
def base(tmp_path):
    """A model's weights in a file."""
    torch.manual_seed(0)
    save_file(MODELS.build(TOY).state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.fixture
def factors() -> dict:
    rng = torch.Generator().manual_seed(1)
    return {LAYER: (torch.randn(2, 48, generator=rng), torch.randn(144, 2, generator=rng))}


@pytest.fixture
def checkpoint(tmp_path, base, factors):
    """A checkpoint folder of a LoRA run: its average is twice its weights."""
    A, B = factors[LAYER]
    state = {f"{LAYER}.lora_A.default.weight": A, f"{LAYER}.lora_B.default.weight": B}
    config = {"model": {"type": "STDiT-XXS/2", "from_pretrained": str(base)}, "lora": {"rank": 2, "alpha": 6}}
    parts = {"model": state, "ema": {name: 2 * tensor for name, tensor in state.items()}}
    return save_checkpoint(tmp_path / "run" / "step1", parts, state={}, manifest={"config": config, "step": 1})


def test_merge_adds_the_scaled_product(checkpoint, base, factors, tmp_path):
    merge(checkpoint, tmp_path / "out.safetensors", scale=0.5, dtype="fp32")
    before, after = load_file(base), load_file(tmp_path / "out.safetensors")
    A, B = (2 * factor for factor in factors[LAYER])  # the average
    expected = before[f"{LAYER}.weight"] + 0.5 * 6 / 2 * B @ A
    torch.testing.assert_close(after.pop(f"{LAYER}.weight"), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_export_takes_the_part_it_is_told(checkpoint, factors, tmp_path):
    export(checkpoint, tmp_path / "model", part="model")
    adapter = read_adapter(tmp_path / "model")
    assert adapter.scale == 3
    assert all(torch.equal(a, b) for a, b in zip(adapter.factors[LAYER], factors[LAYER], strict=True))
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 6, [LAYER])
    export(checkpoint, tmp_path / "average")
    assert torch.equal(read_adapter(tmp_path / "average").factors[LAYER][0], 2 * factors[LAYER][0])
    with pytest.raises(UserError, match="there already"):
        export(checkpoint, tmp_path / "model")


def test_an_exported_adapter_needs_to_be_told_its_model(factors, base, tmp_path):
    folder = write_adapter(Adapter(factors, 1.0), tmp_path / "adapter")
    with pytest.raises(UserError, match="--config"):
        merge(folder, tmp_path / "out.safetensors", base=str(base))
    (tmp_path / "config.py").write_text('model = dict(type="STDiT-XXS/2")\n')
    with pytest.raises(UserError, match="--base"):
        merge(folder, tmp_path / "out.safetensors", config=tmp_path / "config.py")
    assert merge(folder, tmp_path / "out.safetensors", base=str(base), config=tmp_path / "config.py") > 0


def test_what_is_no_lora(tmp_path, base):
    plain = save_checkpoint(tmp_path / "plain", {"model": {}}, state={}, manifest={"config": {"lora": None}})
    with pytest.raises(UserError, match="run without lora"):
        export(plain, tmp_path / "out")
    with pytest.raises(UserError, match="run without lora"):
        read_adapter(plain)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        read_adapter(base)
    with pytest.raises(UserError, match="it also holds"):
        factors_of(load_file(base), base)
    with pytest.raises(UserError, match="lack lora_A or lora_B"):
        factors_of({"a.lora_A.weight": torch.ones(1)}, "x")
    with pytest.raises(UserError, match="rank=0"):
        LoraOptions.of({"rank": 0})


def test_the_command_line(checkpoint, tmp_path, monkeypatch, capsys):
    def run(*argv: object) -> None:
        monkeypatch.setattr(sys, "argv", ["lora", *map(str, argv)])
        main()

    run("export", checkpoint, tmp_path / "adapter")
    run("merge", checkpoint, tmp_path / "out.safetensors", "--scale", "0.3")
    assert "MB" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("merge", checkpoint, tmp_path / "out.safetensors")
    assert "there already" in capsys.readouterr().err
