"""The configs of NOVA's training guide (YACS, diffnext.config), and what they mean here.

    from opensora.config.yacs import cfg      # in place of diffnext.config
    cfg.PIPELINE.TYPE = "nova_train_t2i"
    open("nova.yml", "w").write(str(cfg))

    python scripts/train.py nova.yml                # or --cfg nova.yml
    python scripts/inference.py nova.yml --ckpt-path CHECKPOINT --prompt "..."
    python scripts/inference.py PIPELINE_FOLDER --prompt "..."      # with model_index.json, transformer/, vae/ and others

Keys and defaults are the guide's; an unknown key, a value of another type and a setting without a counterpart are errors.
A DeepSpeed file (`--deepspeed zero2.json`) sets engine, dtype, batch and clipping.
"""

import ast
import contextlib
import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from opensora.config.upgrade import translate_level
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.folders import read_json

DEFAULTS: dict[str, Any] = {
    "NUM_GPUS": 1,
    "RNG_SEED": 3,
    "GPU_ID": 0,
    "PIPELINE": {"TYPE": "", "MODULES": {}},
    "MODEL": {"TYPE": "transformer", "CONFIG": {}, "WEIGHTS": "", "PRECISION": "bfloat16"},
    "SOLVER": {
        "BASE_LR": 1e-4, "MIN_LR": 0.0, "WARM_UP_STEPS": 250, "WARM_UP_FACTOR": 0.001, "LR_POLICY": "", "DECAY_STEPS": [],
        "DECAY_GAMMA": 0.5, "MAX_STEPS": 2**31 - 1, "OPTIMIZER": "AdamW", "ADAM_BETA2": 0.95, "WEIGHT_DECAY": 0.02,
        "ACCUM_STEPS": 1, "DISPLAY": 20, "EMA_EVERY": 100, "SNAPSHOT_EVERY": 5000, "SNAPSHOT_PREFIX": "model",
    },
    "TRAIN": {
        "DATASET": "", "DATASET2": "", "LOADER": "vae_train", "NUM_THREADS": 4, "BATCH_SIZE": 1, "MODEL_EMA": 0.99,
        "DEVICE_EMA": "gpu", "LOSS_REPEAT": 4, "CHECKPOINTING": 2,
    },
}  # fmt: skip
FREE = ("CONFIG", "MODULES")  # groups with any keys
MODULES = ("vae", "text_encoder", "tokenizer", "transformer", "scheduler")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
FIELDS = {  # our field -> the key with the same meaning
    "seed": "RNG_SEED",
    "data_path": "TRAIN.DATASET",
    "num_workers": "TRAIN.NUM_THREADS",
    "batch_size": "TRAIN.BATCH_SIZE",
    "accumulation_steps": "SOLVER.ACCUM_STEPS",
    "lr": "SOLVER.BASE_LR",
    "warmup_steps": "SOLVER.WARM_UP_STEPS",
    "weight_decay": "SOLVER.WEIGHT_DECAY",
    "log_every": "SOLVER.DISPLAY",
    "ckpt_every": "SOLVER.SNAPSHOT_EVERY",
}
FIXED = (  # keys of which only the default is supported
    "NUM_GPUS", "GPU_ID", "MODEL.TYPE", "TRAIN.DATASET2", "TRAIN.LOADER", "SOLVER.DECAY_STEPS", "SOLVER.DECAY_GAMMA",
    "SOLVER.MIN_LR", "SOLVER.OPTIMIZER", "SOLVER.WARM_UP_FACTOR",
)  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "PIPELINE.TYPE": ("nova_train_t2i", "nova_train_t2v"),
    "MODEL.PRECISION": tuple(DTYPES),
    "TRAIN.CHECKPOINTING": (0, 1, 2, 3),
    "TRAIN.DEVICE_EMA": ("cpu", "cuda", "gpu", ""),
    "SOLVER.LR_POLICY": ("", "cosine_decay"),
}
REMEDIES = {
    "NUM_GPUS": "; start torchrun --nproc_per_node N scripts/train.py FILE",
    "GPU_ID": "; set CUDA_VISIBLE_DEVICES in the environment",
    "TRAIN.DATASET2": "; write all fields into one folder of records",
}
DEEPSPEED_FIELDS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "accumulation_steps",
    "gradient_clipping": "grad_clip",
}
DEEPSPEED_STAGES: dict[int, dict[str, Any]] = {
    0: {"plugin": "ddp"},
    1: {"plugin": "ddp", "hybrid_zero": True},
    2: {"plugin": "fsdp2"},
    3: {"plugin": "fsdp2", "fsdp_reshard": "zero3"},
}
HEADS = {768: 12, 1024: 16, 1536: 16}
ARCHITECTURE = (  # keys of a published model's config; `image_size` is the data's here
    "arch", "image_dim", "image_size", "image_stride", "text_token_dim", "text_token_len", "image_base_size",
    "video_base_size", "video_mixer_rank", "rotary_pos_embed",
)  # fmt: skip
EXAMPLE = '["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"]'
PIPELINE = "model_index.json"  # in the folder of a pipeline
VIDEO_FRAMES, FPS = 33, 12  # of NOVA's published video model
MODEL_HINT = f'Name a complete pipeline\'s folder in MODEL.WEIGHTS, or describe the model in MODEL.CONFIG, such as {{"arch": {EXAMPLE}}}.'


class CfgNode:
    """A group of keys, which are its attributes. `str()` is YAML, keys sorted."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        vars(self)["_path"] = path
        for key, value in values.items():
            nested = isinstance(value, Mapping) and key not in FREE
            vars(self)[key] = CfgNode(value, f"{path}{key}.") if nested else copy.deepcopy(value)

    def __getattr__(self, key: str) -> Any:  # of what is not there
        raise AttributeError(self._unknown(key) if not key.startswith("_") else key)

    def __setattr__(self, key: str, given: Any) -> None:
        """A text is read as yacs does; an int counts as float, a whole float as int and a tuple as list."""
        path, old, value = f"{self._path}{key}", getattr(self, key), given
        if isinstance(old, CfgNode):
            raise UserError(f"{path} is a group of keys: set {path}.KEY.")
        if isinstance(given, str) and not isinstance(old, str):  # to PyYAML `1e-4` is a text, as it lacks a point
            with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                value = ast.literal_eval(given)
        numbers = type(value) in (int, float) and type(old) in (int, float)
        if numbers and (isinstance(old, float) or float(value).is_integer()):
            value = type(old)(value)
        elif isinstance(value, tuple | Mapping) and isinstance(old, list | dict):
            value = list(value) if isinstance(value, tuple) else dict(value)
        if type(value) is not type(old):
            raise UserError(f"{path}={given!r}: expected {type(old).__name__}, not {type(value).__name__}.")
        vars(self)[key] = value

    def __str__(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = {key: value for key, value in vars(self).items() if key != "_path"}
        return {key: v.to_dict() if isinstance(v, CfgNode) else copy.deepcopy(v) for key, v in values.items()}

    def merge(self, values: Mapping[str, Any]) -> None:
        """Take over values; the keys must be known. A group without values, `SOLVER:` in YAML, sets nothing.

        Raises:
            UserError: a key is unknown, or a value has another type.
        """
        for key, value in values.items():
            if key not in vars(self):
                raise UserError(self._unknown(key))
            old = vars(self)[key]
            if isinstance(old, CfgNode) and isinstance(value, Mapping):
                old.merge(value)
            elif value is not None or not isinstance(old, CfgNode | dict):
                setattr(self, key, value)

    def _unknown(self, key: Any) -> str:
        # YAML's keys may be numbers
        return f"{self._path}{key} is not a key of this config.{did_you_mean(str(key), list(vars(self)))}"


def default_cfg() -> CfgNode:
    """A config with the guide's defaults."""
    return CfgNode(DEFAULTS)


cfg = default_cfg()


def read_yacs(path: Path, *, for_sampling: bool = False) -> dict[str, Any]:
    """The values of a YAML file as those of a `TrainConfig`, or of an `InferenceConfig` that samples what it trains.

    Raises:
        UserError: the file is not such a config, or sets what is not supported.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path}: no valid YAML ({error}).") from error
    if not isinstance(content, Mapping):
        raise UserError(f"config file {path}: expected keys such as PIPELINE, MODEL, SOLVER and TRAIN.")
    node = default_cfg()
    node.merge(content)
    values = to_train_config(node)
    if not for_sampling:
        return values
    shared = ("model", "vae", "text_encoder", "scheduler", "dtype")
    return {name: values[name] for name in shared} | _published_size(values, _model_config(node))


def read_pipeline(folder: Path) -> dict[str, Any]:
    """The values of an `InferenceConfig` that samples with the pipeline in a folder, as `diffnext` saves one.

    Raises:
        UserError: it is another pipeline than NOVA's.
    """
    node = default_cfg()
    node.MODEL.WEIGHTS = str(folder)
    config = _model_config(node)
    if "arch" not in config:
        raise UserError(
            f"{folder}: only NOVA's pipelines can take a config's place, and this one's transformer is a "
            f"{config.get('_class_name')}. Name a config, and the weights with --ckpt-path {folder / 'transformer'}."
        )
    base = config.get("video_base_size")
    video = isinstance(base, list) and base[:1] > [1]  # as there: such a model has motion tokens
    node.PIPELINE.TYPE = CHOICES["PIPELINE.TYPE"][video]
    components = _components(node)
    return components | _published_size(components, config)


def _published_size(components: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Frames, rate and, where the model's config has it, height and width of what NOVA's pipelines make."""
    size, frames = config.get("image_size"), VIDEO_FRAMES if components["model"]["motion"] else 1
    known = {} if size is None else {"image_size": [size, size] if isinstance(size, int) else size}
    return {"num_frames": frames, "fps": FPS, **known}


def to_train_config(node: CfgNode) -> dict[str, Any]:
    """The values of a `TrainConfig` that train what the guide's config would.

    Raises:
        UserError: lists every key that is not supported.
    """
    modules, solver, train = node.PIPELINE.MODULES, node.SOLVER, node.TRAIN
    supported = CHOICES | {key: (_at(default_cfg(), key),) for key in FIXED}
    wrong = {
        key: f"supported: {', '.join(map(repr, values))}{REMEDIES.get(key, '')}"
        for key, values in supported.items()
        if _at(node, key) not in values
    }
    if not set(modules) <= set(MODULES) or not all(isinstance(folder, str) for folder in modules.values()):
        wrong["PIPELINE.MODULES"] = f"there are {', '.join(MODULES)}, each with the name of a folder"
    if not node.MODEL.WEIGHTS:
        wrong["MODEL.WEIGHTS"] = "name the folder that has vae, text_encoder and transformer"
    if not train.DATASET:
        wrong["TRAIN.DATASET"] = "name the folder of records"
    if solver.EMA_EVERY < 1:
        wrong["SOLVER.EMA_EVERY"] = "a number of steps is at least 1; MODEL_EMA = 0 makes no EMA"
    if not 0 <= train.MODEL_EMA < 1:
        wrong["TRAIN.MODEL_EMA"] = "a decay is in [0, 1)"
    if wrong:
        lines = "".join(f"\n  {key}={_at(node, key)!r}: {why}." for key, why in wrong.items())
        raise UserError(f"this config sets what is not supported:{lines}")
    return {
        **_components(node),
        **{field: _at(node, key) for field, key in FIELDS.items()},
        "dtype": DTYPES[node.MODEL.PRECISION],
        "dataset": {"type": "RecordVideoTextDataset", "data_path": train.DATASET},
        "epochs": 10**6,
        "max_steps": None if DEFAULTS["SOLVER"]["MAX_STEPS"] == solver.MAX_STEPS else solver.MAX_STEPS,
        "lr_schedule": "cosine" if solver.LR_POLICY == "cosine_decay" else "constant",
        "adam_betas": (0.9, solver.ADAM_BETA2),
        "grad_clip": 0.0,
        # NOVA's EMA decays once in EMA_EVERY steps
        "ema_decay": train.MODEL_EMA ** (1 / solver.EMA_EVERY) if train.MODEL_EMA else 0.0,
        "ema_every": solver.EMA_EVERY if train.MODEL_EMA else 1,
        "ema_device": "cpu" if train.DEVICE_EMA == "cpu" else "model",
        "exp_name": solver.SNAPSHOT_PREFIX or None,
        "grad_checkpoint": translate_level(train.CHECKPOINTING),
    }


def deepspeed_overrides(path: Path) -> dict[str, Any]:
    """What a DeepSpeed JSON means here: engine, dtype, batch, accumulation and clipping.

    Raises:
        UserError: it is not a JSON object, or has a key that is not supported.
    """
    hint = (
        "It may have one of bf16 and fp16 with 'enabled', zero_optimization with 'stage' 0 to 3, and "
        f"{', '.join(DEEPSPEED_FIELDS)} as numbers; everything else is a field of the config (--help)."
    )
    values: dict[str, Any] = {}
    unknown = []
    for key, value in read_json(path, hint).items():
        found: dict[str, Any] | None = None
        if key in DEEPSPEED_FIELDS and type(value) in (int, float):
            found = {DEEPSPEED_FIELDS[key]: value}
        elif key in ("bf16", "fp16") and value == {"enabled": False}:
            found = {}
        elif key in ("bf16", "fp16") and value == {"enabled": True} and "dtype" not in values:
            found = {"dtype": key}
        elif key == "zero_optimization" and isinstance(value, dict) and value.keys() == {"stage"}:
            found = DEEPSPEED_STAGES.get(value["stage"]) if type(value["stage"]) is int else None  # not True
        if found is None:
            unknown.append(f"{key}={value!r}")
        values |= found or {}
    if unknown:
        raise UserError(f"--deepspeed {path}: not supported: {'; '.join(unknown)}. {hint}")
    return values


def _at(node: CfgNode, key: str) -> Any:
    """The value of a key such as "SOLVER.BASE_LR"."""
    return functools.reduce(getattr, key.split("."), node)


def _model_config(node: CfgNode) -> dict[str, Any]:
    """The model's config: that of the node or, where that is empty, of the folder with its weights."""
    folder = node.PIPELINE.MODULES.get("transformer", str(Path(node.MODEL.WEIGHTS) / "transformer"))
    config: dict[str, Any] = node.MODEL.CONFIG or read_json(Path(folder) / "config.json", MODEL_HINT)
    return config


def _components(node: CfgNode) -> dict[str, Any]:
    """Model, VAE, text encoder and scheduler of a pipeline's folder."""
    video = node.PIPELINE.TYPE.endswith("t2v")
    folders = {name: node.PIPELINE.MODULES.get(name, str(Path(node.MODEL.WEIGHTS) / name)) for name in MODULES}
    model = {"type": "NOVA", "motion": video, "trained": "all" if video else "image"}
    config = _model_config(node)
    if not node.MODEL.CONFIG:
        model["from_pretrained"] = folders["transformer"]
    text_encoder = {"type": "hf", "from_pretrained": folders["text_encoder"]}
    text_encoder["model_max_length"] = config.get("text_token_len") or 256
    if Path(folders["tokenizer"]).is_dir():
        text_encoder["tokenizer"] = folders["tokenizer"]
    vae_config = Path(folders["vae"]) / "config.json"
    vae = "DiffusersVideoVAE" if video else "VideoAutoencoderKL"
    if vae_config.is_file() and read_json(vae_config, MODEL_HINT).get("_class_name") == "AutoencoderKLOpenSora":
        vae = "ScaleOnlyVAE"  # of NOVA's own video VAE there is only the scale: enough to train from records
    scheduler = {"type": "nova", "loss_repeat": node.TRAIN.LOSS_REPEAT}
    noise_config = Path(folders["scheduler"]) / "scheduler_config.json"
    if noise_config.is_file():
        noise = read_json(noise_config, MODEL_HINT)
        kind = str(noise.get("_class_name", "FlowMatch"))
        if not kind.startswith("FlowMatch") or noise.get("use_dynamic_shifting"):
            raise UserError(f"{noise_config}: the scheduler 'nova' does flow matching with a fixed shift, not {kind}.")
        names = {"shift": "shift", "num_train_timesteps": "num_timesteps"}
        scheduler |= {ours: noise[theirs] for theirs, ours in names.items() if theirs in noise}
    return {
        "model": {**model, **architecture(config)},
        "vae": {"type": vae, "from_pretrained": folders["vae"]},
        "text_encoder": text_encoder,
        "scheduler": scheduler,
    }


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `NOVA` for a published config: `arch`, such as ["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"], and more.

    Raises:
        UserError: it is not of that form, or has an unknown key.
    """
    for key in config:
        if key not in ARCHITECTURE and not str(key).startswith("_"):
            hint = did_you_mean(str(key), list(ARCHITECTURE))
            raise UserError(
                f"the model's config has an unknown key {key!r}.{hint} Known are {', '.join(ARCHITECTURE)}."
            )
    try:
        return _architecture(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in config.items())
        raise UserError(
            f"the model's config is not of NOVA's form ({error}): {shown}. Expected is one such as arch={EXAMPLE}, "
            "image_stride=8, video_base_size=[16, 15, 24], image_base_size=[30, 48]."
        ) from error


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    ((depth, width), (image_depth, image_width), (head_depth, head_width)) = (
        tuple(int(n) for n in name.partition("_d")[2].split("w"))[:2] for name in config["arch"]
    )
    if image_width != width:
        raise ValueError("the encoders have two widths")
    if config.get("text_token_dim", 1) is None:
        raise ValueError("a model of classes; there is text to image and to video")
    patch = 15 // config.get("image_stride", 8) + 1
    found: dict[str, Any] = {
        "width": width, "num_heads": HEADS.get(width, max(1, width // 64)), "video_depth": depth, "image_depth": image_depth,
        "head_depth": head_depth, "head_width": head_width, "patch_size": patch,
    }  # fmt: skip
    if config.get("image_dim"):
        found["in_channels"] = config["image_dim"]
    if config.get("video_mixer_rank"):
        found["mixer_rank"] = max(config["video_mixer_rank"], -1)
    if config.get("rotary_pos_embed"):
        found["positions"] = "rotary"
    elif config.get("video_base_size") is not None:
        frames, rows, columns = config["video_base_size"]  # in patches of the video encoder, which are twice as large
        coarse = [2 * patch * rows, 2 * patch * columns]
        fine = [patch * n for n in config.get("image_base_size") or (2 * rows, 2 * columns)]
        if fine != coarse:
            raise ValueError(f"positions of latents of {coarse} and of {fine}, which must have one size")
        found["base_size"] = [frames, *coarse]
    return found
