"""Loading weights into a model: converted by content, checked strictly, reported in one line.

Each architecture's `convert(state, model) -> Conversion` knows what other files call its tensors. What no tensor shows, such as
the number of heads, is compared where the source states it: the manifest of a checkpoint of ours, the header of a file of
`tools.convert` or `tools.export_weights`, and `config.json` next to the weights.
"""

import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from opensora.checkpoint.load import load_strictly, open_checkpoint, read_weights
from opensora.checkpoint.save import MANIFEST
from opensora.checkpoint.weight_files import find_weights, kind_of
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.quantised_linear import QUANTISED, QuantisedLinear, quantise_linears
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError

log = logging.getLogger(__name__)
PATCHES = "x_embedder.proj.weight"
OUTPUT = ("final_layer.linear.weight", "final_layer.linear.bias")
NULL_TEXT = "y_embedder.y_embedding"
NO_NULL_TEXT = "the file has no table of 'no text': guidance uses the encoding of an empty prompt"
TABLES = ("pos_embed", "pos_embed_spatial", "pos_embed_temporal", "temp_embed", "temp_pos_embed", "pos_embed.pos_embed",
          "pos_embed.inv_freq", "rope.freqs")  # fmt: skip
"""Tables of positions in released files; ours are never saved."""

HEADS = "num_heads"
SETTINGS = ("base_size", "space_scale", "time_scale", "input_sq_size", "positions", "no_temporal_pos_emb", "norm_order",
            "kv_compress", "mode")  # fmt: skip
"""What changes no tensor's name or shape, but what a model computes."""
CONFIG = "config.json"
OF_DIFFUSERS = ("PixArtTransformer2DModel", "LatteTransformer3DModel", "DiTTransformer2DModel", "WanTransformer3DModel")
OF_AUTHORS = ("WanModel",)  # whose words for heads and eps are ours and diffusers'
WITHOUT_EFFECT = ("rope_max_seq_len", "qk_norm")  # of diffusers' settings: a limit, and what its class ignores
OF_LORA = re.compile(r"\.lora_(A|B|down|up)\.")
# what a constructor raises for arguments of another version
OF_ANOTHER_VERSION = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


PIXART, PIXART_MS, SIGMA = "PixArt-XL-2-512x512.pth", "PixArt-XL-2-1024-MS.pth", "PixArt-Sigma-XL-2-1024-MS.pth"
RELEASED = {
    "DiT-XL/2": ("DiT-XL-2-256x256.pt with condition='label_1000'",),
    "Latte-XL/2": ("Latte-XL-2-256x256-ucf101.pt with condition='label_101'",),
    "LatteT2V-XL/2": ("maxin-cn/Latte-1", PIXART),
    "PixArt-XL/2": (PIXART,),
    "PixArtMS-XL/2": (PIXART_MS,),
    "PixArt-Sigma-XL/2": (SIGMA,),
    "STDiT-XL/2": (PIXART, "OpenSora-v1-HQ-16x256x256.pth"),
    "STDiT2-XL/2": (PIXART, "hpcai-tech/OpenSora-STDiT-v2-stage3"),
    "STDiT3-XL/2": (SIGMA, "hpcai-tech/OpenSora-STDiT-v3"),
    "Wan2.1-T2V-1.3B": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",),
    "Wan2.1-T2V-14B": ("Wan-AI/Wan2.1-T2V-14B-Diffusers",),
    "Wan2.1-I2V-14B": ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
    "Wan2.1-FLF2V-14B": ("Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",),
    "Wan2.2-T2V-A14B": ("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
    "Wan2.2-I2V-A14B": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers",),
    "Wan2.2-TI2V-5B": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers",),
}
"""Registered name -> what `from_pretrained` may name to start from released weights; the first is what its authors started from."""
SIZES = ("depth", "hidden_size", "num_heads", "mlp_ratio", "ffn_dim", "patch_size")  # that the released files fix


def released_weights(component: Mapping[str, Any]) -> tuple[str, ...]:
    """What `from_pretrained` of a model's config may name; empty where nothing is released in its size."""
    return () if any(name in component for name in SIZES) else RELEASED.get(component["type"], ())


@dataclass
class Conversion:
    """A file's weights in a model's own names, and what was done on the way."""

    tensors: dict[str, Tensor]  # by own name
    format: str  # what the file was recognised as, such as "DiT, diffusers"
    converted: dict[str, str] = field(
        default_factory=dict
    )  # own name -> what was changed ("2-D patch kernel made 3-D")
    dropped: dict[str, str] = field(default_factory=dict)  # the file's name -> why it is not used
    initial: dict[str, str] = field(
        default_factory=dict
    )  # own name -> why it may be missing, and keeps its initial value

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

    Settings that the source states and that differ from the model's are logged as a warning. Returns the line that is logged of
    what was loaded, converted, dropped and left at its initial value.

    Raises:
        UserError: the file is missing, unsafe, of another architecture, or of another number of heads. The model is then
            as it was.
    """
    log.info("loading %s", path)
    file = _weights_file(path)
    state = read_weights(file or path)
    if any(map(OF_LORA.search, state)) and not any(map(OF_LORA.search, model.state_dict())):
        raise UserError(f"{path} looks like a LoRA, which goes into a model with --lora or tools/lora.py.")
    conversion = convert(state, model)
    tensors = conversion.tensors
    if NULL_TEXT in tensors and not tensors[NULL_TEXT].any():  # as `CaptionEmbedder.clear_null` writes it
        del tensors[NULL_TEXT]
        conversion.dropped[NULL_TEXT] = "zeros, which stand for none"
        conversion.initial[NULL_TEXT] = NO_NULL_TEXT
    own = model.state_dict()
    warning = ""
    if all(tensor.shape == own[name].shape for name, tensor in tensors.items() if name in own):
        warning = _compare_settings(model, path, *_stated_model(path, file)[:2])  # else the shapes are the error
    load_strictly(model, tensors, path, may_miss=conversion.initial.keys() - tensors.keys())
    if isinstance(embedder := getattr(model, "y_embedder", None), CaptionEmbedder):
        embedder.null_known = NULL_TEXT in tensors
        if not embedder.null_known and model.class_dropout_prob == 0:
            embedder.clear_null()  # training that drops no captions gives it no meaning, but would save it
    dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
    initial = [why for name, why in conversion.initial.items() if name not in tensors]
    ours = sum(not name.endswith(".weight_scale") for name in own)  # of what is quantised here
    notes = [f"{len(tensors)} of {ours} tensors in {dtypes}"]
    for done, reasons in (
        ("converted", conversion.converted.values()),
        ("dropped", conversion.dropped.values()),
        ("left as is", initial),
    ):
        notes += [f"{count} {done} ({why})" for why, count in Counter(reasons).items()]
    report = f"{type(model).__name__} from {path} ({conversion.format}): {'; '.join(notes)}"
    log.info(report)
    if warning:
        log.warning(warning)
    return report


def store_frozen(model: Any, dtype: str) -> None:
    """Store the weights of a denoiser's linear layers and convolutions in bf16, in which autocast multiplies by them anyway, or in less.

    All others stay fp32: biases, norms, tables, and layers inside of a module marked `outside_autocast`. It is for weights that nothing
    trains: of an update below 0.2 % of a weight nothing would be left. What is quantised already stays as it is.

    Args:
        dtype: "fp32" changes nothing, "bf16" halves the memory; "fp8" and "int8" quantise the linear layers inside the blocks, see
            `opensora.models.quantised_linear`, and store what else "bf16" would as that does.
    """
    if dtype == "fp32":
        return
    outside = [part for part in model.modules() if getattr(part, "outside_autocast", False)]
    kept = {layer for part in outside for layer in part.modules()}
    if dtype in QUANTISED:
        for block in model.transformer_blocks():
            quantise_linears(block, dtype, kept)
        dtype = "bf16"
    for layer in model.modules():
        if isinstance(layer, nn.Linear | _ConvNd) and not isinstance(layer, QuantisedLinear) and layer not in kept:
            layer.weight.data = layer.weight.data.to(to_torch_dtype(dtype))  # one at a time


def written_by(path: str | Path) -> str | None:
    """The `model.type` that a checkpoint's manifest, or the header of a file of ours, states; None = neither does."""
    return _stated_model(path, _weights_file(path))[2]


def stated_component(path: str | Path) -> dict[str, Any]:
    """The model component that a checkpoint, or the header of a file of ours, states, without its weights; {} = it states none.

    Raises:
        UserError: there are no weights at `path`.
    """
    is_checkpoint = (Path(path).expanduser() / MANIFEST).is_file()
    where, config, name = _stated_model(path, None if is_checkpoint else find_weights(path))
    if where == CONFIG:  # of other codes, in their words
        config = {}
    component = {"type": name, **config} if name else dict(config)
    component.pop("from_pretrained", None)
    return component if isinstance(component.get("type"), str) else {}


def null_text_known(model: Any) -> bool:
    """Whether `model.null_condition` means something to the model; not so of weights from files without that table."""
    return getattr(model, "has_null_text", True) and getattr(getattr(model, "y_embedder", None), "null_known", True)


def _weights_file(path: str | Path) -> Path | None:
    """The file, or the index of shards, that holds the weights; None = a checkpoint of ours, or nothing."""
    if not (Path(path).expanduser() / MANIFEST).is_file():
        with suppress(UserError):  # reading reports it, with what is there
            return find_weights(path)
    return None


def _stated_model(path: str | Path, file: Path | None) -> tuple[str, Mapping[str, Any], str | None]:
    """What states the source's model, the arguments that it states ({} = none), and the `model.type`."""
    where, config, name = "manifest", None, None
    if file is None:
        manifest = open_checkpoint(Path(path).expanduser()).manifest
        config, name = (manifest.get("config") or {}).get("model"), manifest.get("model")
    elif kind_of(file) == "safetensors":
        with safe_open(file, "pt") as opened:
            header = opened.metadata() or {}
        where, config, name = "header", _parse(header.get("config", "")), header.get("model")
    if file is not None and not (isinstance(config, Mapping) and config) and (near := file.parent / CONFIG).is_file():
        where, config = CONFIG, _parse(near.read_text(encoding="utf-8", errors="replace"))
    return where, config if isinstance(config, Mapping) else {}, name


def _parse(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return None


def _compare_settings(model: nn.Module, path: str | Path, where: str, stated: Mapping[str, Any]) -> str:
    """A warning where the model has other settings than the source's, or ""; of another number of heads a UserError."""
    name = stated.get("model_type" if where == CONFIG else "type")
    known = isinstance(name, str) and name in MODELS.choices()
    theirs: dict[str, Any] = {HEADS: stated.get(HEADS)}
    fixed: dict[str, tuple[Any, Any]] = {}  # what no argument of the model's changes
    if where == CONFIG and (cls := stated.get("_class_name")) in OF_DIFFUSERS + OF_AUTHORS:
        theirs = {HEADS: stated.get("num_attention_heads", stated.get(HEADS))}
        ours = getattr(getattr(model, "net", None), "config", {})
        compared = {"eps"} if cls in OF_AUTHORS else ours.keys() - {"num_attention_heads", *WITHOUT_EFFECT}
        both = {key: (stated[key], ours[key]) for key in sorted(compared & stated.keys() & ours.keys())}
        fixed = {key: values for key, values in both.items() if not _same(*values)}
    elif not (known and HEADS in inspect.signature(MODELS.get(str(name))).parameters):
        if known or where == CONFIG:  # such as a text encoder's; a user's own model may have heads
            return ""
    elif where != CONFIG:
        with suppress(*OF_ANOTHER_VERSION), torch.device("meta"):  # built, since the constructor knows the defaults
            built = MODELS.build({key: value for key, value in stated.items() if key != "from_pretrained"})
            related = isinstance(model, type(built)) or isinstance(built, type(model))
            theirs = {key: getattr(built, key, None) for key in (HEADS, *(SETTINGS if related else ()))}
    own = {key: getattr(model, key, None) for key in theirs}
    heads = theirs.pop(HEADS)
    if isinstance(heads, int) and heads > 0 and own[HEADS] not in (None, heads):
        raise UserError(
            f"{path}: its {where} says {heads} attention heads, the model has {HEADS}={own[HEADS]}. No tensor's shape shows "
            f"that, but attention would compute something else: set model.{HEADS}={heads}."
        )
    if fixed:
        values = ", ".join(f"{key}={one!r}, not {other!r}" for key, (one, other) in fixed.items())
        raise UserError(f"{path}: its {where} says {values}, which no argument of {type(model).__name__} changes.")
    differing = [key for key, value in theirs.items() if not _same(value, own[key])]
    if not differing:
        return ""
    values = "; ".join(f"{key}: the file's {theirs[key]!r}, the model's {own[key]!r}" for key in differing)
    to_set = ", ".join(f"model.{key}={theirs[key]!r}" for key in differing)
    return (
        f"{path}: its {where} states other settings, which no tensor shows ({values}). To compute what the file's model did, "
        f"set {to_set}. To train on at another size or length they may differ."
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return isclose(one, other, rel_tol=1e-6)
    one, other = (list(value) if isinstance(value, tuple) else value for value in (one, other))  # JSON has no tuples
    return bool(one == other)
