"""Low-rank adapters (LoRA, Hu et al. 2021) as files, and their merge into plain weights.

An adapted linear layer computes W x + s (alpha / rank) B A x, with A [rank, in] and B [out, rank]. Adding s (alpha / rank)
B A to W gives a plain layer with the same output, so sampling needs neither an extra product nor a package.

Files are those of peft: a folder with `adapter_config.json` and `adapter_model.safetensors`. Of a checkpoint folder of a run
with `lora` the EMA is taken.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from opensora.checkpoint.load import MANIFEST, open_checkpoint
from opensora.checkpoint.weight_files import read_file
from opensora.config.schema import LoraOptions, is_number
from opensora.registry import did_you_mean
from opensora.utils.errors import UserError
from opensora.utils.folders import read_json

CONFIG_FILE, WEIGHT_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # how peft names a wrapped model's layers in its files
FACTOR = re.compile(rf"^(?:{re.escape(PREFIX)})?(.+)\.lora_([AB])(?:\.\w+)?\.weight$")
COUNTER = "lora_forwards"  # see `opensora.training.lora`
# what peft can do beyond B A x, by its name in a config; a file that asks for one of these is refused
UNKNOWN_KINDS = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "layer_replication",
    "alora_invocation_tokens", "use_qalora", "target_parameters", "fan_in_fan_out",
)  # fmt: skip


class Adapter(NamedTuple):
    """A trained adapter: for each layer's name its A [rank, in] and B [out, rank]; all are scaled by `scale`."""

    factors: dict[str, tuple[Tensor, Tensor]]
    scale: float


def factors_of(state: Mapping[str, Tensor], source: str | Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer name -> (A, B), from the names of peft's files or of our checkpoints.

    Raises:
        UserError: there is no adapter in it, half of one, or something else too.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in state.items():
        if match := FACTOR.match(name):
            halves.setdefault(match[1], {})[match[2]] = tensor
        elif name != COUNTER:
            others.append(name)
    if others:
        raise UserError(f"{source} is no LoRA: it also holds {', '.join(sorted(others)[:3])}.")
    if not halves or any(pair.keys() != {"A", "B"} for pair in halves.values()):
        raise UserError(f"{source} is no LoRA: {'its layers lack' if halves else 'it holds no'} lora_A or lora_B.")
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}


def read_adapter(path: str | Path) -> Adapter:
    """An adapter from a folder of peft, its `adapter_model.safetensors`, or a checkpoint folder of a LoRA run.

    Raises:
        UserError: there is none at `path`, it is damaged, or it does more than add B A.
    """
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file() or not path.exists():  # which says so, and what there is
        checkpoint = open_checkpoint(path)
        options = (checkpoint.manifest.get("config") or {}).get("lora")
        if options is None:
            raise UserError(f"{path} is a checkpoint of a run without lora: load it with --ckpt-path.")
        state = checkpoint.tensors("ema") or checkpoint.tensors("model")
        return Adapter(factors_of(state, path), LoraOptions.of(options).scale)
    weights = path if path.is_file() else path / WEIGHT_FILE
    file = weights.parent / CONFIG_FILE
    if not weights.is_file() or not file.is_file():
        raise UserError(
            f"{path} is no LoRA: expected a folder with {CONFIG_FILE} and {WEIGHT_FILE}, or a checkpoint folder of a run "
            "with lora=dict(...)."
        )
    remedy = "Copy or download the folder again."
    config = read_json(file, remedy)
    kind, more = config.get("peft_type"), [key for key in UNKNOWN_KINDS if config.get(key)]
    if kind != "LORA" or config.get("bias", "none") != "none" or more:
        raise UserError(f"{file}: {', '.join(more) or f'peft_type={kind!r}'}: only plain LoRA without bias is read.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not is_number(rank) or rank != int(rank) or rank < 1 or not is_number(alpha):
        raise UserError(
            f"{file}: r={rank!r} and lora_alpha={alpha!r} must be a whole number from 1 and a number. {remedy}"
        )
    scale = float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
    return Adapter(factors_of(read_file(weights), weights), scale)


def write_adapter(adapter: Adapter, folder: Path, *, base: str | None = None) -> Path:
    """Write `folder` as peft does; it must not be there yet.

    Args:
        base: path of the weights that the adapter was trained on, for the reader.

    Raises:
        UserError: `folder` exists.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"{folder} is there already; choose another name.") from error
    rank = next(iter(adapter.factors.values()))[0].shape[0]
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapter.factors),
        "inference_mode": True,
    }
    tensors = {
        f"{PREFIX}{name}.lora_{letter}.weight": factor.detach().cpu().contiguous()
        for name, pair in adapter.factors.items()
        for letter, factor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / WEIGHT_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    return folder


@torch.no_grad()
def merge_adapter(model: nn.Module, adapter: Adapter, scale: float = 1.0, source: str | Path = "the LoRA") -> int:
    """Add `scale` times the adapter to the weights of `model`, in place and in fp32; returns how many layers changed.

    Raises:
        UserError: the model has no such layers; it is then as it was.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    problems = []
    for name, (A, B) in adapter.factors.items():
        if name not in layers:
            problems.append(f"  {name}: not there.{did_you_mean(name, list(layers))}")
        elif layers[name].weight.shape != (B.shape[0], A.shape[1]) or A.shape[0] != B.shape[1]:
            shapes = f"B {tuple(B.shape)} times A {tuple(A.shape)}"
            problems.append(f"  {name}: {tuple(layers[name].weight.shape)}, the LoRA has {shapes}")
    if problems:
        shown = "\n".join(problems[:5])
        raise UserError(
            f"{source} does not fit this {type(model).__name__}: {len(problems)} of {len(adapter.factors)} layers.\n"
            f"{shown}\nUse the model that the LoRA was trained on."
        )
    for name, (A, B) in adapter.factors.items():
        weight = layers[name].weight
        update = scale * adapter.scale * (B.to(weight.device, torch.float32) @ A.to(weight.device, torch.float32))
        weight.copy_(weight.float() + update)
    return len(adapter.factors)
