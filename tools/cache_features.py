"""Encode the clips and captions of a training config, once: the VAE's moments, the text encoder's features, and the optical-flow scores.

    python -m tools.cache_features TRAIN_CONFIG [--cache-dir DIR] [--what moments text flow] [--epochs E] [--field value ...]
    torchrun --standalone --nproc_per_node 8 -m tools.cache_features TRAIN_CONFIG ...          processes share the work
    python -m tools.cache_features --check DIR                                                 read all, name what is damaged

DIR is the dataset's `cache_dir` unless given. All other options are the config's, as for scripts/train.py. A call that was
interrupted goes on where it stopped. The optical-flow score is measured also unasked, with the moments, where the config's model
is conditioned on it and the table does not have it. To train from the cache:
    --dataset.type CachedVideoTextDataset --dataset.cache_dir DIR [--dataset.content samples] [--dataset.text features]
    --dataset.type CachedVariableVideoTextDataset --dataset.cache_dir DIR [--dataset.text features]             for buckets
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

import torch
import torch.distributed as dist
from torch import Tensor

from opensora.acceleration.distributed import init_world, shutdown
from opensora.config.load import TrainConfig, parse_config
from opensora.config.resolve import DEFAULT_DATASET
from opensora.datasets.buckets.bucket import move_to_legal_sizes
from opensora.datasets.cache.buckets import (
    BUCKETS,
    CONDITIONS,
    FEATURES,
    FILES,
    IMAGES,
    Encoder,
    write_buckets,
)
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
from opensora.datasets.cache.records import METADATA, RecordReader
from opensora.datasets.cache.records_dataset import RecordVideoTextDataset
from opensora.datasets.dataloader import bounded_prefetch
from opensora.datasets.datasets import VideoTextDataset
from opensora.datasets.table.table import read_table
from opensora.datasets.variable_dataset import VariableVideoTextDataset
from opensora.datasets.video.files import Decoding
from opensora.inference.sizes import legal_dataset, take_whole_patches
from opensora.models.image_encoder import check_image_encoder, required_frames_of
from opensora.models.wan.condition import condition_latents, image_features
from opensora.registry import DATASETS, DENOISERS, IMAGE_ENCODERS, MODELS, SCHEDULERS, TEXT_ENCODERS, VAES, build_module
from opensora.schedulers.mask_ratios import MaskRatios
from opensora.training.batch_encoder import condition_settings, freeze, masks_of, pixel_frames
from opensora.utils.errors import UserError, exit_on_user_error
from opensora.utils.logging import show_messages
from tools.cache_flow import RECORDS, cached_flow, wants_flow
from tools.command import Parser

COMPONENTS = {
    "model": DENOISERS,
    "vae": VAES,
    "text_encoder": TEXT_ENCODERS,
    "image_encoder": IMAGE_ENCODERS,
    "scheduler": SCHEDULERS,
    "dataset": DATASETS,
}
ONE_SIZE = ("VideoTextDataset", "CachedVideoTextDataset")
BUCKETED = ("VariableVideoTextDataset", "VariableVideoText", "CachedVariableVideoTextDataset")
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
    masks = refuse_what_cannot_be_cached(cfg, dataset, args)
    if (Path(folder) / "manifest.json").exists():
        warnings.warn(f"{folder} also holds files of an older format, which nothing reads: delete manifest.json and the "
                      "*.safetensors next to it.", stacklevel=2)  # fmt: skip
    show_messages()
    world = init_world(cfg.device, timeout=timedelta(days=7))  # others may have longer clips, and more left to do
    job = Job(Path(folder), world, shard_bytes=round(args.shard_mb * 2**20))
    done: dict[str, Counts] = {}
    if "moments" in args.what:
        full: Any = freeze(build_module(cfg.vae, MODELS), world.device)
        take_whole_patches(full, cfg.model)
        vae = SimpleNamespace(moments=full.sliced_moments, latent_size=full.latent_size, fingerprint=full.fingerprint)
        of_moments = job._replace(dtype=args.moments_dtype)
        if masks is not None:
            done = _write_buckets(cfg, dataset, full, masks, of_moments, args.epochs or 1)
        else:
            done = _write_moments(legal_dataset(dataset, full), vae, of_moments, args.epochs, args.chunk)
        del vae, full
    if "flow" in args.what or ("moments" in args.what and wants_flow(cfg.model)):
        done |= cached_flow(cfg, dataset, job, asked="flow" in args.what)
    if "text" in args.what:
        done[TEXT] = _write_captions(cfg, dataset, job._replace(dtype=args.text_dtype), args.batch)
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
        "--epochs",
        type=int,
        default=0,
        help="encode the samples of so many epochs; 0: whole clips, any window of them. Of buckets: windows of each clip (1)",
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


def refuse_what_cannot_be_cached(cfg: TrainConfig, dataset: Dataset, args: argparse.Namespace) -> MaskRatios | None:
    """Raise a `UserError` for datasets whose samples no cache of moments or flow holds; captions are those of any. Returns the masks
    of conditioning frames where moments of a dataset with buckets are wanted."""
    kind = str(dataset.get("type", DEFAULT_DATASET))
    chosen = [name for name in args.what if name != "text"]
    if kind not in (*ONE_SIZE, *BUCKETED) and not (kind == RECORDS and chosen == ["flow"]) and chosen:
        raise UserError(
            f"a {kind} cannot train from a cache of {' and '.join(chosen)}: it holds the clips of a {ONE_SIZE[0]}, which a {ONE_SIZE[1]} "
            f"reads, or of a {BUCKETED[0]}, which a {BUCKETED[-1]} reads. Give such a config, or store the captions alone: --what text."
        )
    if "moments" not in chosen:
        return None
    if kind not in BUCKETED:
        if not args.epochs:
            refuse_rate_of_clips(dataset.get("target_fps"))
        return None
    check_image_encoder(cfg.model, cfg.image_encoder)
    masks = masks_of(cfg)
    if required_frames_of(cfg.model) is not None:
        masks.given_frames(2)  # refuses kinds that cannot be cached
    return masks


def check(folder: Path) -> list[str]:
    """What is damaged in a cache; reads all of it.

    Raises:
        UserError: the folder holds no cache.
    """
    names = (CLIPS, SAMPLES, TEXT, FLOW, FILES)
    parts = [folder / name for name in names if (folder / name).is_dir()]
    parts += [path.parent for part in FEATURES for path in sorted(folder.glob(f"{part}-*/{METADATA}"))]
    if not parts:
        raise UserError(f"--check: {folder} has no folder {', '.join(names)}; pass a cache's cache_dir.")
    return [problem for part in parts for problem in RecordReader(part, remedy="Run the tool again.").check()]


def _write_captions(cfg: TrainConfig, dataset: Dataset, job: Job, batch: int) -> Counts:
    encoder = build_module(text_encoder_of(cfg.text_encoder), MODELS).to(job.world.device)
    if dataset.get("type") == RECORDS:
        captions = RecordVideoTextDataset(str(dataset["data_path"])).all_captions()
    else:
        columns = dataset.get("text_columns", ("text",))
        path, root = dataset["data_path"], dataset["root"]
        captions = captions_of(
            read_table(path, root, columns, check_files=False, max_bad_share=1.0)
        )  # training refuses too many
    return write_text(captions, encoder, job, batch_size=batch)


def _write_buckets(
    cfg: TrainConfig, component: Dataset, vae: Any, masks: MaskRatios, job: Job, windows: int
) -> dict[str, Counts]:
    taken = inspect.signature(VariableVideoTextDataset).parameters.keys() & component.keys()
    source = VariableVideoTextDataset(**{name: component[name] for name in taken})
    move_to_legal_sizes(source.buckets, vae)
    of_vae = {"vae": vae.fingerprint(), "size_multiples": list(vae.legal_size((1, 1, 1))[1:])}
    encoders = {BUCKETS: Encoder(lambda video: {"moments": vae.sliced_moments(video)[0]}, of_vae)}
    images: Any = None
    if cfg.image_encoder is not None:
        images = freeze(build_module(cfg.image_encoder, IMAGE_ENCODERS), job.world.device)
    if (conditions := condition_settings(cfg.model, masks, images)) is not None:

        def encode_conditions(video: Tensor) -> dict[str, Tensor]:
            given = masks.given_frames(vae.latent_frames(video.shape[2]))  # [K, t]
            frames = pixel_frames(given, vae.strides[0]).to(video.device)  # [K, T]
            return {
                "latents": torch.cat([condition_latents(vae, video, each[None]) for each in frames]),
                "given": given,
            }

        encoders[CONDITIONS] = Encoder(encode_conditions, {**of_vae, "kinds": conditions["kinds"]})
    if conditions is not None and images is not None:
        of_images = {name: conditions[name] for name in ("image_encoder", "frames")}
        encoders[IMAGES] = Encoder(
            lambda video: {"features": image_features(images, video, conditions["frames"])[0]}, of_images
        )
    largest = max(bucket.num_frames * bucket.height * bucket.width * 12 for bucket in source.buckets)  # fp32
    threads, _ = bounded_prefetch(cfg.num_workers, largest, cfg.prefetch_gib)
    return write_buckets(source, encoders, job._replace(threads=threads), windows)


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
                what = {FLOW: "measured", FILES: "read"}.get(part, "encoded")
                print(f"{part}: {written} {what}, {present} were there already")
    finally:
        shutdown()


if __name__ == "__main__":
    main()
