"""Switches that PyTorch keeps for the whole process, set while a compiled module runs and put back behind it.

So that a denoiser may compute in TF32 beside a VAE that does not. Programs are compiled inside the first call, and see them.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from opensora.acceleration.compiler.options import Options

# of nexfort's variables, those that name what it alone could do
WITHOUT_MEANING = ("NEXFORT_ENABLE_FP8_QUANTIZE_ATTENTION", "NEXFORT_FORCE_QUANTE_ON_CUDA")


class Flag(NamedTuple):
    """An attribute of an object of PyTorch's, and its value while the module runs."""

    owner: Any
    name: str
    value: bool


def flags_of(options: Options) -> list[Flag]:
    """What `options` switch while the module runs."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = []
    if "low-precision" in options.words:
        flags += [Flag(matmul, "allow_tf32", True), Flag(cudnn, "allow_tf32", True)]
        short = options.short_sums
        flags += [
            Flag(matmul, "allow_fp16_reduced_precision_reduction", short),
            Flag(matmul, "allow_bf16_reduced_precision_reduction", short),
        ]
    for name, owner, attribute in (
        ("overrides.conv_benchmark", cudnn, "benchmark"),
        ("overrides.matmul_allow_tf32", matmul, "allow_tf32"),
    ):
        if name in options.overrides:
            flags.append(Flag(owner, attribute, options.overrides[name]))
    if options.dynamic is True:
        from torch.fx.experimental import _config as shapes

        # or a first call with height == width makes a program for squares
        flags.append(Flag(shapes, "use_duck_shape", False))
    if "cache-all" in options.words:
        import torch._functorch.config as functorch

        flags.append(Flag(functorch, "enable_autograd_cache", True))
    if "freezing" in options.words:
        from torch._inductor import config as inductor

        # dynamo looks here, not into the module's settings, whether weights are to be inputs of the program
        flags.append(Flag(inductor, "freezing", True))
    return flags


@contextmanager
def switched(flags: list[Flag]) -> Iterator[None]:
    """Set all flags; put back what was there."""
    before = [getattr(flag.owner, flag.name) for flag in flags]
    try:
        for flag in flags:
            setattr(flag.owner, flag.name, flag.value)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(flag.owner, flag.name, value)


def cache_settings() -> dict[str, bool]:
    """Inductor's settings that nexfort's environment variables ask for; a warning for those that mean nothing here."""
    settings = {}
    for variable, name in (
        ("NEXFORT_GRAPH_CACHE", "fx_graph_cache"),
        ("NEXFORT_ENABLE_TRITON_AUTOTUNE_CACHE", "autotune_local_cache"),
    ):
        if (value := os.environ.get(variable)) is not None:
            settings[name] = value.lower() in ("1", "true", "on", "yes")
    for variable in WITHOUT_MEANING:
        if variable in os.environ:
            warnings.warn(f"{variable} has no effect: it belongs to nexfort's own kernels.", stacklevel=4)
    return settings
