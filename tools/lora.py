"""Take a LoRA out of a checkpoint, to ship it, or merge it into the model that it was trained on.

    python -m tools.lora export CHECKPOINT OUT [--format peft|diffusers|comfyui|kohya] [--part ema|model]
    python -m tools.lora merge LORA OUT.safetensors [--base WEIGHTS] [--config CONFIG] [--scale 1.0] [--dtype fp16|bf16|fp32]
                         [--imports FILE ...]

`export` writes a folder of peft's, adapter_config.json and adapter_model.safetensors, a few MB; or, of models that other programs
know (Wan), one .safetensors file for diffusers (`load_lora_weights`), for ComfyUI, or with kohya's names. `scripts/inference.py --lora
OUT` reads all of them. `merge` writes plain weights for `--ckpt-path`. CHECKPOINT and LORA may be a checkpoint folder of a LoRA run, or
the run's folder, whose newest checkpoint is taken: it knows its model and base. LORA may be any file or folder that --lora takes; an
exported folder knows its base; the model is then what the base's file states, or that of --config, a training or sampling config. A
model of your own is found through the config's `imports` or --imports (docs/own-parts.md).
"""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from opensora.checkpoint.load import MANIFEST, open_checkpoint
from opensora.checkpoint.lora import (
    CONFIG_FILE,
    Adapter,
    checkpoint_adapter,
    merge_adapter,
    read_adapter,
    write_adapter,
    write_lora_file,
)
from opensora.checkpoint.weight_files import refuse_existing, write_file
from opensora.config.load import read_file
from opensora.models.diffusers_denoiser import DiffusersDenoiser
from opensora.registry import MODELS
from opensora.training.lora import target_names
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.folders import read_json
from opensora.utils.imports import import_parts
from opensora.utils.logging import show_messages
from tools.command import Parser
from tools.convert import load, newest_checkpoint, refuse_overflow, stated_model, usable_model

log = logging.getLogger("opensora.lora")


def export(checkpoint: Path, out: Path, *, part: str = "ema", form: str = "peft") -> Path:
    """Write the adapter of a checkpoint as peft does, or as one file for other programs; returns `out`.

    Args:
        checkpoint: folder of a checkpoint.
        out: the folder to make, or the .safetensors file.
        part: "ema" or "model".
        form: "peft", "diffusers", "comfyui" or "kohya".

    Raises:
        UserError: it is no checkpoint of a LoRA run, its model has no names in other programs, or `out` is there already.
    """
    opened = open_checkpoint(checkpoint)
    config = opened.manifest.get("config") or {}
    adapter = checkpoint_adapter(opened, part)
    constructor = inspect.unwrap(MODELS.get(str(config["model"].get("type"))) or Adapter)
    if issubclass(constructor, DiffusersDenoiser):  # by the names of diffusers' network
        adapter = adapter._replace(factors={n.removeprefix("net."): pair for n, pair in adapter.factors.items()})
    if form == "peft":
        return write_adapter(adapter, out, base=config["model"].get("from_pretrained"))
    original_name = getattr(constructor, "original_name", None)
    if original_name is None:
        raise UserError(f"{config['model'].get('type')}: {form} knows no such model; export its LoRA as peft.")
    if form == "kohya":  # diffusers reads such a file only if every layer of the blocks is in it
        with torch.device("meta"):
            model = MODELS.build(usable_model(config, checkpoint))
        shapes = {name: model.get_submodule(name).weight.shape for name in target_names(model, "all-linear")}
        zeros = {n.removeprefix("net."): (torch.zeros(1, s[1]), torch.zeros(s[0], 1)) for n, s in shapes.items()}
        adapter = adapter._replace(factors=zeros | adapter.factors)
    return write_lora_file(adapter, out, form, original_name)


def merge(
    lora: Path,
    out: Path,
    *,
    base: str | None = None,
    config: Path | None = None,
    scale: float = 1.0,
    dtype: str = "fp16",
    imports: Sequence[str] | None = None,
) -> int:
    """Write the base's weights with the adapter merged in; returns the file's size in bytes.

    Args:
        lora: a checkpoint folder of a LoRA run, or an exported adapter.
        base: weights to start from; None: what the config, the run or the exported adapter names.
        config: a config file with the model; None: the run's own, or what the base states.
        scale: how much of the adapter.
        dtype: of the file.
        imports: files or modules with parts of the user's own; None: those that the config file names.

    Raises:
        UserError: something does not fit, is missing, or `out` is there already.
    """
    refuse_existing(out)
    adapter = read_adapter(lora)
    values: dict[str, Any] = {}
    where = config or lora
    if config is not None:
        values = read_file(config)[0]
    elif (lora / MANIFEST).is_file():
        values = open_checkpoint(lora).manifest.get("config") or {}
    if imports is None and config is not None and config.suffix == ".py":
        imports = values.get(
            "imports"
        )  # such a config is code; other files and checkpoints are data, whose names are not run unasked
    import_parts(imports if isinstance(imports, list | tuple) else ())
    component = usable_model(values, where) if values else {}
    named = values["model"].get("from_pretrained") if values else None
    if named is None and config is None and (lora / CONFIG_FILE).is_file():
        where = lora / CONFIG_FILE
        named = read_json(where, "").get("base_model_name_or_path")
    if base is None and named is None:
        raise UserError(
            f"no base weights: a LoRA changes a model that it does not contain, and {where} names none. Name it with --base WEIGHTS."
        )
    if base is None:
        log.info("the base is %s, as %s says", named, where)
    try:
        weights = newest_checkpoint(str(base or named))
        component = component or stated_model(weights)
        if not component:
            raise UserError(
                f"neither {lora} nor {weights} states of which model it is; name a config that does with --config."
            )
        model = load(weights, component)
    except UserError as error:
        if base is not None:
            raise
        raise UserError(f"{error}\nThe base, {named}, is what {where} names; --base WEIGHTS names another.") from error
    layers = merge_adapter(model, adapter, scale, lora)
    header = {"model": component["type"], "config": component, "source": str(lora), "base": weights}
    refuse_overflow(model.state_dict(), dtype)
    return write_file(
        model.state_dict(), out, dtype=dtype, header={**header, "lora_layers": layers, "lora_scale": scale}
    )


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("export", help="a checkpoint's adapter as a file of its own")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--part", choices=("ema", "model"), default="ema")
    one.add_argument(
        "--format", choices=("peft", "diffusers", "comfyui", "kohya"), default="peft", help="who is to read it"
    )
    two = commands.add_parser("merge", help="base and adapter as plain weights")
    two.add_argument("lora", type=Path, help="checkpoint or folder of a LoRA run, or an exported folder")
    two.add_argument("out", type=Path, nargs="?", help="the .safetensors file to make")
    two.add_argument("--out", type=Path, dest="out_file", help="the same, as an option")
    two.add_argument("--base", help="weights that the adapter was trained on")
    two.add_argument("--config", type=Path, help="config with the model, for an exported adapter")
    two.add_argument("--scale", type=float, default=1.0, help="how much of the adapter")
    two.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    two.add_argument(
        "--imports", nargs="+", metavar="FILE", help="files or modules of your own, in place of the config's"
    )
    args = parser.parse_args()
    show_messages()
    if args.command == "export":
        checkpoint = Path(newest_checkpoint(str(args.checkpoint)))
        print(export(checkpoint, args.out, part=args.part, form=args.format))
        return
    outs = [out for out in (args.out, args.out_file) if out is not None]
    if len(outs) != 1:
        two.error("name the file to make once, as OUT or as --out FILE")
    size = merge(
        Path(newest_checkpoint(str(args.lora))),
        outs[0],
        base=args.base,
        config=args.config,
        scale=args.scale,
        dtype=args.dtype,
        imports=args.imports,
    )
    print(f"{outs[0]}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
