"""Class numbers as prompts, for class-conditional DiT and Latte."""

import warnings

import torch
from torch import nn

from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS
from opensora.utils.errors import UserError


@MODELS.register_module("classes")
class ClassEncoder(nn.Module):
    """Reads "207" as class 207: y [B, 1, 1, 1] int64, mask [B, 1]. It has no weights.

    Args:
        num_classes: Classes are 0 ... num_classes - 1; the N of the denoiser's condition="label_N".
        model_max_length: Accepted from older configs; a class is one token.
    """

    output_dim = 1
    model_max_length = 1

    def __init__(self, num_classes: int, model_max_length: int | None = None) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes} is not positive.")
        if model_max_length not in (None, 1):
            warnings.warn(f"model_max_length={model_max_length} has no effect: a class is one token.", stacklevel=2)
        self.num_classes = num_classes

    def encode(self, texts: list[str]) -> TextCondition:
        """B numbers -> y [B, 1, 1, 1] int64, mask [B, 1], on the CPU.

        Raises:
            UserError: a prompt is no class number.
        """
        classes = torch.tensor([self._class_number(text) for text in texts], dtype=torch.int64)
        return TextCondition(classes[:, None, None, None], torch.ones(len(texts), 1, dtype=torch.bool))

    def fingerprint(self) -> str:
        """What features kept in a cache depend on."""
        return f"classes-{self.num_classes}"

    def _class_number(self, text: str) -> int:
        stripped = text.strip()
        if not stripped.isdecimal() or int(stripped) >= self.num_classes:
            raise UserError(
                f"the prompt {text!r} is not a class: expected a whole number from 0 to {self.num_classes - 1}."
            )
        return int(stripped)
