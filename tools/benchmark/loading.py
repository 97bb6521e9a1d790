"""What feeds and saves a training: the loader of cached features, the decoding of videos, checkpoints."""

import argparse
import csv
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opensora.acceleration.distributed import World
from opensora.checkpoint.load import latest_checkpoint, open_checkpoint
from opensora.config.schema import LoopConfig
from opensora.datasets.cache.dataset import CachedVideoTextDataset
from opensora.datasets.cache.features import TEXT, TEXT_FEATURES
from opensora.datasets.cache.moments import CLIP_FEATURES, CLIPS, cache_settings
from opensora.datasets.cache.records import RecordWriter
from opensora.datasets.dataloader import build_loader
from opensora.datasets.sampler import EpochBatchSampler
from opensora.datasets.video import timeline
from opensora.datasets.video.files import Decoding
from opensora.datasets.video.read_video import open_clip, probe, read_frames
from opensora.training.run import RunState
from opensora.training.saver import Saver
from opensora.utils.errors import UserError
from tools.benchmark.measure import Options, Table, processor_s, quiet, seconds, synchronize

CHANNELS = 8  # of stored moments: mean and log variance of four
TOKENS = 120
LOADER_COLUMNS = {
    "workers": "d", "first epoch samples/s": ".0f", "later samples/s": ".0f", "times the goal": ".1f", "processor ms a sample": ".2f",
    "of one core, at the goal": ".0%",
}  # fmt: skip


def dataloader(argv: Sequence[str]) -> None:
    """Count the samples a second that the loader gives when it reads cached features, against what the training step takes.

    Writes a cache of random moments and text features, as `tools.cache_features` would for a VAE of four channels and T5-XXL, and
    reads it with `CachedVideoTextDataset` as scripts/train.py does: shuffled, in batches, with its worker processes. In the first
    epoch each record's checksum is verified, so later ones have a column of their own. Processor time does not depend on what else a
    machine does, and is that of all epochs, workers and their start included. The goal is the samples a second that one GPU's
    training step takes (docs/explanation/benchmarks/train_step.md); each GPU has its own loader.
    """
    options = Options("dataloader", dataloader.__doc__, argv, device="cpu")
    options.add("--workers", [0, 1, 2], [0])
    options.add("--clips", 512, 16)
    options.add("--latent", [16, 32, 32], [2, 4, 4], nargs=3, metavar=("T", "H", "W"))
    options.add_argument("--tokens", type=int, default=100, help="of a caption, without padding")
    options.add("--width", 4096, 16, help="of the text features")
    options.add_argument("--batch", type=int, default=8)
    options.add("--epochs", 3, 2)
    options.add_argument("--goal", type=float, default=30.0, help="samples a second of the training step on one GPU")
    options.add_argument("--folder", help="on the disk to measure; by default the one for temporary files")
    args = options.parse()
    if args.epochs < 2 or args.clips % args.batch:
        raise UserError(
            f"--epochs {args.epochs} --clips {args.clips}: two epochs or more, and clips by the batch ({args.batch})."
        )
    torch.set_num_threads(1)  # workers have one each too
    with quiet(), tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        table = write_cache(folder, args)
        mib = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / args.clips / 2**20
        size = 8 * args.latent[1], 8 * args.latent[2]
        options.heading(f"{os.cpu_count()} cores, {args.clips} clips of {mib:.2f} MiB, goal {args.goal:g} samples/s")
        rows = Table(LOADER_COLUMNS)
        for workers in args.workers:
            dataset = CachedVideoTextDataset(str(table), name, args.latent[0], image_size=size, text="features")
            stop = args.epochs * args.clips // args.batch
            sampler = EpochBatchSampler(len(dataset), args.batch, seed=0, stop=stop)
            batches = iter(build_loader(dataset, sampler, num_workers=workers))
            used, start = processor_s(), time.perf_counter()
            for _ in range(args.clips // args.batch):
                next(batches)
            between = time.perf_counter()
            later = sum(len(batch["text"]) for batch in batches)
            rate = later / (time.perf_counter() - between)
            each_s = (processor_s() - used) / (args.clips + later)
            rows.row(workers, args.clips / (between - start), rate, rate / args.goal, 1e3 * each_s, each_s * args.goal)


def write_cache(folder: Path, args: argparse.Namespace) -> Path:
    """Write cache and table; returns the table's path."""
    size = [8 * n for n in args.latent[1:]]
    of_text = {"output_dim": args.width, "model_max_length": TOKENS, "tokens": TOKENS, "dtype": "bfloat16"}
    mask = torch.arange(TOKENS) < args.tokens
    with (
        RecordWriter(folder / CLIPS, CLIP_FEATURES, settings=cache_settings("random", size, "center", "fp16")) as clips,
        RecordWriter(folder / TEXT, TEXT_FEATURES, settings={"encoder": "random", **of_text}) as texts,
    ):
        for clip in range(args.clips):
            record: dict[str, Any] = {"source": f"1-{clip}", "num_frames": args.latent[0], "fps": 24.0}
            clips.write({"moments": torch.randn(CHANNELS, *args.latent).half(), **record}, f"{clip}.mp4")
            y = torch.randn(args.tokens, args.width).bfloat16()
            texts.write({"y": y, "mask": mask, "caption": f"clip {clip}"}, f"clip {clip}")
    table = folder / "clips.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "text", "num_frames"])
        writer.writerows([f"{clip}.mp4", f"clip {clip}", args.latent[0]] for clip in range(args.clips))
    return table


# ----------------------------------------------------------------------------------------------------------- decoding

ASSETS = Path("assets/clips")
NUM_FRAMES, INTERVAL, ROUNDS = 16, 3, 3
COMPARED = 5  # clips
MAX_FRAMES = 120  # in order: more would be as fast, and fill the memory
DECODE_COLUMNS = {
    "file": "", "reader": "", f"ms per clip of {NUM_FRAMES} at interval {INTERVAL}": "", "frames/s, in order": "", "frames like ours": "",
}  # fmt: skip
Reader = Callable[[str, Sequence[int]], np.ndarray]  # path, indices -> [T, H, W, 3] uint8


def read_with_opensora(decoding: Decoding) -> Reader:
    """Ours, with nothing remembered."""

    def read(path: str, indices: Sequence[int]) -> np.ndarray:
        timeline._known.clear()
        with open_clip(path, decoding) as clip:
            return np.stack(clip.read(indices))

    return read


def read_with_decord(path: str, indices: Sequence[int]) -> np.ndarray:
    """decord's batches."""
    import decord

    return decord.VideoReader(path, num_threads=1).get_batch(list(indices)).asnumpy()


def read_with_opencv(path: str, indices: Sequence[int]) -> np.ndarray:
    """OpenCV: seek to the first frame, grab all, convert the wanted ones."""
    import cv2

    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    capture.set(cv2.CAP_PROP_POS_FRAMES, indices[0])
    wanted, frames = set(indices), []
    for index in range(indices[0], indices[-1] + 1):
        if not capture.grab():
            break
        if index in wanted:
            frames.append(cv2.cvtColor(capture.retrieve()[1], cv2.COLOR_BGR2RGB))
    capture.release()
    return np.stack(frames) if frames else np.empty((0, 1, 1, 3), np.uint8)


READERS: dict[str, tuple[Reader, str]] = {  # name -> function and package; all but ours convert colours as `fast` does
    "opensora": (read_with_opensora(Decoding()), "av"),
    "opensora-fast": (read_with_opensora(Decoding(colors="fast")), "av"),
    "decord": (read_with_decord, "decord"),
    "opencv": (read_with_opencv, "opencv-python"),
}


def decode(argv: Sequence[str]) -> None:
    """Time decoding to RGB, of random clips and in order, with ours and with what else is installed.

    Each reader runs in this process with one thread. A clip is read as by a data loader whose files never repeat: open the file,
    seek and decode 16 frames at interval 3 from a random start. In order, the first 120 frames are decoded. Times are processor
    time of the process; the table has the median of rounds, and their range. Frames are compared with ours.

    Without files it takes assets/clips. decord and opencv are compared where they are installed; neither is needed.
    """
    options = Options("decode", decode.__doc__, argv, device="cpu")
    options.add_argument("files", nargs="*", type=Path)
    options.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS))
    options.add("--seconds", 4.0, 0.0, help="for each reader and kind of reading, of each file")
    args = options.parse()
    paths = args.files or sorted(ASSETS.glob("*.mp4"))[: 1 if args.toy else None]
    if missing := [path for path in paths if not path.is_file()]:
        raise UserError(f"{missing[0]} does not exist; name video files.")
    readers: dict[str, Reader] = {}
    for name in args.readers:
        read = READERS[name][0]
        try:
            read(str(paths[0]), [0])
        except (ImportError, OSError, RuntimeError, UserError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        readers[name] = read
    options.heading(*(f"{name} ({installed(READERS[name][1])})" for name in readers), "one thread each")
    table = Table(DECODE_COLUMNS)
    for path in map(str, paths):
        info = probe(path)
        for name, cells in decoding_times(readers, path, info.num_frames, args.seconds).items():
            table.row(f"{Path(path).name} {info.width}x{info.height}, {info.num_frames} frames", name, *cells)


def installed(package: str) -> str:
    """A package with its version."""
    for name in (f"{package}-headless", package):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return package


def decoding_times(readers: dict[str, Reader], path: str, num_frames: int, least_s: float) -> dict[str, list[str]]:
    """Cells of the table for each reader."""
    span = min((NUM_FRAMES - 1) * INTERVAL + 1, num_frames)
    rng, last = random.Random(0), num_frames - span
    clips = [range(start, start + span, INTERVAL) for start in (*(rng.randrange(last + 1) for _ in range(19)), last)]
    in_order = range(min(num_frames, MAX_FRAMES))
    per_clip: dict[str, list[float]] = {name: [] for name in readers}
    per_second: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(ROUNDS):  # in turn, so that a busy moment of the machine hits all
        for name, read in readers.items():
            per_clip[name].append(1000 * time_each(read, path, clips, least_s / ROUNDS))
            per_second[name].append(len(in_order) / time_each(read, path, [in_order], least_s / ROUNDS))
    with_range = "{:.4g} [{:.3g}-{:.3g}]".format
    return {
        name: [
            *(
                with_range(statistics.median(times), min(times), max(times))
                for times in (per_clip[name], per_second[name])
            ),
            agreement(read, path, clips[-COMPARED:]),
        ]
        for name, read in readers.items()
    }


def time_each(read: Reader, path: str, clips: Sequence[Sequence[int]], least_s: float) -> float:
    """Seconds of processor time for a clip: the mean of as many as fit, one at least."""
    begun, count = time.process_time(), 0
    while count == 0 or time.process_time() - begun < least_s:
        read(path, clips[count % len(clips)])
        count += 1
    return (time.process_time() - begun) / count


def agreement(read: Reader, path: str, clips: Sequence[Sequence[int]]) -> str:
    """Whether the frames of some clips are ours, but for rounding of colours."""

    def difference(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(a.astype(np.int16) - b).mean())

    off, others = [], 0
    for clip in clips:
        ours = read_frames(path, clip[0], len(clip), clip[1] - clip[0] if len(clip) > 1 else 1).numpy()
        theirs = read(path, clip)
        if theirs.shape != ours.shape:
            return f"no: shape {'x'.join(map(str, theirs.shape))}"
        distance = [difference(a, b) for a, b in zip(theirs, ours, strict=True)]
        # frames of a still scene hardly differ: the right one must be nearer than the one before
        others += sum(difference(theirs[i], ours[i - 1]) < distance[i] for i in range(1, len(ours)))
        off += distance
    total = sum(map(len, clips))
    return f"no: {others} of {total} are others" if others else f"yes, off by {statistics.mean(off):.1f}/255"


# -------------------------------------------------------------------------------------------------------- checkpoints

TENSORS = 450  # of each part
PARTS = ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq")
SAVE_COLUMNS = {
    "": "", "the loop waits, s": ".3f", "computes, s": ".3f", "on disk after, s": ".2f", "share of the synchronous wait": ".1%",
}  # fmt: skip


def checkpoint(argv: Sequence[str]) -> None:
    """Time how long a train loop waits for a checkpoint: written while it waits, and written while it continues.

    Weights, EMA and the two moments of AdamW, fp32, `--gib` in all, as many tensors as STDiT-XL/2 has. "waits" is how long
    `Saver.save` takes, "on disk" is until the checkpoint is complete: flushed, with its checksums and its manifest. The first
    asynchronous save also gets the memory for its copy, which later ones use again. Between saves the loop does nothing, so that the
    one before is complete when the next begins. Each figure is the least of several, as other work on the machine can only add.
    "computes" is the part of the wait in which the loop's thread had a core: on a busy machine the rest is waiting for one.
    """
    options = Options("checkpoint", checkpoint.__doc__, argv, device="any")
    options.add("--gib", 2.0, 0.001, help="size of the checkpoint")
    options.add("--repeats", 5, 1)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    args = options.parse()
    device = options.device
    numel = int(args.gib * 2**30 / 4 / len(PARTS) / TENSORS)
    parts: dict[str, dict[str, Tensor]] = {}
    for part, _, key in (name.partition("/") for name in PARTS):
        for i in range(TENSORS):
            parts.setdefault(part, {})[f"blocks.{i}/{key}".rstrip("/")] = torch.randn(numel, device=device)
    options.heading(f"{args.gib:g} GiB in {args.folder}, least of {args.repeats}")
    with quiet():
        table = Table(SAVE_COLUMNS)
        whole, load_s = save_times(parts, args.folder, device, ckpt_async=False, repeats=args.repeats)
        saves, _ = save_times(parts, args.folder, device, ckpt_async=True, repeats=args.repeats + 1)
        least = {"synchronous": whole, "asynchronous, the first": saves[:1], "asynchronous, later": saves[1:]}
        for name, times in least.items():
            waits, computes, ends = map(min, zip(*times, strict=True))
            table.row(name, waits, computes, ends, waits / min(save[0] for save in whole))
    print(f"\nloading it: {load_s:.2f} s")


def save_times(
    parts: dict[str, dict[str, Tensor]], folder: Path, device: torch.device, *, ckpt_async: bool, repeats: int
) -> tuple[list[tuple[float, float, float]], float]:
    """Of so many saves: seconds that `save` took, those in which its thread had a core, those until it was complete.

    And the seconds of reading the last one into tensors that are there.
    """
    run = Path(tempfile.mkdtemp(dir=folder))
    try:
        config = LoopConfig(ckpt_async=ckpt_async, keep_last_n=1)
        saver, times = Saver(run, World(0, 1, device), config, {"model": "benchmark"}), []
        for step in range(1, repeats + 1):
            synchronize(device)
            begin, computed = time.perf_counter(), time.thread_time()
            saver.save(RunState("data", 1, step=step), parts)
            waits, computes = time.perf_counter() - begin, time.thread_time() - computed
            saver.wait()
            times.append((waits, computes, time.perf_counter() - begin))

        def load() -> None:
            newest = latest_checkpoint(run)
            assert newest is not None
            for part, tensors in parts.items():
                saved = open_checkpoint(newest).tensors(part)
                for name, tensor in tensors.items():
                    tensor.copy_(saved[name])

        return times, seconds(load, device)
    finally:
        shutil.rmtree(run)
