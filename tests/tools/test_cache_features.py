"""`python -m tools.cache_features`: from a training config to a cache that the config's dataset reads."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from opensora.datasets.latent_cache import CachedVideoTextDataset
from opensora.datasets.sampler import SampleKey
from opensora.models.vae.vae import VideoAutoencoderKL
from opensora.utils.errors import UserError
from tools.cache_features import cache_features, main

CONFIG = """
num_frames = 1
image_size = (16, 24)
dataset = dict(type={type!r}, {arguments})
model = dict(type="STDiT-XS/2")
vae = dict(type="VideoAutoencoderKL", from_pretrained={vae!r})
text_encoder = dict(type="t5", from_pretrained="unused")
scheduler = dict(type="iddpm")
device = "cpu"
"""
TINY = {"block_out_channels": (4, 4), "layers_per_block": 1, "norm_num_groups": 2, "latent_channels": 2}


@pytest.fixture
def folder(tmp_path):
    VideoAutoencoderKL(architecture=TINY).save_pretrained(tmp_path / "vae")
    rng = np.random.default_rng(0)
    for i in range(2):
        Image.fromarray(rng.integers(0, 256, (16, 24, 3), np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "clips.csv").write_text("path,text\n0.png,a\n1.png,b\n")
    return tmp_path


def write_config(folder, type="CachedVideoTextDataset", **arguments) -> str:
    written = ", ".join(f"{key}={str(value)!r}" for key, value in arguments.items())
    path = folder / "config.py"
    path.write_text(CONFIG.format(type=type, arguments=written, vae=str(folder / "vae")))
    return str(path)


def test_the_dataset_of_the_config_reads_what_was_written(folder):
    config = write_config(folder, data_path=folder / "clips.csv", cache_dir=folder / "cache")
    assert cache_features([config]) == (2, 0)
    assert cache_features([config]) == (0, 2)
    vae = VideoAutoencoderKL(str(folder / "vae")).eval()
    dataset = CachedVideoTextDataset(
        str(folder / "clips.csv"), str(folder / "cache"), 1, 1, (16, 24), vae_fingerprint=vae.fingerprint()
    )
    pixels = torch.from_numpy(np.array(Image.open(folder / "1.png"))).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        expected = vae.moments(pixels)[0]
    torch.testing.assert_close(dataset[SampleKey(0, 1)]["moments"], expected, atol=2e-3, rtol=2e-3)


def test_overrides_and_options(folder):
    config = write_config(folder, "VideoTextDataset")
    data = f"--data-path={folder / 'clips.csv'}"
    assert cache_features(
        [config, data, "--cache-dir", str(folder / "c"), "--image-size", "8", "8", "--chunk", "1"]
    ) == (2, 0)
    assert json.loads((folder / "c" / "manifest.json").read_text())["settings"]["image_size"] == [8, 8]
    with pytest.raises(UserError, match="give --cache-dir"):
        cache_features([config, data])
    with pytest.raises(UserError, match="--chunk 0"):
        cache_features([config, data, "--cache-dir", "c", "--chunk", "0"])
    with pytest.raises(UserError, match="nonsense"):
        cache_features([config, data, "--cache-dir", "c", "--nonsense", "1"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be used")
def test_a_gpu_that_is_not_there_is_refused(folder):
    config = write_config(folder, data_path=folder / "clips.csv", cache_dir=folder / "cache")
    with pytest.raises(UserError, match="device='cuda', but PyTorch sees no GPU"):
        cache_features([config, "--device", "cuda"])
    assert not (folder / "cache").exists()


def test_the_command(folder, monkeypatch, capsys):
    config = write_config(folder, data_path=folder / "clips.csv", cache_dir=folder / "cache")
    monkeypatch.setattr("sys.argv", ["cache_features", config])
    main()
    assert capsys.readouterr().out == "2 clips encoded, 0 were there already\n"
    (folder / "clips.csv").unlink()
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "error: data_path:" in capsys.readouterr().err
