"""Take the weights out of a checkpoint, to ship or to start another run from.

    python -m tools.export_weights CHECKPOINT_OR_RUN OUT.safetensors [--part ema|model] [--dtype fp16|bf16|fp32]

The EMA weights are taken by default. In fp16, the default, values end at 65504; weights that do not fit are refused. The file's header says which model, config and step it came from. Weights
of other origins, and other formats: tools/convert.py.
"""

from pathlib import Path

from opensora.checkpoint.load import open_checkpoint
from opensora.checkpoint.weight_files import refuse_existing, write_file
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.command import Parser
from tools.convert import newest_checkpoint, refuse_adapters, refuse_overflow

PARTS = ("ema", "model")


def export_weights(checkpoint: Path, out: Path, *, part: str = "ema", dtype: str = "fp16") -> int:
    """Write one part of a checkpoint as a single file; returns its size in bytes.

    Raises:
        UserError: the checkpoint is incomplete, of a LoRA run, has no such part or numbers beyond `dtype`, or `out` is there already.
    """
    refuse_existing(out)
    opened = open_checkpoint(checkpoint)
    config = opened.manifest.get("config") or {}
    refuse_adapters(config, checkpoint)
    tensors = opened.tensors(part)
    if not tensors:
        others = [other for other in PARTS if opened.tensors(other)]
        raise UserError(
            f"{checkpoint} holds no {part!r}; "
            + (f"take --part {others[0]}." if others else f"it has none of the parts {', '.join(PARTS)}.")
        )
    refuse_overflow(tensors, dtype)
    header = {key: opened.manifest.get(key) for key in ("model", "step", "git_commit")}
    header["config"] = config.get("model")
    return write_file(tensors, out, dtype=dtype, header={"part": part, "source": str(checkpoint), **header})


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", choices=PARTS, default="ema")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    args = parser.parse_args()
    show_messages()
    checkpoint = Path(newest_checkpoint(str(args.checkpoint)))
    size = export_weights(checkpoint, args.out, part=args.part, dtype=args.dtype)
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
