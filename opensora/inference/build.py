"""The components of a pipeline, from a config, from a checkpoint of ours, or from either with changes."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from opensora.checkpoint.lora import merge_adapter, read_adapters
from opensora.checkpoint.weight_files import refuse_misnamed
from opensora.config.load import InferenceConfig, config_from_dict, parse_config, read_file, to_dict
from opensora.inference.sizes import overlap, take_whole_patches
from opensora.models.image_encoder import argument, check_image_encoder
from opensora.models.loading import store_frozen
from opensora.models.quantised_linear import QUANTISED
from opensora.registry import DENOISERS, IMAGE_ENCODERS, SAMPLERS, TEXT_ENCODERS, VAES, build_module
from opensora.utils.errors import UserError
from opensora.utils.imports import import_parts

COMPONENTS = {
    "model": DENOISERS,
    "vae": VAES,
    "text_encoder": TEXT_ENCODERS,
    "image_encoder": IMAGE_ENCODERS,
    "scheduler": SAMPLERS,
}


class Components(NamedTuple):
    """What a pipeline is made of; models are frozen and in eval mode."""

    model: Any
    vae: Any
    text_encoder: Any
    scheduler: Any
    image_encoder: Any = None


def build_components(cfg: InferenceConfig, device: torch.device | None = None) -> Components:
    """Build all components that `cfg` names, on the CPU.

    Args:
        device: where random initial weights of a large model are made, instead.

    Raises:
        PartError: one cannot be built.
        UserError: weights cannot be read, or the size is none that the VAE can make.
    """
    for name in ("from_pretrained", "from_pretrained_2"):
        refuse_misnamed(cfg.model.get(name), f"model.{name}")
    check_image_encoder(cfg.model, cfg.image_encoder)
    if isinstance(cfg.lora, Mapping) and argument(cfg.model, "boundary") is None:
        raise UserError(f"lora.{min(cfg.lora)}: {cfg.model['type']} has no two experts: name the file with --lora.")
    adapters = [] if cfg.lora is None else read_adapters(cfg.lora, cfg.lora_scale)
    scheduler = build_module(cfg.scheduler, SAMPLERS)  # quickly found mistakes come before minutes of loading
    vae = build_module(cfg.vae, VAES)
    take_whole_patches(vae, cfg.model)
    if isinstance(cfg.num_frames, int) and cfg.loop > 1:
        overlap(vae, vae.legal_num_frames(cfg.num_frames), cfg.condition_frame_length)  # refuses what cannot be shared
    text_encoder = build_module(cfg.text_encoder, TEXT_ENCODERS)
    image_encoder = None if cfg.image_encoder is None else build_module(cfg.image_encoder, IMAGE_ENCODERS)
    # a LoRA is merged into weights that are not quantised yet
    stored = "bf16" if adapters and cfg.frozen_weights in QUANTISED else cfg.frozen_weights
    model = build_module(
        cfg.model,
        DENOISERS,
        in_channels=vae.out_channels,
        caption_channels=text_encoder.output_dim,
        model_max_length=text_encoder.model_max_length,
        frozen_weights=stored,
        device=device,
    )
    store_frozen(model, stored)
    if cfg.model.get("from_pretrained") is None:
        warnings.warn("the model has random weights; name a checkpoint with --ckpt-path.", stacklevel=3)
    for path, adapter, scale in adapters:
        merge_adapter(model, adapter, scale, path)
    store_frozen(model, cfg.frozen_weights)
    for part in (model, vae, text_encoder, *([] if image_encoder is None else [image_encoder])):
        part.requires_grad_(False).eval()
    return Components(model, vae, text_encoder, scheduler, image_encoder)


def inference_config(source: str | Path, changes: Mapping[str, Any]) -> InferenceConfig:
    """The settings of a config file, or of a checkpoint folder of ours, with some changed.

    A checkpoint has what was trained: model, VAE, text encoder, scheduler, frame rate, and, unless it was trained in buckets, the
    size. The changes must have `imports` where components are the user's own.

    Args:
        source: a .py, .json or .yml file, a checkpoint folder, or the folder of a pipeline of NOVA.
        changes: fields of `InferenceConfig` or its command-line names (`ckpt_path`, `cfg_scale`, ...), with their values.

    Raises:
        UserError: there is nothing of the kind at `source`, or the settings are wrong.
    """
    import_parts(changes.get("imports") or ())
    path = Path(source)
    # of a checkpoint something may be missing that is among the changes
    values = (
        read_file(path, InferenceConfig)[0]
        if path.is_dir()
        else to_dict(parse_config(InferenceConfig, COMPONENTS, [str(path)]))
    )
    for name, value in changes.items():
        alias = InferenceConfig.aliases.get(name)
        if alias is None:
            values[name] = value
            for other in InferenceConfig.replaces.get(name, ()) if value is not None else ():
                if other not in changes:  # as on the command line: a resolution takes the place of an image_size
                    values[other] = None
        else:
            component, key = alias.path
            values[component] = {**values[component], key: value}
    return config_from_dict(InferenceConfig, values, COMPONENTS)


def calls_parts(scheduler: Any) -> bool:
    """Whether a sampler calls a model's parts one by one (NOVA's), instead of the whole model once a step."""
    return not hasattr(scheduler, "solver")
