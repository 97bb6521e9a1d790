"""Quantised linear layers through torchao, for the mode word "quant".

Narrow layers, and those that see one vector a sample (modulation, embeddings), are left alone: they take no time.
"""

from collections.abc import Sequence

import torch
from torch import nn

from opensora.acceleration.compile import repeated_blocks
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
ONE_VECTOR = ("norm", "adaln", "embed", "modulation")


def quantise(module: nn.Module, kind: str | None, min_features: int, skip: Sequence[str]) -> None:
    """Quantise the weights of linear layers in place; names in the state dict stay. See `Options` for the arguments.

    Raises:
        UserError: torchao is not installed, there is no such type, device or weights do not allow it, or no layer is wide enough.
            Nothing is changed then.
    """
    if kind not in (None, *TYPES):
        raise UserError(
            f"compiler options: no quant_type {kind!r}.{did_you_mean(str(kind), list(TYPES))} Types: {', '.join(TYPES)}."
        )
    try:
        from torchao import quantization
    except ImportError as error:
        raise UserError("mode 'quant' needs torchao: pip install -e '.[quant]', or leave quant out.") from error
    inside = {id(layer) for root in repeated_blocks(module) or [module] for layer in root.modules()}
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if id(layer) in inside
        and type(layer) is nn.Linear
        and min(layer.in_features, layer.out_features) >= min_features
        and not any(word in name.lower() for word in ONE_VECTOR)
    }
    for name in skip:
        if layers.pop(name, None) is None:
            raise UserError(
                f"quant_skip: {name!r} is not a layer that would be quantised.{did_you_mean(name, list(layers))}"
            )
    if not layers:
        raise UserError(
            f'mode "quant": {type(module).__name__} has no linear layer of {min_features} features in and out to quantise; set '
            "quant_min_features lower."
        )
    ids = {id(layer) for layer in layers.values() if not is_quantised(layer)}
    if not ids:
        return
    float8 = all(takes_float8(layer.weight.device) for layer in layers.values())
    bf16 = all(layer.weight.dtype == torch.bfloat16 for layer in layers.values())
    if kind is None:  # the fastest that the GPU computes and that the weights' dtype allows
        kind = "int8_dynamic" if not float8 else BY_ROW if bf16 else f"{BY_ROW}_per_tensor"
    if kind.startswith("fp8") and not float8:
        raise UserError(f"quant_type={kind!r} needs a GPU of compute capability 8.9 or later; use int8_dynamic.")
    if kind == BY_ROW and not bf16:
        raise UserError(
            f"quant_type={kind!r} needs weights in bf16: convert the model first, or use one of "
            f"{', '.join(one for one in TYPES if one != BY_ROW)}."
        )
    name, granularity = TYPES[kind]
    arguments = {} if granularity is None else {"granularity": getattr(quantization, granularity)()}
    config = getattr(quantization, name)(**arguments)
    quantization.quantize_(module, config, filter_fn=lambda layer, _: id(layer) in ids)


def takes_float8(device: torch.device) -> bool:
    """Whether it multiplies in float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def is_quantised(layer: nn.Module) -> bool:
    """Whether torchao holds the weights of a linear layer."""
    return type(layer) is nn.Linear and type(layer.weight.data).__module__.startswith("torchao.")
