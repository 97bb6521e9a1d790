"""Training steps against the goals: our way beside the reference's and diffusers', on the same work, in one process.

    python -m tools.benchmark.goals [--settings stdit-16x256 ...] [--ways reference ours diffusers] [--peak-tflops 790] [--toy]

A setting is a model, a size of latents and a batch. The ways to train it, all in bf16 and with fp32 master weights:

- `reference`: the reference's shipped settings, re-created with our model: see tools/benchmark/rivals.py for what that means, and
  for the time by which to judge it;
- `ours`: blocks compiled, the `ddp` engine in one process, and the least activation checkpointing that fits: the values of
  `grad_checkpoint` in --checkpoint are tried in order (by default those of the setting, without what is sure not to fit into 80 GB);
- `diffusers`: diffusers' nearest model, its blocks compiled, weights in bf16; with its own gradient checkpointing where that is
  needed. `diffusers-autocast` is the same with fp32 weights under autocast, to see which is faster.

"At equal FLOPs" is samples/s times the FLOPs of the way's own model over those of ours: only diffusers' models differ. "Of the
reference" compares these rates. TFLOP/s count the matrix products of a forward pass three times; recomputation is no useful work.
MFU is their share of --peak-tflops, or of a large bf16 product measured first. The errors are |found - fp32| / |fp32| of the prediction
for the first sample and of the gradients of all weights, against eager fp32 without our kernels (tools/benchmark/exact.py). Set-up is
everything before the clock: building, compiling, warming up. For "retries" see tools/benchmark/train_step.py. Without a GPU, or with --toy, the same settings are shrunk to what a laptop does.
"""

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.attention import sdpa_kernel

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from opensora.config.activation_checkpointing import level_of
from opensora.models.layers.modulation import plain_modulation
from opensora.utils.errors import UserError, exit_on_user_error
from tools.benchmark.exact import Errors, Exact, Steps, errors_of, exact
from tools.benchmark.heading import heading, quiet
from tools.benchmark.rivals import FLASH, RoundedWeights, diffusers_like, like_the_reference
from tools.benchmark.train_step import (
    Timed,
    add_experiments,
    build,
    forget,
    inputs,
    matmul_tflops,
    start,
    switched_on,
    switches,
    timed,
    told,
    train,
)

COLUMNS = (
    "setting", "way", "checkpointed", "ms/step", "samples/s", "at equal FLOPs", "of the reference", "TFLOP/s", "MFU", "peak GiB",
    "error", "gradient error", "set-up s",
)  # fmt: skip
WAYS = ("reference", "ours", "diffusers", "diffusers-autocast")
OUT_OF_MEMORY = "out of memory"
TOY = {"hidden_size": 64, "depth": 2, "num_heads": 2, "caption_channels": 32}


Value = TypeVar("Value")


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        model: a registered denoiser.
        latent: frames, rows and columns.
        batch: samples of a step.
        text_len: tokens of the text.
        levels: values of `grad_checkpoint` to try, in order.
        warmup, steps: how many steps before the clock starts, and after.
        size: keyword arguments of the model.
    """

    model: str
    latent: tuple[int, int, int]
    batch: int
    text_len: int = 120
    levels: tuple[str, ...] = ("none", "every:2", "block")
    warmup: int = 3
    steps: int = 8
    size: dict[str, int] | None = None

    def shrunk(self) -> "Setting":
        """The same for a laptop: as many frames as one or some, as many rows as an odd or an even number."""
        T, H, _ = self.latent
        latent = (min(T, 3), 5 if H % 2 else 4, 4)
        text_len = min(self.text_len, 6)
        return replace(self, latent=latent, batch=2, text_len=text_len, warmup=1, steps=2, size=TOY)


SETTINGS = {
    "stdit-16x256": Setting("STDiT-XL/2", (16, 32, 32), 8),
    "stdit-16x512": Setting("STDiT-XL/2", (16, 64, 64), 2),
    "stdit-64x512": Setting(
        "STDiT-XL/2", (64, 64, 64), 1, levels=("selective", "selective+every:8", "every:2", "block"), warmup=2, steps=4
    ),
    "stdit3-51x360p": Setting("STDiT3-XL/2", (15, 45, 80), 2, 300, ("selective", "selective:2", "block"), 2, 4),
    "stdit3-51x720p": Setting("STDiT3-XL/2", (15, 90, 160), 1, 300, ("selective:2", "block"), 2, 3),
    "dit-256": Setting("DiT-XL/2", (1, 32, 32), 128, text_len=1),
}
"""51 frames of 360p or 720p are latents of 15 frames in the VAE of Open-Sora 1.2; all others are VAEs of frames."""


@dataclass(frozen=True)
class Trained:
    """A model in its engine, and how it computes."""

    engine: Steps
    flops: int  # of a forward pass of one sample
    kernels: Callable[[], AbstractContextManager[None]] = nullcontext  # what surrounds all of its work


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    timed: Timed
    flops: int  # of a forward pass of one sample
    errors: Errors  # against fp32; none of another model
    setup_s: float


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    began = time.perf_counter()
    device = torch.device(args.device)
    peak = args.peak_tflops or matmul_tflops(device, torch.bfloat16)
    known = "given" if args.peak_tflops else "measured"
    memory = f", at most {args.memory_gib:g} GiB" if args.memory_gib else ""
    print(
        f"{heading(device, 'tools.benchmark.goals')}, bf16{''.join(f', {name}' for name in told(args))}{memory}; MFU of {peak:.4g} TFLOP/s ({known})\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with quiet():
        for name in args.settings:
            setting = SETTINGS[name].shrunk() if args.toy else SETTINGS[name]
            measure_setting(args, name, replace(setting, batch=args.batch or setting.batch), peak)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def parse_args() -> argparse.Namespace:
    """Options, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=tuple(SETTINGS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS[:3]), choices=WAYS)
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        type=level_of,
        metavar="LEVEL",
        help="values of grad_checkpoint for our ways, in order",
    )
    parser.add_argument("--batch", type=int, help="in place of the settings' own")
    add_experiments(parser)
    parser.add_argument("--peak-tflops", type=float, help="of the device in bf16; measured when left out")
    parser.add_argument("--memory-gib", type=float, help="as if the card had no more: 79 for one of 80 GB")
    parser.add_argument("--toy", action="store_true", help="tiny models and latents; always so on a CPU")
    args = switched_on(parser)
    args.toy = args.toy or args.device == "cpu"
    if args.memory_gib and args.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gib * 2**30 / whole))
    return args


def measure_setting(args: argparse.Namespace, name: str, setting: Setting, peak: float) -> None:
    """Print the lines of one setting."""
    device = torch.device(args.device)
    found = attempt(lambda: exactly(setting, device), device)
    if isinstance(found, str):
        print(line(name, "fp32", "-", found), flush=True)
        return
    right, flops = found
    rate_of_reference = None
    levels: Sequence[str] = tuple(args.checkpoint or setting.levels)
    for way in args.ways:
        level, result = first_that_fits(args, name, setting, way, levels_of(way, levels), right)
        if result is None:
            continue
        rate = setting.batch / result.timed.seconds * result.flops / flops
        rate_of_reference = rate if way == "reference" else rate_of_reference
        times = "-" if rate_of_reference is None else f"{rate / rate_of_reference:.2f}"
        print(line(name, way, level, *cells(setting, result, rate, times, peak)), flush=True)


def first_that_fits(
    args: argparse.Namespace, name: str, setting: Setting, way: str, levels: Sequence[str], right: Exact
) -> tuple[str, Result | None]:
    """The first value of `grad_checkpoint` that works, and what it gives; each that does not is a line of the table."""
    failure = ""
    for level in levels:
        found = attempt(partial(measure, args, setting, way, level, right), torch.device(args.device))
        if isinstance(found, Result):
            return level, found
        print(line(name, way, level, found), flush=True)
        if found == failure != OUT_OF_MEMORY:  # it fails in another way, and always
            break
        failure = found
    return levels[-1], None


def levels_of(way: str, levels: Sequence[str]) -> Sequence[str]:
    """The values of `grad_checkpoint` to try for a way: `levels` are those for ours."""
    if way == "reference":
        return ("block",)
    if way.startswith("diffusers"):  # it has all or nothing
        return ("none", "block") if levels[0] == "none" else ("block",)
    return levels


def line(name: str, way: str, level: str, *cells: str) -> str:
    """A line of the table, filled up."""
    return f"| {' | '.join([name, way, str(level), *cells, *['-'] * (len(COLUMNS) - 3 - len(cells))])} |"


def cells(setting: Setting, found: Result, rate: float, times: str, peak: float) -> list[str]:
    """The figures of a line."""
    seconds, tflops = found.timed.seconds, 3 * setting.batch * found.flops / found.timed.seconds / 1e12
    return [
        f"{seconds * 1e3:.1f}",
        f"{setting.batch / seconds:.3g}",
        f"{rate:.3g}",
        times,
        f"{tflops:.3g}",
        f"{tflops / peak:.1%}",
        found.timed.memory,
        *found.errors.cells(),
        f"{found.setup_s:.1f}",
    ]


def exactly(setting: Setting, device: torch.device) -> tuple[Exact, int]:
    """Ours for the first sample, eager in fp32 without our kernels, and the FLOPs of the forward pass of one sample."""
    model = build(setting.model, device, setting.text_len, **(setting.size or {}))
    like_the_reference(model)
    z, t, cond = inputs(model, setting.batch, setting.latent, device)
    return exact(model, z, t, cond), model.flops(setting.latent, cond["y"].shape[2])


def attempt(call: Callable[[], Value], device: torch.device) -> Value | str:
    """What `call` gives, or why it gives nothing; in the end all is as before."""
    try:
        return call()
    except UserError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  (whatever a library raises must not end the other lines)
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(
            error
        ):  # the latter is cuBLAS' word for it
            return OUT_OF_MEMORY
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first[:100]}"
    finally:
        forget(device)


def measure(args: argparse.Namespace, setting: Setting, way: str, level: str, right: Exact) -> Result:
    """Build, compile, compare, train."""
    device = torch.device(args.device)
    began = time.perf_counter()
    model = build(setting.model, device, setting.text_len, **(setting.size or {}))
    z, t, cond = inputs(model, setting.batch, setting.latent, device)
    if way.startswith("diffusers"):
        trained = with_diffusers(model, setting, device, level, autocast=way == "diffusers-autocast")
    elif way == "reference":
        trained = as_the_reference(model, setting, level)
        del cond["mask"]  # all tokens are real
    else:
        trained = Trained(
            start(model, device, "bf16", "compiled", level, **switches(args)),
            model.flops(setting.latent, cond["y"].shape[2]),
        )
    del model
    gc.collect()
    with trained.kernels():
        other = way.startswith("diffusers")
        errors = Errors(None, None) if other else errors_of(trained.engine, z, t, cond, right)
        train(trained.engine, z, cond, range(setting.warmup))
        setup_s = time.perf_counter() - began
        found = timed(trained.engine, z, cond, 0, setting.steps)
    return Result(found, trained.flops, errors, setup_s)


def as_the_reference(model: Any, setting: Setting, level: str) -> Trained:
    """The reference's settings, see `tools.benchmark.rivals`."""
    flops = model.flops(setting.latent, setting.text_len)
    like_the_reference(model)
    checkpoint_activations(model.transformer_blocks(), level)
    return Trained(RoundedWeights(model, autocast=True), flops, plain_kernels)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """What the reference computes with: PyTorch's flash attention, and none of our kernels."""
    with sdpa_kernel(FLASH), plain_modulation():
        yield


def with_diffusers(model: Any, setting: Setting, device: torch.device, level: str, *, autocast: bool) -> Trained:
    """Diffusers' model in place of ours, compiled block by block; `autocast` keeps its weights in fp32."""
    with device:
        theirs, flops = diffusers_like(model, setting.latent)
    theirs.train()
    for (
        block
    ) in theirs.transformer_blocks():  # of two shapes and the same code: the second would become dynamic, and slower
        block.compile(dynamic=False)
    if level == "block":
        theirs.theirs.enable_gradient_checkpointing()
    if not autocast:
        return Trained(RoundedWeights(theirs, autocast=False), flops)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-5, fused=device.type == "cuda")
    return Trained(build_engine("ddp", theirs, optimizer, World(0, 1, device), dtype="bf16", grad_clip=1.0), flops)


if __name__ == "__main__":
    main()
