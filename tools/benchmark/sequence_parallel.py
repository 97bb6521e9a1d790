"""Time training steps whose samples are shared by several GPUs (sequence parallelism), against one sample per GPU.

    torchrun --standalone --nproc_per_node 2 -m tools.benchmark.sequence_parallel [--cases STDiT-XL/2:64x64x64 ...] ...

One line of a table for each combination of a case (MODEL:TxHxW, the size of the latent: 64x64x64 is 64x512x512 pixels under
a VAE that shrinks by 8), a number of processes that share a sample, and a way to exchange. With 1 they share none: that is data
parallelism, `batch` samples for each process. "sent" is what a process sends in the all-to-alls of a forward pass, counted
from shapes; the backward pass sends as much, and so does each recomputation. Started without torchrun, it times one process.
Without a GPU the defaults are small enough for a laptop.
"""

import argparse
import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, barrier, init_world, shutdown
from opensora.acceleration.engine import build_engine
from opensora.acceleration.sequence_parallel import Method, parallelise
from opensora.acceleration.sequence_parallel.volume import volume
from opensora.registry import MODELS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import exit_on_user_error
from tools.benchmark.train_step import train

ON_GPU = {"cases": ["STDiT-XL/2:64x64x64", "STDiT3-XL/2:15x60x106"], "dtype": "bf16", "steps": 10, "warmup": 4}
ON_CPU = {"cases": ["STDiT-XXS/2:4x8x8"], "dtype": "fp32", "steps": 3, "warmup": 1}


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    seconds: float  # a step
    samples: int  # of a step, on all processes
    sent_bytes: int  # by one process in a forward pass
    peak_bytes: int  # 0 on a CPU


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    world = init_world(args.device)
    try:
        if world.is_main:
            write_header(args, world)
        for case in args.cases:
            for sp_size in args.sp_sizes or sorted({1, world.size}):
                methods: list[Method] = args.methods if sp_size > 1 else ["auto"]
                for method in methods:
                    row = cells(args, case, sp_size, method)
                    if world.is_main:
                        how = method if sp_size > 1 else "none"
                        sys.stdout.write(f"| {case} | {sp_size} | {how} | {row} |\n")
                        sys.stdout.flush()
    finally:
        shutdown()


def parse_args() -> argparse.Namespace:
    """Options, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    defaults: dict[str, Any] = ON_GPU if parser.parse_known_args()[0].device == "cuda" else ON_CPU
    parser.add_argument("--cases", nargs="+", default=defaults["cases"], metavar="MODEL:TxHxW")
    parser.add_argument("--sp-sizes", type=int, nargs="+", help="processes that share a sample; default 1 and all")
    parser.add_argument("--methods", nargs="+", default=["dsp", "ulysses"], choices=("auto", "dsp", "ulysses"))
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--fsdp-reshard", default="zero2", choices=("zero2", "zero3"), help="of engine fsdp2")
    parser.add_argument("--blocks", default="compiled", choices=("eager", "compiled"))
    parser.add_argument("--checkpoint", default="block", help="a value of grad_checkpoint")
    parser.add_argument("--text-len", type=int, default=120)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default=defaults["dtype"], choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--warmup", type=int, default=defaults["warmup"])
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    return parser.parse_args()


def write_header(args: argparse.Namespace, world: World) -> None:
    """What was measured on."""
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    engine = f"{args.engine} ({args.fsdp_reshard})" if args.engine == "fsdp2" else args.engine
    sys.stdout.write(
        f"{world.size} x {name}, torch {torch.__version__}, {args.dtype}, engine {engine}, {args.blocks} blocks, "
        f"grad_checkpoint={args.checkpoint}, batch {args.batch}, {args.text_len} text tokens\n\n"
        "| case | sp_size | exchange | ms/step | samples/s | sent MiB/forward | peak GiB |\n|---|---|---|---|---|---|---|\n"
    )


def cells(args: argparse.Namespace, case: str, sp_size: int, method: Method) -> str:
    """The figures of one line, or why there are none."""
    world = init_world(args.device, sp_size)
    try:
        result = measure(args, world, case, method)
    except torch.OutOfMemoryError:
        # the sizes are the same in all processes, and so is what does not fit
        return "out of memory | - | - | -"
    finally:
        gc.collect()
        torch._dynamo.reset()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        barrier()
    memory = f"{result.peak_bytes / 2**30:.1f}" if result.peak_bytes else "-"
    rate = result.samples / result.seconds
    return f"{result.seconds * 1e3:.1f} | {rate:.3g} | {result.sent_bytes / 2**20:.4g} | {memory}"


def measure(args: argparse.Namespace, world: World, case: str, method: Method) -> Result:
    """Build the model and time `args.steps` steps after `args.warmup`."""
    name, _, size = case.partition(":")
    latent = [int(n) for n in size.split("x")]
    torch.manual_seed(0)
    with world.device:
        model = MODELS.build({"type": name}, model_max_length=args.text_len).train()
    sent = 0
    if world.sp_size > 1:
        parallelise(model, world.sp_group, method=method)
        itemsize = to_torch_dtype(args.dtype).itemsize
        traffic = volume(model, world.sp_size, latent, batch=args.batch, itemsize=itemsize, method=method)
        sent = traffic.all_to_all_bytes
    if args.blocks == "compiled":
        compile_blocks(model.transformer_blocks())
    checkpoint_activations(model.transformer_blocks(), args.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=world.device.type == "cuda")
    settings = {"fsdp_reshard": args.fsdp_reshard} if args.engine == "fsdp2" else {}
    engine = build_engine(args.engine, model, optimizer, world, dtype=args.dtype, grad_clip=1.0, **settings)
    z, cond = batch_of(args, world, model, latent)
    train(engine, z, cond, range(args.warmup))
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = train(engine, z, cond, range(args.warmup, args.warmup + args.steps)) / args.steps
    memory = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    return Result(seconds, args.batch * world.dp_size, sent, memory)


def batch_of(args: argparse.Namespace, world: World, model: Any, latent: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Latents and conditions; processes that share a sample have the same."""
    rng = torch.Generator().manual_seed(world.dp_rank)
    z = torch.randn(args.batch, model.in_channels, *latent, generator=rng)
    y = torch.randn(model.null_condition(args.batch).shape, generator=rng)
    cond = {"y": y, "mask": torch.ones(args.batch, y.shape[2], dtype=torch.bool)}
    for condition, value in (("fps", 8), ("height", 512), ("width", 512), ("num_frames", latent[0])):
        cond[condition] = torch.full((args.batch,), float(value))
    return z.to(world.device), {name: value.to(world.device) for name, value in cond.items()}


if __name__ == "__main__":
    main()
