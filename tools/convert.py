"""Convert a denoiser's weights: from anything that can be loaded to diffusers' format, to one file of ours, or, of Wan, to ComfyUI's.

    python -m tools.convert CHECKPOINT OUTPUT.safetensors --dtype fp16
    python -m tools.convert CHECKPOINT FOLDER                               # of diffusers
    python -m tools.convert PixArt-XL-2-512x512.pth FOLDER --model "PixArt-XL/2" --to diffusers
    python -m tools.convert CHECKPOINT OUTPUT.safetensors --to comfyui --dtype bf16
    python -m tools.convert CHECKPOINT FOLDER --pipeline Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dtype bf16

INPUT is what a config's `from_pretrained` takes: a file, a folder or a hub id (docs/how-to/weights.md), or the folder of a run, whose
newest checkpoint is taken. Checkpoints and files of ours state their model and its arguments; for others, name it with --model.
It must fit the input exactly. Arguments are changed with `--set depth=12 caption_channels=768`; the channels, and the length of
the table of "no text", are the input's. What the input lacks by nature, such as
the temporal attention of a PixArt file, is listed and has its initial value; but a table of "no text" that the input lacks
is written as zeros, which are read as none. `--to diffusers` writes a folder with
config.json and diffusion_pytorch_model.safetensors; what diffusers fixes in its config is set with `--option
sample_size=64`; with `--pipeline` the folder is a whole pipeline, whose other parts are copied from that one.
A model of two networks is written as the folders transformer and transformer_2. `--to comfyui` writes one network under the names of Wan's
authors, which ComfyUI and diffusers' `from_single_file` read. A model of your own is found with `--imports my_parts.py` (docs/own-parts.md). Nothing is overwritten, and an output is complete or not there.
"""

import argparse
import inspect
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora.checkpoint.load import MANIFEST, latest_checkpoint, open_checkpoint, read_weights
from opensora.checkpoint.pretrained import hub_error, resolve_pretrained
from opensora.checkpoint.weight_files import PIPELINE, refuse_existing, write_file
from opensora.config.command_line import parse_literal
from opensora.config.upgrade import upgrade
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.loading import NULL_TEXT, OUTPUT, PATCHES, null_text_known, stated_component
from opensora.models.wan.convert import FOLDERS, sizes
from opensora.registry import DENOISERS, MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.environment import git_commit
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.imports import import_parts, not_imported
from opensora.utils.logging import show_messages
from tools.command import Parser

log = logging.getLogger("opensora.convert")
COUNTS = ("hidden_size", "num_heads", "width")  # arguments that models divide by, or make tensors of
DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"


def convert(
    source: str,
    out: Path,
    model: Mapping[str, Any],
    *,
    to: str,
    dtype: str = "fp32",
    options: Mapping[str, int] | None = None,
    pipeline: str | None = None,
) -> Path:
    """Load `source` into the model and write it in another form; returns `out`.

    Args:
        source: as a config's `from_pretrained`.
        out: the folder (diffusers) or file (safetensors) to make.
        model: a config's model: its `type` and arguments.
        to: "diffusers", "safetensors" or "comfyui".
        dtype: dtype of the file.
        options: for `Denoiser.to_diffusers`.
        pipeline: folder or hub id of a pipeline of diffusers, to be written with these weights in it.

    Raises:
        UserError: `out` is there, `source` does not fit, or the format cannot express the model or its numbers.
    """
    refuse_existing(out)
    built = load(source, model)
    if to == "diffusers":
        write_diffusers(built, out, dtype=dtype, options=options or {}, pipeline=pipeline)
        return out
    header: dict[str, Any] = {"source": source, "git_commit": git_commit()}
    if to == "comfyui":
        state = original_state(built)
    else:
        config = {key: value for key, value in model.items() if not key.startswith("from_pretrained")}
        header, state = {"model": model["type"], "config": config, **header}, built.state_dict()
    refuse_overflow(state, dtype)
    write_file(state, out, dtype=dtype, header=header)
    return out


def original_state(model: Any) -> dict[str, Tensor]:
    """The weights of a model over diffusers' network in its authors' names, which are ComfyUI's.

    Raises:
        UserError: it is another model, or one of two networks.
    """
    original_name = getattr(model, "original_name", None)
    if original_name is None:
        raise UserError(f"--to comfyui is for Wan; ComfyUI has no {type(model).__name__} that these weights fit.")
    if model.net_2 is not None:
        raise UserError(
            "ComfyUI reads each of the two experts from a file of its own: write one with --set expert=high, the other with "
            "--set expert=low."
        )
    return {original_name(name): tensor for name, tensor in model.to_diffusers()[1].items()}


def load(source: str, model: Mapping[str, Any]) -> Any:
    """The named model with the weights of `source`, ready to be written; sizes that it does not set are those of the weights.

    A table of "no text" that they lack would be written as random numbers, which nothing tells from a real one: it is zero.

    Raises:
        UserError: name or arguments are unknown, it is no denoiser, or the weights do not fit.
    """
    constructor = MODELS.get(model["type"])
    if constructor is not None and model["type"] not in DENOISERS.choices():
        raise UserError(f"{model['type']} is no denoiser; only those are converted here.")
    if wrong := [
        f"{key}={model[key]!r}" for key in COUNTS if isinstance(model.get(key), int | float) and model[key] < 1
    ]:
        raise UserError(
            f"{model['type']}: {', '.join(wrong)} must be a whole number from 1 (--set, or the config's model)."
        )
    cfg = {**model, "from_pretrained": source}
    if problems := MODELS.problems(cfg):
        raise UserError("\n".join(problems))
    taken = inspect.signature(constructor).parameters
    cfg = {key: value for key, value in shown_by_weights(read_weights(source)).items() if key in taken} | cfg
    torch.manual_seed(0)  # what the source lacks is the same each time
    try:
        built = MODELS.build(cfg)
    except UserError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:  # an argument of --set
        raise UserError(f"{model['type']}: {error}") from error
    if not null_text_known(built) and isinstance(getattr(built, "y_embedder", None), CaptionEmbedder):
        built.y_embedder.clear_null()
    return built


def shown_by_weights(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of a denoiser that shapes show, where the names are ours or, of Wan, diffusers': most a run takes from its VAE and
    text encoder."""
    patches, output = state.get(PATCHES), state.get(OUTPUT[1])  # [D, C, (frames,) p, p], [frames * p * p * C_out]
    caption, table = state.get("y_embedder.y_proj.fc1.weight"), state.get(NULL_TEXT)  # [D, C_text], [L, C_text]
    if wan := sizes(state) or sizes({f"net.{name}": tensor for name, tensor in state.items()}):
        return {name: wan[name] for name in ("in_channels", "caption_channels")}
    shown: dict[str, Any] = {} if patches is None else {"in_channels": patches.shape[1]}
    if patches is not None and output is not None:
        shown["pred_sigma"] = len(output) == 2 * patches[0].numel()
    if caption is not None:
        shown["caption_channels"] = caption.shape[1]
    if table is not None:
        shown["model_max_length"] = len(table)
    return shown


def newest_checkpoint(source: str) -> str:
    """The newest checkpoint where `source` is the folder of a run; anything else as it is."""
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / MANIFEST).is_file() and (found := latest_checkpoint(folder)):
        log.info("%s: the newest checkpoint of the run is %s", folder, found.name)
        return str(found)
    return source


def stated_model(source: str) -> dict[str, Any]:
    """The model component of a checkpoint or a file of ours; {} = the source states none.

    Raises:
        UserError: there is nothing at `source`, it is of a LoRA run, or its model is one of the user's own that was not imported.
    """
    config: Mapping[str, Any]
    if (Path(source).expanduser() / MANIFEST).is_file():
        config = open_checkpoint(Path(source).expanduser()).manifest.get("config") or {}
        refuse_adapters(config, source)
    else:
        config = {"model": stated_component(source)}
    return usable_model(config, source) if config.get("model") else {}


def usable_model(values: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """The `model` of a config's values, without its weights and in current spelling.

    Raises:
        UserError: it is no model, or not registered where the values name code that may do so, which is not run unasked.
    """
    model, named = values.get("model"), values.get("imports") or []
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{where}: imports={named!r}: expected a list of files (.py) and modules.")
    if not isinstance(model, dict) or not isinstance(model.get("type"), str):
        raise UserError(f"{where} names no model.")
    if MODELS.get(model["type"]) is None and (missing := not_imported(named)):
        raise UserError(
            f"{model['type']!r}, the model of {where}, is not registered. It may come from {', '.join(missing)}, "
            f"which is code and is not run unasked; if you trust it: --imports {' '.join(missing)}."
        )
    return {key: value for key, value in upgrade("model", model).items() if not key.startswith("from_pretrained")}


def refuse_adapters(config: Mapping[str, Any], checkpoint: str | Path) -> None:
    """Refuse the checkpoint of a LoRA run, by the config in its manifest, where plain weights are wanted.

    Raises:
        UserError: it names the commands that make something of it.
    """
    if config.get("lora") is not None:
        raise UserError(
            f"{checkpoint} is of a LoRA run: it holds adapters, not the weights of a model. Merge them into the weights that they "
            f"were trained on, `python -m tools.lora merge {checkpoint} OUT.safetensors`, or take them alone, "
            f"`python -m tools.lora export {checkpoint} FOLDER`."
        )


def refuse_overflow(tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Refuse weights that a dtype cannot hold.

    Raises:
        UserError: one would become infinite; the tensor is named.
    """
    wanted = to_torch_dtype(dtype)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (tensor.to(wanted).isinf() & tensor.isfinite()).any():
            largest = tensor.abs().nan_to_num(posinf=0).max().item()
            raise UserError(
                f"{name} has numbers up to {largest:.6g}, and {dtype} ends at {torch.finfo(wanted).max:.6g}: they would become "
                "infinite. Write with a wider --dtype, bf16 or fp32."
            )


def write_diffusers(
    model: Any, out: Path, *, dtype: str, options: Mapping[str, int], pipeline: str | None = None
) -> None:
    """Make a folder that diffusers' `from_pretrained` reads: a network's, or, of two networks or with `pipeline`, a pipeline's.

    Raises:
        UserError: diffusers cannot express the model, knows no such option, or there is no such pipeline.
    """
    import diffusers

    try:
        config, state = model.to_diffusers(**options)
    except TypeError as error:
        raise UserError(f"--option {' '.join(f'{key}={value}' for key, value in options.items())}: {error}") from error
    refuse_overflow(state, dtype)
    config = {**config, "_diffusers_version": diffusers.__version__}
    second = {name.removeprefix("net_2."): state.pop(name) for name in list(state) if name.startswith("net_2.")}
    networks = {FOLDERS["low" if getattr(model, "expert", "") == "low" else "high"]: state} if pipeline else {"": state}
    networks = {FOLDERS["high"]: state, FOLDERS["low"]: second} if second else networks
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        if pipeline is not None:
            copy_pipeline(pipeline, partial, but=networks)
        for folder, tensors in networks.items():
            write_file(tensors, partial / folder / DIFFUSERS_FILE, dtype=dtype, header={})
            (partial / folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_pipeline(pipeline: str, out: Path, *, but: Iterable[str]) -> None:
    """Copy a pipeline of diffusers, a folder or of the hub, without some of its folders.

    Raises:
        UserError: it is not there.
    """
    found = resolve_pretrained(pipeline, what="pipeline", any_of=[[PIPELINE]])
    if not Path(found).is_dir():
        import huggingface_hub

        try:
            found = huggingface_hub.snapshot_download(found, ignore_patterns=[f"{name}/*" for name in but])
        except (OSError, ValueError) as error:
            raise hub_error(pipeline, "pipeline", error) from error
    shutil.copytree(found, out, ignore=shutil.ignore_patterns(*but, ".*"), dirs_exist_ok=True)


def pairs(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """`["depth=12"] -> {"depth": 12}`.

    Raises:
        UserError: a text has no `=`.
    """
    if wrong := [text for text in texts if "=" not in text]:
        raise UserError(f"{flag} {wrong[0]}: write key=value.")
    return {key.replace("-", "_"): parse_literal(value) for key, _, value in (text.partition("=") for text in texts)}


def read_arguments() -> argparse.Namespace:
    parser = Parser(__doc__, __spec__)
    parser.add_argument("input", help="file, folder or hub id of weights")
    parser.add_argument("output", type=Path, help="what to make")
    parser.add_argument("--model", help="registered name, where the input states none: see python -m opensora.registry")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="model's arguments")
    parser.add_argument(
        "--to",
        choices=("diffusers", "safetensors", "comfyui"),
        help="safetensors (of ours) if output ends so, else a folder of diffusers",
    )
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp32")
    parser.add_argument("--option", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="for diffusers")
    parser.add_argument("--pipeline", metavar="FOLDER_OR_ID", help="write a whole pipeline of diffusers: this one's")
    parser.add_argument("--imports", nargs="+", default=(), metavar="FILE", help="files or modules of your own")
    return parser.parse_args()


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = read_arguments()
    to = args.to or ("safetensors" if args.output.suffix == ".safetensors" else "diffusers")
    for flag in ("option", "pipeline"):
        if getattr(args, flag) and to != "diffusers":
            raise UserError(f"--{flag} is for --to diffusers only.")
    if args.pipeline:
        resolve_pretrained(args.pipeline, what="--pipeline", any_of=[[PIPELINE]])  # before weights are loaded
    changes, options = pairs(args.set, "--set"), pairs(args.option, "--option")
    show_messages()
    source = newest_checkpoint(args.input)
    import_parts(args.imports)
    model = stated_model(source)
    if args.model not in (None, model.get("type")):
        model = {"type": args.model}
    if not model:
        raise UserError(
            f"{source} does not state of which model it is: name it with --model (python -m opensora.registry --registry model "
            "lists the names), and with --set its arguments that are not the defaults."
        )
    out = convert(
        source, args.output, model | changes, to=to, dtype=args.dtype, options=options, pipeline=args.pipeline
    )
    size = sum(file.stat().st_size for file in (out, *out.rglob("*")) if file.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
