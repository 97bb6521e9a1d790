"""Class numbers as prompts, for class-conditional DiT and Latte, and whether all parts mean the same classes."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS, did_you_mean
from opensora.utils.errors import UserError

SHOWN = 20


@MODELS.register_module("classes")
class ClassEncoder(nn.Module):
    """Reads "207" as class 207: y [B, 1, 1, 1] int64, mask [B, 1]. It has no weights.

    Args:
        num_classes: Classes are 0 ... num_classes - 1; the N of the denoiser's condition="label_N".
        model_max_length: Accepted from older configs; a class is one token.
        names: Of the classes, in the order of their numbers, as a training prints them; prompts may be names then, too.
    """

    output_dim = 1
    model_max_length = 1

    def __init__(
        self, num_classes: int, model_max_length: int | None = None, names: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes={num_classes} is not positive.")
        if model_max_length not in (None, 1):
            warnings.warn(f"model_max_length={model_max_length} has no effect: a class is one token.", stacklevel=2)
        if names is not None and (len(names) != num_classes or len(set(names)) != num_classes):
            raise ValueError(f"names are {len(set(names))} different ones, and num_classes={num_classes}.")
        self.num_classes, self.names = num_classes, list(names or ())

    def encode(self, texts: list[str]) -> TextCondition:
        """B numbers, or names, -> y [B, 1, 1, 1] int64, mask [B, 1], on the CPU; a UserError where a prompt is none."""
        classes = torch.tensor([self._class_number(text) for text in texts], dtype=torch.int64)
        return TextCondition(classes[:, None, None, None], torch.ones(len(texts), 1, dtype=torch.bool))

    def fingerprint(self) -> str:
        """What features kept in a cache depend on."""
        return f"classes-{self.num_classes}"

    def _class_number(self, text: str) -> int:
        stripped = text.strip()
        if stripped in self.names:
            return self.names.index(stripped)
        if not stripped.isdecimal() or int(stripped) >= self.num_classes:
            known = f", or one of {', '.join(self.names[:SHOWN])}" if self.names else ""
            raise UserError(
                f"the prompt {text!r} is not a class: expected a whole number from 0 to {self.num_classes - 1}{known}."
                f"{did_you_mean(stripped, self.names)}"
            )
        return int(stripped)


def check_classes(text_encoder: Any, denoiser: Any) -> None:
    """Raise a UserError where one means classes and the other text, or other classes; an unconditional denoiser takes anything.

    Args:
        text_encoder: "classes" has `num_classes`, others have not; a cache of features has the `encoder` it was made with.
        denoiser: its `y_embedder` has `num_classes` when it is conditioned on classes.
    """
    embedder = getattr(denoiser, "y_embedder", None)
    if embedder is None or getattr(text_encoder, "encoder", text_encoder) is None:  # a cache may not know its encoder
        return
    given, taken = _num_classes(text_encoder), getattr(embedder, "num_classes", None)
    if given != taken:
        gives, takes = ("text" if count is None else f"{count} classes" for count in (given, taken))
        raise UserError(
            f"the text encoder gives {gives}, but {type(denoiser).__name__} takes {takes}. For N classes set both "
            "text_encoder=dict(type='classes', num_classes=N) and model.condition='label_N' (DiT and Latte); for text, neither."
        )


def check_classes_of_data(dataset: Any, text_encoder: Any) -> None:
    """Raise a UserError where a dataset that counts its classes has more than the text encoder knows."""
    counted, known = getattr(dataset, "num_classes", None), _num_classes(text_encoder)
    if counted is not None and known is not None and counted > known:
        raise UserError(
            f"the data have {counted} classes, but text_encoder.num_classes={known}. Set it and model.condition="
            f"'label_{counted}' to the number of classes of the data."
        )


def _num_classes(text_encoder: Any) -> int | None:
    encoder = getattr(text_encoder, "encoder", text_encoder)
    return encoder.get("num_classes") if isinstance(encoder, Mapping) else getattr(encoder, "num_classes", None)
