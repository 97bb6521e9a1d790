"""Training with float8 matrix products: the linear layers of a denoiser's blocks that see all tokens become torchao's.

Weights stay fp32 under the same names, in the same `Parameter` objects, so that engines, EMA and checkpoints see no difference.
For each product, both factors are scaled and cast to 8 bits (Micikevicius et al. 2022, arXiv:2209.05433). Two ways to scale:

| recipe | scales | formats |
|---|---|---|
| `rowwise` | one for each token and each output feature | e4m3 |
| `tensorwise` | one for each tensor; less to compute, and one outlier costs all others precision | e4m3, gradients e5m2 |
| `rowwise_with_gw_hp` | as rowwise, but the gradient of the weights is a product in bf16 | e4m3 |
"""

import logging
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opensora.checkpoint.lora import FACTOR
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

logger = logging.getLogger(__name__)

Recipe = Literal["rowwise", "tensorwise", "rowwise_with_gw_hp"]

CAPABILITY = (8, 9)
"""The first compute capability with float8 products: Ada, then Hopper."""
_MULTIPLE = 16  # of the sizes of a float8 product
LAYERS = {
    "attn": ("qkv", "proj"),
    "attn_temp": ("qkv", "proj"),
    "cross_attn": ("q_linear", "proj"),
    "mlp": ("fc1", "fc2"),
}
"""Part of a denoiser's block -> its linear layers that see all tokens."""


def recipe_of(float8: bool | str) -> str | None:  # noqa: FBT001  (a config's value)
    """The recipe that the config's `float8` means; None = no float8."""
    return "rowwise" if float8 is True else float8 or None


def check_float8(recipe: str, device: torch.device, *, emulate: bool = False) -> None:
    """Refuse what cannot work here, before anything is loaded.

    Raises:
        UserError: there is no such recipe, torchao is not installed, or the device has no float8 products.
    """
    if recipe not in get_args(Recipe):
        names = list(get_args(Recipe))
        raise UserError(f"float8={recipe!r} is not one of {', '.join(names)}.{did_you_mean(recipe, names)}")
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise UserError(f"float8 needs torchao: pip install -e '.[quant]', or leave float8 out ({error}).") from error
    if emulate:
        return
    here = "a CPU has none"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= CAPABILITY:
            return
        here = f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
    raise UserError(
        f"float8={recipe!r} needs a GPU with float8 products, of compute capability 8.9 or later (Ada, Hopper or newer); {here}. "
        "Leave float8 out."
    )


def convert_linears(model: Any, recipe: str = "rowwise", *, emulate: bool = False) -> int:
    """Let the linear layers that see all tokens compute in float8, in place; call it before `compile_blocks`.

    These are, inside `model.transformer_blocks()`: an attention's `qkv` and `proj`, a cross-attention's `q_linear` and
    `proj`, an MLP's `fc1` and `fc2`, where both sizes are multiples of 16. Modulation, embedders, what reads the text and the
    last layer see few rows, or need the precision.

    Args:
        model: a `Denoiser`, on its device, in fp32, without adapters.
        recipe: see the module.
        emulate: compute in fp32 on factors that were rounded to float8, on any device; for tests, as it is slow.

    Returns:
        How many layers were converted.

    Raises:
        UserError: see `check_float8`; or there is no such layer, or it has adapters.
    """
    check_float8(recipe, next(model.parameters()).device, emulate=emulate)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = _token_linears(model)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    wanted = {id(layer) for layer in chosen.values()}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, _: id(layer) in wanted)
    for name in chosen:  # torchao's function makes its own class, and mends what Triton does wrong
        model.get_submodule(name).__class__ = _layer_class()
    logger.info("float8, %s: %d linear layers.", recipe, len(chosen))
    return len(chosen)


class _TokenRows(nn.Linear):
    """Before torchao's layer: rows are filled up with zeros, which change no result, to a multiple of 16.

    The gradient of the weights sums over the rows, so that other numbers of them would fail, and only in the backward pass.
    torchao's own `pad_inner_dim` copies all six factors of the three products, whether it is needed or not. Rows come as a
    matrix, since torchao casts before it makes them one, and cannot where scales are by row and the tokens lie transposed in
    memory.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in] -> [..., out]`, in the format of autocast if that is on, or else in x's."""
        device = x.device.type
        if torch.is_autocast_enabled(device):  # torchao asks for CUDA's autocast alone
            x = x.to(torch.get_autocast_dtype(device))
        rows = x.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        short = -num_rows % _MULTIPLE
        if short:
            rows = F.pad(rows, (0, 0, 0, short))
        return super().forward(rows)[:num_rows].reshape(*x.shape[:-1], self.out_features)


@cache
def _layer_class() -> type[nn.Module]:
    """Made here and not at import, since torchao may not be installed."""
    from torchao.float8.float8_linear import Float8Linear

    return type("TokenFloat8Linear", (_TokenRows, Float8Linear), {})


def _token_linears(model: Any) -> dict[str, nn.Linear]:
    """By full name, in the model's order.

    Raises:
        UserError: there is none, or some have adapters.
    """
    inside = {id(module) for block in model.transformer_blocks() for module in block.modules()}
    layers = {name: module for name, module in model.named_modules() if id(module) in inside}
    if any(FACTOR.match(f"{name}.weight") for name in layers):
        raise UserError("float8 does not go with LoRA: the frozen layers lie inside adapters. Leave one of them out.")
    chosen = {name: layer for name, layer in layers.items() if type(layer) is nn.Linear and _sees_tokens(name)}
    fitting = {
        name: layer
        for name, layer in chosen.items()
        if layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0
    }
    if not fitting:
        raise UserError(
            f"float8: {type(model).__name__} has no linear layer whose sizes are multiples of {_MULTIPLE} in its blocks; of "
            f"{len(chosen)} layers that see all tokens, all are of other sizes or in float8 already."
        )
    return fitting


def _sees_tokens(name: str) -> bool:
    part, _, layer = ".".join(name.split(".")[-2:]).partition(".")
    return layer in LAYERS.get(part, ())
