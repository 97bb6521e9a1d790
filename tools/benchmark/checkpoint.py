"""How long a train loop waits for a checkpoint: written while it waits, and written while it goes on.

    python -m tools.benchmark.checkpoint [--gib 2] [--repeats 5] [--folder /tmp] [--device cuda]

Weights, average and the two moments of AdamW, fp32, `--gib` in all, as many tensors as STDiT-XL/2 has. "waits" is how long
`Saver.save` takes, "on disk" is until the checkpoint is complete: flushed, with its checksums and its manifest. The first
asynchronous save also gets the memory for its copy, the later ones use it again, so it is told apart. Between saves the
loop does nothing, so that the one before is complete when the next begins. The least of several times is told, as other
work on the machine can only add. "computes" is the part of the wait in which the loop's thread had a core: on a busy
machine the rest is waiting for one.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from opensora.acceleration.distributed import World
from opensora.checkpoint.load import latest_checkpoint, open_checkpoint
from opensora.config.schema import LoopConfig
from opensora.training.run import RunState
from opensora.training.saver import Saver
from tools.benchmark.heading import quiet

TENSORS = 450  # of each part
PARTS = ("model", "ema", "optimizer/exp_avg", "optimizer/exp_avg_sq")


@quiet()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    device = torch.device(args.device)
    parts = state_of(args.gib, device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}; {args.gib:g} GiB in {args.folder}, least of {args.repeats}\n")
    print("| | the loop waits, s | computes, s | on disk after, s | share of the synchronous wait |")
    print("|---|---|---|---|---|")
    whole = measure(parts, args.folder, device, ckpt_async=False, repeats=args.repeats)
    show("synchronous", whole, whole)
    saves = measure(parts, args.folder, device, ckpt_async=True, repeats=args.repeats + 1)
    show("asynchronous, the first", saves[:1], whole)
    show("asynchronous, later", saves[1:], whole)
    print(f"\nloading it: {load_seconds(parts, args.folder, device):.2f} s")


def state_of(gib: float, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The parts of a checkpoint of `gib` GiB."""
    numbers = int(gib * 2**30 / 4 / len(PARTS) / TENSORS)
    parts: dict[str, dict[str, Tensor]] = {}
    for name in PARTS:
        part, _, key = name.partition("/")
        for i in range(TENSORS):
            parts.setdefault(part, {})[f"blocks.{i}/{key}".rstrip("/")] = torch.randn(numbers, device=device)
    return parts


def saver_in(folder: Path, device: torch.device, *, ckpt_async: bool) -> Saver:
    """What saves one checkpoint at a time there."""
    return Saver(folder, World(0, 1, device), LoopConfig(ckpt_async=ckpt_async, keep_last_n=1), {"model": "benchmark"})


class Times(NamedTuple):
    """Seconds of one save."""

    waits: float  # that `save` took
    computes: float  # of them, those in which its thread had a core
    ends: float  # until the checkpoint was complete


def show(name: str, saves: list[Times], whole: list[Times]) -> None:
    """A line of the table: the least of each."""
    least, reference = (Times(*map(min, zip(*each, strict=True))) for each in (saves, whole))
    told = f"{least.waits / reference.waits:.1%}" if saves is not whole else ""
    print(f"| {name} | {least.waits:.3f} | {least.computes:.3f} | {least.ends:.2f} | {told} |")


def measure(
    parts: dict[str, dict[str, Tensor]], folder: Path, device: torch.device, *, ckpt_async: bool, repeats: int
) -> list[Times]:
    """The times of so many saves, one after another."""
    run = Path(tempfile.mkdtemp(dir=folder))
    try:
        saver, times = saver_in(run, device, ckpt_async=ckpt_async), []
        for step in range(1, repeats + 1):
            wait_for(device)
            begin, computed = time.perf_counter(), time.thread_time()
            saver.save(RunState("data", 1, step=step), parts)
            waits, computes = time.perf_counter() - begin, time.thread_time() - computed
            saver.wait()
            times.append(Times(waits, computes, time.perf_counter() - begin))
        return times
    finally:
        shutil.rmtree(run)


def load_seconds(parts: dict[str, dict[str, Tensor]], folder: Path, device: torch.device) -> float:
    """Seconds to read all of a checkpoint into tensors that are there."""
    run = Path(tempfile.mkdtemp(dir=folder))
    try:
        saver_in(run, device, ckpt_async=False).save(RunState("data", 1, step=1), parts)
        return timed(lambda: read(run, parts))
    finally:
        shutil.rmtree(run)


def read(run: Path, parts: dict[str, dict[str, Tensor]]) -> None:
    """The newest checkpoint of a run into `parts`."""
    newest = latest_checkpoint(run)
    assert newest is not None
    for part, tensors in parts.items():
        saved = open_checkpoint(newest).tensors(part)
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def timed(work: Callable[[], None]) -> float:
    """Seconds that something takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
