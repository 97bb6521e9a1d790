"""Take a LoRA out of a checkpoint, to ship it, or merge it into the model that it was trained on.

    python -m tools.lora export CHECKPOINT FOLDER [--part ema|model]
    python -m tools.lora merge LORA OUT.safetensors [--base WEIGHTS] [--config CONFIG] [--scale 1.0] [--dtype fp16|bf16|fp32]
                         [--imports FILE ...]

`export` writes peft's adapter_config.json and adapter_model.safetensors, a few MB; `scripts/inference.py --lora FOLDER`
and peft read them. `merge` writes plain weights for `--ckpt-path`. LORA is a checkpoint folder of a LoRA run, which knows
its model and base, or an exported folder, which needs --config (a training or sampling config with the model) and --base.
A model of your own is found through the config's `imports` or --imports (docs/own-parts.md).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensora.checkpoint.load import MANIFEST, open_checkpoint, read_weights
from opensora.checkpoint.lora import Adapter, factors_of, load_lora, write_adapter
from opensora.checkpoint.weight_files import refuse_existing, write_file
from opensora.config.load import read_file
from opensora.config.schema import LoraOptions
from opensora.registry import MODELS
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.imports import import_parts, not_imported
from opensora.utils.logging import show_messages
from tools.command import Parser
from tools.convert import load, refuse_overflow

# arguments of a denoiser that a run takes from VAE and text encoder, and where its weights show them
SHOWN_BY_WEIGHTS = {
    "in_channels": ("x_embedder.proj.weight", 1),
    "caption_channels": ("y_embedder.y_proj.fc1.weight", 1),
    "model_max_length": ("y_embedder.y_embedding", 0),
}


def export(checkpoint: Path, out: Path, *, part: str = "ema") -> Path:
    """Write the adapter of a checkpoint as peft does; returns the folder.

    Raises:
        UserError: it is no checkpoint of a LoRA run, or `out` is there already.
    """
    opened = open_checkpoint(checkpoint)
    config = opened.manifest.get("config") or {}
    if config.get("lora") is None:
        raise UserError(
            f"{checkpoint} is a checkpoint of a run without lora; take its weights with tools.export_weights."
        )
    adapter = Adapter(factors_of(opened.tensors(part), checkpoint), LoraOptions.of(config["lora"]).scale)
    return write_adapter(adapter, out, base=config["model"].get("from_pretrained"))


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
        base: weights to start from; None: what the run or the config names.
        config: a config file with the model; None: the run's own.
        scale: how much of the adapter.
        dtype: of the file.
        imports: files or modules with parts of the user's own; None: those that the config file names.

    Raises:
        UserError: something does not fit, is missing, or `out` is there already.
    """
    refuse_existing(out)
    component = _model_of(lora, config, imports)
    base = base or component.get("from_pretrained")
    if base is None:
        raise UserError(
            "no base weights: the LoRA changes a model that it does not contain. Name it with --base WEIGHTS."
        )
    state = read_weights(base)  # sizes that the weights show, where they have our names; else the model's defaults hold
    shown = {key: state[name].shape[axis] for key, (name, axis) in SHOWN_BY_WEIGHTS.items() if name in state}
    model = load(base, {**shown, **component})
    layers = load_lora(model, lora, scale)
    header = {"model": component["type"], "source": str(lora), "base": base, "lora_layers": layers, "lora_scale": scale}
    refuse_overflow(model.state_dict(), dtype)
    return write_file(model.state_dict(), out, dtype=dtype, header=header)


def _model_of(lora: Path, config: Path | None, imports: Sequence[str] | None) -> dict[str, Any]:
    """The component of the base; what registers it is imported."""
    values: dict[str, Any] = {}
    if config is not None:
        values = read_file(config)[0]
    elif (lora / MANIFEST).is_file():
        values = open_checkpoint(lora).manifest.get("config") or {}
    else:
        raise UserError(f"{lora} does not say of which model it is; name a config with --config.")
    model, named = values.get("model"), values.get("imports") or []
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{config or lora}: imports={named!r}: expected a list of files (.py) and modules.")
    if not isinstance(model, dict) or not isinstance(model.get("type"), str):
        raise UserError(f"{config or lora} names no model.")
    # a .py config is code, other files and checkpoints are data: what they name is not run unasked
    import_parts(named if imports is None and config is not None and config.suffix == ".py" else imports or ())
    if MODELS.get(model["type"]) is None and (missing := not_imported(named)):
        raise UserError(
            f"{model['type']!r}, the model of {config or lora}, is not registered. It may come from {', '.join(missing)}, "
            f"which is code and is not run unasked; if you trust it: --imports {' '.join(missing)}."
        )
    return dict(model)


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("export", help="a checkpoint's adapter as a folder of peft")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--part", choices=("ema", "model"), default="ema")
    two = commands.add_parser("merge", help="base and adapter as plain weights")
    two.add_argument("lora", type=Path)
    two.add_argument("out", type=Path)
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
        print(export(args.checkpoint, args.out, part=args.part))
        return
    size = merge(
        args.lora,
        args.out,
        base=args.base,
        config=args.config,
        scale=args.scale,
        dtype=args.dtype,
        imports=args.imports,
    )
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
