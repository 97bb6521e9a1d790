"""Exchanging LoRAs under a compiled model: weights are written over in place, so that no program is compiled anew.

    loras = Adapters(pipe.model, {"style": "loras/style", "motion": "loras/motion"})
    loras.use({"style": 0.8, "motion": 0.5})
    loras.use({})                               the base again, bit for bit

Programs and CUDA graphs read weights at fixed addresses, and copying keeps these. The base's own weights of the layers that
an adapter changes are kept too, so that any number of exchanges adds no rounding.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from opensora.acceleration.compile.module import record_of
from opensora.acceleration.compile.quantise import is_quantised
from opensora.checkpoint.lora import Adapter, merge_adapter, read_adapter
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError


class Adapters:
    """Adapters of one model, of which any mixture is in its weights.

    Args:
        model: with the base's weights; compiled or not.
        paths: name -> folder of peft, its safetensors file, or a checkpoint folder of a LoRA run.

    Raises:
        UserError: a path holds no LoRA, or the model's weights cannot change: it is frozen or quantised.
    """

    def __init__(self, model: nn.Module, paths: Mapping[str, str | Path]) -> None:
        _check(model)
        self.model = model
        self.adapters = {name: read_adapter(path) for name, path in paths.items()}
        layers = dict(model.named_modules())
        changed = {name for adapter in self.adapters.values() for name in adapter.factors}
        self._base: dict[str, Tensor] = {
            name: layer.weight.detach().clone() for name in changed if isinstance(layer := layers.get(name), nn.Linear)
        }

    @torch.no_grad()
    def use(self, scales: Mapping[str, float]) -> None:
        """Put the base plus `scale` times each named adapter into the weights; the others are out.

        Raises:
            UserError: there is no such adapter, or it does not fit the model, whose weights are then the base's; or they cannot
                change any more.
        """
        _check(self.model)  # it may have been compiled since
        for name in scales:
            if name not in self.adapters:
                raise UserError(
                    f"no LoRA {name!r}.{did_you_mean(name, list(self.adapters))} There are: {', '.join(self.adapters)}."
                )
        layers = dict(self.model.named_modules())
        for name, weight in self._base.items():
            layers[name].weight.copy_(weight)
        # their factors side by side are one adapter that does what all of them do
        factors: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, scale in scales.items():
            adapter = self.adapters[name]
            for layer, (A, B) in adapter.factors.items():
                factors.setdefault(layer, []).append((A.float(), scale * adapter.scale * B.float()))
        joined = {
            layer: (torch.cat([A for A, _ in pairs]), torch.cat([B for _, B in pairs], dim=1))
            for layer, pairs in factors.items()
        }
        if scales:
            merge_adapter(self.model, Adapter(joined, 1.0))


def _check(model: nn.Module) -> None:
    """Refuse a model whose weights cannot change: frozen, or quantised, which `compile` does with any backend."""
    record = record_of(model)
    words = set() if record is None else {"freezing", "quant"} & record.options.words
    if any(map(is_quantised, model.modules())):
        words.add("quant")
    for word in sorted(words):
        raise UserError(
            f"{type(model).__name__} was compiled with {word}, after which its weights cannot change; compile it without, or "
            "merge the LoRA first."
        )
