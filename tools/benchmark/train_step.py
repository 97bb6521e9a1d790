"""Time training steps of denoisers: forward, backward, clipping, AdamW. No data, no VAE, no text encoder.

    python -m tools.benchmark.train_step [--models STDiT-XL/2 DiT-XL/2] [--blocks eager compiled] [--checkpoint none block] ...

One line of a table for each combination. FLOPs are the model's own `flops()` times three (backward = 2 x forward);
recomputation by activation checkpointing is not counted as useful work. MFU is their rate over that of a large matrix
product, which is measured first on the same device, or given by --peak-tflops. The clock runs over all steps without
waiting for the device in between, as in training. "retries" beside the memory: how often it ran out until PyTorch had freed what it
keeps for later (`alloc_retries` of docs/training-log.md); such times are those of a GPU that is too full. The errors are
|fast - eager fp32| / |eager fp32| of the prediction for the first sample and of the gradients of all weights
(tools/benchmark/exact.py). Without a GPU the defaults are small enough for a laptop.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch._inductor.config
from torch import Tensor

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, prefer_expandable_segments
from opensora.acceleration.engine import Engine, build_engine
from opensora.config.activation_checkpointing import level_of
from opensora.registry import MODELS, SCHEDULERS
from opensora.training.meter import alloc_retries
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import exit_on_user_error
from opensora.utils.seed import generators
from tools.benchmark.compile_modes import awake
from tools.benchmark.exact import Errors, Steps, errors_of, exact
from tools.benchmark.heading import heading

ON_GPU = {"models": ["STDiT-XL/2", "DiT-XL/2"], "latent": [16, 32, 32], "batch": 8, "dtype": "bf16", "steps": 20}
ON_CPU = {"models": ["STDiT-XS/2", "DiT-S/2"], "latent": [4, 16, 16], "batch": 1, "dtype": "fp32", "steps": 5}


class Timed(NamedTuple):
    """Some steps."""

    seconds: float  # each
    peak_bytes: int  # in use; 0 on a CPU
    alloc_retries: int  # of all

    @property
    def memory(self) -> str:
        """A cell of a table, in GiB."""
        if not self.peak_bytes:
            return "-"
        return f"{self.peak_bytes / 2**30:.1f}{f', {self.alloc_retries} retries' if self.alloc_retries else ''}"


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    timed: Timed
    flops: float  # useful, of a step
    errors: Errors  # against fp32


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    device = torch.device(args.device)
    peak = args.peak_tflops or matmul_tflops(device, to_torch_dtype(args.dtype))
    print(
        f"{heading(device, 'tools.benchmark.train_step')}, {args.dtype}, batch {args.batch}, latent {'x'.join(map(str, args.latent))}, "
        f"{args.text_len} text tokens{''.join(f', {name}' for name in told(args))}; MFU of {peak:.4g} TFLOP/s ({'given' if args.peak_tflops else 'measured'})\n"
    )
    print("| model | blocks | checkpointed | ms/step | samples/s | TFLOP/s | MFU | peak GiB | error | gradient error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in args.models:
        for blocks in args.blocks:
            for checkpoint in args.checkpoint:
                print(
                    f"| {model} | {blocks} | {checkpoint} | {cells(args, model, blocks, checkpoint, peak)} |",
                    flush=True,
                )


def told(args: argparse.Namespace) -> list[str]:
    """What else was asked for, for the heading."""
    return [*["cuda_graphs"] * args.cuda_graphs, *args.inductor]


def parse_args() -> argparse.Namespace:
    """Options, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    defaults: dict[str, Any] = ON_GPU if parser.parse_known_args()[0].device == "cuda" else ON_CPU
    parser.add_argument("--models", nargs="+", default=defaults["models"])
    parser.add_argument("--blocks", nargs="+", default=["eager", "compiled"], choices=("eager", "compiled"))
    parser.add_argument("--checkpoint", nargs="+", type=level_of, default=["none"], help="values of grad_checkpoint")
    parser.add_argument("--latent", type=int, nargs=3, default=defaults["latent"], metavar=("T", "H", "W"))
    parser.add_argument("--text-len", type=int, default=120)
    parser.add_argument("--batch", type=int, default=defaults["batch"])
    parser.add_argument("--dtype", default=defaults["dtype"], choices=("fp32", "bf16", "fp16"))
    add_experiments(parser)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--peak-tflops", type=float, help="of the device, in the number format; measured when left out")
    return switched_on(parser)


def add_experiments(parser: argparse.ArgumentParser) -> None:
    """Options for what is not the default, as it was not measured yet or costs something."""
    parser.add_argument("--cuda-graphs", action="store_true", help="the config's cuda_graphs")
    parser.add_argument(
        "--inductor",
        nargs="+",
        default=[],
        metavar="NAME",
        help="settings of inductor to switch on, such as combo_kernels",
    )


def switches(args: argparse.Namespace) -> dict[str, bool]:
    """The fields of the config among the options of `add_experiments`."""
    return {"cuda_graphs": args.cuda_graphs}


def switched_on(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, of which `add_experiments` changes this process; its memory is as in training."""
    args = parser.parse_args()
    prefer_expandable_segments()
    for name in args.inductor:
        if getattr(torch._inductor.config, name, None) is None:
            parser.error(f"--inductor: torch._inductor.config of torch {torch.__version__} has no {name}")
        setattr(torch._inductor.config, name, True)
    return args


def cells(args: argparse.Namespace, model: str, blocks: str, checkpoint: str, peak: float) -> str:
    """The figures of one line, or why there are none."""
    try:
        result = measure(args, model, blocks, checkpoint)
    except torch.OutOfMemoryError:
        return "out of memory | - | - | - | - | - | -"
    finally:
        forget(torch.device(args.device))
    seconds, tflops = result.timed.seconds, result.flops / result.timed.seconds / 1e12
    speed = f"{seconds * 1e3:.1f} | {args.batch / seconds:.2f} | {tflops:.3g} | {tflops / peak:.1%}"
    return f"{speed} | {result.timed.memory} | {' | '.join(result.errors.cells())}"


def measure(args: argparse.Namespace, name: str, blocks: str, checkpoint: str) -> Result:
    """Build the model and time `args.steps` steps after `args.warmup`."""
    device = torch.device(args.device)
    model = build(name, device, args.text_len)
    z, t, cond = inputs(model, args.batch, args.latent, device)
    right = exact(build(name, device, args.text_len), z, t, cond)
    engine = start(model, device, args.dtype, blocks, checkpoint, **switches(args))
    errors = errors_of(engine, z, t, cond, right)
    flops = 3.0 * args.batch * model.flops(tuple(args.latent), cond["y"].shape[2])
    return Result(timed(engine, z, cond, args.warmup, args.steps), flops, errors)


def build(name: str, device: torch.device, text_len: int, **size: int) -> Any:
    """A model to train, always with the same weights; `size` is for toys."""
    torch.manual_seed(0)
    with device:
        return awake(MODELS.build({"type": name}, model_max_length=text_len, **size)).train()


def start(model: Any, device: torch.device, dtype: str, blocks: str, checkpoint: str, **switches: bool) -> Engine:
    """The engine, ready to train.

    Args:
        blocks: "eager" or "compiled".
        checkpoint: a value of the config's `grad_checkpoint`.
        switches: more of its fields.
    """
    if blocks == "compiled":
        compile_blocks(model.transformer_blocks())
    checkpoint_activations(model.transformer_blocks(), checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    return build_engine("ddp", model, optimizer, World(0, 1, device), dtype=dtype, grad_clip=1.0, **switches)


def inputs(
    model: Any, batch: int, latent: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Latents z, timesteps, and what else the model asks for; the text is as long as it can be."""
    z = torch.randn(batch, model.in_channels, *latent, device=device)
    y = torch.randn_like(model.null_condition(batch))
    cond = {"y": y, "mask": torch.ones(batch, y.shape[2], dtype=torch.bool, device=device)}
    for condition, value in (("fps", 8), ("height", 256), ("width", 256), ("num_frames", latent[0])):
        cond[condition] = torch.full((batch,), float(value), device=device)
    return z, torch.linspace(100, 900, batch, device=device), cond


def timed(engine: Steps, z: Tensor, cond: dict[str, Tensor], warmup: int, steps: int) -> Timed:
    """The steps after the warm-up; memory is the most of both."""
    if z.device.type == "cuda":  # now: recorded passes allocate while they are recorded, and never again
        torch.cuda.reset_peak_memory_stats()
    train(engine, z, cond, range(warmup))
    before = alloc_retries(z.device)
    seconds = train(engine, z, cond, range(warmup, warmup + steps)) / steps
    memory = torch.cuda.max_memory_allocated() if z.device.type == "cuda" else 0
    return Timed(seconds, memory, alloc_retries(z.device) - before)


def forget(device: torch.device) -> None:
    """Free what the last measurement held, its compiled programs too."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def train(engine: Steps, z: Tensor, cond: dict[str, Tensor], steps: range) -> float:
    """Take the steps; returns the seconds they took."""
    scheduler = SCHEDULERS.build({"type": "iddpm"})
    synchronize(z.device)
    started = time.perf_counter()
    for number in steps:
        rngs = generators(0, "benchmark", number, ids=range(len(z)), device=z.device)
        with engine.micro_step(last=True):
            loss = scheduler.training_losses(engine.model, z, cond, generators=rngs).mean()
        engine.backward(loss)
        engine.step()
    synchronize(z.device)
    return time.perf_counter() - started


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """What a large matrix product reaches."""
    n, repeats = (8192, 50) if device.type == "cuda" else (1024, 5)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    for _ in range(5):
        a @ b
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        a @ b
    synchronize(device)
    return repeats * 2 * n**3 / (time.perf_counter() - started) / 1e12


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
