"""Encode the clips of a training config with its VAE, once, for CachedVideoTextDataset.

    python -m tools.cache_features TRAIN_CONFIG [--cache-dir DIR] [--chunk FRAMES] [--field value ...]

DIR is the dataset's `cache_dir` unless given. All other options are the config's, as for scripts/train.py. A call that was
interrupted goes on where it stopped. To use the cache, train with
    --dataset.type CachedVideoTextDataset --dataset.cache_dir DIR
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensora.acceleration.distributed import init_world
from opensora.datasets.latent_cache import write_cache
from opensora.datasets.table import read_table
from opensora.models.encode import freeze
from opensora.registry import DATASETS, MODELS, SCHEDULERS, build_module
from opensora.utils.config import TrainConfig, parse_config
from opensora.utils.errors import UserError, exit_on_user_error

COMPONENTS = {"model": MODELS, "vae": MODELS, "text_encoder": MODELS, "scheduler": SCHEDULERS, "dataset": DATASETS}


def cache_features(argv: Sequence[str] | None = None) -> tuple[int, int]:
    """Run the command line; returns how many clips were encoded and how many were there already."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--cache-dir", "--cache_dir", type=Path, help="where to write; the dataset's cache_dir if left out"
    )
    parser.add_argument("--chunk", type=int, default=32, help="frames that are decoded and encoded at a time")
    args, rest = parser.parse_known_args(argv)
    if args.chunk < 1:
        raise UserError(f"--chunk {args.chunk} must be at least 1.")
    cfg = parse_config(TrainConfig, COMPONENTS, rest)
    dataset = dict(cfg.dataset or {})
    folder = args.cache_dir or dataset.get("cache_dir")
    if folder is None:
        raise UserError("give --cache-dir: the config's dataset has no cache_dir.")
    data_path = dataset.get("data_path", cfg.data_path)
    if data_path is None:
        raise UserError("give --data-path: the config names no table of clips.")
    table = read_table(data_path, dataset.get("root", cfg.root), text_columns=())
    device = init_world(cfg.device).device
    vae: Any = freeze(build_module(cfg.vae, MODELS), device)
    return write_cache(
        table,
        Path(folder),
        vae,
        image_size=tuple(dataset.get("image_size", cfg.image_size)),
        transform_name=dataset.get("transform_name", "center"),
        device=device,
        chunk=args.chunk,
    )


@exit_on_user_error
def main() -> None:
    """The command line."""
    encoded, present = cache_features()
    print(f"{encoded} clips encoded, {present} were there already")


if __name__ == "__main__":
    main()
