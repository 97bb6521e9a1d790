"""How many samples a second the loader gives when it reads cached features, beside what the training step takes.

    python -m tools.benchmark.dataloader [--workers 0 1 2] [--clips 512] [--latent 16 32 32] [--goal 30] [--toy]

Writes a cache of random moments and text features, as `tools.cache_features` would for a VAE of four channels and T5-XXL, and
reads it with `CachedVideoTextDataset` as scripts/train.py does: shuffled, in batches, with its worker processes. In the first
epoch each record's checksum is verified, so that later ones are told apart. Processor time does not depend on what else a machine
does, and is that of all epochs, workers and their start included. The goal is the samples a second that one GPU's
training step takes (docs/benchmarks/train_step.md); each GPU has its own loader. Another epoch, which is not timed, is compared
with what was written.
"""

import argparse
import csv
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opensora.datasets.cache.dataset import CachedVideoTextDataset
from opensora.datasets.cache.moments import CLIP_FEATURES, CLIPS, clip_settings
from opensora.datasets.cache.records import RecordWriter
from opensora.datasets.cache.text import FEATURES, FOLDER
from opensora.datasets.dataloader import BatchLoader, build_dataloader
from opensora.utils.errors import UserError, exit_on_user_error
from tools.benchmark.heading import heading, quiet

CHANNELS = 8  # mean and log variance of four
TOKENS = 120


class Rate(NamedTuple):
    """Samples a second of the first epoch and of the later ones; processor milliseconds a sample, of workers too."""

    first: float
    later: float
    processor_ms: float


@exit_on_user_error
@quiet()
def main() -> None:
    """The command line."""
    args = parse_args()
    torch.set_num_threads(1)  # workers have one each too
    print(heading(torch.device("cpu"), "tools.benchmark.dataloader") + f", {os.cpu_count()} cores\n")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        table = write_cache(Path(folder), args)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors")) / args.clips
        print(
            f"{args.clips} clips of latents {'x'.join(map(str, args.latent))}, fp16, and {args.tokens} of {TOKENS} tokens of"
        )
        print(
            f"{args.width} channels, bf16: {size / 2**20:.2f} MiB a sample; batch {args.batch}; goal {args.goal:g} samples/s\n"
        )
        print(
            "| workers | first epoch samples/s | later samples/s | times the goal | processor ms a sample | of one core, at the goal |"
        )
        print("|---|---|---|---|---|---|")
        for workers in args.workers:
            rate = measure(Path(folder), table, args, workers)
            share = rate.processor_ms * args.goal / 1000
            print(
                f"| {workers} | {rate.first:.0f} | {rate.later:.0f} | {rate.later / args.goal:.1f} | {rate.processor_ms:.2f} | {share:.0%} |",
                flush=True,
            )


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--clips", type=int, default=512)
    parser.add_argument("--latent", nargs=3, type=int, default=[16, 32, 32], metavar=("T", "H", "W"))
    parser.add_argument("--tokens", type=int, default=100, help="of a caption, without padding")
    parser.add_argument("--width", type=int, default=4096, help="of the text features")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--goal", type=float, default=30.0, help="samples a second of the training step on one GPU")
    parser.add_argument("--folder", help="on the disk to measure; by default the one for temporary files")
    parser.add_argument("--toy", action="store_true", help="16 tiny clips, to see that it runs")
    args = parser.parse_args()
    if args.toy:
        args.clips, args.latent, args.width = 16, [2, 4, 4], 16
    if args.epochs < 2 or args.clips % args.batch:
        raise UserError(
            f"--epochs {args.epochs} --clips {args.clips}: two epochs or more, and clips by the batch ({args.batch})."
        )
    return args


def moments_of(clip: int, args: argparse.Namespace) -> Tensor:
    """What is stored for a clip: [2C, T, h, w] fp16."""
    rng = torch.Generator().manual_seed(clip)
    return torch.randn(CHANNELS, *args.latent, generator=rng).half()


def text_of(clip: int, args: argparse.Namespace) -> Tensor:
    """What is stored for its caption: [l, D] bf16."""
    rng = torch.Generator().manual_seed(-1 - clip)
    return torch.randn(args.tokens, args.width, generator=rng).bfloat16()


def write_cache(folder: Path, args: argparse.Namespace) -> Path:
    """Write cache and table; returns the table's path."""
    size = [8 * n for n in args.latent[1:]]
    text_settings = {
        "encoder": "random",
        "output_dim": args.width,
        "model_max_length": TOKENS,
        "tokens": TOKENS,
        "dtype": "bfloat16",
    }
    mask = torch.arange(TOKENS) < args.tokens
    with (
        RecordWriter(folder / CLIPS, CLIP_FEATURES, settings=clip_settings("random", size, "center", "fp16")) as clips,
        RecordWriter(folder / FOLDER, FEATURES, settings=text_settings) as texts,
    ):
        for clip in range(args.clips):
            record: dict[str, Any] = {"source": f"1-{clip}", "num_frames": args.latent[0], "fps": 24.0}
            clips.write({"moments": moments_of(clip, args), **record}, f"{clip}.mp4")
            texts.write({"y": text_of(clip, args), "mask": mask, "caption": f"clip {clip}"}, f"clip {clip}")
    table = folder / "clips.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "text", "num_frames"])
        writer.writerows([f"{clip}.mp4", f"clip {clip}", args.latent[0]] for clip in range(args.clips))
    return table


def measure(folder: Path, table: Path, args: argparse.Namespace, workers: int) -> Rate:
    """Compare one epoch, then read all of them again with this many workers."""
    for batch in loader_of(folder, table, args, workers, epochs=1):
        compare(batch, args)
    batches = iter(loader_of(folder, table, args, workers, epochs=args.epochs))
    per_epoch = args.clips // args.batch
    used, start = processor_s(), time.perf_counter()
    for _ in range(per_epoch):
        next(batches)
    between = time.perf_counter()
    later = sum(len(batch["text"]) for batch in batches)
    end = time.perf_counter()
    used = processor_s() - used
    return Rate(args.clips / (between - start), later / (end - between), 1e3 * used / (args.clips + later))


def processor_s() -> float:
    """Of this process and of its workers that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def loader_of(folder: Path, table: Path, args: argparse.Namespace, workers: int, *, epochs: int) -> BatchLoader:
    """A loader with nothing read yet."""
    size = (8 * args.latent[1], 8 * args.latent[2])
    dataset = CachedVideoTextDataset(str(table), str(folder), args.latent[0], image_size=size, text="features")
    return build_dataloader(dataset, args.batch, seed=0, num_workers=workers, stop=epochs * args.clips // args.batch)


def compare(batch: dict[str, Any], args: argparse.Namespace) -> None:
    """Raise an error if a batch is not what was written."""
    for i, caption in enumerate(batch["text"]):
        clip = int(caption.removeprefix("clip "))
        same = torch.equal(batch["moments"][i], moments_of(clip, args).float())
        if not same or not torch.equal(batch["y"][i, 0, : args.tokens], text_of(clip, args)):
            raise UserError(f"clip {clip} was read wrongly.")


if __name__ == "__main__":
    main()
