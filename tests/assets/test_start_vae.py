"""The command that writes a linear start: what it says is what the folder gives, and what it refuses."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from assets.build.start_vae import main
from opensora.datasets.in_memory import InMemoryVideoDataset
from opensora.datasets.sampler import SampleKey
from opensora.models.vae import DiffusersVideoVAE
from opensora.models.vae.metrics import psnr, reconstruct

CONFIG = "configs/vae/train/video-small.py"
COUNT = 4


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Images of few numbers."""
    folder = tmp_path_factory.mktemp("start")
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        coarse = Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8))
        coarse.resize((48, 48), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    path = folder / "table.csv"
    path.write_text("path\n" + "".join(f"{i}.png\n" for i in range(COUNT)))
    return path


@pytest.fixture
def run(monkeypatch, table):
    def run(out, *words):
        frames = [] if "--num-frames" in words else ["--num-frames", "5"]
        size = [*frames, "--image-size", "32", "32", "--vae.architecture.decoder_base_dim", "48"]
        command = ["start_vae", CONFIG, "--out", out, "--clips", COUNT, "--data-path", table, *size, *words]
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])
        main()

    return run


def test_the_folder_gives_back_what_the_command_says(run, table, tmp_path, capsys):
    run(tmp_path / "vae")
    said = float(capsys.readouterr().out.split(" with ")[1].split(" dB")[0])
    vae = DiffusersVideoVAE(str(tmp_path / "vae"), posterior="mode")
    dataset = InMemoryVideoDataset(str(table), num_frames=5, image_size=(32, 32), seed=42)
    clips = torch.stack([dataset[SampleKey(0, index)]["video"] for index in range(COUNT)])
    measured = float(psnr(reconstruct(vae, clips), clips).mean())
    assert said == pytest.approx(measured, abs=0.02)
    assert measured > 20  # untrained: below 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-frames", "1"], "num_frames=1: a linear start is fitted to clips of 5 frames or more"),
        (["--vae.type", "VideoAutoencoderKL", "--vae.architecture", "{}"], "is made for DiffusersVideoVAE"),
        (["--vae.architecture.base_dim", "16"], "'base_dim': 16"),
    ],
)
def test_what_has_no_linear_start_is_refused(run, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "vae", *words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "vae").exists()
