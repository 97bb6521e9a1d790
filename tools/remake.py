"""Make a sample again from the JSON file next to it, and compare the frames bit for bit.

    python -m tools.remake samples/sample_0003.json [--out remade/]

Weights and references must be where the file says. The exit code is 0 when the frames are the same, and 1 when they differ;
what is known to have changed since is logged. The sample is written to `--out` under its old name.
"""

import sys
from fractions import Fraction
from pathlib import Path

from opensora.inference.jobs import remake
from opensora.inference.manifest import frames_hash, read_sidecar
from opensora.inference.output import save_sample
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.folders import make_writable
from opensora.utils.imports import import_parts
from opensora.utils.logging import show_messages
from tools.command import Parser


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("sidecar", type=Path, help="the .json file next to a sample")
    parser.add_argument("--out", type=Path, default=Path("remade"), help="folder for the new sample")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: as the sidecar's config says")
    parser.add_argument(
        "--imports", nargs="+", default=(), help="files or modules of your own that the sample's config names"
    )
    args = parser.parse_args()
    show_messages()
    import_parts(args.imports)
    if args.out.resolve() == args.sidecar.parent.resolve():
        raise UserError(f"--out {args.out} is the folder of the sample itself, which is not to be replaced.")
    record = read_sidecar(args.sidecar)
    make_writable(args.out, "out")  # before minutes of sampling
    video = remake(record, args.device, progress=True)
    stem = args.out / args.sidecar.name.removesuffix(".json")
    path = save_sample(video, stem, Fraction(record["save_fps"]), save_format=record["config"]["save_format"])
    same = frames_hash(video) == record["frames"]
    print(f"{path}: {'the same frames bit for bit' if same else 'the frames DIFFER from those of the sidecar'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
