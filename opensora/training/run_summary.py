"""What a run says before its first step: which parts of the model are trained, and how many samples a step has."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import nn

SHOWN_CLASSES = 20


class BucketOf(Protocol):
    """What is asked of a bucket."""

    @property
    def name(self) -> str: ...

    @property
    def batch_size(self) -> int | None: ...


def parameter_table(model: nn.Module) -> str:
    """The parameters of each top-level module, trained and frozen; a parameter that two share is counted once."""
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        top = counts.setdefault(name.partition(".")[0], [0, 0])
        top[not parameter.requires_grad] += parameter.numel()
    total = [sum(column) for column in zip(*counts.values(), strict=True)] if counts else [0, 0]
    rows = [*counts.items(), ("total", total)]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {'parameters':<{width}} {'trained':>14} {'frozen':>14}"]
    lines += [f"  {name:<{width}} {trained:>14,} {frozen:>14,}" for name, (trained, frozen) in rows]
    return "\n".join(lines)


def effective_batch(
    batch_size: int, ranks: int, accumulation: int, *, sp_size: int = 1, buckets: Iterable[BucketOf] = ()
) -> str:
    """Samples of an optimizer step: of each process x data-parallel processes x accumulated batches; for each bucket.

    With buckets the processes of a step may have different ones: then a line says what a step of that bucket alone has.
    """
    sizes: Mapping[str, int] = {bucket.name: bucket.batch_size for bucket in buckets if bucket.batch_size is not None}
    shared = f", each sample on {sp_size} processes" if sp_size > 1 else ""
    lines = [f"samples of a step (batch x data-parallel processes x accumulation{shared}):"]
    for name, size in (sizes or {"": batch_size}).items():
        lines.append(
            f"  {name + ': ' if name else ''}{size} x {ranks} x {accumulation} = {size * ranks * accumulation}"
        )
    return "\n".join(lines)


def class_list(names: Sequence[str]) -> str:
    """A line that says which number is which class, for prompts are numbers; nothing where classes have no names."""
    shown = [f"{number} = {name}" for number, name in enumerate(names[:SHOWN_CLASSES])]
    more = (
        f" and {len(names) - SHOWN_CLASSES} more, in the order of the folders' names"
        if len(names) > SHOWN_CLASSES
        else ""
    )
    return f"\nclasses: {', '.join(shown)}{more}" if names else ""
