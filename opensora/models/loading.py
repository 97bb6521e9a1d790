"""Loading weights into a model: recognised by content, converted, checked strictly, and reported in one table.

Each architecture's `weights.py` has `convert(state, model) -> Conversion`, which knows what other files call its tensors;
everything else is here.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from opensora.checkpoint.load import load_strictly, open_checkpoint, read_weights
from opensora.checkpoint.save import MANIFEST
from opensora.checkpoint.weight_files import find_weights, kind_of
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.settings import compare_settings, written_settings
from opensora.utils.errors import UserError

log = logging.getLogger(__name__)
PATCHES = "x_embedder.proj.weight"
OUTPUT = ("final_layer.linear.weight", "final_layer.linear.bias")
NULL_TEXT = "y_embedder.y_embedding"
NO_NULL_TEXT = "the file has no table of 'no text': guidance uses the encoding of an empty prompt"
TABLES = ("pos_embed", "pos_embed_spatial", "pos_embed_temporal", "temp_embed", "temp_pos_embed", "pos_embed.pos_embed",
          "pos_embed.inv_freq", "rope.freqs")  # fmt: skip
"""Tables of positions in released files; ours are never saved."""

ARCHITECTURES: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    ("a LoRA, which goes into a model with --lora or tools/lora.py,", ("lora_A.",), ()),
    ("NOVA", ("image_decoder.", "mask_embed."), ()),
    ("STDiT3", ("spatial_blocks.*.", "temporal_blocks.*."), ()),
    ("LatteT2V", ("blocks.*.cross_attn.", "temporal_blocks.*."), ()),
    ("LatteT2V in diffusers' names", ("temporal_transformer_blocks.*.",), ()),
    ("STDiT2", ("blocks.*.attn_temp.", "t_block_temp."), ()),
    ("STDiT", ("blocks.*.attn_temp.",), ("t_block_temp.",)),
    ("PixArtMS", ("blocks.*.cross_attn.", "csize_embedder."), ("attn_temp.",)),
    ("PixArt-Sigma with compressed keys", ("blocks.*.cross_attn.", "blocks.*.attn.sr."), ("attn_temp.",)),
    ("PixArt", ("blocks.*.cross_attn.", "t_block."), ("attn_temp.",)),
    ("PixArt in diffusers' names", ("transformer_blocks.*.attn2.", "adaln_single."), ()),
    ("Latte", ("blocks.*.adaLN_modulation.", "temp_embed"), ()),
    ("DiT or Latte, which share their names", ("blocks.*.adaLN_modulation.", "t_embedder."), ()),
    ("DiT in diffusers' names", ("transformer_blocks.*.norm1.emb.class_embedder.",), ()),
    ("FLUX or Open-Sora 2", ("double_blocks.*.", "single_blocks.*."), ()),
    ("a VAE", ("encoder.", "decoder.", "conv_in."), ("transformer_blocks.",)),
    ("a U-Net", ("down_blocks.*.", "mid_block.", "up_blocks.*."), ("encoder.",)),
    ("a T5 text encoder", ("block.*.layer.*.SelfAttention.",), ()),
    ("a CLIP text encoder", ("text_model.encoder.",), ()),
    ("an optimizer's state", ("/exp_avg",), ()),
)
"""Architecture, what its tensors' names contain (block and layer indices as `*`), and what they do not; the first fit counts."""


@dataclass
class Conversion:
    """A file's weights in a model's own names, and what was done on the way.

    Args:
        tensors: own name -> tensor.
        format: what the file was recognised as, such as "DiT, diffusers".
        converted: own name -> what was changed beyond the name ("2-D patch kernel made 3-D").
        dropped: the file's name -> why it is not used ("recomputed for every size").
        initial: own name -> why it may be missing, and keeps its initial value ("PixArt has no temporal attention").
    """

    tensors: dict[str, Tensor]
    format: str
    converted: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    initial: dict[str, str] = field(default_factory=dict)

    def drop(self, why: str, *prefixes: str) -> None:
        """Leave out the file's tensors whose names begin so."""
        dropped = [name for name in self.tensors if name.startswith(prefixes)]
        self.dropped |= dict.fromkeys(dropped, why)
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in dropped}

    def may_miss(self, model: nn.Module, why: str, *parts: str) -> None:
        """Let the model's tensors with one of `parts` in their names keep their initial values where the file has none."""
        self.initial |= {name: why for name in model.state_dict() if any(part in name for part in parts)}

    def fit_shapes(self, model: nn.Module) -> None:
        """Make patches of one frame the model's, drop position tables, and make the "no text" table as long as the model's.

        A patch kernel of several frames sees their mean, and the final layer gives every frame of a patch the same: a
        still video becomes what the image became. The "no text" table is extended by its last row, as Open-Sora does.
        """
        own, tensors = model.state_dict(), self.tensors
        self.dropped |= {name: "recomputed for every size" for name in TABLES if tensors.pop(name, None) is not None}
        kernel = tensors.get(PATCHES)  # [D, C, p, p] or [D, C, frames, p, p]
        if kernel is not None and kernel.ndim == 4:
            kernel = tensors[PATCHES] = kernel.unsqueeze(2)
            self.converted[PATCHES] = "2-D patch kernel made 3-D"
        if kernel is not None and kernel.ndim == 5 and kernel.shape[2] == 1 < (frames := own[PATCHES].shape[2]):
            tensors[PATCHES] = kernel.repeat(1, 1, frames, 1, 1) / frames
            self.converted[PATCHES] = f"patch kernel of one frame spread over {frames}"
            for name in OUTPUT:
                if name in tensors:  # the frame is the slowest axis of a token's output
                    tensors[name] = tensors[name].repeat(frames, *[1] * (tensors[name].ndim - 1))
                    self.converted[name] = f"output of one frame repeated for {frames}"
        if NULL_TEXT in tensors and NULL_TEXT in own and len(tensors[NULL_TEXT]) != len(own[NULL_TEXT]):
            table, rows = tensors[NULL_TEXT], len(own[NULL_TEXT])
            self.converted[NULL_TEXT] = f"{len(table)} rows of the no-text table made {rows}"
            tensors[NULL_TEXT] = torch.cat([table[:rows], table[-1:].expand(max(rows - len(table), 0), -1)])


Convert = Callable[[Mapping[str, Tensor], nn.Module], Conversion]


def load_weights(model: nn.Module, path: str | Path, convert: Convert) -> str:
    """Load `path` (anything that `opensora.checkpoint.load.read_weights` reads) into `model`, strictly.

    Where the file states settings of its model (see `opensora.models.settings`), differences are logged as a warning.

    Returns:
        The table of what was loaded, converted, dropped and left at its initial value; it is also logged.

    Raises:
        UserError: the file is missing, unsafe, of another architecture, or of another number of heads. The model is then
            as it was.
    """
    file = None
    if not _is_checkpoint(path):
        with suppress(UserError):  # reading reports it, with what is there
            file = find_weights(path)
    state = read_weights(file or path)
    written, warning = written_settings(path, file), ""
    try:
        conversion = convert(state, model)
        if NULL_TEXT in conversion.tensors and not conversion.tensors[NULL_TEXT].any():
            conversion.drop("zeros, which stand for none", NULL_TEXT)  # as `CaptionEmbedder.clear_null` writes it
            conversion.initial[NULL_TEXT] = NO_NULL_TEXT
        own = model.state_dict()
        fits = all(tensor.shape == own[name].shape for name, tensor in conversion.tensors.items() if name in own)
        if written is not None and fits:  # else the shapes are the error, which heads follow from
            warning = compare_settings(written, model, path)
        load_strictly(model, conversion.tensors, path, may_miss=conversion.initial.keys() - conversion.tensors.keys())
    except UserError as error:
        guess = recognise(state)
        looks = f"looks like {guess}" if guess else "is of no architecture that is known here"
        raise UserError(f"{error}\n{path} {looks}.") from error
    if isinstance(embedder := getattr(model, "y_embedder", None), CaptionEmbedder):
        embedder.null_known = NULL_TEXT in conversion.tensors
        if not embedder.null_known and model.class_dropout_prob == 0:
            embedder.clear_null()  # training that drops no captions gives it no meaning, but would save it
    table = report(conversion, model, path)
    log.info(table)
    if warning:
        log.warning(warning)
    return table


def written_by(path: str | Path) -> str | None:
    """The `model.type` that a checkpoint's manifest, or the header of a file of ours, names; None = neither does.

    Args:
        path: as for `load_weights`, which has read it.
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


def recognise(state: Mapping[str, Tensor]) -> str | None:
    """`PixArt (blocks.*.cross_attn, t_block, no attn_temp), 28 blocks of width 1152`; None = no known architecture."""
    names = "\n".join({star(name) for name in state})
    fits = (
        entry
        for entry in ARCHITECTURES
        if all(part in names for part in entry[1]) and not any(part in names for part in entry[2])
    )
    if (found := next(fits, None)) is None:
        return None
    architecture, contained, absent = found
    evidence = [*contained, *(f"no {part}" for part in absent)]
    depths: Counter[str] = Counter()
    for name in state:
        if block := re.match(r"((?:\w*_)?blocks)\.(\d+)\.", name):
            depths[block[1]] = max(depths[block[1]], int(block[2]) + 1)
    size = " and ".join(f"{depth} {blocks.replace('_', ' ')}" for blocks, depth in sorted(depths.items()))
    biases = [state[name] for name in ("x_embedder.proj.bias", "pos_embed.proj.bias") if name in state]
    width = f" of width {len(biases[0])}" if size and biases and biases[0].ndim == 1 else ""
    return f"{architecture} ({', '.join(part.rstrip('.*') for part in evidence)}){', ' if size else ''}{size}{width}"


def star(name: str) -> str:
    """A tensor's name with the indices of blocks and layers written `*`: `blocks.*.mlp.fc1.weight`."""
    return re.sub(r"((?:block|layer)s?)\.\d+(?=\.)", r"\1.*", name)


def report(conversion: Conversion, model: nn.Module, path: str | Path) -> str:
    """One line for each thing that happened, with counts."""
    own, tensors = model.state_dict(), conversion.tensors
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()).most_common()
    counts = [name if len(dtypes) == 1 else f"{name} ({count} tensors)" for name, count in dtypes]
    numel = sum(tensor.numel() for tensor in tensors.values()) / 1e6
    left = {name: why for name, why in conversion.initial.items() if name not in tensors}
    lines = [
        f"{type(model).__name__} from {path} ({conversion.format})",
        ", ".join([f"  loaded      {len(tensors)} of {len(own)} tensors", f"{numel:.2f} M parameters", *counts]),
    ]
    for title, items in (("converted", conversion.converted), ("dropped", conversion.dropped), ("left as is", left)):
        for reason in dict.fromkeys(items.values()):
            names = [name for name, why in items.items() if why == reason]
            patterns = ", ".join(_collapse(names, [*own, *conversion.dropped]))
            lines.append(f"  {title:<11} {len(names)} tensor{'s' * (len(names) > 1)}: {reason} ({patterns})")
    return "\n".join(lines)


def _is_checkpoint(path: str | Path) -> bool:
    return (Path(path).expanduser() / MANIFEST).is_file()


def _collapse(names: Sequence[str], all_names: Iterable[str], most: int = 4) -> list[str]:
    """At most `most` patterns for many names: `blocks.*.attn_temp.*` where everything under it is among them."""
    if len(names) <= 2:
        return list(names)
    included = list(dict.fromkeys(star(name) for name in names))
    others = {star(name) for name in all_names} - set(included)

    def shortest(pattern: str) -> str:
        """The shortest `head.*` that covers `pattern`, some more of `included`, and none of `others`; else `pattern`."""
        words = pattern.split(".")
        for length in range(1, len(words)):
            head = ".".join(words[:length]) + "."
            if not any(other.startswith(head) for other in others):
                return head + "*" if sum(name.startswith(head) for name in included) > 1 else pattern
        return pattern

    patterns = list(dict.fromkeys(shortest(pattern) for pattern in included))
    return patterns if len(patterns) <= most else [*patterns[: most - 1], "..."]
