"""What a config's `lora` says (LoRA, Hu et al. 2021): adapters of rank r on linear layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeGuard, get_args

from opensora.registry import did_you_mean
from opensora.utils.errors import UserError

Preset = Literal["attention", "all-linear"]


@dataclass(frozen=True)
class LoraOptions:
    """What a config's `lora` says.

    Args:
        rank: rows of A.
        alpha: the update is scaled by alpha / rank.
        target_modules: which linear layers of the blocks get an adapter: "attention", "all-linear", or names or ends of
            names such as ["attn.qkv", "mlp.fc1"].
        dropout: how often an input of A is set to zero in training.
    """

    rank: int = 16
    alpha: float = 16
    target_modules: Preset | list[str] = "attention"
    dropout: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "LoraOptions":
        """The options of a config.

        Raises:
            UserError: lists everything that is wrong.
        """
        if problems := lora_problems(values):
            raise UserError("\n".join(problems))
        options = cls(**values)
        return replace(options, rank=int(options.rank))  # 16.0 will do

    @property
    def scale(self) -> float:
        """Of the product B A."""
        return self.alpha / self.rank


def lora_problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with a config's `lora`, one sentence each."""
    known = [field.name for field in fields(LoraOptions)]
    problems = [
        f"lora takes no {key!r}.{did_you_mean(str(key), known)} It takes: {', '.join(known)}."
        for key in values
        if key not in known
    ]
    options = LoraOptions(**{key: value for key, value in values.items() if key in known})
    if not is_number(options.rank) or options.rank != int(options.rank) or options.rank < 1:
        problems.append(f"lora.rank={options.rank!r} must be a whole number from 1.")
    if not is_number(options.alpha) or options.alpha <= 0:
        problems.append(f"lora.alpha={options.alpha!r} must be a positive number.")
    if not is_number(options.dropout) or not 0 <= options.dropout < 1:
        problems.append(f"lora.dropout={options.dropout!r} must be in [0, 1).")
    targets = options.target_modules
    presets = get_args(Preset)
    named = isinstance(targets, list | tuple) and targets and all(isinstance(name, str) for name in targets)
    if not named and targets not in presets:
        problems.append(
            f"lora.target_modules={targets!r} must be one of {', '.join(map(repr, presets))} or a list of layers' names."
        )
    return problems


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
