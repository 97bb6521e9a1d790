"""Older and foreign spellings of config values, in one place, and what they are called now.

`upgrade` is applied to whatever becomes a config: files, command lines, and the configs in checkpoints and sidecars, so the
rest of the project sees the current spelling alone. NOVA's YACS configs and DeepSpeed's JSON files are read in `yacs.py`.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from opensora.utils.errors import UserError


class Alias(NamedTuple):
    """A short command-line name for a key inside a component."""

    path: tuple[str, str]
    annotation: Any


class Removed(NamedTuple):
    """A field that is gone. Values under which it did nothing are still accepted."""

    annotation: Any
    why: str
    accepted: tuple[Any, ...] = (None, False)


GENERATION_ALIASES = {
    "ckpt_path": Alias(("model", "from_pretrained"), str | None),
    "cfg_scale": Alias(("scheduler", "cfg_scale"), float),
    "num_sampling_steps": Alias(("scheduler", "num_sampling_steps"), int),
    "cfg_channel": Alias(("scheduler", "cfg_channel"), int | None),
    "flash_attn": Alias(("model", "enable_flash_attn"), bool),
    "layernorm_kernel": Alias(("model", "enable_layernorm_kernel"), bool),
}
VAE_ALIASES = {"ckpt_path": Alias(("vae", "from_pretrained"), str | None)}
MULTI_RESOLUTION = {"PixArtMS": "PixArt(MS|[-_]1B|[-_]?Sigma)", "STDiT2": "STDiT[23]", "OpenSora": "STDiT[23]"}
"""Open-Sora's `multi_resolution` -> regular expression of the model types that it fits."""

_GONE = "this field was removed: "
_VAE_ENGINE = "a VAE is trained with ddp. hybrid_zero=True shards its optimizer's state."
REMOVED_TRAIN: Mapping[str, Removed] = {
    "cast_once": Removed(bool | None, _GONE + "it gained less than 3 % of a step. Leave it out."),
    "float8": Removed(bool | str | None, _GONE + "training in float8 was slower than in bf16. Leave it out."),
}
REMOVED_VAE_TRAIN: Mapping[str, Removed] = {
    "plugin": Removed(Literal["ddp", "fsdp2", "zero2", "zero2-seq"], _VAE_ENGINE, ("ddp",)),
    "fsdp_reshard": Removed(Literal["zero2", "zero3"], _VAE_ENGINE, ("zero2",)),
}

OLD_KEYS: dict[str, dict[str, str]] = {"model": {"enable_flashattn": "enable_flash_attn"}}  # keys of components
OLD_TYPES: Mapping[str, Any] = {"grad_checkpoint": int | bool | str}  # fields whose older values have other types
LEVELS = {
    **dict.fromkeys(("false", "no", "f", "n", "0"), "none"),
    **dict.fromkeys(("true", "yes", "t", "y"), "block"),
    **{"1": "mlp:1/3", "2": "mlp:2/3", "3": "mlp"},  # levels of NOVA, and so 1 is not True
}
MASKS = {"intepolate": "interpolate", "no": "identity"}  # Open-Sora's, with or without "mask_" in front

# old boolean of a scheduler -> the argument it stands for, and the values that True and that False leave open; where nothing
# else is set, the first of them is meant
OLD_SCHEDULERS: dict[str, dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "iddpm": {
        "learn_sigma": ("variance", ("learned_range",), ("fixed_large", "fixed_small")),
        "sigma_small": ("variance", ("fixed_small",), ("learned_range", "fixed_large")),
        "predict_xstart": ("prediction", ("x0",), ("eps", "v")),
        "use_kl": ("loss", ("rescaled_kl", "kl"), ("mse", "rescaled_mse")),
        "rescale_learned_sigmas": ("loss", ("rescaled_mse", "rescaled_kl"), ("mse", "rescaled_kl", "kl")),
        "faster": ("timestep_sampling", ("speedit", "speed", "logit-normal"), ("uniform",)),
    },
    "rflow": {
        "use_timestep_transform": ("shift", ("resolution", "length"), ("none",)),
        "use_discrete_timesteps": ("time", ("discrete",), ("continuous",)),
    },
}
OLD_SCHEDULES = {"cosine": "squaredcos_cap_v2"}  # noise_schedule of "iddpm" and "dpm-solver"
# options that "dpm-solver" had, and their defaults
THRESHOLDING = {"thresholding": "none", "thresholding_ratio": None, "thresholding_max": None}


def upgrade(name: str, value: Any) -> Any:
    """The value of a field in its current spelling; what is current, or wrong, comes back as it is.

    Raises:
        UserError: two spellings contradict each other.
    """
    if name == "grad_checkpoint":
        return translate_level(value)
    if name in ("reference_path", "mask_strategy") and isinstance(value, list):  # one entry for each prompt
        return ["" if entry in (None, "None") else entry for entry in value]
    if not isinstance(value, dict):
        return value
    if name == "mask_ratios":
        kinds = {key: str(key).removeprefix("mask_") for key in value}
        kinds = {key: MASKS.get(kind, kind) for key, kind in kinds.items()}
        if twice := {kind for kind in kinds.values() if [*kinds.values()].count(kind) > 1}:
            raise UserError(f"mask_ratios: {min(twice)!r} is there twice, under two names; keep one.")
        return {kinds[key]: ratio for key, ratio in value.items()}
    value = dict(value)
    for old, new in OLD_KEYS.get(name, {}).items():
        if old in value:
            if value.get(new, value[old]) != value[old]:
                both = f"{old}={value[old]!r} and {new}={value[new]!r}"
                raise UserError(f"{name}: {both} are one setting; keep {new}.")
            value[new] = value.pop(old)
    return _upgrade_scheduler(name, value) if name in ("scheduler", "val_scheduler") else value


def upgrade_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config in its current spelling, to be compared with another."""
    return {name: upgrade(name, value) for name, value in values.items()}


def translate_level(value: Any) -> Any:
    """The current spelling of a value of `grad_checkpoint`, such as "block" for True; any other value unchanged."""
    text = str(value) if isinstance(value, int) else value
    return LEVELS.get(text.lower(), text) if isinstance(text, str) else value


def replaced_by(name: str, key: str) -> str:
    """The argument of a scheduler that an old key stands for; empty: the key is not an old one."""
    old = {key: argument for flags in OLD_SCHEDULERS.values() for key, (argument, *_) in flags.items()}
    old["sample_method"] = "timestep_sampling"
    return old.get(key, "") if name in ("scheduler", "val_scheduler") else ""


def _upgrade_scheduler(name: str, value: dict[str, Any]) -> dict[str, Any]:
    kind = str(value.get("type")).removeprefix("opensora.").removesuffix("-speed")
    flags = OLD_SCHEDULERS.get(kind, {})
    unset = {"timestep_sampling", *flags, *(argument for argument, *_ in flags.values())}  # None was their default
    value = {key: given for key, given in value.items() if given is not None or key not in unset}
    if kind in ("iddpm", "dpm-solver") and value.get("noise_schedule") in [*OLD_SCHEDULES]:
        value["noise_schedule"] = OLD_SCHEDULES[value["noise_schedule"]]
    for key, default in THRESHOLDING.items() if kind == "dpm-solver" else ():
        if (given := value.pop(key, default)) not in (None, default):
            raise UserError(f"{name}.{key}={given!r} was removed: it is for pixels, not for latents. Leave it out.")
    left: dict[str, tuple[str, ...]] = {}
    set_by: dict[str, list[str]] = {}
    for flag, (argument, if_true, if_false) in flags.items():
        if flag not in value:
            continue
        on = value.pop(flag)
        if on not in (True, False):
            raise UserError(f"{name}.{flag}={on!r}: expected True or False.")
        choices = if_true if on else if_false
        left[argument] = tuple(choice for choice in left.get(argument, choices) if choice in choices)
        set_by.setdefault(argument, []).append(f"{flag}={on}")
    for argument, choices in left.items():
        named = value.get(argument)
        found = named.get("type") if isinstance(named, dict) else named
        if not choices or found not in (None, *choices):
            set_by[argument] += [] if named is None else [f"{argument}={named!r}"]
            raise UserError(
                f"{name}: {' and '.join(set_by[argument])} contradict each other; keep {argument}=... alone."
            )
        value[argument] = choices[0] if named is None else named
    if kind == "rflow":
        _upgrade_sample_method(name, value)
    return value


def _upgrade_sample_method(name: str, value: dict[str, Any]) -> None:
    """Open-Sora's `sample_method`, "uniform" or "logit-normal" with `loc` and `scale`, becomes `timestep_sampling`."""
    method = value.pop("sample_method", None)
    found = {key: given for key in ("loc", "scale") if (given := value.pop(key, None)) is not None}
    if method is None and not found:
        return
    if method not in (None, "uniform", "logit-normal"):
        raise UserError(f"{name}.sample_method={method!r} is not one of uniform, logit-normal.")
    if value.get("timestep_sampling") is not None:
        raise UserError(f"{name}: timestep_sampling sets the same as sample_method, loc and scale; keep the first.")
    if method != "logit-normal" and (found.get("loc", 0) != 0 or found.get("scale", 1) != 1):
        raise UserError(f"{name}: {found} have no effect with sample_method='uniform'; use 'logit-normal'.")
    value["timestep_sampling"] = {"type": method, **found} if method == "logit-normal" else "uniform"
