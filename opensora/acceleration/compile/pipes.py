"""`compile_pipe`: the parts of a pipeline, in OneDiff's order; of diffusers, or of ours.

The two know their parts by attributes, so that no pipeline is imported here. Where OneDiff leaves a part out (the third
text encoder of SD3) it stays out: it runs once a prompt.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from opensora.acceleration.compile.blocks import is_ours, repeated_blocks
from opensora.acceleration.compile.module import (
    INDUCTOR,
    NEXFORT,
    NONE,
    check_backend,
    compile_module,
    restore,
    set_memory_format,
)
from opensora.acceleration.compile.options import Given, Options, parse_options
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "image_encoder")
DENOISERS = ("unet", "controlnet", "fast_unet", "prior", "decoder", "transformer", "model")  # ours is the last
WHOLE_LAYOUT = (*DENOISERS, "vqgan", "vae")  # parts with convolutions
JOINED_QKV = ("to_qkv", "to_kv", "to_added_qkv")

Pipe = TypeVar("Pipe")


def compile_pipe(
    pipe: Pipe,
    *,
    backend: str = NEXFORT,
    options: Given = None,
    ignores: Sequence[str] = (),
    fuse_qkv_projections: bool = False,
) -> Pipe:
    """Compile the parts of a pipeline in place.

    `low-precision` reaches the denoiser and the text encoders, not the VAE; `quant` and `regional` the denoiser alone; `jit`
    leaves parts eager that repeat no blocks. An fp16 VAE that overflows in fp16 (`force_upcast`) becomes fp32 first.

    Args:
        pipe: of diffusers, or a `VideoPipeline`.
        backend, options: see `compile`.
        ignores: parts to leave alone, by name or the beginning of one: "vae" is its encoder and its decoder.
        fuse_qkv_projections: make one matrix product of query, key and value, where diffusers can.

    Returns:
        The same pipeline.

    Raises:
        UserError: as `compile`; it has no such parts; or it cannot do what is asked for.
    """
    chosen, name = parse_options(options), check_backend(backend)
    parts = parts_of(pipe)
    _check_pipe(pipe, [part for part, _ in parts], chosen, name)
    for one in ignores:
        if not any(_ignored(part, [one]) for part, _ in parts):
            known = ", ".join(part for part, _ in parts)
            warnings.warn(f"compile_pipe: ignores={one!r} is no part of it; it has {known}.", stacklevel=2)
    if fuse_qkv_projections:
        _fuse_qkv_projections(pipe)
    if not _ignored("vae", ignores):
        _upcast_vae(getattr(pipe, "vae", None))
    if chosen.memory_format is not None:
        for attribute in WHOLE_LAYOUT:
            module = getattr(pipe, attribute, None)
            if isinstance(module, nn.Module) and not _ignored(attribute, ignores):
                set_memory_format(module, chosen.memory_format)
    for part, module in parts:
        if not _ignored(part, ignores):
            _compile_part(part, module, name, chosen)
    return pipe


def parts_of(pipe: Any) -> list[tuple[str, nn.Module]]:
    """The parts that are compiled, in order, by name."""
    parts = []
    for name in TEXT_ENCODERS:
        encoder = getattr(pipe, name, None)
        if isinstance(encoder, nn.Module) and type(encoder).forward is nn.Module.forward:
            encoder = getattr(encoder, "model", None)  # of ours, the transformer inside is what is called
        parts.append((name, encoder))
    parts += [(name, getattr(pipe, name, None)) for name in DENOISERS]
    vqgan = getattr(pipe, "vqgan", None)
    parts += [(f"vqgan.{name}", getattr(vqgan, name, None)) for name in ("down_blocks", "up_blocks")]
    vae = getattr(pipe, "vae", None)
    inside = list(vae.modules()) if isinstance(vae, nn.Module) else []  # ours has diffusers' inside, or two
    parts += [(f"vae.{name}", getattr(one, name, None)) for name in ("decoder", "encoder") for one in inside]
    return [(name, part) for name, part in parts if isinstance(part, nn.Module)]


def unfuse_qkv_projections(pipe: Any) -> None:
    """Undo `fuse_qkv_projections`; the state dicts have their first names again, for joined layers go, which diffusers would keep."""
    for one in _able(pipe, "unfuse_qkv_projections"):
        one.unfuse_qkv_projections()
    for layer in (inner for module in _modules(pipe) for inner in module.modules()):
        if getattr(layer, "fused_projections", None) is True:
            for name in JOINED_QKV:
                if hasattr(layer, name):
                    delattr(layer, name)
            layer.fused_projections = False  # type: ignore[assignment]


def _fuse_qkv_projections(pipe: Any) -> None:
    """By the pipeline's own method, or its denoisers'. Ours have one matrix as they are."""
    able = _able(pipe, "fuse_qkv_projections")
    for one in able:
        one.fuse_qkv_projections()
    if not able and not any(map(is_ours, _modules(pipe))):
        raise UserError(f"fuse_qkv_projections: {type(pipe).__name__} has no way to do it; leave it out.")


def _able(pipe: Any, method: str) -> list[Any]:
    return [pipe] if hasattr(pipe, method) else [one for one in _modules(pipe) if hasattr(one, method)]


def _modules(pipe: Any) -> list[nn.Module]:
    return [part for part in vars(pipe).values() if isinstance(part, nn.Module)]


def _ignored(name: str, ignores: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in ignores)


def _check_pipe(pipe: Any, parts: Sequence[str], options: Options, backend: str) -> None:
    if not set(parts) - set(TEXT_ENCODERS):
        raise UserError(f"compile_pipe: {type(pipe).__name__} has none of the parts {', '.join((*DENOISERS, 'vae'))}.")
    if backend == NONE:
        return
    if getattr(pipe, "step_cache", None) is not None:
        raise UserError(
            "compile_pipe: a step cache decides in Python what is computed, inside of what would be compiled. Use the config's "
            "compile=True, which compiles around it, or leave the cache out."
        )
    policy = getattr(getattr(pipe, "place", None), "policy", "none")
    if policy == "block" or (policy != "none" and options.words & {"cudagraphs", "freezing"}):
        raise UserError(
            f"compile_pipe: offload={policy!r} moves weights that the program holds on to. Use offload='none', or the config's "
            "compile=True."
        )


def _compile_part(name: str, module: nn.Module, backend: str, options: Options) -> None:
    if "jit" in options.words and not repeated_blocks(module) and backend == INDUCTOR:
        logger.info("compile_pipe: %s repeats no blocks; with jit it is eager.", name)
        restore(module)
        return
    drop: set[str] = set()
    changes: dict[str, Any] = {"memory_format": None}
    if name not in DENOISERS:
        drop.add("quant")
        changes |= {"quant_type": None, "quant_skip": [], "quant_min_features": 512}
        changes |= {"regional": None, "fullgraph": False}
    if name.startswith(("vae.", "vqgan.")):
        drop.add("low-precision")
    compile_module(module, backend, replace(options, mode=options.mode_without(drop), **changes))


def _upcast_vae(vae: Any) -> None:
    """Make an fp16 VAE fp32 that must not compute in fp16, and let it take fp16 latents and pixels still.

    diffusers would do it around each decoding, and compile two programs.
    """
    if not getattr(getattr(vae, "config", None), "force_upcast", False) or not isinstance(vae, nn.Module):
        return
    if next(vae.parameters()).dtype != torch.float16:
        return
    vae.to(torch.float32)
    first = getattr(vae, "post_quant_conv", None) or getattr(vae.decoder, "conv_in", None)
    for layer in (first, getattr(vae.encoder, "conv_in", None)):
        if isinstance(layer, nn.Module):
            layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].to(layer.weight.dtype), *inputs[1:]))
