"""Exchanging LoRAs under a compiled model: weights are overwritten in place, so that no program is compiled anew.

    loras = Adapters(pipe.model, {"style": "loras/style", "motion": "loras/motion"})
    loras.use({"style": 0.8, "motion": 0.5})
    loras.use({})                               the base again, bit for bit

The base's own weights of the layers that an adapter changes are kept, so that any number of exchanges adds no rounding.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from opensora.acceleration.compile.nexfort import record_of
from opensora.acceleration.compile.quantise import is_quantised
from opensora.checkpoint.lora import merge_adapter, parameters_of, read_adapter
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
        self.model = model
        self._check()
        self.adapters = {name: read_adapter(path) for name, path in paths.items()}
        self._scales: dict[str, float] = {}  # in use
        self._base: dict[str, Tensor] = {}  # parameters that one in use has changed

    @torch.no_grad()
    def use(self, scales: Mapping[str, float]) -> None:
        """Put the base plus `scale` times each named adapter into the weights; the others are out.

        Raises:
            UserError: there is no such adapter, it does not fit the model, or the weights cannot change any more; the weights
                are then as they were.
        """
        self._check()  # it may have been compiled since
        for name in scales:
            if name not in self.adapters:
                raise UserError(
                    f"no LoRA {name!r}.{did_you_mean(name, list(self.adapters))} There are: {', '.join(self.adapters)}."
                )
        try:
            self._merge(scales)
        except UserError:
            self._merge(self._scales)
            raise
        self._scales = dict(scales)

    def _merge(self, scales: Mapping[str, float]) -> None:
        for name, weight in self._base.items():
            self.model.get_parameter(name).copy_(weight)
        for name, scale in scales.items():
            adapter, source = self.adapters[name], f"LoRA {name!r}"
            for changed in {*parameters_of(self.model, adapter, source).values()} - self._base.keys():
                self._base[changed] = self.model.get_parameter(changed).detach().clone()
            merge_adapter(self.model, adapter, scale, source)

    def _check(self) -> None:
        record = record_of(self.model)
        frozen = record is not None and "freezing" in record.options.words
        if frozen or any(map(is_quantised, self.model.modules())):
            raise UserError(
                f"{type(self.model).__name__} was compiled with {'freezing' if frozen else 'quant'}, after which its weights cannot "
                "change; compile it without, or merge the LoRA first."
            )
