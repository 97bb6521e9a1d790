"""The configs of NOVA's training guide (YACS, diffnext.config), and what they mean here.

    from opensora.config.yacs import cfg      # in place of diffnext.config
    cfg.PIPELINE.TYPE = "nova_train_t2i"
    open("nova.yml", "w").write(str(cfg))

    python scripts/train.py nova.yml                # or --cfg nova.yml

Keys and defaults are the guide's; an unknown key, or a value of another type, is an error. Keys without a meaning here are an
error too once they are set, with what to use instead. A DeepSpeed file (`--deepspeed zero2.json`) sets engine, number format,
batch and clipping.
"""

import ast
import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
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
        UserError: the file is no such config, or asks for what there is not.
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
        UserError: lists every key that has no meaning here.
    """
    if problems := [
        f"{key}={value!r}: {remedy}" for key, supported, remedy in YACS_RULES if not supported(value := node.at(key))
    ]:
        raise UserError("this config asks for what there is not here:\n" + "\n".join(f"  {p}" for p in problems))
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
    """What a DeepSpeed JSON means here: engine, number format, batch, accumulation and clipping.

    Raises:
        UserError: it is no JSON object, or has a key without a meaning here.
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
        found = _deepspeed_value(key, value)
        if found is None or (key in ("bf16", "fp16") and found and "dtype" in values):
            unknown.append(f"{key}={value!r}")
        else:
            values |= found
    if unknown:
        raise UserError(
            f"--deepspeed {path}: nothing here answers to {'; '.join(unknown)}. It may have one of bf16 and fp16 with 'enabled', "
            f"zero_optimization with 'stage' 0 to 3, and {', '.join(DEEPSPEED_FIELDS)} as numbers; everything else is a field of the "
            "config (--help)."
        )
    return values


def _deepspeed_value(key: str, value: Any) -> dict[str, Any] | None:
    """The fields that a key sets; None where it means nothing here."""
    if key in DEEPSPEED_FIELDS:
        return (
            {DEEPSPEED_FIELDS[key]: value} if isinstance(value, int | float) and not isinstance(value, bool) else None
        )
    if key in ("bf16", "fp16") and isinstance(value, dict) and value.keys() == {"enabled"}:
        return {"dtype": key} if value["enabled"] is True else {}
    if key == "zero_optimization" and isinstance(value, dict) and value.keys() == {"stage"}:
        stage = value["stage"]
        return DEEPSPEED_STAGES.get(stage) if type(stage) is int else None  # not True, which equals 1
    return None


def _typed(path: str, given: Any, old: Any) -> Any:
    """The value in the type of the one before; texts are read as yacs does, int counts as float, and tuples as lists."""
    if isinstance(old, CfgNode):
        raise UserError(f"{path} is a group of keys: set {path}.KEY.")
    value = given if isinstance(old, str) else _decoded(given)
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


def _decoded(value: Any) -> Any:
    """A text as the Python literal that it is, as yacs reads it: for PyYAML `1e-4` is a text, as it lacks a point."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # no literal
        return value


def _components(node: CfgNode) -> dict[str, Any]:
    """Model, VAE, text encoder and scheduler of a pipeline's folder."""
    weights, modules, video = Path(node.MODEL.WEIGHTS), node.PIPELINE.MODULES, node.PIPELINE.TYPE.endswith("t2v")
    folders = {name: modules.get(name, str(weights / name)) for name in PIPELINE_MODULES}
    config = node.MODEL.CONFIG or _read_json(Path(folders["transformer"]) / "config.json")
    pretrained = {} if node.MODEL.CONFIG else {"from_pretrained": folders["transformer"]}
    tokens = config.get("text_token_len") or TEXT_TOKENS
    text_encoder = {"type": "hf", "from_pretrained": folders["text_encoder"], "model_max_length": tokens}
    if Path(folders["tokenizer"]).is_dir():
        text_encoder["tokenizer"] = folders["tokenizer"]
    return {
        "model": {
            "type": "NOVA",
            **architecture(config),
            "motion": video,
            "trained": "all" if video else "image",
            **pretrained,
        },
        "vae": {"type": _vae_type(Path(folders["vae"]), node.PIPELINE.TYPE), "from_pretrained": folders["vae"]},
        "text_encoder": text_encoder,
        "scheduler": {"type": "nova", "loss_repeat": node.TRAIN.LOSS_REPEAT, **_noise(Path(folders["scheduler"]))},
    }


def _vae_type(folder: Path, kind: str) -> str:
    """Of NOVA's own video VAE there is only the scale, which is all that training from records takes of a VAE."""
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return "ScaleOnlyVAE" if config.get("_class_name") == "AutoencoderKLOpenSora" else VAES[kind]


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `NOVA` for a published config: `arch`, such as ["vit_d16w1024", "vit_d32w1024", "mlp_d6w1024"], and more.

    Raises:
        UserError: it is not of that form, or has a key that says nothing here.
    """
    if unknown := [key for key in config if key not in ARCHITECTURE and not str(key).startswith("_")]:
        raise UserError(
            f"the model's config has {unknown[0]}={config[unknown[0]]!r}, which says nothing here."
            f"{did_you_mean(str(unknown[0]), list(ARCHITECTURE))} Known are {', '.join(ARCHITECTURE)}."
        )
    if config.get("text_token_dim", 1) is None:
        raise UserError(
            "the model's config has text_token_dim=None, a model of classes; there is text to image and to video."
        )
    _refuse_wrong_numbers(config)
    found = {**_sizes(config.get("arch", ())), "patch_size": 15 // config.get("image_stride", IMAGE_STRIDE) + 1}
    if config.get("image_dim"):
        found["in_channels"] = config["image_dim"]
    if config.get("video_mixer_rank"):
        found["mixer_rank"] = max(config["video_mixer_rank"], -1)
    if config.get("rotary_pos_embed"):
        return found | {"positions": "rotary"}
    base = _base_size(config.get("video_base_size"), config.get("image_base_size"), found["patch_size"])
    return found if base is None else found | {"base_size": base}


def _refuse_wrong_numbers(config: Mapping[str, Any]) -> None:
    forms: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("image_stride", lambda n: _are_counts([n], 1), "a whole number from 1"),
        ("video_base_size", lambda size: size is None or _are_counts(size, 3), "three whole numbers from 1, or None"),
        ("image_base_size", lambda size: size is None or _are_counts(size, 2), "two whole numbers from 1, or None"),
        ("video_mixer_rank", lambda n: n is None or type(n) is int, "a whole number, or None"),
    )
    for key, is_right, expected in forms:
        if key in config and not is_right(config[key]):
            raise UserError(f"the model's config has {key}={config[key]!r}; expected {expected}.")


def _are_counts(values: Any, how_many: int) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == how_many
        and all(type(value) is int and value >= 1 for value in values)  # not True, which is an int
    )


def _sizes(arch: Sequence[str]) -> dict[str, Any]:
    try:
        (video, image, head) = (tuple(int(n) for n in name.partition("_d")[2].split("w")) for name in arch)
        width = video[1]
        found = {
            "width": width, "num_heads": HEADS.get(width, max(1, width // 64)), "video_depth": video[0],
            "image_depth": image[0], "head_depth": head[0], "head_width": head[1],
        }  # fmt: skip
    except (ValueError, IndexError, TypeError, AttributeError) as error:  # also what is no list of texts
        raise UserError(
            f"the model's config has arch={arch!r}; expected three names such as vit_d16w1024, vit_d32w1024, mlp_d6w1024."
        ) from error
    if image[1] != width:
        raise UserError(f"the model's config has arch={list(arch)}: the encoders have two widths.")
    return found


def _base_size(video: Sequence[int] | None, image: Sequence[int] | None, patch: int) -> list[int] | None:
    """(T, H, W) of the latent, from its size in the video encoder's patches and in the image encoder's."""
    if video is None:
        return None
    coarse, fine = (2 * patch * video[1], 2 * patch * video[2]), tuple(patch * n for n in image or ())
    if image is not None and fine != coarse:
        raise UserError(
            f"the model's config has video_base_size={list(video)} and image_base_size={list(image)}: latents of {coarse[0]}x"
            f"{coarse[1]} and of {fine[0]}x{fine[1]}. They are of one size."
        )
    return [video[0], *coarse]


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
