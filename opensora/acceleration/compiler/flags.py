"""Switches that PyTorch keeps for the whole process, set while a compiled module runs and put back behind it.

So that a denoiser may compute in TF32 beside a VAE that does not. Programs are compiled inside the first call, and see them.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
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
    with ExitStack() as undo:
        for flag in flags:
            undo.callback(_set(flag))
        yield


def _set(flag: Flag) -> Callable[[], None]:
    """Set a flag; returns what puts back what was there."""
    if flag.name == "allow_tf32":
        matmul = flag.owner is torch.backends.cuda.matmul
        return _set_matmul_tf32(allow=flag.value) if matmul else _set_cudnn_tf32(allow=flag.value)
    before = getattr(flag.owner, flag.name)
    setattr(flag.owner, flag.name, flag.value)
    return partial(setattr, flag.owner, flag.name, before)


# PyTorch 2.9 brought `fp32_precision` beside `allow_tf32`. Of the older one it keeps a value of its own, which cannot be read
# while the newer says something else, and which sets the newer when it is set. So both are saved, and while the module runs
# they agree, for the compiler reads both.


def _set_matmul_tf32(*, allow: bool) -> Callable[[], None]:
    cuda = _with_precision(torch.backends.cuda.matmul)
    cpu = _with_precision(torch.backends.mkldnn, "matmul")  # the older value is one for both
    before = [owner.fp32_precision for owner in (*cuda, *cpu)]
    for owner in (*cuda, *cpu):
        owner.fp32_precision = "ieee"  # agrees with all older values
    older = torch.get_float32_matmul_precision()
    cpu_before = before[len(cuda) :]
    torch.set_float32_matmul_precision("highest" if not allow else "medium" if "bf16" in cpu_before else "high")
    if allow:
        for owner, precision in zip(cpu, cpu_before, strict=True):
            _put_back(owner, precision)

    def undo() -> None:
        torch.set_float32_matmul_precision(older)
        for owner, precision in zip((*cuda, *cpu), before, strict=True):
            _put_back(owner, precision)

    return undo


def _set_cudnn_tf32(*, allow: bool) -> Callable[[], None]:
    cudnn = torch.backends.cudnn
    owners = [*_with_precision(cudnn, "conv"), *_with_precision(cudnn, "rnn")]
    before = [owner.fp32_precision for owner in owners]
    for owner in owners:
        owner.fp32_precision = "tf32"
    try:
        older = cudnn.allow_tf32
    except RuntimeError:  # it disagrees with "tf32"
        older = False
    cudnn.allow_tf32 = allow

    def undo() -> None:
        cudnn.allow_tf32 = older
        for owner, precision in zip(owners, before, strict=True):
            _put_back(owner, precision)

    return undo


def _with_precision(owner: Any, name: str | None = None) -> list[Any]:
    """What has the newer setting, or nothing where PyTorch is older."""
    found = owner if name is None else getattr(owner, name, None)
    return [found] if hasattr(found, "fp32_precision") else []


def _put_back(owner: Any, precision: str) -> None:
    """Set what was read; a value that is inherited from `torch.backends.fp32_precision` goes on being so."""
    owner.fp32_precision = "none"
    if owner.fp32_precision != precision:
        owner.fp32_precision = precision


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
