"""docs/how-to/nova.md's commands of training, one after the other at toy size: each works with what the one before it left."""

import re
import shlex
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

from opensora.config.load import TrainConfig, parse_config
from opensora.datasets.cache.records import RecordWriter
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module

ROOT = Path(__file__).parents[2]
REGISTRIES = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}
CHANNELS = {"VideoAutoencoderKL": 4, "DiffusersVideoVAE": 16}  # of the latents of the VAEs that the configs name
SMALL = (
    "--model.width=32", "--model.num_heads=1", "--model.video_depth=1", "--model.image_depth=2", "--device=cpu", "--dtype=fp32",
    "--num-workers=0", "--batch-size=2", "--max-steps=1", "--log-every=1", "--ckpt-every=1", "--warmup-steps=0",
    "--text-encoder.model_max_length=12", "--text-encoder.dtype=fp32",
)  # fmt: skip
"""The heads and the VAEs' channels stay as they are."""


def commands() -> list[list[str]]:
    """Those of the section on training that name a config."""
    section = (ROOT / "docs" / "how-to" / "nova.md").read_text().partition("\n## Training\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if "configs/" in line]


def config_of(command: list[str]) -> TrainConfig:
    return parse_config(TrainConfig, REGISTRIES, [str(ROOT / command[1]), "--data-path=records"])


def write_records(folder: str, cfg: TrainConfig) -> None:
    """Two, with the fields that the page shows and as many channels as the VAE has."""
    features = {"moments": "bytes", "caption": "string", "text": "string", "shape": ["int64"]}
    length = (cfg.num_frames - 1) // 16 + 1  # latent frames, a quarter of the VAE's
    video = cfg.num_frames > 1
    with RecordWriter(folder, {**features, **({"flow": "float64"} if video else {})}) as writer:
        for i in range(2):
            x = np.random.default_rng(i).normal(size=(2 * CHANNELS[cfg.vae["type"]], length, 8, 8)).astype(np.float16)
            record = {"shape": x.shape, "moments": x.tobytes(), "caption": "a dog", "text": ""}
            writer.write({**record, **({"flow": 5.0} if video else {})})


@pytest.fixture
def toy_vaes(tmp_path, toy_encoders):
    """Options that put an untrained VAE in the place of a config's, with as many channels."""
    torch.manual_seed(0)
    wan = diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    wan.save_pretrained(tmp_path / "wan" / "vae")
    return {
        "VideoAutoencoderKL": f"--vae.from_pretrained={toy_encoders['vae']}",
        "DiffusersVideoVAE": f"--vae.from_pretrained={tmp_path / 'wan'}",
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_work_one_after_the_other(tmp_path, toy_encoders, toy_vaes, train_script, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    trained = []
    for number, command in enumerate(commands()):
        cfg = config_of(command)
        write_records(command[command.index("--data-path") + 1], cfg)
        options = [*SMALL, toy_vaes[cfg.vae["type"]], f"--text-encoder.from_pretrained={toy_encoders['text']}"]
        argv = [str(trained[-1]) if word == "IMAGE_MODEL" else word for word in command]
        monkeypatch.setattr(sys, "argv", [*argv, *options, f"--exp-name={number}"])
        train_script.main()
        trained += (tmp_path / "outputs" / str(number)).glob("*-global_step1")
    assert len(trained) == len(commands()) == 3
    assert ["--ckpt-path" in command for command in commands()] == [False, True, False]


def test_the_video_model_takes_all_that_the_one_for_pictures_learnt():
    """At full size, by names and shapes; what the second has more is the motion tokens."""
    before, after = (shapes_of(command) for command in commands()[:2])
    assert (
        {name for name in after if name not in before} == {n for n in after if n.startswith("motion_embed.")} != set()
    )
    assert {name: after[name] for name in before} == before


def shapes_of(command: list[str]) -> dict[str, torch.Size]:
    cfg = config_of(command)
    assert cfg.model["from_pretrained"] is None
    with torch.device("meta"):
        model = build_module(cfg.model, MODELS, in_channels=CHANNELS[cfg.vae["type"]], model_max_length=256)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
