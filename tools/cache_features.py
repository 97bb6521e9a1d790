"""Encode the clips and captions of a training config, once: the VAE's moments, the text encoder's features, and the optical-flow scores.

    python -m tools.cache_features TRAIN_CONFIG [--cache-dir DIR] [--what moments text flow] [--epochs E] [--field value ...]
    torchrun --standalone --nproc_per_node 8 -m tools.cache_features TRAIN_CONFIG ...          processes share the work
    python -m tools.cache_features --check DIR                                                 read all, name what is damaged

DIR is the dataset's `cache_dir` unless given. All other options are the config's, as for scripts/train.py. A call that was
interrupted goes on where it stopped. The optical-flow score is measured also unasked, with the moments, where the config's model
is conditioned on it and the table does not have it. To train from the cache:
    --dataset.type CachedVideoTextDataset --dataset.cache_dir DIR [--dataset.content samples] [--dataset.text features]
"""

import argparse
import inspect
import os
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from opensora.acceleration.distributed import init_world, shutdown
from opensora.config.load import TrainConfig, parse_config
from opensora.config.resolve import DEFAULT_DATASET
from opensora.datasets.cache.features import DTYPES as TEXT_DTYPES
from opensora.datasets.cache.features import FLOW, TEXT, captions_of, write_text
from opensora.datasets.cache.moments import (
    CLIPS,
    SAMPLES,
    Choices,
    Counts,
    Job,
    cache_settings,
    refuse_rate_of_clips,
    write_clips,
    write_samples,
)
from opensora.datasets.cache.moments import DTYPES as MOMENT_DTYPES
from opensora.datasets.cache.records import RecordReader
from opensora.datasets.cache.records_dataset import RecordVideoTextDataset
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.table.table import read_table
from opensora.datasets.video.files import Decoding
from opensora.inference.sizes import legal_dataset
from opensora.registry import DATASETS, DENOISERS, MODELS, SCHEDULERS, TEXT_ENCODERS, VAES, build_module
from opensora.training.batch_encoder import freeze
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.cache_flow import RECORDS, cached_flow, wants_flow
from tools.command import Parser

COMPONENTS = {
    "model": DENOISERS,
    "vae": VAES,
    "text_encoder": TEXT_ENCODERS,
    "scheduler": SCHEDULERS,
    "dataset": DATASETS,
}
CACHEABLE = ("VideoTextDataset", "CachedVideoTextDataset")
Dataset = Mapping[str, Any]


def cache_features(argv: Sequence[str] | None = None) -> dict[str, Counts]:
    """Run the command line; returns for each part how many records were written and how many were there already."""
    args, rest = arguments().parse_known_args(argv)
    for name, least in (("chunk", 1), ("batch", 1), ("epochs", 0), ("shard_mb", 1e-6)):
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}.")
    cfg = parse_config(TrainConfig, COMPONENTS, rest, options=vars(args))
    shared = ("data_path", "root", "num_frames", "frame_interval", "image_size", "seed")
    dataset = {**{name: getattr(cfg, name) for name in shared}, **(cfg.dataset or {})}
    folder = args.cache_dir or dataset.get("cache_dir")
    if folder is None:
        raise UserError("give --cache-dir: the config's dataset has no cache_dir.")
    if dataset["data_path"] is None:
        raise UserError("give --data-path: the config names no table of clips.")
    if dataset.get("type") == RECORDS and "moments" in args.what:
        raise UserError(
            f"a {RECORDS} has its moments already; what may be missing is the flow, and the features of its captions: "
            "--what flow text."
        )
    refuse_other_datasets(dataset, args.what)
    if "moments" in args.what and not args.epochs:
        refuse_rate_of_clips(dataset.get("target_fps"))
    if (Path(folder) / "manifest.json").exists():
        warnings.warn(f"{folder} also holds files of an older format, which nothing reads: delete manifest.json and the "
                      "*.safetensors next to it.", stacklevel=2)  # fmt: skip
    show_messages()
    world = init_world(cfg.device, timeout=timedelta(days=7))  # others may have longer clips, and more left to do
    job = Job(Path(folder), world, shard_bytes=round(args.shard_mb * 2**20))
    done: dict[str, Counts] = {}
    if "moments" in args.what:
        full: Any = freeze(build_module(cfg.vae, MODELS), world.device)
        vae = SimpleNamespace(moments=full.sliced_moments, latent_size=full.latent_size, fingerprint=full.fingerprint)
        dataset = legal_dataset(dataset, full)
        done = _write_moments(dataset, vae, job._replace(dtype=args.moments_dtype), args.epochs, args.chunk)
        del vae, full
    if "flow" in args.what or ("moments" in args.what and wants_flow(cfg.model)):
        done |= cached_flow(cfg, dataset, job, asked="flow" in args.what)
    if "text" in args.what:
        encoder = build_module(text_encoder_of(cfg.text_encoder), MODELS).to(world.device)
        if dataset.get("type") == RECORDS:
            captions = RecordVideoTextDataset(str(dataset["data_path"])).all_captions()
        else:
            columns = dataset.get("text_columns", ("text",))
            captions = captions_of(read_table(dataset["data_path"], dataset["root"], columns, check_files=False))
        done[TEXT] = write_text(captions, encoder, job._replace(dtype=args.text_dtype), batch_size=args.batch)
    return done


def arguments() -> argparse.ArgumentParser:
    """The tool's own options."""
    parser = Parser(__doc__, __spec__, usage="%(prog)s TRAIN_CONFIG [options] [--field value ...]")
    parser.add_argument("--check", type=Path, metavar="DIR", help="read all of a cache, and name what is damaged")
    parser.add_argument("--cache-dir", type=Path, help="where to write; the dataset's cache_dir if left out")
    parser.add_argument(
        "--what", nargs="+", choices=("moments", "text", "flow"), default=("moments",), help="what to encode"
    )
    parser.add_argument(
        "--epochs", type=int, default=0, help="encode the samples of so many epochs; 0: whole clips, any window of them"
    )
    parser.add_argument("--moments-dtype", choices=MOMENT_DTYPES, default="fp16", help="of the stored moments")
    parser.add_argument(
        "--text-dtype", choices=TEXT_DTYPES, default="auto", help="of the stored text; auto: as the encoder computes"
    )
    parser.add_argument("--chunk", type=int, default=32, help="frames that are decoded and encoded at a time")
    parser.add_argument("--batch", type=int, default=16, help="captions that are encoded at a time")
    parser.add_argument(
        "--shard-mb", type=float, default=256, help="size of a file; what an interruption costs at most"
    )
    return parser


def text_encoder_of(component: Mapping[str, Any]) -> dict[str, Any]:
    """The encoder to run: the config's, or the one that its `cached` encoder stands for.

    Raises:
        UserError: it is `cached` and does not say of what.
    """
    if component["type"] != "cached":
        return dict(component)
    if component.get("encoder") is None:
        raise UserError("text_encoder is 'cached': give it encoder=dict(type=..., ...), so that the cache can be made.")
    return dict(component["encoder"])


def refuse_other_datasets(dataset: Dataset, what: Sequence[str]) -> None:
    """Raise a `UserError` for datasets whose samples no cache of moments or flow holds; captions are those of any."""
    kind = str(dataset.get("type", DEFAULT_DATASET))
    chosen = [name for name in what if name != "text"]
    if kind in CACHEABLE or (kind == RECORDS and chosen == ["flow"]) or not chosen:
        return
    raise UserError(
        f"a {kind} cannot train from a cache of {' and '.join(chosen)}: it holds the clips of a {CACHEABLE[0]}, of one length and "
        f"size, which a {CACHEABLE[1]} reads. Give such a config (--dataset.type {CACHEABLE[1]}, and no bucket_config), or store the "
        "captions alone: --what text."
    )


def check(folder: Path) -> list[str]:
    """What is damaged in a cache; reads all of it.

    Raises:
        UserError: the folder holds no cache.
    """
    names = (CLIPS, SAMPLES, TEXT, FLOW)
    parts = [folder / name for name in names if (folder / name).is_dir()]
    if not parts:
        raise UserError(f"--check: {folder} has no folder {', '.join(names)}; pass a cache's cache_dir.")
    return [problem for part in parts for problem in RecordReader(part, remedy="Run the tool again.").check()]


def _write_moments(dataset: Dataset, vae: Any, job: Job, epochs: int, chunk: int) -> dict[str, Counts]:
    height, width = dataset["image_size"]
    size, transform = (int(height), int(width)), dataset.get("transform_name", "center")
    decoding = Decoding.of(dataset.get("decode"))
    choices = Choices(bool(dataset.get("use_image_transform", False)), decoding, dataset.get("target_fps"))
    if not epochs:
        table = read_table(dataset["data_path"], dataset["root"], text_columns=())
        return {
            CLIPS: write_clips(table, vae, job, image_size=size, transform_name=transform, choices=choices, chunk=chunk)
        }
    taken = inspect.signature(VideoTextDataset).parameters.keys() & dataset.keys()
    source = VideoTextDataset(**{name: dataset[name] for name in taken})
    window = {name: dataset[name] for name in ("num_frames", "frame_interval", "seed")}
    settings = cache_settings(vae.fingerprint(), size, transform, job.dtype, choices, **window)
    return {SAMPLES: write_samples(source, vae, job, settings, epochs)}


@exit_on_user_error
def main() -> None:
    """The command line."""
    folder = arguments().parse_known_args()[0].check
    if os.environ.get("RANK", "0") == "0":
        show_messages()
    if folder is not None:
        if damaged := check(folder):
            raise UserError("\n".join([f"{len(damaged)} records are damaged:", *damaged]))
        print(f"{folder}: no record is damaged")
        return
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # else what is not written yet would be lost
    try:
        done = cache_features()
        if not dist.is_initialized() or dist.get_rank() == 0:
            for part, (written, present) in done.items():
                what = "measured" if part == FLOW else "encoded"
                print(f"{part}: {written} {what}, {present} were there already")
    finally:
        shutdown()


if __name__ == "__main__":
    main()
