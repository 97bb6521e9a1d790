"""Convert a denoiser's weights: from anything that can be loaded to diffusers' format or to one file of ours.

    python -m tools.convert INPUT OUTPUT --model "PixArt-XL/2" --to diffusers
    python -m tools.convert INPUT OUTPUT.safetensors --model "STDiT-XL/2" --to safetensors --dtype fp16

INPUT is what a config's `from_pretrained` takes: a file, a folder or a hub id (docs/how-to/weights.md). It must fit the named
model exactly, whose arguments can be changed with `--set depth=12 caption_channels=768`; what it lacks by nature, such as
the temporal attention of a PixArt file, is listed and has its initial value; but a table of "no text" that the input lacks
is written as zeros, which are read as none. `--to diffusers` writes a folder with
config.json and diffusion_pytorch_model.safetensors; what diffusers fixes in its config is set with `--option
sample_size=64`. A model of your own is found with `--imports my_parts.py` (docs/own-parts.md). Nothing is overwritten, and an output is complete or not there.
"""

import argparse
import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora.checkpoint.weight_files import refuse_existing, write_file
from opensora.config.command_line import parse_literal
from opensora.models.denoiser import Denoiser
from opensora.models.layers.embedders import CaptionEmbedder
from opensora.models.loading import null_text_known
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.environment import git_commit
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.imports import import_parts
from opensora.utils.logging import show_messages

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
) -> Path:
    """Load `source` into the model and write it in another form; returns `out`.

    Args:
        source: as a config's `from_pretrained`.
        out: the folder (diffusers) or file (safetensors) to make.
        model: a config's model: its `type` and arguments.
        to: "diffusers" or "safetensors".
        dtype: dtype of the file.
        options: for `Denoiser.to_diffusers`.

    Raises:
        UserError: `out` is there, `source` does not fit, or the format cannot express the model or its numbers.
    """
    refuse_existing(out)
    built = load(source, model)
    if to == "safetensors":
        header = {"model": model["type"], "config": model, "source": source, "git_commit": git_commit()}
        state = built.state_dict()
        refuse_overflow(state, dtype)
        write_file(state, out, dtype=dtype, header=header)
    else:
        write_diffusers(built, out, dtype=dtype, options=options or {})
    return out


def load(source: str, model: Mapping[str, Any]) -> Denoiser:
    """The named model with the weights of `source`, ready to be written.

    A table of "no text" that they lack would be written as random numbers, which nothing tells from a real one: it is zero.

    Raises:
        UserError: name or arguments are unknown, it is no denoiser, or the weights do not fit.
    """
    constructor = MODELS.get(model["type"])
    if constructor is not None and not issubclass(inspect.unwrap(constructor), Denoiser):
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
    torch.manual_seed(0)  # what the source lacks is the same each time
    try:
        built: Denoiser = MODELS.build(cfg)
    except UserError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:  # an argument of --set
        raise UserError(f"{model['type']}: {error}") from error
    if not null_text_known(built) and isinstance(built.y_embedder, CaptionEmbedder):
        built.y_embedder.clear_null()
    return built


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


def write_diffusers(model: Denoiser, out: Path, *, dtype: str, options: Mapping[str, int]) -> None:
    """Make a folder that diffusers' `from_pretrained` reads.

    Raises:
        UserError: diffusers cannot express the model, or knows no such option.
    """
    import diffusers

    try:
        config, state = model.to_diffusers(**options)
    except TypeError as error:
        raise UserError(f"--option {' '.join(f'{key}={value}' for key, value in options.items())}: {error}") from error
    refuse_overflow(state, dtype)
    config = {**config, "_diffusers_version": diffusers.__version__}
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        write_file(state, partial / DIFFUSERS_FILE, dtype=dtype, header={})
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def pairs(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """`["depth=12"] -> {"depth": 12}`.

    Raises:
        UserError: a text has no `=`.
    """
    if wrong := [text for text in texts if "=" not in text]:
        raise UserError(f"{flag} {wrong[0]}: write key=value.")
    return {key.replace("-", "_"): parse_literal(value) for key, _, value in (text.partition("=") for text in texts)}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="file, folder or hub id of weights")
    parser.add_argument("output", type=Path, help="what to make")
    parser.add_argument("--model", required=True, help="registered name: python -m opensora.registry --registry model")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="model's arguments")
    parser.add_argument("--to", required=True, choices=("diffusers", "safetensors"))
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp32")
    parser.add_argument("--option", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="for diffusers")
    parser.add_argument("--imports", nargs="+", default=(), metavar="FILE", help="files or modules of your own")
    return parser.parse_args()


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = read_arguments()
    if args.option and args.to != "diffusers":
        raise UserError("--option is for --to diffusers only.")
    show_messages()
    import_parts(args.imports)
    model = {"type": args.model, **pairs(args.set, "--set")}
    options = pairs(args.option, "--option")
    out = convert(args.input, args.output, model, to=args.to, dtype=args.dtype, options=options)
    size = sum(file.stat().st_size for file in (out, *out.glob("*")) if file.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
