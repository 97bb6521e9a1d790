"""Quantised linear layers through torchao, for the mode word "quant".

Narrow layers, and those that see one vector a sample (modulation, embeddings), are left alone: they take no time, and precision
there matters most. `layer_errors` measures what each of the others does to the output by itself, and `worst` names those that
do most, for the option `quant_skip`.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.compiler.options import Options
from opensora.acceleration.compiler.regions import repeated_blocks
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

# OneDiff's names -> torchao's class, and whether scales are by row or one for a tensor (None: it takes no such choice)
TYPES: dict[str, tuple[str, str | None]] = {
    "fp8_e4m3_e4m3_dynamic": ("Float8DynamicActivationFloat8WeightConfig", "PerRow"),
    "fp8_e4m3_e4m3_dynamic_per_tensor": ("Float8DynamicActivationFloat8WeightConfig", "PerTensor"),
    "fp8_e4m3_e4m3_weightonly": ("Float8WeightOnlyConfig", None),
    "int8_dynamic": ("Int8DynamicActivationInt8WeightConfig", None),
    "int8_weightonly": ("Int8WeightOnlyConfig", None),
}
FLOAT8_CAPABILITY = (8, 9)
ONE_VECTOR = ("norm", "adaln", "embed", "modulation")


def quantise(module: nn.Module, options: Options) -> int:
    """Quantise the weights of linear layers in place; returns how many were. Names in the state dict stay.

    Raises:
        UserError: torchao is not installed, there is no such type, the device cannot compute it, or no layer is wide enough.
    """
    kind = options.quant_type or _best(module)
    if kind not in TYPES:
        raise UserError(
            f"compiler options: no quant_type {kind!r}.{did_you_mean(kind, list(TYPES))} Types: {', '.join(TYPES)}."
        )
    quantization = _torchao()
    if kind.startswith("fp8") and _capability(module) < FLOAT8_CAPABILITY:
        raise UserError(f"quant_type={kind!r} needs a GPU of compute capability 8.9 or later; use int8_dynamic.")
    chosen = _linears(module, options.quant_min_features)
    if not chosen:
        raise UserError(
            f'mode "quant": {type(module).__name__} has no linear layer of {options.quant_min_features} features in and out that is '
            "not quantised; set quant_min_features lower."
        )
    for name in options.quant_skip:
        if name not in chosen:
            raise UserError(
                f"quant_skip: {name!r} is no layer that would be quantised.{did_you_mean(name, list(chosen))}"
            )
    ids = {id(layer) for name, layer in chosen.items() if name not in options.quant_skip}
    quantization.quantize_(module, _config(quantization, kind), filter_fn=lambda layer, _: id(layer) in ids)
    return len(ids)


@torch.no_grad()
def layer_errors(
    module: nn.Module, call: Callable[[], Tensor], quant_type: str | None = None, min_features: int = 512
) -> dict[str, float]:
    """What quantising one layer alone does to the output, for each layer that "quant" would quantise.

    Args:
        module: not quantised yet; it is the same afterwards.
        call: runs it on inputs that matter, such as one step of sampling, and returns a tensor; the same at each call.
        quant_type, min_features: see `Options`.

    Returns:
        Full name of the layer -> |quantised - as it is| / |as it is|.

    Raises:
        UserError: torchao is not installed.
    """
    quantization = _torchao()
    config = _config(quantization, quant_type or _best(module))
    wanted, errors = call().float(), {}
    for name, layer in _linears(module, min_features).items():
        parent, _, last = name.rpartition(".")
        twin = nn.Sequential(copy.deepcopy(layer))
        quantization.quantize_(twin, config)
        setattr(module.get_submodule(parent), last, twin[0])
        try:
            errors[name] = float((call().float() - wanted).norm() / wanted.norm())
        finally:
            setattr(module.get_submodule(parent), last, layer)
    return errors


def worst(errors: Mapping[str, float], keep: float = 0.9) -> list[str]:
    """The layers to leave alone, so that `keep` of all (0 to 1) are quantised: those with the largest errors, for `quant_skip`."""
    ranked = sorted(errors, key=lambda name: errors[name], reverse=True)
    return sorted(ranked[: len(ranked) - round(keep * len(ranked))])


def _torchao() -> Any:
    try:
        from torchao import quantization
    except ImportError as error:
        raise UserError("mode 'quant' needs torchao: pip install 'opensora[quant]', or leave quant out.") from error
    return quantization


def _config(quantization: Any, kind: str) -> Any:
    name, granularity = TYPES[kind]
    build = getattr(quantization, name)
    return build() if granularity is None else build(granularity=getattr(quantization, granularity)())


def _linears(module: nn.Module, narrowest: int) -> dict[str, nn.Linear]:
    """By full name: of the repeated blocks, where there are some; those that are quantised already are not among them."""
    inside = {id(layer) for root in repeated_blocks(module) or [module] for layer in root.modules()}
    return {
        name: layer
        for name, layer in module.named_modules()
        if id(layer) in inside
        and type(layer) is nn.Linear
        and type(layer.weight.data) is torch.Tensor
        and min(layer.in_features, layer.out_features) >= narrowest
        and not any(word in name.lower() for word in ONE_VECTOR)
    }


def _best(module: nn.Module) -> str:
    return "fp8_e4m3_e4m3_dynamic" if _capability(module) >= FLOAT8_CAPABILITY else "int8_dynamic"


def _capability(module: nn.Module) -> tuple[int, int]:
    device = next(module.parameters()).device
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
