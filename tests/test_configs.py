"""Every shipped config loads against its schema, its model can be built, and its parts fit together."""

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import ResNet18_Weights

from opensora.config.load import InferenceConfig, TrainConfig, VAEInferenceConfig, VAETrainConfig, parse_config
from opensora.config.schema import Schema
from opensora.datasets.buckets.bucket import Buckets
from opensora.inference.prompts import load_prompts
from opensora.models.denoiser import Denoiser
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.utils.errors import UserError
from tests.scripts.conftest import load_script

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.py") if path.parent.name != "_base_"
)
TEXT_CHANNELS = {"t5": 4096, "clip": 512, "classes": 1, "hf": 384}  # of the encoders that the configs name
REGISTRIES = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}
REGISTRIES["discriminator"] = MODELS
DATA = {False: ["--data-path", "clips.csv"], True: []}


def schema_of(config: str) -> Schema:
    path = Path(config)
    if "inference" in (*path.parts, *path.stem.split("_")):
        return VAEInferenceConfig if "vae" in path.parts else InferenceConfig
    return VAETrainConfig if "vae" in path.parts or path.stem == "train_vae" else TrainConfig


def parse(config: str):
    schema = schema_of(config)
    return parse_config(schema, REGISTRIES, [str(ROOT / config), *DATA[schema is InferenceConfig]])


def encoder_of(config: str) -> dict[str, Any]:
    """The text encoder, or the one whose features are stored."""
    component = parse(config).text_encoder
    return component["encoder"] if component["type"] == "cached" else component


OF_DENOISERS = [config for config in CONFIGS if schema_of(config) in (TrainConfig, InferenceConfig)]


def test_there_are_configs():
    assert len(CONFIGS) >= 6


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_loads(config):
    parse(config)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_loads_where_parts_are_not_looked_into(config):
    schema = schema_of(config)
    assert parse_config(schema, argv=[str(ROOT / config), *DATA[schema is InferenceConfig]])


@cache
def model_of(config: str) -> Denoiser:
    """The config's denoiser on the meta device, built as the scripts build it."""
    cfg, encoder = parse(config), encoder_of(config)
    architecture = {**cfg.model, "from_pretrained": None}  # weights are downloaded or trained, not shipped
    runtime = {
        "in_channels": 4,
        "caption_channels": TEXT_CHANNELS[encoder["type"]],
        "model_max_length": 1 if encoder["type"] == "classes" else encoder["model_max_length"],
    }
    with torch.device("meta"):
        return build_module(architecture, MODELS, **runtime)


@pytest.mark.parametrize("config", OF_DENOISERS)
def test_the_model_of_a_config_can_be_built(config):
    model = model_of(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(list(model.transformer_blocks())) > 0


@pytest.mark.parametrize("config", OF_DENOISERS)
def test_the_model_takes_what_the_text_encoder_gives(config):
    encoder = encoder_of(config)
    null = model_of(config).null_condition(1)
    if encoder["type"] == "classes":
        assert not null.is_floating_point()
        assert parse(config).model["condition"] == f"label_{encoder['num_classes']}"
    else:
        length = 1 if encoder["type"] == "clip" else encoder["model_max_length"]  # clip gives one pooled vector
        assert null.shape == (1, 1, length, TEXT_CHANNELS[encoder["type"]])


@pytest.mark.parametrize("config", OF_DENOISERS)
def test_the_model_predicts_what_the_scheduler_wants(config):
    scheduler = build_module(parse(config).scheduler, SCHEDULERS)
    if parse(config).scheduler["type"] == "nova":
        assert parse(config).model["type"].startswith("NOVA")
        return
    if parse(config).scheduler["type"] in ("dpm-solver", "rflow"):  # they drop a learned variance
        assert model_of(config).out_channels in (4, 8)
        return
    learned = scheduler.variance == "learned_range"
    assert model_of(config).out_channels == (8 if learned else 4)


@pytest.mark.parametrize("config", OF_DENOISERS)
def test_the_size_is_one_that_the_vae_makes(config):
    assert all(side % 8 == 0 for side in parse(config).image_size)


@pytest.mark.parametrize("config", [c for c in OF_DENOISERS if parse(c).num_frames == 1])
def test_images_have_no_time(config):
    cfg = parse(config)
    if cfg.model["type"].startswith(("DiT", "PixArt")):  # of the others, each has its own way with one frame
        assert cfg.model["no_temporal_pos_emb"] is True
    if isinstance(cfg, TrainConfig) and cfg.dataset["type"] != "RecordVideoTextDataset":
        assert cfg.frame_interval == 1
        assert cfg.use_image_transform or cfg.dataset["type"] == "CachedVideoTextDataset"  # which holds no pixels


@pytest.mark.parametrize("config", [c for c in CONFIGS if schema_of(c) is InferenceConfig])
def test_the_prompts_of_a_config_are_there(config, monkeypatch):
    monkeypatch.chdir(ROOT)
    cfg = parse(config)
    prompts = load_prompts(cfg.prompt, cfg.prompt_path)
    if cfg.text_encoder["type"] == "classes":
        y, _ = build_module(cfg.text_encoder, MODELS).encode(prompts)  # refuses what is no class
        assert y.shape == (len(prompts), 1, 1, 1)
    else:
        assert all(" " in prompt for prompt in prompts)


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in CONFIGS if schema_of(c) is VAETrainConfig])
def test_the_vae_takes_the_clips_of_its_config(config):
    cfg = parse(config)
    if "architecture" not in cfg.vae:
        return  # weights of the hub
    vae = build_module(cfg.vae, MODELS)
    for length in cfg.mixed_lengths or [cfg.num_frames]:
        assert vae.legal_num_frames(length) == length
        vae.latent_size((length, *cfg.image_size))


def test_the_labels_are_those_of_the_class_numbers():
    numbers, labels = (load_prompts(None, ROOT / f"assets/texts/imagenet_{kind}.txt") for kind in ("id", "labels"))
    names = ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    assert [names[int(number)] for number in numbers] == labels
    numbers, labels = (load_prompts(None, ROOT / f"assets/texts/ucf101_{kind}.txt") for kind in ("id", "labels"))
    assert len(numbers) == len(labels)
    assert sorted(labels) == [label for _, label in sorted(zip(map(int, numbers), labels, strict=True))]  # alphabetical


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_opens_with_its_task_command_weights_and_hardware(config):
    text = (ROOT / config).read_text().split('"""')
    assert not text[0]
    assert config in text[1]
    assert re.search(r"^Weights: .+\.$\nHardware: .+\.$", text[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "frames", "interval", "size", "batch_size", "ckpt_every", "grad_checkpoint", "space", "time"),
    [
        ("16x256x256", 16, 3, 256, 8, 1000, "block", 0.5, 1.0),
        ("16x512x512", 16, 3, 512, 8, 500, "none", 1.0, 1.0),
        ("64x512x512", 64, 2, 512, 4, 250, "block", 1.0, 2 / 3),
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


@pytest.mark.parametrize(
    ("name", "frames", "interval", "batch_size", "lr", "ckpt_every", "grad_checkpoint"),
    [
        ("dit/train/1x256x256", 1, 1, 128, 1e-4, 1000, "none"),
        ("dit/train/16x256x256", 16, 3, 8, 2e-5, 1000, "none"),
        ("latte/train/16x256x256", 16, 3, 8, 2e-5, 1000, "block"),
        ("pixart/train/16x256x256", 16, 3, 8, 2e-5, 1000, "none"),
        ("pixart/train/1x512x512", 1, 1, 32, 2e-5, 1000, "block"),
        ("pixart/train/64x512x512", 64, 2, 4, 2e-5, 250, "block"),
        ("pixart/train/1x2048x2048", 1, 1, 4, 2e-5, 1000, "block"),
        ("opensora/train/360x512x512", 360, 3, 1, 2e-5, 250, "block"),
        ("opensora/train/64x512x512-sp", 64, 2, 1, 2e-5, 1000, "block"),
        ("opensora/train/16x256x256-mask", 16, 3, 8, 2e-5, 1000, "block"),
        ("opensora/train/16x256x256-spee-rflow", 16, 3, 16, 2e-5, 1000, "block"),
        ("opensora-v1-1/train/image_rflow", 1, 1, 100, 2e-5, 500, "block"),
    ],
)
def test_how_open_sora_trains_in_its_other_files(name, frames, interval, batch_size, lr, ckpt_every, grad_checkpoint):
    cfg = parse(f"configs/{name}.py")
    assert (cfg.num_frames, cfg.frame_interval) == (frames, interval)
    assert (cfg.batch_size, cfg.lr, cfg.grad_clip, cfg.dtype) == (batch_size, lr, 1.0, "bf16")
    assert (cfg.ckpt_every, cfg.grad_checkpoint, cfg.plugin) == (ckpt_every, grad_checkpoint, "ddp")


@pytest.mark.parametrize(
    ("name", "model", "steps", "scale", "channel", "sampler"),
    [
        ("dit/inference/1x256x256-class", {"condition": "label_1000"}, 250, 4.0, 3, "ancestral"),
        ("latte/inference/16x256x256-class", {"condition": "label_101"}, 250, 7.0, None, "ancestral"),
        ("latte/inference/16x512x512-t2v", {"space_scale": 1.0}, 50, 7.5, None, "ddim"),
        ("pixart/inference/1x256x256", {"space_scale": 1.0}, 20, 4.5, None, "dpm-solver"),
        ("pixart/inference/1x512x512", {"space_scale": 1.0}, 20, 4.5, None, "dpm-solver"),
        ("pixart/inference/1x1024MS", {"space_scale": 2.0, "base_size": 64}, 20, 4.5, None, "dpm-solver"),
        ("pixart/inference/1x1024-sigma", {"space_scale": 2.0, "base_size": 64}, 20, 4.5, None, "dpm-solver"),
        ("pixart/inference/1x2048MS", {"space_scale": 4.0, "base_size": 128}, 14, 4.5, None, "dpm-solver"),
        ("pixart/inference/1x20481B", {"type": "PixArt-1B/2", "base_size": 128}, 14, 4.5, None, "dpm-solver"),
        (
            "opensora-v1-1/inference/sample",
            {"input_sq_size": 512, "norm_order": "rope_then_norm"}, 100, 7.0, 3, "ancestral",
        ),
    ],
)  # fmt: skip
def test_how_released_weights_are_sampled(name, model: dict[str, Any], steps, scale, channel, sampler):
    cfg = parse(f"configs/{name}.py")
    assert {key: cfg.model[key] for key in model} == model
    scheduler = build_module(cfg.scheduler, SCHEDULERS)
    assert (scheduler.num_sampling_steps, scheduler.cfg_scale, scheduler.cfg_channel) == (steps, scale, channel)
    assert getattr(scheduler, "sampler", cfg.scheduler["type"]) == sampler


@pytest.mark.parametrize("config", [c for c in OF_DENOISERS if encoder_of(c)["type"] == "t5"])
def test_captions_are_cleaned_as_those_of_the_released_weights(config):
    """PixArt, Latte-1 and Open-Sora 1.x, or Wan; a sampling config is also for what its training config makes."""
    family = config.split("/")[1 + config.startswith("configs/finetune")]
    assert family.startswith(("opensora", "pixart", "latte", "wan"))
    assert encoder_of(config)["clean"] == ("basic" if family == "wan" else "legacy")


@pytest.mark.parametrize("config", [c for c in OF_DENOISERS if getattr(parse(c), "bucket_config", None)])
def test_the_buckets_of_a_config_are_legal(config):
    cfg = parse(config)
    buckets = Buckets(cfg.bucket_config, cfg.dataset.get("size_multiple", 16))
    patch = model_of(config).patch_size
    assert all(bucket.height % (8 * patch[1]) == bucket.width % (8 * patch[2]) == 0 for bucket in buckets)
    assert buckets.batch_sizes.max() > 0


@pytest.mark.parametrize(
    ("name", "interval", "entry"),
    [
        ("image", 1, ("512", 1, (1.0, 80))),
        ("video", 3, ("240p", 16, (1.0, 16))),
        ("stage1", 3, ("144p", 96, (1.0, 1))),
        ("stage2", 3, ("256", 1, (0.8, 254))),
        ("stage3", 3, ("720p", 96, (0.0, None))),
    ],
)
def test_the_buckets_of_open_sora_1_1(name, interval, entry):
    cfg = parse(f"configs/opensora-v1-1/train/{name}.py")
    assert (cfg.dataset["frame_interval"], cfg.lr, cfg.ckpt_every) == (interval, 2e-5, 500)
    assert cfg.bucket_config[entry[0]][entry[1]] == entry[2]
    assert cfg.text_encoder["model_max_length"] == 200
    assert "norm_order" not in cfg.model  # the released weights' order is for them alone


@pytest.mark.parametrize(
    ("name", "lr", "ckpt_every", "masked", "entry"),
    [
        ("train/stage1_feat", 2e-4, 500, 0.5, None),
        ("misc/bs", 2e-4, 500, 0.5, ("512", 408, (1.0, 1))),
        ("misc/feat", 2e-4, 200, 0.5, ("256", 102, ((0.5, 0.33), 10))),
        ("misc/extract", 2e-4, 500, 0.5, None),
    ],
)
def test_what_open_sora_1_2_does_with_features_and_sizes(name, lr, ckpt_every, masked, entry):
    cfg = parse(f"configs/opensora-v1-2/{name}.py")
    assert (cfg.lr, cfg.ckpt_every, cfg.adam_eps, cfg.ema_decay) == (lr, ckpt_every, 1e-15, 0.99)
    assert sum(cfg.mask_ratios.values()) == pytest.approx(masked)
    assert encoder_of(f"configs/opensora-v1-2/{name}.py")["model_max_length"] == 300
    if entry is not None:
        assert cfg.bucket_config[entry[0]][entry[1]] == entry[2]


def test_the_stages_of_open_sora_1_2s_vae():
    stages = [parse(f"configs/vae/train/stage{i}.py") for i in (1, 2, 3)]
    assert [cfg.vae["freeze_vae_2d"] for cfg in stages] == [True, False, False]
    assert [cfg.num_frames for cfg in stages] == [17, 17, 33]
    assert [cfg.mixed_lengths.count(1) / len(cfg.mixed_lengths) for cfg in stages] == [0.2, 0.2, 1 / 33]
    assert stages[2].mixed_lengths == [*range(1, 34)]
    for cfg in stages:
        assert (cfg.lr, cfg.batch_size, cfg.loss["lpips"], cfg.loss["mse"]) == (1e-5, 1, 0.1, 0.0)


def test_speed_has_its_published_settings():
    """k=5, tau=700, lambda=0.6: weights from 0.4 to 0.6, and 1 from tau on."""
    component = parse("configs/dit/train/1x256x256-class-speed.py").scheduler
    unmirrored = {**component, "timestep_sampling": {**component["timestep_sampling"], "mirrored": 0.0}}
    density = build_module(unmirrored, SCHEDULERS).timestep_sampling.density
    assert float(density[:700].sum()) == pytest.approx(5 * 700 / (5 * 700 + 300))
    weights = build_module(component, SCHEDULERS).loss_weights.table
    assert (float(weights[:700].min()), float(weights[:700].max())) == pytest.approx((0.4, 0.6), abs=0.01)
    assert set(weights[700:].tolist()) == {1.0}


def test_an_expert_of_wan_is_trained_at_its_own_noise_levels(monkeypatch, capsys):
    with_interval = load_script().with_expert_interval
    cfg = parse("configs/wan/train/t2v-a14b-lora.py")
    assert with_interval(cfg).scheduler["interval"] == (0.875, 1.0)
    low = replace(cfg, model={**cfg.model, "expert": "low"})
    assert with_interval(low).scheduler["interval"] == (0.0, 0.875)
    part = replace(low, scheduler={**cfg.scheduler, "interval": (0.1, 0.8)})
    assert with_interval(part) == part
    with pytest.raises(UserError, match=r"interval=\(0.1, 0.8\): the expert 'high' .* at noise levels \(0.875, 1.0\)"):
        with_interval(replace(part, model=cfg.model))
    with pytest.raises(UserError, match="trained one at a time"):
        with_interval(replace(cfg, model={**cfg.model, "expert": "both"}))
    monkeypatch.setattr(
        sys,
        "argv",
        ["train.py", str(ROOT / "configs/wan/train/t2v-a14b-lora.py"), "--data-path=x", "--model.expert=both"],
    )
    with pytest.raises(SystemExit):
        load_script().main()
    assert "trained one at a time" in capsys.readouterr().err
    one = parse("configs/wan/train/t2v-1.3b-lora.py")
    one = replace(one, scheduler={**one.scheduler, "interval": (0.5, 1.0)})  # of one network: as the user likes
    assert with_interval(one) == one
