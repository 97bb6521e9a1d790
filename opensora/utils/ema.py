"""An exponential moving average of a model's weights, always in fp32.

With decay 0.9999 the increment of a bf16 average is below half a unit in the last place, so it would never move.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class EMA:
    """`ema <- decay * ema + (1 - decay) * weights` after every optimizer step; buffers and frozen weights are copied.

    The decay warms up as `min(decay, (1 + step) / (10 + step))`: without it the average is mostly the initialisation
    for the first ten thousand steps.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.shadow = {name: tensor.detach().clone() for name, tensor in _fp32(model.state_dict()).items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after optimizer step number `step` (the first is 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        state = _fp32(model.state_dict())
        averaged = [name for name in state if name in trained]
        if averaged:
            torch._foreach_lerp_([self.shadow[n] for n in averaged], [state[n] for n in averaged], 1 - decay)
        for name in state.keys() - trained:
            self.shadow[name].copy_(state[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights, named as the model's."""
        return self.shadow

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved averages; names and shapes must be the same."""
        if state.keys() != self.shadow.keys():
            raise ValueError(f"EMA names differ: {sorted(state.keys() ^ self.shadow.keys())[:5]}")
        for name, tensor in self.shadow.items():
            tensor.copy_(state[name])


def _fp32(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
