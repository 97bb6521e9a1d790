"""Linear layers whose frozen weights are stored in one byte each, with one scale a row: "fp8" (e4m3) or "int8".

W is nearly scale * Q. A forward pass makes W in the dtype of its input and multiplies; the backward pass gives the gradient of the
input alone, and makes W again. Both are opaque operations: of a formula that it sees, the compiler would keep W of every layer
from the forward to the backward pass, which is the memory that this saves.

The error of a weight is at most scale / 2 with "int8" and 1/16 of it with "fp8", whose smallest weights (2^-6 scale) have 2^-10 scale.
Of normally distributed weights "int8" is three times nearer.

The mode "quant" of `opensora.acceleration.compile` is for speed in sampling: torchao's layers also round what they multiply, and hold
subclasses of tensors. These train adapters exactly, and hold plain tensors, which can be sharded, streamed and broadcast.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

QUANTISED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def quantise(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`weight [out, in]` -> Q [out, in] in `dtype`, one of `QUANTISED`, and the fp32 scales [out, 1]."""
    values = weight.to(torch.float32, copy=True)
    least, most = values.aminmax(dim=1, keepdim=True)
    largest = torch.maximum(most, -least)
    in_range = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    scale = (largest / in_range.max).clamp_min(torch.finfo(torch.float32).tiny)  # a row may be zero
    if dtype == torch.int8:
        return values.div_(scale).round_().to(dtype), scale
    scale = scale / torch.frexp(scale).mantissa  # a power of two: nothing is lost by it, and products are exact in bf16
    return values.div_(scale).to(dtype), scale


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Q [out, in] and its scales [out, 1] -> the weight in `dtype`, rounded once."""
    return weight.to(dtype, copy=True).mul_(scale)


def quantise_linears(root: nn.Module, dtype: str, kept: Collection[nn.Module] = ()) -> None:
    """Replace the linear layers inside `root` by a `QuantisedLinear` in place, one at a time, but those in `kept`."""
    for parent in list(root.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer not in kept:
                setattr(parent, name, QuantisedLinear(layer, QUANTISED[dtype]))


class QuantisedLinear(nn.Linear):
    """`linear` with its weight in `dtype`, one of `QUANTISED`; the state has `weight`, `weight_scale` and `bias`.

    It computes in the dtype of autocast, or else of its input. No gradients of its own parameters are computed.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        self.store(linear.weight, dtype)
        self.requires_grad_(False)

    @torch.no_grad()
    def store(self, weight: Tensor, dtype: torch.dtype | None = None) -> None:
        """Take in `weight [out, in]` of any float dtype, on the device of the one before, or, if that is on meta, on its own."""
        weight = weight if self.weight.is_meta else weight.to(self.weight.device)
        weight, scale = quantise(weight, dtype or self.weight.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return quantised_linear(x, self.weight, self.weight_scale, self.bias)


@torch.library.custom_op("opensora::quantised_linear", mutates_args=())
def quantised_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`x [..., in]` times the weight [out, in] with scales [out, 1], plus the bias [out]; [..., out] in x's dtype."""
    return F.linear(x, dequantise(weight, scale, x.dtype), None if bias is None else bias.to(x.dtype))


@quantised_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("opensora::quantised_linear_backward", mutates_args=())
def quantised_linear_backward(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x: `grad [..., out]` times the weight, [..., in]."""
    return grad @ dequantise(weight, scale, grad.dtype)


@quantised_linear_backward.register_fake
def _(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


def _setup(ctx, inputs, output: Tensor) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
    return quantised_linear_backward(grad, *ctx.saved_tensors), None, None, None


quantised_linear.register_autograd(_backward, setup_context=_setup)
