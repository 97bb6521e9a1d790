"""Weights out of a checkpoint, as one file that says where it comes from."""

import json
import sys

import pytest
import torch
from safetensors import safe_open

from opensora.checkpoint.load import read_weights, save_checkpoint
from opensora.utils.errors import UserError
from tools.export_weights import export_weights, main


@pytest.fixture
def checkpoint(tmp_path):
    manifest = {"step": 7, "model": "STDiT-XS/2", "config": {"model": {"type": "STDiT-XS/2"}}, "git_commit": "abc"}
    parts = {"model": {"w": torch.ones(2), "n": torch.tensor(1)}, "ema": {"w": torch.zeros(2), "n": torch.tensor(1)}}
    return save_checkpoint(tmp_path / "c", parts, state={}, manifest=manifest)


@pytest.mark.parametrize(("part", "expected"), [("ema", 0), ("model", 1)])
def test_part_format_and_header(checkpoint, tmp_path, part, expected):
    out = tmp_path / "deep" / "w.safetensors"
    assert export_weights(checkpoint, out, part=part) == out.stat().st_size
    state = read_weights(out)
    assert state["w"].dtype == torch.float16
    assert state["n"].dtype == torch.int64
    assert float(state["w"][0]) == expected
    with safe_open(out, "pt") as file:
        header = file.metadata()
    assert json.loads(header.pop("config")) == {"type": "STDiT-XS/2"}
    assert header.pop("source") == str(checkpoint)
    assert header == {"format": "pt", "part": part, "model": "STDiT-XS/2", "step": "7", "git_commit": "abc"}


def test_nothing_is_overwritten(checkpoint, tmp_path):
    (tmp_path / "w").write_text("precious")
    with pytest.raises(UserError, match="is there already"):
        export_weights(checkpoint, tmp_path / "w")
    assert (tmp_path / "w").read_text() == "precious"


def test_a_part_that_is_not_there_is_refused(tmp_path):
    manifest = {"step": 7, "model": "STDiT-XS/2"}
    one = save_checkpoint(tmp_path / "one", {"model": {"w": torch.ones(2)}}, state={}, manifest=manifest)
    with pytest.raises(UserError, match="one holds no 'ema'; take --part model"):
        export_weights(one, tmp_path / "w.safetensors")
    none = save_checkpoint(tmp_path / "none", {"optimizer": {"w": torch.ones(2)}}, state={}, manifest=manifest)
    with pytest.raises(UserError, match="none of the parts ema, model"):
        export_weights(none, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


def test_adapters_are_no_weights_of_a_model(tmp_path):
    manifest = {"step": 7, "config": {"model": {"type": "STDiT-XS/2"}, "lora": {"rank": 2}}}
    lora = save_checkpoint(tmp_path / "lora", {"ema": {"a.lora_A.weight": torch.ones(2)}}, state={}, manifest=manifest)
    with pytest.raises(UserError, match=rf"it holds adapters.*python -m tools.lora merge {lora} OUT.safetensors"):
        export_weights(lora, tmp_path / "w.safetensors")


@pytest.mark.parametrize("number", [7e4, -1e30])
def test_numbers_that_fp16_cannot_hold_are_refused(tmp_path, number):
    parts = {"ema": {"fine": torch.tensor([65504.0, float("inf")]), "blocks.0.w": torch.tensor([1.0, number])}}
    checkpoint = save_checkpoint(tmp_path / "c", parts, state={}, manifest={"step": 7, "model": "STDiT-XS/2"})
    out = tmp_path / "w.safetensors"
    with pytest.raises(UserError, match=r"blocks\.0\.w has numbers up to .*fp16 ends at 65504.*--dtype, bf16 or fp32"):
        export_weights(checkpoint, out)
    assert not out.exists()
    export_weights(checkpoint, out, dtype="bf16")
    assert read_weights(out)["blocks.0.w"].isfinite().all()


@pytest.mark.parametrize("of_run", [False, True])
def test_the_command_line(checkpoint, tmp_path, monkeypatch, capsys, of_run):
    folder = checkpoint.parent if of_run else checkpoint
    out = tmp_path / "w.safetensors"
    monkeypatch.setattr(sys, "argv", ["x", str(folder), str(out), "--dtype", "fp32"])
    main()
    assert capsys.readouterr().out == f"{out}: 0.0 MB\n"
    assert read_weights(out)["w"].dtype == torch.float32
