"""Quantised linear layers through torchao, for the mode word "quant".

Narrow layers, and those that see one vector a sample (modulation, embeddings), are left alone: they take no time, and precision
there matters most. `layer_errors` measures what each of the others does to the output by itself, and `worst` names those that
do most, for the option `quant_skip`.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from opensora.acceleration.compile.blocks import repeated_blocks
from opensora.acceleration.compile.options import Options
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
BY_ROW = "fp8_e4m3_e4m3_dynamic"  # torchao takes bf16 weights alone
FLOAT8_CAPABILITY = (8, 9)
ONE_VECTOR = ("norm", "adaln", "embed", "modulation")

# module -> quant_type, quant_min_features, quant_skip
_DONE: weakref.WeakKeyDictionary[nn.Module, tuple[str, int, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def plan(module: nn.Module, options: Options) -> Callable[[], None]:
    """What quantises the weights of linear layers in place when it is called; names in the state dict stay.

    Layers that were quantised with the same options are left as they are.

    Raises:
        UserError: torchao is not installed, there is no such type, device or weights do not allow it, no layer is wide enough, or
            the weights were quantised already in another way.
    """
    _check_name(options.quant_type)
    quantization = _torchao()
    done = _DONE.get(module) if any(map(is_quantised, module.modules())) else None
    rest = (options.quant_min_features, tuple(sorted(options.quant_skip)))
    if done is not None and done != (options.quant_type or done[0], *rest):
        raise UserError(
            f"{type(module).__name__}: its weights are quantised already, with quant_type={done[0]!r}, quant_min_features={done[1]} "
            f"and quant_skip={list(done[2])}, and what they were is lost. Use these again, or load the weights anew."
        )
    chosen = _linears(module, options.quant_min_features)
    if not chosen and done is None:
        raise UserError(
            f'mode "quant": {type(module).__name__} has no linear layer of {options.quant_min_features} features in and out that is '
            "not quantised; set quant_min_features lower."
        )
    for name in options.quant_skip:
        if name not in chosen:
            raise UserError(
                f"quant_skip: {name!r} is no layer that would be quantised.{did_you_mean(name, list(chosen))}"
            )
    layers = {name: layer for name, layer in chosen.items() if name not in options.quant_skip}
    kind = options.quant_type or (_best(layers.values()) if done is None else done[0])
    _check_type(kind, layers)

    def quantise() -> None:
        ids = {id(layer) for layer in layers.values()}
        quantization.quantize_(module, _config(quantization, kind), filter_fn=lambda layer, _: id(layer) in ids)
        _DONE[module] = (kind, *rest)

    return quantise


def is_quantised(layer: nn.Module) -> bool:
    """Whether torchao holds the weights of a linear layer."""
    return type(layer) is nn.Linear and type(layer.weight.data).__module__.startswith("torchao.")


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
        UserError: torchao is not installed, there is no such type, or device or weights do not allow it.
    """
    _check_name(quant_type)
    quantization = _torchao()
    layers = _linears(module, min_features)
    kind = quant_type or _best(layers.values())
    _check_type(kind, layers)
    config = _config(quantization, kind)
    expected, errors = call().float(), {}
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        twin = nn.Sequential(copy.deepcopy(layer))
        quantization.quantize_(twin, config)
        setattr(module.get_submodule(parent), last, twin[0])
        try:
            errors[name] = float((call().float() - expected).norm() / expected.norm())
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
        raise UserError("mode 'quant' needs torchao: pip install -e '.[quant]', or leave quant out.") from error
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


def _check_name(kind: str | None) -> None:
    if kind not in (None, *TYPES):
        raise UserError(
            f"compiler options: no quant_type {kind!r}.{did_you_mean(str(kind), list(TYPES))} Types: {', '.join(TYPES)}."
        )


def _check_type(kind: str, layers: Mapping[str, nn.Linear]) -> None:
    if layers and kind.startswith("fp8") and _capability(layers.values()) < FLOAT8_CAPABILITY:
        raise UserError(f"quant_type={kind!r} needs a GPU of compute capability 8.9 or later; use int8_dynamic.")
    for name, layer in layers.items():
        if kind == BY_ROW and layer.weight.dtype != torch.bfloat16:
            raise UserError(
                f"quant_type={kind!r} needs weights in bf16, and those of {name} are {str(layer.weight.dtype).removeprefix('torch.')}. "
                f"Use one of {', '.join(one for one in TYPES if one != BY_ROW)}, or convert the model to bf16 first."
            )


def _best(layers: Iterable[nn.Linear]) -> str:
    """The fastest type that the GPU computes and that the weights' dtype allows."""
    layers = list(layers)
    if _capability(layers) < FLOAT8_CAPABILITY:
        return "int8_dynamic"
    return BY_ROW if all(layer.weight.dtype == torch.bfloat16 for layer in layers) else f"{BY_ROW}_per_tensor"


def _capability(layers: Iterable[nn.Linear]) -> tuple[int, int]:
    """Of the GPU that all are on; (0, 0) where one is on none."""
    devices = {layer.weight.device for layer in layers}
    return min(
        (torch.cuda.get_device_capability(one) if one.type == "cuda" else (0, 0) for one in devices), default=(0, 0)
    )
