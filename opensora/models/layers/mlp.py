"""The feed-forward layer of the DiT family: timm's `Mlp` with the tanh approximation of GELU. Names: `fc1`, `fc2`."""

from functools import partial

from timm.layers import Mlp
from torch import Tensor, nn


class TanhMlp(Mlp):
    """timm's `Mlp` without its norm and dropout, which do nothing here and cost the host time."""

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in] -> [..., out]`."""
        return self.fc2(self.act(self.fc1(x)))


def tanh_mlp(dim: int, hidden: int, out: int | None = None) -> Mlp:
    """Linear(dim, hidden), GELU, Linear(hidden, out)."""
    gelu = partial(nn.GELU, approximate="tanh")
    return TanhMlp(dim, hidden, out, act_layer=gelu)  # timm calls it: any factory will do


def linear_flops(module: nn.Module, rows: int) -> int:
    """Floating-point operations of all linear layers inside `module`, each applied once to `rows` rows."""
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return sum(2 * rows * layer.in_features * layer.out_features for layer in linears)
