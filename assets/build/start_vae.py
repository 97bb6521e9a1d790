"""Write a VAE that is a linear codec of the training data, for `configs/vae/train/video-small.py` to begin with.

    python -m assets.build.start_vae configs/vae/train/video-small.py --out outputs/vae-start [--clips 64] [--field value ...]
    python scripts/train_vae.py configs/vae/train/video-small.py --vae.from_pretrained outputs/vae-start --vae.architecture None

assets/build/linear_start.py says what it does. Least squares on a CPU: a minute or two.
"""

from pathlib import Path

import torch
from torch import Tensor

from assets.build.linear_start import decoded, start_linearly
from opensora.config.load import VAETrainConfig, parse_config
from opensora.datasets.sampler import SampleKey
from opensora.models.vae import DiffusersVideoVAE
from opensora.models.vae.metrics import psnr
from opensora.registry import DATASETS, MODELS, build_module
from opensora.utils.errors import UserError, exit_on_user_error
from tools.command import Parser

SHOWN = 4  # clips that say how good the start is


@exit_on_user_error
def main() -> None:
    """Read a config, fit, save."""
    parser = Parser(__doc__, __spec__)
    parser.add_argument("config", help="of scripts/train_vae.py; whatever else is given overrides its fields")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--clips", type=int, default=64, help="training samples to fit to")
    args, overrides = parser.parse_known_args()
    cfg = parse_config(
        VAETrainConfig, {"vae": MODELS, "dataset": DATASETS}, [args.config, *overrides], options=vars(args)
    )
    print(start(cfg, args.out, args.clips), flush=True)


def start(cfg: VAETrainConfig, out: Path, count: int) -> str:
    """Write the folder `out`; says how good it is.

    Raises:
        UserError: the config's VAE is no small Wan, or its samples are no clips.
    """
    if count < 1:
        raise UserError(f"--clips {count}: a start is fitted to at least one clip.")
    if cfg.num_frames < 5:
        raise UserError(f"num_frames={cfg.num_frames}: a linear start is fitted to clips of 5 frames or more.")
    torch.manual_seed(cfg.seed)
    vae = build_module({**cfg.vae, "posterior": "mode"}, MODELS)
    if not isinstance(vae, DiffusersVideoVAE):
        raise UserError(f"vae.type={cfg.vae['type']!r}: a linear start is made for DiffusersVideoVAE.")
    clips = _clips(build_module(cfg.dataset, DATASETS, seed=cfg.seed), count)
    start_linearly(vae, clips)
    vae.save_pretrained(out)
    shown = clips[:: max(len(clips) // SHOWN, 1)]
    value = float(psnr(decoded(vae, shown).clamp(-1, 1), shown).mean())
    return f"{out}: a linear start from {len(clips)} clips, of which it gives back {len(shown)} with {value:.2f} dB"


def _clips(dataset: object, count: int) -> Tensor:
    """[count, 3, T, H, W], evenly picked."""
    size = len(dataset)  # type: ignore[arg-type]
    chosen = range(0, size, max(size // count, 1))[:count]
    return torch.stack([dataset[SampleKey(0, index)]["video"] for index in chosen])  # type: ignore[index]


if __name__ == "__main__":
    main()
