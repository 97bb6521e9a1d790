"""Whether a text encoder gives the condition that a denoiser takes: classes or text, and how many classes.

Otherwise the first step fails deep inside, at an embedding's index.
"""

from collections.abc import Mapping
from typing import Any

from opensora.utils.errors import UserError


def check_classes(text_encoder: Any, denoiser: Any) -> None:
    """See that both mean the same classes, or both mean text. An unconditional denoiser takes anything.

    Args:
        text_encoder: "classes" has `num_classes`, others have not; a cache of features has the `encoder` it was made with.
        denoiser: its `y_embedder` has `num_classes` when it is conditioned on classes.

    Raises:
        UserError: they do not fit.
    """
    embedder = getattr(denoiser, "y_embedder", None)
    if embedder is None or getattr(text_encoder, "encoder", text_encoder) is None:  # a cache may not know its encoder
        return
    given, taken = _num_classes(text_encoder), getattr(embedder, "num_classes", None)
    if given == taken:
        return
    name = type(denoiser).__name__
    if taken is None:
        raise UserError(
            f"the text encoder 'classes' gives class labels, but {name} takes text: set model.condition='label_{given}' "
            "(DiT and Latte), or name another text encoder."
        )
    if given is None:
        raise UserError(
            f"{name} has condition='label_{taken}', but the text encoder gives text: use text_encoder=dict(type='classes', "
            f"num_classes={taken})."
        )
    raise UserError(
        f"text_encoder.num_classes={given} and model.condition='label_{taken}' contradict each other: {name} has "
        f"{taken} classes. Set both to the number of classes of the data."
    )


def check_classes_of_data(dataset: Any, text_encoder: Any) -> None:
    """See that the text encoder knows all classes of a dataset that counts them.

    Raises:
        UserError: it knows fewer.
    """
    counted, known = getattr(dataset, "num_classes", None), _num_classes(text_encoder)
    if counted is not None and known is not None and counted > known:
        raise UserError(
            f"the data have {counted} classes, but text_encoder.num_classes={known}. Set it and model.condition="
            f"'label_{counted}' to the number of classes of the data."
        )


def _num_classes(text_encoder: Any) -> int | None:
    encoder = getattr(text_encoder, "encoder", text_encoder)
    return encoder.get("num_classes") if isinstance(encoder, Mapping) else getattr(encoder, "num_classes", None)
