"""The loss in float8 beside bf16's, emulated: a table, a picture, and the latents on their way through a file."""

import sys

import pytest
import torch

from opensora.utils.errors import UserError
from tools.benchmark import float8_loss
from tools.benchmark.float8_loss import Latents, read_latents, save_latents, smooth

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[quant]'")


@pytest.fixture
def file(tmp_path):
    latents = Latents(torch.randn(6, 4, 2, 6, 6), torch.tensor([0, 0, 1, 1, 2, 2]))
    save_latents(latents, tmp_path / "latents.safetensors")
    return tmp_path / "latents.safetensors"


def run(monkeypatch, *options) -> int:
    monkeypatch.setattr(sys, "argv", ["float8_loss", *map(str, options)])
    with pytest.raises(SystemExit) as stop:
        float8_loss.main()
    return stop.value.code


def test_the_table_and_the_picture(file, tmp_path, monkeypatch, capsys):
    options = ("--model=STDiT-XXS/2", "--steps=4", "--batch=2", "--emulate", "--device=cpu", "--again")
    picture = tmp_path / "loss.png"
    assert run(monkeypatch, "--latents", file, *options, "--recipes", "rowwise", "tensorwise", "--plot", picture) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| bf16", "| rowwise", "| tensorwise", "| bf16 again"]
    assert [row[1] for row in rows] == ["-", "16", "16", "-"]
    losses = [float(row[2]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 4, rel=0.01)
    assert picture.stat().st_size > 1000


def test_latents_through_a_file(file, tmp_path):
    latents = read_latents(file)
    assert latents.z.shape == (6, 4, 2, 6, 6)
    assert latents.z.dtype == torch.float32
    assert latents.clip.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(UserError, match="make it by --save-latents"):
        read_latents(tmp_path / "missing.safetensors")


def test_without_float8_products_it_is_refused_at_once(file, monkeypatch, capsys):
    assert run(monkeypatch, "--latents", file, "--device=cpu") != 0
    assert "needs a GPU with float8 products" in capsys.readouterr().err


def test_smoothing():
    torch.testing.assert_close(
        smooth(torch.tensor([1.0, 3.0, 5.0, 7.0]), 2), torch.tensor([1.0, 2.0, 4.0, 6.0]).double()
    )
