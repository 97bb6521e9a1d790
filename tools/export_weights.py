"""Take the weights out of a checkpoint, to ship or to start another run from.

    python -m tools.export_weights CHECKPOINT OUT.safetensors [--part ema|model] [--dtype fp16|bf16|fp32]

The average (EMA) is taken unless told otherwise. The file's header says which model and step it came from.
"""

import argparse
from pathlib import Path

from safetensors.torch import save_file

from opensora.utils.ckpt import open_checkpoint
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError, exit_on_user_error


def export_weights(checkpoint: Path, out: Path, *, part: str = "ema", dtype: str = "fp16") -> int:
    """Write one part of a checkpoint as a single file; returns its size in bytes.

    Raises:
        UserError: the checkpoint is incomplete, or `out` is there already.
    """
    if out.exists():
        raise UserError(f"{out} is there already; remove it or choose another name.")
    opened = open_checkpoint(checkpoint)
    wanted = to_torch_dtype(dtype)
    tensors = {
        name: tensor.to(wanted) if tensor.is_floating_point() else tensor
        for name, tensor in opened.tensors(part).items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    header = {key: str(opened.manifest.get(key)) for key in ("model", "step", "git_commit")}
    save_file(tensors, out, metadata={"format": "pt", "part": part, **header})
    return out.stat().st_size


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", choices=("ema", "model"), default="ema")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    args = parser.parse_args()
    size = export_weights(args.checkpoint, args.out, part=args.part, dtype=args.dtype)
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
