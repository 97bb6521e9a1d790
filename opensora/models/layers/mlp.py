"""The feed-forward layer of the DiT family: timm's `Mlp` with the tanh approximation of GELU. Names: `fc1`, `fc2`."""

from functools import partial

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from opensora.acceleration.kernels.attention import HAS_TRITON

if HAS_TRITON:
    from opensora.acceleration.kernels.gelu_linear import linear_gelu


class TanhMlp(Mlp):
    """timm's `Mlp`; where it is trained on a GPU in a short number format, one kernel gives the gradients of GELU and of `fc1.bias`."""

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in] -> [..., out]`."""
        bias = self.fc1.bias
        if bias is None or not self._is_fused(x):
            return self.fc2(self.act(self.fc1(x)))  # there are no norm and no dropout, which cost the host time
        return self.fc2(linear_gelu(x, self.fc1.weight, bias))

    def _is_fused(self, x: Tensor) -> bool:
        plain = type(self.fc1) is nn.Linear  # an adapter may have taken its place
        if not (HAS_TRITON and plain and x.is_cuda and torch.is_grad_enabled()):
            return False
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.fc1.weight.dtype
        return dtype in (torch.bfloat16, torch.float16)


def tanh_mlp(dim: int, hidden: int, out: int | None = None) -> Mlp:
    """Linear(dim, hidden), GELU, Linear(hidden, out)."""
    gelu = partial(nn.GELU, approximate="tanh")
    return TanhMlp(dim, hidden, out, act_layer=gelu)  # type: ignore[arg-type]  # timm calls it: any factory will do


def linear_flops(module: nn.Module, rows: int) -> int:
    """Floating-point operations of all linear layers inside `module`, each applied once to `rows` rows."""
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return sum(2 * rows * layer.in_features * layer.out_features for layer in linears)
