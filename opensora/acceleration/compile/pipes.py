"""`compile_pipe`: the parts of a pipeline, in OneDiff's order; of diffusers, or of ours.

Where OneDiff leaves a part out (the third text encoder of SD3) it stays out: it runs once a prompt.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from opensora.acceleration.compile import is_ours, repeated_blocks
from opensora.acceleration.compile.nexfort import (
    INDUCTOR,
    NEXFORT,
    NONE,
    Given,
    Options,
    check_backend,
    compile_module,
    parse_options,
    restore,
    set_precision,
)
from opensora.acceleration.compile.quantise import quantise
from opensora.utils.errors import UserError

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "image_encoder")
DENOISERS = ("unet", "controlnet", "fast_unet", "prior", "decoder", "transformer", "model")  # ours is the last

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

    `quant` and `regional` reach the denoiser alone, `memory_format` all but text encoders; `jit` leaves parts eager that repeat no
    blocks.

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
    chosen, backend, parts = parse_options(options), check_backend(backend), _parts_but(pipe, ignores)
    policy = getattr(getattr(pipe, "place", None), "policy", "none")
    moves = policy == "block" or (policy != "none" and chosen.words & {"cudagraphs", "freezing"})
    if backend != NONE and (moves or getattr(pipe, "step_cache", None) is not None):
        raise UserError(
            "compile_pipe: a step cache decides in Python inside of what would be compiled, and offload='block' (with cudagraphs or freezing "
            "any offload) moves weights that the program holds. Leave these out, or use the config's compile=True."
        )
    modules = [module for module in vars(pipe).values() if isinstance(module, nn.Module)]
    if fuse_qkv_projections:  # ours have one matrix as they are
        able: list[Any] = [one for one in modules if hasattr(one, "fuse_qkv_projections")]
        able = [pipe] if hasattr(pipe, "fuse_qkv_projections") else able
        if not able and not any(map(is_ours, modules)):
            raise UserError(f"fuse_qkv_projections: {type(pipe).__name__} has no way to do it; leave it out.")
        for one in able:
            one.fuse_qkv_projections()
    set_precision(chosen)
    for name, module in parts:
        own = chosen
        if name not in DENOISERS:
            own = Options(
                mode=":".join(word for word in chosen.given if word != "quant"),
                dynamic=chosen.dynamic,
                memory_format=None if name in TEXT_ENCODERS else chosen.memory_format,
                overrides=chosen.overrides,
            )
        if "jit" in chosen.words and not repeated_blocks(module) and backend == INDUCTOR:
            restore(module)
        else:
            compile_module(module, backend, own)
    return pipe


def quantize_pipe(
    pipe: Pipe,
    *,
    ignores: Sequence[str] = (),
    quant_type: str | None = None,
    quant_min_features: int = 512,
    quant_skip: Sequence[str] = (),
) -> Pipe:
    """Quantise the denoisers of a pipeline in place, before `compile_pipe`; as the mode word "quant" does.

    Args:
        pipe, ignores: see `compile_pipe`.
        quant_type, quant_min_features, quant_skip: see `Options`.

    Returns:
        The same pipeline.

    Raises:
        UserError: as `compile_pipe` and `quantise`.
    """
    denoisers = [module for name, module in _parts_but(pipe, ignores) if name in DENOISERS]
    if not denoisers:
        raise UserError(f"quantize_pipe: {type(pipe).__name__} has no denoiser to quantise: {', '.join(DENOISERS)}.")
    for module in denoisers:
        quantise(module, quant_type, quant_min_features, quant_skip)
    return pipe


def _parts_but(pipe: Any, ignores: Sequence[str]) -> list[tuple[str, nn.Module]]:
    parts = parts_of(pipe)
    names = [name for name, _ in parts]
    if not set(names) - set(TEXT_ENCODERS):
        raise UserError(f"{type(pipe).__name__} has none of the parts {', '.join((*DENOISERS, 'vae'))}.")
    for one in ignores:
        if not any(f"{name}.".startswith(f"{one}.") for name in names):
            raise UserError(f"ignores={one!r} is not a part of it; it has {', '.join(names)}.")
    return [(name, part) for name, part in parts if not any(f"{name}.".startswith(f"{one}.") for one in ignores)]


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
