"""NOVA's training guide: its snippets, with only the import changed, give our configs."""

import copy
import json
import pickle

import pytest
import torch
import yaml

from opensora.config.load import TrainConfig, parse_config
from opensora.config.yacs import (
    CfgNode,
    architecture,
    deepspeed_overrides,
    default_cfg,
    read_yacs,
    to_train_config,
)
from opensora.registry import DATASETS, MODELS, SCHEDULERS
from opensora.utils.errors import UserError

COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}
GUIDE = """
from opensora.config.yacs import cfg
cfg.NUM_GPUS = 1
cfg.PIPELINE.TYPE = "nova_train_t2i"
cfg.MODEL.PRECISION = "bfloat16"
cfg.MODEL.WEIGHTS = "/path/to/nova-d48w1024-sdxl1024"
cfg.SOLVER.BASE_LR = 1e-4
cfg.SOLVER.MAX_STEPS = 100
cfg.SOLVER.EMA_EVERY = 100
cfg.SOLVER.SNAPSHOT_EVERY = 100
cfg.SOLVER.SNAPSHOT_PREFIX = "nova_d48w1024_1024px"
cfg.TRAIN.DATASET = "./img_dataset"
cfg.TRAIN.LOADER = "vae_train"
cfg.TRAIN.BATCH_SIZE = 1
cfg.TRAIN.CHECKPOINTING = 3  # 0,1,2,3
cfg.TRAIN.MODEL_EMA = 0.98
cfg.TRAIN.DEVICE_EMA = "cpu"  # "cpu", "cuda"
open("./nova_d48w1024_1024px.yml", "w").write(str(cfg))
"""
"""Section 2 of the guide, the import changed."""
ARCH = ["vit_d2w32", "vit_d4w32", "mlp_d2w32"]


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """The folder that the guide's names mean, with the files that its code writes."""
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "nova"
    (weights / "transformer").mkdir(parents=True)
    (weights / "transformer" / "config.json").write_text(json.dumps({"arch": ARCH}))
    for kind, name in (("t2i", "nova_d48w1024_1024px"), ("t2v", "nova_d48w1024_480px")):
        code = GUIDE.replace("t2i", kind).replace("nova_d48w1024_1024px", name)
        code = code.replace("/path/to/nova-d48w1024-sdxl1024", str(weights))
        exec(compile(code, "guide", "exec"), {})
    return tmp_path


def test_the_guides_configs_are_ours(guide):
    image = parse_config(TrainConfig, {}, ["--cfg", "nova_d48w1024_1024px.yml"])
    video = parse_config(TrainConfig, {}, ["nova_d48w1024_480px.yml", "--lr", "1e-5"])
    assert (image.lr, video.lr) == (1e-4, 1e-5)
    assert (image.dtype, image.batch_size, image.max_steps, image.ckpt_every) == ("bf16", 1, 100, 100)
    assert image.ema_decay**100 == pytest.approx(0.98)
    assert (image.ema_every, image.ema_device, image.grad_checkpoint) == (100, "cpu", "mlp")
    assert image.dataset["type"] == "RecordVideoTextDataset"
    assert image.data_path == "./img_dataset"
    assert image.exp_name == "nova_d48w1024_1024px"
    assert image.model == {
        "type": "NOVA", "width": 32, "num_heads": 1, "video_depth": 2, "image_depth": 4, "head_depth": 2, "head_width": 32,
        "patch_size": 2, "motion": False, "trained": "image", "from_pretrained": str(guide / "nova" / "transformer"),
    }  # fmt: skip
    assert (video.model["motion"], video.model["trained"]) == (True, "all")
    assert video.vae["type"] == "DiffusersVideoVAE"


@pytest.mark.parametrize("name", ["nova_d48w1024_480px", "nova_d48w1024_1024px"])
def test_of_novas_own_video_vae_the_scale_is_taken(guide, name):
    config = {"_class_name": "AutoencoderKLOpenSora", "latent_channels": 4, "scaling_factor": 0.5, "shift_factor": 2.0}
    (guide / "nova" / "vae").mkdir()
    (guide / "nova" / "vae" / "config.json").write_text(json.dumps(config))
    vae = MODELS.build(parse_config(TrainConfig, COMPONENTS, [f"{name}.yml"]).vae)
    assert (type(vae).__name__, vae.out_channels) == ("ScaleOnlyVAE", 4)
    mean = torch.arange(8.0).view(1, 4, 1, 1, 2)
    certain = torch.cat([mean, torch.full_like(mean, -30.0)], dim=1)
    torch.testing.assert_close(vae.sample(certain), (mean - 2) * 0.5, rtol=0, atol=1e-5)


def test_the_text_is_sorted_yaml_with_every_key(guide):
    text = (guide / "nova_d48w1024_1024px.yml").read_text()
    assert text.splitlines()[:3] == ["GPU_ID: 0", "MODEL:", "  CONFIG: {}"]
    assert read_yacs(guide / "nova_d48w1024_1024px.yml")["seed"] == 3


PUBLISHED = {
    "_class_name": "NOVATransformer3DModel", "image_dim": 4, "image_size": [480, 768], "image_stride": 8, "text_token_dim": 2560,
    "text_token_len": 256, "rotary_pos_embed": False, "video_base_size": [16, 15, 24], "image_base_size": [30, 48],
    "arch": ["vit_d16w1024", "vit_d32w1024", "mlp_d3w1280"],
}  # fmt: skip
"""Of the published video model."""


def test_a_published_config_is_the_named_model():
    found = architecture(PUBLISHED)
    with torch.device("meta"):
        ours, named = MODELS.build({"type": "NOVA", **found}), MODELS.build({"type": "NOVA-d48w1024-T2V"})
        other = MODELS.build(
            {"type": "NOVA", **architecture({**PUBLISHED, "rotary_pos_embed": True, "video_mixer_rank": 24})}
        )
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in named.named_parameters()}
    assert (ours.base_size, ours.positions, ours.patch_size) == ([16, 60, 96], "absolute", (1, 4, 4))
    assert (other.positions, other.base_size) == ("rotary", None)
    assert other.video_encoder.mixer.lora.weight.shape == (24, 1024)
    assert architecture({**PUBLISHED, "video_mixer_rank": -1})["mixer_rank"] == -1
    assert architecture({**PUBLISHED, "image_stride": 16})["patch_size"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": ["resnet"]}, r"not of NOVA's form .*arch=\['resnet'\]"),
        ({"arch": None}, "not of NOVA's form .*arch=None"),
        ({"arch": [1, 2, 3]}, "not of NOVA's form"),
        ({"arch": ["vit_d16w768", "vit_d32w1024", "mlp_d6w768"]}, "the encoders have two widths"),
        ({"video_mixer_ranks": 4}, "an unknown key 'video_mixer_ranks'. Did you mean 'video_mixer_rank'"),
        ({1: 2}, "an unknown key 1"),
        ({"text_token_dim": None}, "a model of classes"),
        ({"image_base_size": [64, 64]}, r"latents of \[60, 96\] and of \[128, 128\]"),
        ({"image_base_size": [30]}, r"latents of \[60, 96\] and of \[60\]"),
        ({"video_base_size": [8]}, r"not of NOVA's form .*video_base_size=\[8\]"),
        ({"video_base_size": 8}, "not of NOVA's form .*video_base_size=8"),
        ({"image_stride": 0}, "not of NOVA's form .*image_stride=0"),
        ({"image_stride": None}, "not of NOVA's form .*image_stride=None"),
        ({"video_mixer_rank": "many"}, "not of NOVA's form .*video_mixer_rank='many'"),
    ],
)
def test_other_architectures_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        architecture({**PUBLISHED, **change})


def test_the_noise_is_that_of_the_pipelines_scheduler(guide):
    folder = guide / "nova" / "scheduler"
    folder.mkdir()
    (folder / "scheduler_config.json").write_text('{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}')
    assert read_yacs(guide / "nova_d48w1024_1024px.yml")["scheduler"] == {
        "type": "nova",
        "loss_repeat": 4,
        "shift": 3.0,
    }
    (folder / "scheduler_config.json").write_text('{"_class_name": "DDPMScheduler"}')
    with pytest.raises(UserError, match="flow matching with a fixed shift, not DDPMScheduler"):
        read_yacs(guide / "nova_d48w1024_1024px.yml")


def test_keys_and_types_are_checked_where_they_are_set():
    cfg = default_cfg()
    with pytest.raises(AttributeError, match=r"SOLVER.BASELR is not a key of this config. Did you mean 'BASE_LR'"):
        cfg.SOLVER.BASELR = 1
    with pytest.raises(UserError, match=r"SOLVER.MAX_STEPS='a hundred': expected int, not str"):
        cfg.SOLVER.MAX_STEPS = "a hundred"
    with pytest.raises(UserError, match=r"SOLVER is a group of keys"):
        cfg.SOLVER = {}
    cfg.SOLVER.BASE_LR = 1  # an integer is a number too
    assert cfg.SOLVER.BASE_LR == 1.0


def test_texts_are_read_as_yacs_reads_them(guide):
    (guide / "text.yml").write_text(
        f"PIPELINE: {{TYPE: nova_train_t2i}}\nMODEL: {{WEIGHTS: '{guide / 'nova'}'}}\n"
        "SOLVER: {BASE_LR: 1e-4, MAX_STEPS: 1e5, SNAPSHOT_PREFIX: 1e5}\nTRAIN: {DATASET: d}\n"
    )
    values = read_yacs(guide / "text.yml")
    assert (values["lr"], values["max_steps"], values["exp_name"]) == (1e-4, 100_000, "1e5")
    assert type(values["max_steps"]) is int
    cfg = default_cfg()
    cfg.SOLVER.BASE_LR, cfg.SOLVER.DECAY_STEPS, cfg.SOLVER.MAX_STEPS = "1e-3", "[10, 20]", "200"
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.DECAY_STEPS, cfg.SOLVER.MAX_STEPS) == (1e-3, [10, 20], 200)
    for wrong in (1.5, "1.5", "1e-4", "[1]", "1e999"):
        with pytest.raises(UserError, match=r"SOLVER.MAX_STEPS=.*: expected int, not"):
            cfg.SOLVER.MAX_STEPS = wrong


def test_a_config_can_be_copied():
    cfg = default_cfg()
    cfg.SOLVER.MAX_STEPS = 7
    for copied in (copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert str(copied) == str(cfg)
        copied.SOLVER.MAX_STEPS = 8
        assert cfg.SOLVER.MAX_STEPS == 7


@pytest.mark.parametrize("text", ["SOLVER:\n", "TRAIN:\nSOLVER: {}\n", "MODEL: {CONFIG: }\nPIPELINE: {MODULES: }\n"])
def test_an_empty_group_sets_nothing(guide, text):
    (guide / "empty.yml").write_text(text)
    cfg = default_cfg()
    cfg.merge(yaml.safe_load(text))
    assert str(cfg) == str(default_cfg())
    with pytest.raises(UserError, match=r"MODEL.WEIGHTS=''"):
        read_yacs(guide / "empty.yml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: 2\n", "1 is not a key of this config"),
        ("SOLVER: {2: 3}\n", "SOLVER.2 is not a key of this config"),
        ("SOLVER: 3\n", "SOLVER is a group of keys"),
        ("SOLVER: {BASE_LR: }\n", "SOLVER.BASE_LR=None: expected float"),
        ("PIPELINE: {MODULES: {vae: 1}}\n", "MODULES={'vae': 1}: there are vae, .* each with the name of a folder"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, message):
    (tmp_path / "wrong.yml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_yacs(tmp_path / "wrong.yml")


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is no valid JSON"), ("[1]", "holds a list; expected an object")]
)
def test_a_damaged_folder(guide, content, message):
    (guide / "nova" / "transformer" / "config.json").write_text(content)
    with pytest.raises(UserError, match=rf"config\.json {message}"):
        read_yacs(guide / "nova_d48w1024_1024px.yml")


def test_what_there_is_not_is_reported_at_once(tmp_path):
    cfg = default_cfg()
    cfg.merge({"PIPELINE": {"TYPE": "nova_train_c2i", "MODULES": {"unet": "x"}}, "NUM_GPUS": 8, "SOLVER": {"LR_POLICY": "steps_with_decay", "MIN_LR": 1e-6},
               "TRAIN": {"DATASET2": "more", "CHECKPOINTING": 4, "DEVICE_EMA": "disk"}})  # fmt: skip
    (tmp_path / "all.yml").write_text(str(cfg))
    with pytest.raises(UserError) as error:
        read_yacs(tmp_path / "all.yml")
    for part in ("nova_train_c2i", "NUM_GPUS=8", "steps_with_decay", "MIN_LR", "DATASET2", "CHECKPOINTING=4", "DEVICE_EMA='disk'", "MODULES={'unet': 'x'}",
                 "MODEL.WEIGHTS=''", "TRAIN.DATASET=''"):  # fmt: skip
        assert part in str(error.value)
    (tmp_path / "typo.yml").write_text("TRAINN: {}\n")
    with pytest.raises(UserError, match=r"TRAINN is not a key of this config. Did you mean 'TRAIN'"):
        read_yacs(tmp_path / "typo.yml")


CHANGED = {
    "NUM_GPUS": 2, "RNG_SEED": 4, "GPU_ID": 1, "PIPELINE.TYPE": "nova_train_t2v", "PIPELINE.MODULES": {"vae": "elsewhere"},
    "MODEL.TYPE": "unet", "MODEL.CONFIG": {"arch": ["vit_d2w64", "vit_d4w64", "mlp_d2w64"]}, "MODEL.WEIGHTS": "",
    "MODEL.PRECISION": "float16", "SOLVER.BASE_LR": 1e-3, "SOLVER.MIN_LR": 1e-6, "SOLVER.WARM_UP_STEPS": 1,
    "SOLVER.WARM_UP_FACTOR": 0.1, "SOLVER.LR_POLICY": "cosine_decay", "SOLVER.DECAY_STEPS": [10, 20], "SOLVER.DECAY_GAMMA": 0.9,
    "SOLVER.MAX_STEPS": 7, "SOLVER.OPTIMIZER": "SGD", "SOLVER.ADAM_BETA2": 0.9, "SOLVER.WEIGHT_DECAY": 0.1,
    "SOLVER.ACCUM_STEPS": 2, "SOLVER.DISPLAY": 1, "SOLVER.EMA_EVERY": 10, "SOLVER.SNAPSHOT_EVERY": 10,
    "SOLVER.SNAPSHOT_PREFIX": "mine", "TRAIN.DATASET": "other", "TRAIN.DATASET2": "more", "TRAIN.LOADER": "mine",
    "TRAIN.NUM_THREADS": 1, "TRAIN.BATCH_SIZE": 2, "TRAIN.MODEL_EMA": 0.5, "TRAIN.DEVICE_EMA": "cpu", "TRAIN.LOSS_REPEAT": 1,
    "TRAIN.CHECKPOINTING": 1,
}  # fmt: skip
"""Each key of the guide's configs with a value that is not its default."""


def leaves(node, path=""):
    for key, value in vars(node).items():
        if key == "_path":
            continue
        yield from leaves(value, f"{path}{key}.") if isinstance(value, CfgNode) else [f"{path}{key}"]


def set_key(cfg, key, value):
    *groups, name = key.split(".")
    for group in groups:
        cfg = getattr(cfg, group)
    setattr(cfg, name, value)


def ready(guide):
    cfg = default_cfg()
    cfg.merge(
        {"PIPELINE": {"TYPE": "nova_train_t2i"}, "MODEL": {"WEIGHTS": str(guide / "nova")}, "TRAIN": {"DATASET": "d"}}
    )
    return cfg


def tried(call, *args):
    """What a call returns, and what a UserError of it says."""
    try:
        return call(*args), None
    except UserError as error:
        return None, str(error)


def test_every_key_has_a_value_to_be_tried():
    assert sorted(CHANGED) == sorted(leaves(default_cfg()))


@pytest.mark.parametrize("key", CHANGED)
def test_a_key_that_is_set_does_something_or_is_an_error(guide, key):
    plain, cfg = ready(guide), ready(guide)
    set_key(cfg, key, CHANGED[key])
    values, message = tried(to_train_config, cfg)
    assert (values != to_train_config(plain)) if message is None else (f"  {key}=" in message)


@pytest.mark.parametrize("key", [key for key in CHANGED if not isinstance(CHANGED[key], str | list | dict)])
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_that_is_too_small_is_no_failure_of_ours(guide, key, value):
    cfg = ready(guide)
    set_key(cfg, key, value)
    (guide / "small.yml").write_text(str(cfg))
    _, message = tried(parse_config, TrainConfig, COMPONENTS, ["--cfg", "small.yml"])
    assert message is None or str(value) in message


def test_without_a_decay_there_is_no_ema(guide):
    cfg = ready(guide)
    cfg.SOLVER.EMA_EVERY, cfg.TRAIN.MODEL_EMA = 1, 0
    assert to_train_config(cfg)["ema_decay"] == 0
    cfg.SOLVER.EMA_EVERY = 0
    with pytest.raises(UserError, match=r"SOLVER.EMA_EVERY=0: .* at least 1; MODEL_EMA = 0 makes no EMA"):
        to_train_config(cfg)


def test_a_deepspeed_file_chooses_engine_format_and_batch(guide, caplog):
    deepspeed = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
                 "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}  # fmt: skip
    (guide / "zero2_bf16.json").write_text(json.dumps(deepspeed))
    command = ["--cfg", "nova_d48w1024_1024px.yml", "--deepspeed", "zero2_bf16.json"]
    cfg = parse_config(TrainConfig, {}, command)
    assert (cfg.plugin, cfg.fsdp_reshard, cfg.dtype) == ("fsdp2", "zero2", "bf16")
    assert (cfg.batch_size, cfg.accumulation_steps, cfg.grad_clip) == (2, 4, 1.0)
    (guide / "zero2_bf16.json").write_text(
        json.dumps({**deepspeed, "optimizer": {"type": "Adam"}, "train_batch_size": 8})
    )
    with pytest.raises(UserError, match=r"not supported: optimizer=.*; train_batch_size=8"):
        parse_config(TrainConfig, {}, command)
    zero = {"stage": 2, "overlap_comm": True, "allgather_bucket_size": 5e8, "reduce_bucket_size": "auto"}
    usual = {**deepspeed, "train_batch_size": "auto", "zero_optimization": zero, "steps_per_print": 10}
    (guide / "zero2_bf16.json").write_text(json.dumps(usual))
    assert parse_config(TrainConfig, {}, command) == cfg
    idle = "zero_optimization.overlap_comm, zero_optimization.allgather_bucket_size, steps_per_print"
    assert f"note: --deepspeed zero2_bf16.json: {idle} have no effect here." in caplog.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"zero_optimization": {"stage": 0}}, {"plugin": "ddp"}),
        (
            {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
            {"plugin": "ddp", "hybrid_zero": True, "dtype": "fp16"},
        ),
        ({"zero_optimization": {"stage": 3}, "fp16": {"enabled": False}}, {"plugin": "fsdp2", "fsdp_reshard": "zero3"}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, {"dtype": "bf16"}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16={'enabled': True}"),
        ({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}, {"dtype": "fp16"}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16=.*loss_scale"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False, "min_loss_scale": 1}}, {}),
        ({"zero_optimization": {"stage": [2]}}, r"zero_optimization={'stage': \[2\]}"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization={'stage': True}"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization={'stage': 4}"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
            {"plugin": "fsdp2", "optimizer_offload": True},
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, {"plugin": "fsdp2"}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "zero_optimization=.*nvme"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_optimization=.*quantized"),
        ({"zero_optimization": 2}, "zero_optimization=2"),
        ({"train_micro_batch_size_per_gpu": "auto"}, {}),
        ({"train_micro_batch_size_per_gpu": "4"}, "train_micro_batch_size_per_gpu='4'"),
        ([1], "ds.json holds a list; expected an object. It may have one of bf16 and fp16"),
    ],
)
def test_what_the_keys_of_a_deepspeed_file_mean(tmp_path, content, expected):
    (tmp_path / "ds.json").write_text(json.dumps(content))
    if isinstance(expected, dict):
        assert deepspeed_overrides(tmp_path / "ds.json")[0] == expected
        return
    with pytest.raises(UserError, match=expected):
        deepspeed_overrides(tmp_path / "ds.json")
