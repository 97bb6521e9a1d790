"""Older and foreign spellings of config values, in one place, and what they are called now.

`upgrade` is applied to whatever becomes a config: files, command lines, and the configs in checkpoints and sidecars, so the
rest of the project sees the current spelling alone. `translate` reads files of Open-Sora 1.0 to 1.2, whose keys are listed in
docs/how-to/from-open-sora.md. NOVA's YACS configs and DeepSpeed's JSON files are read in `yacs.py`.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from opensora.utils.errors import UserError


class Alias(NamedTuple):
    """A short command-line name for a key inside a component."""

    path: tuple[str, str]
    annotation: Any
    doc: str


class Removed(NamedTuple):
    """A field that is gone. Values under which it did nothing are still accepted; in a file all, if it changes no result."""

    annotation: Any
    why: str
    accepted: tuple[Any, ...] = (None, False)
    harmless: bool = False


_WEIGHTS = "weights to start from: a checkpoint, a file, a folder or a hub id"
_GUIDANCE = "scale of classifier-free guidance"
GENERATION_ALIASES = {
    "ckpt_path": Alias(("model", "from_pretrained"), str | None, _WEIGHTS),
    "cfg_scale": Alias(("scheduler", "cfg_scale"), float, _GUIDANCE),
    "num_sampling_steps": Alias(("scheduler", "num_sampling_steps"), int, "steps of the sampler"),
    "guidance_scale": Alias(("scheduler", "cfg_scale"), float, _GUIDANCE),
    "cfg_channel": Alias(("scheduler", "cfg_channel"), int | None, "latent channels that are guided; None: all"),
    "flash_attn": Alias(("model", "enable_flash_attn"), bool, "fastest attention kernel, or the plain formula"),
    "layernorm_kernel": Alias(("model", "enable_layernorm_kernel"), bool, "apex's fused LayerNorm"),
}
VAE_ALIASES = {"ckpt_path": Alias(("vae", "from_pretrained"), str | None, _WEIGHTS)}


def _turned(ours: Mapping[str, str]) -> dict[str, str]:
    return {theirs: name for name, names in ours.items() for theirs in names.split()}


# Names that diffusers' scripts, finetrainers, musubi-tuner, Wan and others have for options of the same meaning, by ours: a field,
# an alias or a component's key. The command line takes them and says the name here; in a file they are an error that does.
_EVERYWHERE = {"compile": "torch_compile", "dtype": "mixed_precision precision", "seed": "random_seed"}
_LOOP_NAMES = _turned({
    **_EVERYWHERE,
    "accumulation_steps": "gradient_accumulation_steps grad_accumulation_steps grad_accum",
    "adam_eps": "adam_epsilon",
    "batch_size": "train_batch_size per_device_train_batch_size bs",
    "ckpt_every": "checkpointing_steps save_steps save_every save_every_n_steps",
    "data_path": "dataset_path train_data_path data_file",
    "epochs": "num_epochs num_train_epochs max_train_epochs",
    "exp_name": "experiment_name run_name",
    "grad_clip": "max_grad_norm",
    "keep_last_n": "checkpoints_total_limit checkpointing_limit save_total_limit",
    "load": "resume resume_from resume_from_checkpoint",
    "log_every": "logging_steps",
    "lr": "learning_rate",
    "lr_schedule": "lr_scheduler lr_scheduler_type",
    "max_steps": "steps max_train_steps train_steps total_steps",
    "num_frames": "frames video_length",
    "num_workers": "dataloader_num_workers max_data_loader_n_workers",
    "outputs": "output output_dir out_dir",
    "wandb": "use_wandb",
    "warmup_steps": "lr_warmup_steps num_warmup_steps",
    "weight_decay": "adam_weight_decay",
})  # fmt: skip
TRAIN_NAMES = _LOOP_NAMES | _turned({
    "ckpt_path": "weights",
    "grad_checkpoint": "gradient_checkpointing",
    "lora.alpha": "lora_alpha network_alpha",
    "lora.rank": "rank lora_rank network_dim",
    "scheduler.shift": "flow_shift",
    "val_every": "validation_steps eval_steps sample_every_n_steps",
    "val_prompts": "validation_prompt validation_prompts",
})  # fmt: skip
INFERENCE_NAMES = _turned({
    **_EVERYWHERE,
    "cfg_scale": "guidance",
    "ckpt_path": "checkpoint ckpt weights",
    "duration": "seconds",
    "image": "image_path",
    "image_size": "video_size",
    "lora": "lora_path lora_weight lora_weights",
    "lora_scale": "lora_multiplier lora_weight_scale",
    "negative_prompt": "neg_prompt n_prompt",
    "num_frames": "frames video_length",
    "num_sample": "num_samples num_videos_per_prompt num_images_per_prompt",
    "num_sampling_steps": "num_inference_steps num_steps steps sampling_steps sample_steps infer_steps ddim_steps",
    "prompt": "prompts",
    "prompt_path": "prompt_file",
    "save_dir": "output_dir out_dir outdir outputs output_folder",
    "save_fps": "output_fps",
    "scheduler.shift": "flow_shift",
})  # fmt: skip
VAE_TRAIN_NAMES = _LOOP_NAMES | _turned({"ckpt_path": "weights", "eval_every": "validation_steps eval_steps"})
VAE_INFERENCE_NAMES = _turned({
    **_EVERYWHERE,
    "ckpt_path": "checkpoint ckpt weights",
    "files": "input inputs video videos images",
    "num_frames": "frames video_length",
    "save_dir": "output_dir out_dir outdir outputs output_folder output",
    "save_fps": "output_fps",
})  # fmt: skip

# other names that leave something open -> what to write
_OPEN = {
    **dict.fromkeys(("width", "height"), "image_size is (height, width): --image-size HEIGHT WIDTH"),
    **dict.fromkeys(
        ("num_gpus", "gpus", "num_processes", "nproc_per_node"),
        "processes are started by torchrun: torchrun --standalone --nproc-per-node N SCRIPT CONFIG",
    ),
}
_OPEN_LOOP = {
    **_OPEN,
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "one option sets both: --adam-betas 0.9 0.999"),
    **dict.fromkeys(
        ("checkpoint", "ckpt"), "--load CHECKPOINT resumes a run; --ckpt-path WEIGHTS starts a new one from them"
    ),
    **dict.fromkeys(
        ("instance_data_dir", "train_data_dir", "data_dir", "data_root", "video_dir", "dataset_config"),
        "data are a table with one clip per row: --data-path TABLE; a folder of clips: opensora finetune FOLDER",
    ),
    "num_steps": "of training: --max-steps N; of the sampler: --num-sampling-steps N",
    "report_to": "--wandb adds Weights & Biases; TensorBoard files and metrics.jsonl are always written",
    "resolution": "--image-size HEIGHT WIDTH, or --bucket-config with that resolution",
    "use_ema": "EMA weights are always kept: --ema-decay DECAY",
}
_OPEN_WEIGHTS = dict.fromkeys(
    ("pretrained_model_name_or_path", "pretrained_model", "model_path", "model_id"),
    "each part has its own: the denoiser's are --ckpt-path; --vae.from_pretrained, --text-encoder.from_pretrained",
)
TRAIN_OPEN = {
    **_OPEN_LOOP,
    **_OPEN_WEIGHTS,
    **dict.fromkeys(("use_8bit_adam", "use_8bit"), "--optimizer adamw8bit"),
    "fps": "--frame-interval N takes every n-th frame, --dataset.target_fps FPS frames at that rate",
}
VAE_TRAIN_OPEN = {
    **_OPEN_LOOP,
    "optimizer": "it is AdamW: --lr, --weight-decay, --adam-betas, --adam-eps",
    "resolution": "--image-size HEIGHT WIDTH",
}
INFERENCE_OPEN = {
    **_OPEN,
    **_OPEN_WEIGHTS,
    **dict.fromkeys(
        ("cpu_offload", "enable_cpu_offload", "enable_model_cpu_offload", "enable_sequential_cpu_offload"),
        "--offload model, or --offload block for the least memory",
    ),
    **dict.fromkeys(
        ("output", "output_file", "output_path", "save_path", "out"),
        "--save-dir FOLDER is where samples go, --sample-name NAME the start of their names",
    ),
    **dict.fromkeys(("enable_vae_tiling", "enable_tiling"), "--vae-tiling PIXELS, the size of a tile"),
    "size": "--image-size HEIGHT WIDTH, or --resolution 480p --aspect-ratio 9:16",
}
VAE_INFERENCE_OPEN = {**_OPEN, "resolution": "--image-size HEIGHT WIDTH"}

MULTI_RESOLUTION = {"PixArtMS": "PixArt(MS|[-_]1B|[-_]?Sigma)", "STDiT2": "STDiT[23]", "OpenSora": "STDiT[23]"}
"""Open-Sora's `multi_resolution` -> regular expression of the model types that it fits."""

_GONE = "this field was removed: "
_VAE_ENGINE = "a VAE is trained with ddp. hybrid_zero=True shards its optimizer's state."
REMOVED_TRAIN: Mapping[str, Removed] = {
    "cast_once": Removed(bool | None, _GONE + "it gained less than 3 % of a step. Leave it out.", harmless=True),
    "float8": Removed(bool | str | None, _GONE + "training in float8 was slower than in bf16. Leave it out."),
}
REMOVED_INFERENCE: Mapping[str, Removed] = {  # of Open-Sora 1.2, and never here
    "watermark": Removed(
        bool | None, "draw it afterwards: ffmpeg -i sample.mp4 -i mark.png -filter_complex overlay=10:10 marked.mp4"
    ),
    "prompt_generator": Removed(str | None, "make a list of prompts and name it: --prompt-path FILE.", (None, "")),
}
REMOVED_VAE_TRAIN: Mapping[str, Removed] = {
    "plugin": Removed(Literal["ddp", "fsdp2", "zero2", "zero2-seq"], _VAE_ENGINE, ("ddp",), harmless=True),
    "fsdp_reshard": Removed(Literal["zero2", "zero3"], _VAE_ENGINE, ("zero2",), harmless=True),
}

FOREIGN_NAMES = {"diffusion": "scheduler"}  # of components on the command line: SpeeDiT's `diffusion.faster=true`
OLD_KEYS: dict[str, dict[str, str]] = {"model": {"enable_flashattn": "enable_flash_attn"}}  # keys of components
OLD_TYPES: Mapping[str, Any] = {"grad_checkpoint": int | bool | str}  # fields whose older values have other types
LEVELS = {
    **dict.fromkeys(("false", "no", "f", "n", "0"), "none"),
    **dict.fromkeys(("true", "yes", "t", "y"), "block"),
    **{"1": "mlp:1/3", "2": "mlp:2/3", "3": "mlp"},  # levels of NOVA, and so 1 is not True
}
MASKS = {"intepolate": "interpolate", "no": "identity"}  # Open-Sora's, with or without "mask_" in front
OLD_MASKS = {f"mask_{where}": f"quarter_{where}" for where in ("head", "tail", "head_tail")}  # names before 1.1
NOTHING = "no effect here"
# of a schema, keys of Open-Sora's files that are no settings here, and what is said of them; False and None are dropped in silence
DROPPED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "TrainConfig": (
        ("num_bucket_build_workers log_time model.enable_sequence_parallelism model.skip_y_embedder vae_out_channels "
         "model_max_length text_encoder_output_dim text_encoder_model_max_length dataset.dummy_text_feature", NOTHING),
        ("base base_step_time", "--base or --base-seconds of `python -m tools.search_batch_size CONFIG OUT.py --goal even`"),
        ("load_video_features load_text_features save_text_features save_compressed_text_features bin_size",
         "`python -m tools.cache_features` stores features, text uncompressed; docs/how-to/caches.md says how to train on them"),
    ),
    "VAETrainConfig": (
        ("grad_checkpoint lecam_loss_weight gradient_penalty_loss_weight use_real_rec_loss vae.cal_loss", NOTHING),
        ("use_z_rec_loss use_image_identity_loss", "the loss is on pixels here, not on the latents of vae_2d"),
    ),
    "VAEInferenceConfig": (
        ("batch_size num_workers vae.cal_loss", NOTHING),
        ("cal_stats log_stats_every perceptual_loss_weight kl_loss_weight", "`python -m tools.eval_vae` measures"),
    ),
}  # fmt: skip

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


def translate(schema: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values of a config file in the fields of a schema, where Open-Sora calls them otherwise, and notes on what changed.

    Raises:
        UserError: a value has no counterpart here.
    """
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}
    notes: list[str] = []
    if schema == "TrainConfig":
        _translate_training(values, notes)
    elif schema.startswith("VAE") and "vae" not in values and isinstance(values.get("model"), dict):
        _translate_vae(schema, values, notes)
    for keys, what in DROPPED.get(schema, ()):
        found = []
        for name, _, key in (path.partition(".") for path in keys.split()):
            holder = values.get(name) if key else values
            if isinstance(holder, dict) and holder.pop(key or name, None) not in (None, False):
                found.append(f"{name}.{key}" if key else name)
        notes += [f"{', '.join(found)}: {what}."] if found else []
    return values, notes


def _translate_training(values: dict[str, Any], notes: list[str]) -> None:
    """Of the misc files too: search_bs, eval_loss, extract_feat and training on its features."""
    if "num_eval_timesteps" in values:
        values.setdefault("val_num_timesteps", values.pop("num_eval_timesteps"))
        notes.append("num_eval_timesteps is called val_num_timesteps here.")
    buckets = values.get("bucket_config")
    if isinstance(buckets, dict) and all(isinstance(entries, dict) for entries in buckets.values()):
        values["bucket_config"] = {
            name: {key: _bucket(value, is_range="base" in values) for key, value in entries.items()}
            for name, entries in buckets.items()
        }
        if values["bucket_config"] != buckets:
            notes.append(
                "bucket_config: an entry with a range of batch sizes, or no probability, is (1.0, batch size)."
            )
    masks = values.get("mask_ratios")
    if isinstance(masks, dict) and (old := [kind for kind in OLD_MASKS if kind in masks]):
        values["mask_ratios"] = {OLD_MASKS.get(kind, kind): ratio for kind, ratio in masks.items()}
        notes.append(f"mask_ratios: {', '.join(old)} are read as quarter_*; Open-Sora since 1.1 refuses them.")
    if "save_text_features" in values:
        values.setdefault("scheduler", {"type": "rflow"})  # which encoding does not use
    dataset = values.get("dataset")
    if isinstance(dataset, dict) and dataset.get("type") == "BatchFeatureDataset":
        cached = {"type": "CachedVideoTextDataset", "content": "samples", "text": "features"}
        values["dataset"] = {"cache_dir": "./cache/features", **dataset, **cached}
        length = values.get("model_max_length") or values.get("text_encoder_model_max_length") or 300
        text_encoder = {"type": "t5", "from_pretrained": "DeepFloyd/t5-v1_1-xxl", "model_max_length": length}
        values.setdefault("vae", {"type": "OpenSoraVAE_V1_2", "from_pretrained": "hpcai-tech/OpenSora-VAE-v1.2"})
        values.setdefault("text_encoder", text_encoder)
        notes.append(
            "BatchFeatureDataset is a CachedVideoTextDataset here, of a table and the cache_dir that `python -m "
            "tools.cache_features CONFIG --data-path TABLE --epochs 1 --what moments text` makes of it."
        )


def _bucket(entry: Any, *, is_range: bool) -> Any:
    """An entry of a bucket_config from search_bs, (batch size, +-) or (p, (least, most)), or from eval_loss, (None, size)."""
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return entry
    first, second = entry
    if is_range and isinstance(first, int):  # 1.0 is a probability
        return 1.0, first
    if isinstance(second, list | tuple) and second:
        second = second[:2][-1]
    pair = 1.0 if first is None or (isinstance(first, int) and first > 1) else first, second
    return pair if isinstance(entry, tuple) else [*pair]


def _translate_vae(schema: str, values: dict[str, Any], notes: list[str]) -> None:
    """Of scripts/train_vae.py and scripts/inference_vae.py."""
    vae = values["vae"] = dict(values.pop("model"))
    images = vae.get("vae_2d")
    if isinstance(images, dict) and images.get("type") == "VideoAutoencoderKL" and "scaling_factor" not in images:
        vae["vae_2d"] = {**images, "scaling_factor": 0.18215}  # whatever the config of its weights says
    notes.append("model is called vae here.")
    dataset = values.get("dataset") or {}
    if schema == "VAEInferenceConfig":
        given = {
            key: value for key, value in dataset.items() if value is not None and key not in ("type", "transform_name")
        }
        values |= given | {key: value for key, value in values.items() if value is not None}
        del values["dataset"]
        return
    frames = values.get("num_frames") or dataset.get("num_frames") or 1
    lpips, kl = values.pop("perceptual_loss_weight", 0.1) or 0.0, values.pop("kl_loss_weight", 1e-6) or 0.0
    if "loss" not in values:  # sums over pixels of a frame and all latents there, of 4 x 8 x 8 cells with 4 channels
        kl *= 4 * -(-frames // 4) / (3 * 8 * 8)
        values["loss"] = {"l1": 1.0, "lpips": lpips, "kl": kl}
        notes.append(
            f"perceptual_loss_weight, kl_loss_weight: loss.lpips={lpips:g}, loss.kl={kl:.3g}, of means, not sums."
        )
    strategy, share = (
        values.pop("mixed_strategy", None),
        Fraction(values.pop("mixed_image_ratio", 0.0)).limit_denominator(20),
    )
    if strategy not in (None, "mixed_video_image", "mixed_video_random"):
        raise UserError(f"mixed_strategy={strategy!r} is not known: list the lengths, mixed_lengths=[17, 17, 1].")
    if strategy is not None:
        lengths = [frames] * (share.denominator - share.numerator) + [1] * share.numerator
        values.setdefault("mixed_lengths", lengths if strategy == "mixed_video_image" else [*range(1, frames + 1)])
        notes.append("mixed_strategy, mixed_image_ratio: what is drawn are mixed_lengths.")
    for key in ("generator_loss_type", "discriminator_loss_type"):
        if (loss := values.pop(key, "hinge")) != "hinge":
            raise UserError(f"{key}={loss!r}: the GAN's loss is 'hinge' here; leave {key} out.")
    start, factor = values.pop("discriminator_start", -1), values.pop("discriminator_factor", 1)
    weight = values.pop("generator_factor", 0.5) * factor
    if values.get("discriminator") is not None:
        values.update({"adversarial_weight": weight, "adversarial_start": max(start, 0)} | values)


def replaced_by(name: str, key: str) -> tuple[str, ...]:
    """The arguments of a scheduler that an old key stands for; none: the key is not an old one."""
    old: dict[str, tuple[str, ...]] = {
        key: (argument,) for flags in OLD_SCHEDULERS.values() for key, (argument, *_) in flags.items()
    }
    old |= {"sample_method": ("timestep_sampling",), "faster": ("timestep_sampling", "loss_weighting")}
    return old.get(key, ()) if name in ("scheduler", "val_scheduler") else ()


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
