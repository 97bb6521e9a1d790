"""The configs of NOVA's training guide (YACS, diffnext.config), and what they mean here.

    from opensora.config.yacs import cfg      # in place of diffnext.config
    cfg.PIPELINE.TYPE = "nova_train_t2i"
    open("nova.yml", "w").write(str(cfg))

    python scripts/train.py nova.yml                # or --cfg nova.yml

Keys and defaults are the guide's; an unknown key, or a value of another type, is an error. So is setting a key that is not
supported; the message says what to use instead. A DeepSpeed file (`--deepspeed zero2.json`) sets engine, dtype, batch and
clipping.
"""

import ast
import contextlib
import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from opensora.config.upgrade import (
    DEEPSPEED_FIELDS,
    DEEPSPEED_STAGES,
    PIPELINE_MODULES,
    YACS_DEFAULTS,
    YACS_DTYPES,
    YACS_FIELDS,
    YACS_RULES,
    translate_level,
)
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

FREE = ("CONFIG", "MODULES")  # whose keys are the model's
HEADS = {768: 12, 1024: 16, 1536: 16}
VAES = {"nova_train_t2i": "VideoAutoencoderKL", "nova_train_t2v": "DiffusersVideoVAE"}  # of diffusers
TEXT_TOKENS = 256
ARCHITECTURE = (
    "arch", "image_dim", "image_size", "image_stride", "text_token_dim", "text_token_len", "image_base_size",
    "video_base_size", "video_mixer_rank", "rotary_pos_embed",
)  # fmt: skip
"""Keys of a published model's config; `image_size` is the data's here."""
ARCHITECTURE_NUMBERS: dict[str, tuple[int, str]] = {  # key -> length of a list or 0, what is expected
    "image_stride": (0, "a whole number from 1"),
    "video_base_size": (3, "three whole numbers from 1, or None"),
    "image_base_size": (2, "two whole numbers from 1, or None"),
    "video_mixer_rank": (0, "a whole number, or None"),
}
IMAGE_STRIDE = 8  # where a config does not say


class CfgNode:
    """A group of keys, which are its attributes. `str()` is YAML, keys sorted."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        nested = {key: isinstance(value, Mapping) and key not in FREE for key, value in values.items()}
        own = {key: CfgNode(value, f"{path}{key}.") if nested[key] else value for key, value in values.items()}
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_values", own)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):  # looked up by copy and pickle before there are values to look in
            raise AttributeError(key)
        if key not in self._values:
            raise AttributeError(self._unknown(key))
        return self._values[key]

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in self._values:
            raise AttributeError(self._unknown(key))
        self._values[key] = _typed(f"{self._path}{key}", value, self._values[key])

    def __str__(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {key: v.to_dict() if isinstance(v, CfgNode) else copy.deepcopy(v) for key, v in self._values.items()}

    def at(self, path: str) -> Any:
        """The value of a dotted key such as "SOLVER.BASE_LR"."""
        return functools.reduce(getattr, path.split("."), self)

    def merge(self, values: Mapping[str, Any]) -> None:
        """Take over values; the keys must be known. A group without values, `SOLVER:` in YAML, sets nothing.

        Raises:
            UserError: a key is unknown, or a value has another type.
        """
        for key, value in values.items():
            if key not in self._values:
                raise UserError(self._unknown(key))
            old = self._values[key]
            if value is None and isinstance(old, CfgNode | dict):
                continue
            if isinstance(old, CfgNode) and isinstance(value, Mapping):
                old.merge(value)
            else:
                setattr(self, key, value)

    def _unknown(self, key: Any) -> str:
        # YAML's keys may be numbers
        return f"{self._path}{key} is not a key of this config.{did_you_mean(str(key), list(self._values))}"


def default_cfg() -> CfgNode:
    """A config with the guide's defaults."""
    return CfgNode(copy.deepcopy(YACS_DEFAULTS))


cfg = default_cfg()


def read_yacs(path: Path) -> dict[str, Any]:
    """The values of a YAML file as those of a `TrainConfig`.

    Raises:
        UserError: the file is not such a config, or sets what is not supported.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path}: no valid YAML ({error}).") from error
    if not isinstance(content, Mapping):
        raise UserError(f"config file {path}: expected keys such as PIPELINE, MODEL, SOLVER and TRAIN.")
    node = default_cfg()
    node.merge(content)
    return to_train_config(node)


def to_train_config(node: CfgNode) -> dict[str, Any]:
    """The values of a `TrainConfig` that train what the guide's config would.

    Raises:
        UserError: lists every key that is not supported.
    """
    if problems := [
        f"{key}={value!r}: {remedy}" for key, supported, remedy in YACS_RULES if not supported(value := node.at(key))
    ]:
        raise UserError("this config sets what is not supported:\n" + "\n".join(f"  {p}" for p in problems))
    solver, train = node.SOLVER, node.TRAIN
    return {
        **_components(node),
        **{field: node.at(key) for field, key in YACS_FIELDS.items()},
        "dtype": YACS_DTYPES[node.MODEL.PRECISION],
        "dataset": {"type": "RecordVideoTextDataset", "data_path": train.DATASET},
        "epochs": 10**6,
        "max_steps": None if YACS_DEFAULTS["SOLVER"]["MAX_STEPS"] == solver.MAX_STEPS else solver.MAX_STEPS,
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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--deepspeed {path}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--deepspeed {path}: expected an object with keys such as zero_optimization, not {content!r}.")
    values: dict[str, Any] = {}
    unknown = []
    for key, value in content.items():
        found: dict[str, Any] | None = None
        inner = value if isinstance(value, dict) else {}
        if key in DEEPSPEED_FIELDS and isinstance(value, int | float) and not isinstance(value, bool):
            found = {DEEPSPEED_FIELDS[key]: value}
        elif key in ("bf16", "fp16") and inner.keys() == {"enabled"}:
            found = {"dtype": key} if inner["enabled"] is True else {}
            found = None if found and "dtype" in values else found  # both of them
        elif key == "zero_optimization" and inner.keys() == {"stage"} and type(inner["stage"]) is int:  # not True
            found = DEEPSPEED_STAGES.get(inner["stage"])
        if found is None:
            unknown.append(f"{key}={value!r}")
        values |= found or {}
    if unknown:
        raise UserError(
            f"--deepspeed {path}: not supported: {'; '.join(unknown)}. It may have one of bf16 and fp16 with 'enabled', "
            f"zero_optimization with 'stage' 0 to 3, and {', '.join(DEEPSPEED_FIELDS)} as numbers; everything else is a field of the "
            "config (--help)."
        )
    return values


def _typed(path: str, given: Any, old: Any) -> Any:
    """The value in the type of the one before; texts are read as yacs does, int counts as float, and tuples as lists."""
    if isinstance(old, CfgNode):
        raise UserError(f"{path} is a group of keys: set {path}.KEY.")
    value = given
    if isinstance(given, str) and not isinstance(old, str):  # to PyYAML `1e-4` is a text, as it lacks a point
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = ast.literal_eval(given)
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(old, int) and isinstance(value, float) and value.is_integer():  # 1e5 steps
        return int(value)
    if isinstance(old, list) and isinstance(value, tuple):
        return list(value)
    if isinstance(old, dict) and isinstance(value, Mapping):
        return dict(value)
    if type(value) is not type(old):
        raise UserError(f"{path}={given!r}: expected {type(old).__name__}, not {type(value).__name__}.")
    return value


def _components(node: CfgNode) -> dict[str, Any]:
    """Model, VAE, text encoder and scheduler of a pipeline's folder."""
    weights, modules, video = Path(node.MODEL.WEIGHTS), node.PIPELINE.MODULES, node.PIPELINE.TYPE.endswith("t2v")
    folders = {name: modules.get(name, str(weights / name)) for name in PIPELINE_MODULES}
    config = node.MODEL.CONFIG or _read_json(Path(folders["transformer"]) / "config.json")
    pretrained = {} if node.MODEL.CONFIG else {"from_pretrained": folders["transformer"]}
    text_encoder = {"type": "hf", "from_pretrained": folders["text_encoder"]}
    text_encoder["model_max_length"] = config.get("text_token_len") or TEXT_TOKENS
    if Path(folders["tokenizer"]).is_dir():
        text_encoder["tokenizer"] = folders["tokenizer"]
    vae_config = Path(folders["vae"]) / "config.json"
    vae_type = VAES[node.PIPELINE.TYPE]
    if vae_config.is_file() and _read_json(vae_config).get("_class_name") == "AutoencoderKLOpenSora":
        vae_type = "ScaleOnlyVAE"  # of NOVA's own video VAE there is only the scale: enough to train from records
    trained = {"motion": video, "trained": "all" if video else "image"}
    noise = _noise(Path(folders["scheduler"]))
    return {
        "model": {"type": "NOVA", **architecture(config), **trained, **pretrained},
        "vae": {"type": vae_type, "from_pretrained": folders["vae"]},
        "text_encoder": text_encoder,
        "scheduler": {"type": "nova", "loss_repeat": node.TRAIN.LOSS_REPEAT, **noise},
    }


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `NOVA` for a published config: `arch`, such as ["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"], and more.

    Raises:
        UserError: it is not of that form, or has a key that says nothing here.
    """
    _refuse_wrong_keys(config)
    arch, patch = config.get("arch", ()), 15 // config.get("image_stride", IMAGE_STRIDE) + 1
    try:
        ((depth, width), (image_depth, image_width), (head_depth, head_width)) = (
            tuple(int(n) for n in name.partition("_d")[2].split("w"))[:2] for name in arch
        )
    except (ValueError, TypeError, AttributeError) as error:  # also what is not a list of texts
        raise UserError(
            f"the model's config has arch={arch!r}; expected three names such as vit_d16w1024, vit_d32w1024, mlp_d6w1024."
        ) from error
    if image_width != width:
        raise UserError(f"the model's config has arch={list(arch)}: the encoders have two widths.")
    found: dict[str, Any] = {
        "width": width, "num_heads": HEADS.get(width, max(1, width // 64)), "video_depth": depth, "image_depth": image_depth,
        "head_depth": head_depth, "head_width": head_width, "patch_size": patch,
    }  # fmt: skip
    if config.get("image_dim"):
        found["in_channels"] = config["image_dim"]
    if config.get("video_mixer_rank"):
        found["mixer_rank"] = max(config["video_mixer_rank"], -1)
    video, image = config.get("video_base_size"), config.get("image_base_size")  # in patches of the two encoders
    if config.get("rotary_pos_embed"):
        found["positions"] = "rotary"
    elif video is not None:
        coarse, fine = (2 * patch * video[1], 2 * patch * video[2]), tuple(patch * n for n in image or ())
        if image is not None and fine != coarse:
            raise UserError(
                f"the model's config has video_base_size={list(video)} and image_base_size={list(image)}: latents of {coarse[0]}x"
                f"{coarse[1]} and of {fine[0]}x{fine[1]}. They must have one size."
            )
        found["base_size"] = [video[0], *coarse]
    return found


def _refuse_wrong_keys(config: Mapping[str, Any]) -> None:
    if unknown := [key for key in config if key not in ARCHITECTURE and not str(key).startswith("_")]:
        raise UserError(
            f"the model's config has {unknown[0]}={config[unknown[0]]!r}, which says nothing here."
            f"{did_you_mean(str(unknown[0]), list(ARCHITECTURE))} Known are {', '.join(ARCHITECTURE)}."
        )
    if config.get("text_token_dim", 1) is None:
        raise UserError(
            "the model's config has text_token_dim=None, a model of classes; there is text to image and to video."
        )
    for key, (length, expected) in ARCHITECTURE_NUMBERS.items():
        value = config.get(key)
        if key not in config or (value is None and key != "image_stride"):
            continue
        numbers: Any = value if length else [value]
        whole = isinstance(numbers, list | tuple) and len(numbers) == (length or 1)
        whole = whole and all(type(n) is int for n in numbers)  # not True, which is an int
        if not whole or (key != "video_mixer_rank" and min(numbers) < 1):
            raise UserError(f"the model's config has {key}={value!r}; expected {expected}.")


def _noise(folder: Path) -> dict[str, Any]:
    """Of the pipeline's scheduler: how its noise levels are shifted, where it has a config."""
    if not (folder / "scheduler_config.json").is_file():
        return {}
    config = _read_json(folder / "scheduler_config.json")
    if not str(config.get("_class_name", "FlowMatch")).startswith("FlowMatch") or config.get("use_dynamic_shifting"):
        raise UserError(
            f"{folder}: the scheduler 'nova' does flow matching with a fixed shift, not {config.get('_class_name')}"
            f"{' with use_dynamic_shifting' if config.get('use_dynamic_shifting') else ''}."
        )
    names = {"shift": "shift", "num_train_timesteps": "num_timesteps"}
    return {ours: config[theirs] for theirs, ours in names.items() if theirs in config}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(
            f"MODEL.WEIGHTS: there is no {path}. Name a pipeline's folder, or describe the model in MODEL.CONFIG, such as "
            '{"arch": ["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"]}.'
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the text's encoding or of JSON
        raise UserError(f"{path} is no valid JSON ({error}). Copy or download the folder again.") from error
    if not isinstance(config, dict):
        raise UserError(
            f"{path} holds a {type(config).__name__}; expected an object. Copy or download the folder again."
        )
    return config
