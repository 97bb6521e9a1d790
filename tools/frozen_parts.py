"""The frozen parts of a training config, its VAE and its text encoder, without their weights: their sizes are what counts.

An architecture is in `config.json`: of a local folder, or of a hub id that was downloaded before. Nothing is fetched.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn

from opensora.checkpoint.pretrained import resolve_pretrained
from opensora.models.loading import RELEASED
from opensora.models.vae.base import VideoVAE
from opensora.models.vae.opensora_v1_2 import (
    CONFIG,
    IMAGE_ARCHITECTURE,
    IMAGE_VAE,
    OpenSoraVAE_V1_2,
    VideoAutoencoderPipeline,
    image_vae,
)
from opensora.models.vae.vae import DiffusersVAE, parameters_of
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

SD_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
}
WAN = [name for kind, names in RELEASED.items() if kind.startswith("Wan") for name in names]
KNOWN_VAES: dict[str, dict[str, Any]] = {  # those that configs here name, and their kin
    **dict.fromkeys(("stabilityai/sd-vae-ft-ema", "stabilityai/sd-vae-ft-mse", "stabilityai/sdxl-vae"), SD_VAE),
    IMAGE_VAE: IMAGE_ARCHITECTURE,
    **{name: {"_class_name": "AutoencoderKLWan"} for name in WAN},
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {
        "_class_name": "AutoencoderKLWan", "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True,
        "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
        "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
    },
}  # fmt: skip
T5_SIZES = ("d_model", "d_ff", "num_layers", "num_heads")
V1_1 = {"small": (512, 1024, 8, 6), "base": (768, 2048, 12, 12), "large": (1024, 2816, 24, 16), "xl": (2048, 5120, 24, 32),
        "xxl": (4096, 10240, 24, 64)}  # fmt: skip
KNOWN_T5S: dict[str, dict[str, Any]] = {
    f"google/{family}-{size}": {
        **dict(zip(T5_SIZES, sizes, strict=True)), "d_kv": 64, "feed_forward_proj": "gated-gelu", "vocab_size": vocabulary
    }
    for family, vocabulary in {"t5-v1_1": 32128, "flan-t5": 32128, "mt5": 250112, "umt5": 256384}.items()
    for size, sizes in V1_1.items()
}  # fmt: skip
KNOWN_T5S |= dict.fromkeys(WAN, KNOWN_T5S["google/umt5-xxl"])
T5_XXL = KNOWN_T5S["DeepFloyd/t5-v1_1-xxl"] = KNOWN_T5S["google/t5-v1_1-xxl"]
CLIP_LARGE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
KNOWN_CLIPS: dict[str, dict[str, Any]] = {  # of the text encoder, what differs from transformers' own configuration
    "openai/clip-vit-base-patch16": {},
    "openai/clip-vit-base-patch32": {},
    "openai/clip-vit-large-patch14": CLIP_LARGE,
    "openai/clip-vit-large-patch14-336": CLIP_LARGE,
}
TEXT_LENGTH = 120


def build_vae(component: dict[str, Any]) -> VideoVAE:
    """The VAE that a component dict means, untrained.

    Raises:
        UserError: its architecture is not known here.
    """
    return MODELS.build(without_weights(component))


def without_weights(component: dict[str, Any]) -> dict[str, Any]:
    """A component dict that builds the same VAE from its architecture alone."""
    name, kind = component.get("from_pretrained"), inspect.unwrap(MODELS.get(component["type"]) or object)
    if issubclass(kind, VideoAutoencoderPipeline):
        return _pipeline_without_weights(component, name, kind)
    if name is None:
        return component
    component = {**component, "from_pretrained": None}
    if component.get("architecture") is not None or not issubclass(kind, DiffusersVAE):
        return component
    config = config_of(name, component.get("subfolder"), component.get("cache_dir")) or KNOWN_VAES.get(name)
    if config is None:
        raise UserError(
            f"the architecture of the VAE {name} is not known here. Download it and pass its local folder, or say what its "
            f"config.json does with --vae.architecture, such as --vae.architecture.type={next(iter(kind._classes()))}."
        )
    return {**component, "architecture": _architecture(config, kind)}


def _architecture(config: dict[str, Any], kind: type[DiffusersVAE]) -> dict[str, Any]:
    classes = kind._classes()
    name = config.get("_class_name", next(iter(classes)))
    known = parameters_of(classes[name]) if name in classes else list(config)  # the VAE itself refuses other classes
    return {"type": name, **{key: value for key, value in config.items() if key in known}}


def _pipeline_without_weights(
    component: dict[str, Any], name: str | None, kind: type[VideoAutoencoderPipeline]
) -> dict[str, Any]:
    written = config_of(name) or {}
    parts = {key: component.get(key) or written.get(key) for key in ("vae_2d", "vae_temporal")}
    if issubclass(kind, OpenSoraVAE_V1_2):
        parts = {"vae_2d": image_vae()} | {key: part for key, part in parts.items() if part is not None}
    if None in parts.values():
        raise UserError(
            f"the parts of the VAE {name} are not known here: there is no {CONFIG} that describes them. Pass its local folder, "
            "or say what they are with --vae.vae_2d and --vae.vae_temporal."
        )
    unset = component.get("micro_frame_size", "saved") == "saved"
    frames = {key: written[key] for key in ("micro_frame_size",) if unset and key in written}
    built = {key: without_weights(part) for key, part in parts.items() if part is not None}
    return {**component, "from_pretrained": None, **built, **frames}


def build_text(component: dict[str, Any]) -> tuple[nn.Module | None, int | None, int]:
    """The encoder, its width and its number of tokens; None where that is not known, or there is none to be loaded."""
    kind, name = component["type"], component.get("from_pretrained")
    if kind == "classes":
        return None, None, 1
    if kind == "cached":  # features are read from files, so that nothing of the encoder is loaded
        encoder = component.get("encoder")
        return (None, *build_text(encoder)[1:]) if encoder else (None, None, TEXT_LENGTH)
    length = component.get("model_max_length", TEXT_LENGTH)
    found = config_of(name, component.get("subfolder"), component.get("cache_dir"))
    if kind == "t5":
        if found is None:
            found = KNOWN_T5S.get(name or "", T5_XXL)  # `assumptions` reports one that is not known
        elif missing := [size for size in T5_SIZES if size not in found]:
            raise UserError(
                f"text encoder {name}: its {CONFIG} has no {missing[0]!r}, so it is no T5's. Pass the folder of the encoder "
                "itself (of a pipeline, its text_encoder), or use type='hf'."
            )
        config = transformers.T5Config(**found)
        return transformers.T5EncoderModel(config), config.d_model, length
    if kind == "clip":
        known = KNOWN_CLIPS.get(name or "", {}) if found is None else found.get("text_config", found)
        clip = transformers.CLIPTextConfig(**known)
        return transformers.CLIPTextModel(clip), clip.hidden_size, 1
    if found is None:
        return None, None, length
    auto = transformers.AutoConfig.for_model(**found)
    model = transformers.AutoModel.from_config(auto)
    return model.get_encoder() if auto.is_encoder_decoder else model, auto.hidden_size, length


def assumptions(component: dict[str, Any], flag: str = "--text_encoder") -> list[str]:
    """What `build_text` assumes of an encoder that it does not know, and how to correct it; a line for each.

    Args:
        flag: the option of the command line that sets the component.
    """
    kind, name = component["type"], component.get("from_pretrained")
    if kind == "cached":
        return assumptions(component["encoder"], f"{flag}.encoder") if component.get("encoder") else []
    known = {"t5": KNOWN_T5S, "clip": KNOWN_CLIPS, "hf": {}}.get(kind)
    if (
        known is None
        or name is None
        or name in known
        or config_of(name, component.get("subfolder"), component.get("cache_dir"))
    ):
        return []
    assumed = {
        "t5": f"assumed those of T5 v1.1 XXL (4762 million parameters, width {T5_XXL['d_model']})",
        "clip": "assumed those of OpenAI's ViT-B/32 (63 million parameters, width 512)",
        "hf": "so its weights are not counted",
    }[kind]
    return [
        f"text encoder {name}: its sizes are not known here, {assumed}. If it is another, download it, or pass "
        f"{flag}.from_pretrained=FOLDER with its {CONFIG}."
    ]


def vae_bytes(vae: nn.Module) -> float:
    """Of a GPU: the weights in their dtype."""
    return float(sum(p.numel() * p.element_size() for p in vae.parameters()))


def text_bytes(component: dict[str, Any], encoder: nn.Module | None, processes: int) -> float:
    """Of a GPU: the weights that stay there in their dtype, when `processes` of a node could share them.

    Weights that are on the device only while they encode (`between_uses`) count nothing: they go before the denoiser works.
    """
    if encoder is None or component.get("between_uses", "keep") != "keep":
        return 0.0
    int8 = component.get("dtype") == "int8"  # of its linear layers
    dtype = to_torch_dtype("bf16" if int8 else component.get("dtype", "fp32"))
    quantised = {f"{name}.weight" for name, m in encoder.named_modules() if int8 and isinstance(m, nn.Linear)}
    # as transformers load them: T5 keeps layers that overflow
    stay = getattr(encoder, "_keep_in_fp32_modules", None) or () if dtype == torch.float16 else ()
    sizes = (
        p.numel() + 4 * len(p)
        if name in quantised
        else p.numel() * (4 if set(stay) & set(name.split(".")) else dtype.itemsize)
        for name, p in encoder.named_parameters()
    )
    return sum(sizes) / (processes if component.get("shardformer") else 1)


def config_of(name: str | None, subfolder: str | None = None, cache_dir: str | None = None) -> dict[str, Any] | None:
    """The config.json of a part that is here: in a folder, next to a file, or in the hub's cache."""
    if name is None:
        return None
    if Path(name).expanduser().is_file():
        file: Any = Path(name).expanduser().parent / CONFIG
    elif (folder := Path(resolve_pretrained(name, what="part"))).is_dir():
        file = folder / (subfolder or "") / CONFIG
    else:
        file = try_to_load_from_cache(name, f"{subfolder}/{CONFIG}" if subfolder else CONFIG, cache_dir)
    return (
        json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(file, str | Path) and Path(file).is_file()
        else None
    )
