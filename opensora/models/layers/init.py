"""How denoisers start: Xavier everywhere, small for embedders, zero for what must not disturb at first."""

from collections.abc import Iterable

from torch import nn


def init_linears(model: nn.Module, patches: nn.Conv3d) -> None:
    """Xavier-uniform for every linear layer and for the patch embedding, which is a linear layer over patches."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.xavier_uniform_(patches.weight.view(patches.out_channels, -1))
    assert patches.bias is not None, "the patch embedding has a bias"
    nn.init.zeros_(patches.bias)


def init_small(*modules: nn.Module) -> None:
    """Weights of all linear and embedding layers inside the modules ~ N(0, 0.02^2)."""
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02)


def init_zero(layers: Iterable[nn.Module]) -> None:
    """Layers that give zero at first, so that their branch is the identity."""
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
