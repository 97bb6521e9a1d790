"""Whether a text encoder gives the condition that a denoiser takes: classes or text, and how many classes.

Otherwise the first step fails deep inside, at an embedding's index.
"""

from collections.abc import Mapping
from typing import Any

from opensora.utils.errors import UserError


def check_classes(text_encoder: Any, denoiser: Any) -> None:
    """See that both mean the same classes, or both mean text. An unconditional denoiser takes anything.

    Args:
        text_encoder: "classes" has `num_classes`, others have not; one that remembers is asked for the `encoder` it
            stands for.
        denoiser: its `y_embedder` has `num_classes` when it is conditioned on classes.

    Raises:
        UserError: they do not fit.
    """
    embedder = getattr(denoiser, "y_embedder", None)
    encoder = getattr(text_encoder, "encoder", text_encoder)
    if embedder is None or encoder is None:  # unconditional, or a cache that does not say what it was made with
        return
    given = encoder.get("num_classes") if isinstance(encoder, Mapping) else getattr(encoder, "num_classes", None)
    taken = getattr(embedder, "num_classes", None)
    if given == taken:
        return
    name = type(denoiser).__name__
    if taken is None:
        raise UserError(
            f"the text encoder 'classes' gives class numbers, but {name} takes text: set model.condition='label_{given}' "
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
