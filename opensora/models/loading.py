"""Loading weights into a model: recognised by content, converted, checked strictly, and reported in one table.

Each architecture's `weights.py` has `convert(state, model) -> Conversion`, which knows what other files call its tensors;
everything else is here.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from opensora.checkpoint.load import load_strictly, open_checkpoint, read_weights
from opensora.checkpoint.save import MANIFEST
from opensora.checkpoint.weight_files import kind_of
from opensora.checkpoint.weight_sources import find_weights
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.recognise import recognise, star
from opensora.models.settings import other_settings, refuse_other_heads, written_settings
from opensora.utils.errors import UserError

log = logging.getLogger(__name__)
NULL_TEXT = "y_embedder.y_embedding"
NO_NULL_TEXT = "the file has no table of 'no text': guidance uses the encoding of an empty prompt"
PATCHES = "x_embedder.proj.weight"


@dataclass
class Conversion:
    """A file's weights in a model's own names, and what was done on the way.

    Args:
        tensors: own name -> tensor.
        format: what the file was recognised as, such as "DiT, diffusers".
        converted: own name -> what was changed beyond the name ("2-D patch kernel, one frame of a 3-D one").
        dropped: the file's name -> why it is not used ("recomputed for every size").
        initial: own name -> why it may be missing, and keeps its initial value ("PixArt has no temporal attention").
    """

    tensors: dict[str, Tensor]
    format: str
    converted: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    initial: dict[str, str] = field(default_factory=dict)


Convert = Callable[[Mapping[str, Tensor], nn.Module], Conversion]


def load_weights(model: nn.Module, path: str | Path, convert: Convert) -> str:
    """Load `path` (anything that `opensora.checkpoint.load.read_weights` reads) into `model`, strictly.

    Where the file says what its model computes with (see `opensora.models.settings`), other settings are told as a warning.

    Returns:
        The table of what was loaded, converted, dropped and left at its initial value; it is also logged.

    Raises:
        UserError: the file is missing, unsafe, of another architecture, or of another number of heads. The model is then
            as it was.
    """
    file = _located(path)
    state = read_weights(file or path)
    written = written_settings(path, file)
    try:
        conversion = convert(state, model)
        _leave_out_zeros(conversion)
        if written is not None and _same_shapes(conversion.tensors, model):
            refuse_other_heads(written, model, path)
        missing = conversion.initial.keys() - conversion.tensors.keys()
        load_strictly(model, conversion.tensors, path, may_miss=missing)
    except UserError as error:
        raise UserError(f"{error}\n{path} {_looks_like(state)}.") from error
    _settle_null_text(conversion, model)
    table = report(conversion, model, path)
    log.info(table)
    if written is not None and (others := other_settings(written, model, path)):
        log.warning(others)
    return table


def written_by(path: str | Path) -> str | None:
    """The `model.type` that a checkpoint's manifest, or the header of a file of ours, names; None = nothing says it.

    Args:
        path: as for `load_weights`, which has read it: here nothing is reported that is wrong with it.
    """
    if _is_checkpoint(path):
        return cast(str | None, open_checkpoint(Path(path).expanduser()).manifest.get("model"))
    file = find_weights(path)
    if kind_of(file) != "safetensors":
        return None
    with safe_open(file, "pt") as opened:
        return cast(str | None, (opened.metadata() or {}).get("model"))


def null_text_known(model: Any) -> bool:
    """Whether `model.null_condition` means something to the model; not so of weights from files without that table."""
    return bool(getattr(getattr(model, "y_embedder", None), "null_known", True))


def report(conversion: Conversion, model: nn.Module, path: str | Path) -> str:
    """One line for each thing that happened, with counts."""
    own = model.state_dict()
    numel = sum(tensor.numel() for tensor in conversion.tensors.values())
    left = {name: why for name, why in conversion.initial.items() if name not in conversion.tensors}
    lines = [
        f"{type(model).__name__} from {path} ({conversion.format})",
        f"  loaded      {len(conversion.tensors)} of {len(own)} tensors, {numel / 1e6:.2f} M numbers"
        f"{_formats(conversion.tensors)}",
    ]
    for title, items in (("converted", conversion.converted), ("dropped", conversion.dropped), ("left as is", left)):
        lines += [f"  {title:<11} {line}" for line in _by_reason(items, [*own, *conversion.dropped])]
    return "\n".join(lines)


def pick(state: Mapping[str, Tensor], dropped: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`state` without the names in `dropped` (name -> reason), and those of them that were there."""
    kept = {name: tensor for name, tensor in state.items() if name not in dropped}
    return kept, {name: why for name, why in dropped.items() if name in state}


def fit_shapes(conversion: Conversion, model: nn.Module) -> None:
    """Make 2-D patch kernels 3-D and the "no text" table as long as the model's, in place, and note it."""
    tensors, own = conversion.tensors, model.state_dict()
    if PATCHES in tensors and tensors[PATCHES].ndim == 4:
        tensors[PATCHES] = grow_patches(tensors[PATCHES], own[PATCHES].shape[2])
        conversion.converted[PATCHES] = "2-D patch kernel made 3-D"
    rows = len(own[NULL_TEXT])
    if NULL_TEXT in tensors and len(tensors[NULL_TEXT]) != rows:
        conversion.converted[NULL_TEXT] = f"{len(tensors[NULL_TEXT])} rows of the no-text table made {rows}"
        tensors[NULL_TEXT] = resize_rows(tensors[NULL_TEXT], rows)


def resize_rows(table: Tensor, rows: int) -> Tensor:
    """Cut a "no text" table [L, C], or extend it by its last row, as Open-Sora does."""
    if len(table) >= rows:
        return table[:rows]
    return torch.cat([table, table[-1:].expand(rows - len(table), -1)])


def grow_patches(weight: Tensor, num_frames: int) -> Tensor:
    """A 2-D patch kernel `[D, C, p, p]` as the 3-D one `[D, C, num_frames, p, p]` that sees the frames' mean."""
    return weight.unsqueeze(2).repeat(1, 1, num_frames, 1, 1) / num_frames


def _is_checkpoint(path: str | Path) -> bool:
    return (Path(path).expanduser() / MANIFEST).is_file()


def _located(path: str | Path) -> Path | None:
    """The file that is read, so that a hub is asked once; None = a checkpoint of ours, or nothing, which reading tells."""
    try:
        return None if _is_checkpoint(path) else find_weights(path)
    except UserError:
        return None


def _same_shapes(tensors: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether the sizes are the model's; if not, those are what there is to tell, and heads follow from them."""
    own = model.state_dict()
    return all(tensor.shape == own[name].shape for name, tensor in tensors.items() if name in own)


def _leave_out_zeros(conversion: Conversion) -> None:
    """Take a table of zeros for none, in place: that is how `CaptionEmbedder.clear_null` writes it."""
    if NULL_TEXT in conversion.tensors and not conversion.tensors[NULL_TEXT].any():
        del conversion.tensors[NULL_TEXT]
        conversion.dropped[NULL_TEXT] = "zeros, which stand for none"
        conversion.initial[NULL_TEXT] = NO_NULL_TEXT


def _settle_null_text(conversion: Conversion, model: nn.Module) -> None:
    """Let the model know whether it has a "no text" of its own."""
    embedder = getattr(model, "y_embedder", None)
    if not isinstance(embedder, CaptionEmbedder):
        return
    embedder.null_known = NULL_TEXT in conversion.tensors
    if not embedder.null_known and model.class_dropout_prob == 0:
        embedder.clear_null()  # a training that drops no captions gives it no meaning, but would save it


def _looks_like(state: Mapping[str, Tensor]) -> str:
    guess = recognise(state)
    return f"looks like {guess}" if guess else "is of no architecture that is known here"


def _formats(tensors: Mapping[str, Tensor]) -> str:
    """`, float16`, or the number of tensors of each format."""
    counts = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    if len(counts) < 2:
        return "".join(f", {name}" for name in counts)
    return ", " + ", ".join(f"{name} ({count} tensors)" for name, count in counts.most_common())


def _by_reason(items: Mapping[str, str], all_names: Iterable[str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, why in items.items():
        groups.setdefault(why, []).append(name)
    return [
        f"{len(names)} tensor{'s' * (len(names) > 1)}: {why} ({', '.join(_collapse(names, all_names))})"
        for why, names in groups.items()
    ]


def _collapse(names: Sequence[str], all_names: Iterable[str], most: int = 4) -> list[str]:
    """At most `most` patterns for many names: `blocks.*.attn_temp.*` where everything under it is meant."""
    if len(names) <= 2:
        return list(names)
    meant = list(dict.fromkeys(star(name) for name in names))
    others = {star(name) for name in all_names} - set(meant)
    patterns = list(dict.fromkeys(_shortest(pattern, meant, others) for pattern in meant))
    return patterns if len(patterns) <= most else [*patterns[: most - 1], "..."]


def _shortest(pattern: str, meant: Sequence[str], others: Iterable[str]) -> str:
    """The shortest `head.*` that covers `pattern` and some more of `meant`, and none of `others`; else `pattern`."""
    pieces = pattern.split(".")
    for length in range(1, len(pieces)):
        head = ".".join(pieces[:length]) + "."
        if not any(other.startswith(head) for other in others):
            return head + "*" if sum(name.startswith(head) for name in meant) > 1 else pattern
    return pattern
