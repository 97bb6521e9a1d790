"""Every shipped config loads against its schema, and its model can be built."""

from pathlib import Path

import pytest
import torch

from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.utils.config import InferenceConfig, TrainConfig, VAETrainConfig, parse_config
from opensora.utils.config_schema import Schema

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.py"))
REGISTRIES = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}


def schema_of(config: str) -> Schema:
    path = Path(config)
    if "inference" in (*path.parts, path.stem):
        return InferenceConfig
    return VAETrainConfig if "vae" in path.parts or path.stem == "train_vae" else TrainConfig


def parse(config: str):
    schema = schema_of(config)
    argv = [] if schema is InferenceConfig else ["--data-path", "clips.csv"]
    return parse_config(schema, REGISTRIES, [str(ROOT / config), *argv])


def test_there_are_configs():
    assert len(CONFIGS) >= 6


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_loads(config):
    parse(config)


@pytest.mark.parametrize("config", [c for c in CONFIGS if schema_of(c) is not VAETrainConfig])
def test_the_model_of_a_config_can_be_built(config):
    cfg = parse(config)
    architecture = {**cfg.model, "from_pretrained": None}  # weights are downloaded or trained, not shipped
    runtime = {
        "in_channels": 4,
        "caption_channels": 4096 if cfg.text_encoder["type"] == "t5" else 384,
        "model_max_length": cfg.text_encoder["model_max_length"],
    }
    with torch.device("meta"):
        model = build_module(architecture, MODELS, **runtime)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(list(model.transformer_blocks())) > 0


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_opens_with_what_it_does_and_its_exact_command(config):
    text = (ROOT / config).read_text()
    assert text.startswith('"""')
    assert config in text.split('"""')[1]


@pytest.mark.parametrize(
    ("name", "frames", "interval", "size", "batch_size", "ckpt_every", "grad_checkpoint", "space", "time"),
    [
        ("16x256x256", 16, 3, 256, 8, 1000, True, 0.5, 1.0),
        ("16x512x512", 16, 3, 512, 8, 500, False, 1.0, 1.0),
        ("64x512x512", 64, 2, 512, 4, 250, True, 1.0, 2 / 3),
    ],
)
def test_the_settings_of_open_sora_1_0(
    name, frames, interval, size, batch_size, ckpt_every, grad_checkpoint, space, time
):
    train, inference = parse(f"configs/opensora/train/{name}.py"), parse(f"configs/opensora/inference/{name}.py")
    assert (train.num_frames, train.frame_interval, train.image_size) == (frames, interval, (size, size))
    assert (train.batch_size, train.lr, train.grad_clip, train.dtype) == (batch_size, 2e-5, 1.0, "bf16")
    assert (train.ckpt_every, train.grad_checkpoint, train.plugin) == (ckpt_every, grad_checkpoint, "ddp")
    assert (inference.num_frames, inference.fps, inference.image_size) == (frames, 24 // interval, (size, size))
    assert (inference.scheduler["num_sampling_steps"], inference.scheduler["cfg_scale"]) == (100, 7.0)
    for cfg in (train, inference):
        assert cfg.model["type"] == "STDiT-XL/2"
        assert (cfg.model["space_scale"], cfg.model["time_scale"]) == (space, time)
