"""Write LPIPS' weights as fp16 safetensors: half the size, to take along to a machine without a network.

    python -m assets.build.halve_lpips vgg data/vae/lpips_vgg.safetensors
    python scripts/train_vae.py CONFIG --lpips data/vae/lpips_vgg.safetensors

The first argument is "vgg", "alex" or a weight file of stlpips-pytorch. Distances change by less than one part in a thousand.
"""

from pathlib import Path

from opensora.checkpoint.weight_files import read_file, write_file
from opensora.models.vae.metrics import find_weights
from opensora.utils.errors import exit_on_user_error
from tools.command import Parser


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("weights")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    source = find_weights(args.weights)
    size = write_file(read_file(source), args.out, dtype="fp16", header={"source": source.name, "part": "lpips"})
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
