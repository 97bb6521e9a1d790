"""The feed-forward layer of all denoisers here, with the parameter names of timm's `Mlp`: `fc1`, `fc2`."""

from torch import Tensor, nn


class Mlp(nn.Module):
    """Linear(dim, hidden), activation, Linear(hidden, out). Not timm's, whose import brings torchvision: seconds at each start.

    Args:
        dim: width of the input.
        hidden: width between the two layers.
        out: width of the output; None = `dim`.
        act: the activation; None = the tanh approximation of GELU, as in DiT.
    """

    def __init__(self, dim: int, hidden: int, out: int | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate="tanh") if act is None else act
        self.fc2 = nn.Linear(hidden, dim if out is None else out)

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., dim] -> [..., out]`."""
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y


def linear_flops(module: nn.Module, rows: int) -> int:
    """Floating-point operations of all linear layers inside `module`, each applied once to `rows` rows."""
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return sum(2 * rows * layer.in_features * layer.out_features for layer in linears)
