"""Time training steps whose samples are shared by several GPUs (sequence parallelism), against one sample per GPU.

    torchrun --standalone --nproc_per_node 2 -m tools.benchmark.sequence_parallel [--cases STDiT-XL/2:64x64x64 ...] ...

One line of a table for each combination of a case (MODEL:TxHxW, the size of the latent: 64x64x64 is 64x512x512 pixels under
a VAE that shrinks by 8), a number of processes that share a sample, and a way to exchange. With 1 they share none: that is data
parallelism, `batch` samples for each process. "sent" is what a process sends in the all-to-alls of a forward pass, counted
from shapes; the backward pass sends as much, and so does each recomputation. MFU is the model's own FLOPs, three times those of a
forward pass, over the peak of all GPUs. "exposed" is communication that nothing hides: the time of one more step, under the profiler,
in which a kernel of NCCL runs and no other kernel does; the median over the processes. It contains waiting for slower processes. "idle" is what the
step takes less the time in which any kernel runs: the GPU waits for the host to launch the next one.
Started without torchrun, it times one process. Without a GPU the defaults are small enough for a laptop.
tools/benchmark/scaling.py runs many of these on several numbers of GPUs.
"""

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass, field
from math import isnan, nan, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, barrier, init_world, shutdown
from opensora.acceleration.engine import Engine, build_engine, check_engine
from opensora.acceleration.sequence_parallel import Method, parallelise
from opensora.acceleration.sequence_parallel.volume import volume
from opensora.config.activation_checkpointing import level_of
from opensora.registry import MODELS
from opensora.training.flops import FORWARDS_IN_A_STEP
from opensora.training.meter import device_peak
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import exit_on_user_error
from tools.benchmark.step_profile import busy_ms, gpu_kernels
from tools.benchmark.train_step import train

ON_GPU = {"cases": ["STDiT-XL/2:64x64x64", "STDiT3-XL/2:15x60x106"], "dtype": "bf16", "steps": 10, "warmup": 4}
ON_CPU = {"cases": ["STDiT-XXS/2:4x8x8"], "dtype": "fp32", "steps": 3, "warmup": 1}
COLUMNS = (
    "case", "sp_size", "exchange", "ms/step", "samples/s", "tokens/s", "MFU", "exposed ms/step", "idle ms/step", "sent MiB/forward",
    "peak GiB",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What is trained, and how.

    Attributes:
        case: MODEL:TxHxW.
        sp_size: processes that share a sample.
        method: how they exchange.
        engine, settings: as `build_engine` takes them.
        blocks: "eager" or "compiled".
        checkpoint: a value of `grad_checkpoint`.
        batch: samples of a step, of each group of `sp_size` processes.
        text_len: tokens of the text.
        dtype: of the computation.
        warmup, steps: steps before the clock starts, and after.
    """

    case: str
    sp_size: int = 1
    method: Method = "auto"
    engine: str = "ddp"
    settings: dict[str, Any] = field(default_factory=dict)
    blocks: str = "compiled"
    checkpoint: str = "block"
    batch: int = 1
    text_len: int = 120
    dtype: str = "bf16"
    warmup: int = 4
    steps: int = 10

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, rows and columns."""
        T, H, W = (int(n) for n in self.case.partition(":")[2].split("x"))
        return T, H, W


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    seconds: float  # a step
    samples: int  # of a step, on all processes
    tokens: int  # of a step, on all processes
    flops: float  # useful, of a step, on all processes
    exposed_s: float | None  # communication that nothing hides, a step; None where it was not measured
    sent_bytes: int  # by one process in a forward pass
    peak_bytes: int  # 0 on a CPU
    setup_s: float  # everything before the clock starts: building, compiling, warming up
    idle_s: float | None = None  # in which no kernel runs, a step; None where it was not measured


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
                    row = cells(args, work_of(args, case, sp_size, method), world)
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
    parser.add_argument("--cuda-graphs", action="store_true", help="of engine ddp: record the passes")
    parser.add_argument("--shard-size", type=int, help="of engine fsdp2: processes that share the state; default all")
    parser.add_argument("--blocks", default="compiled", choices=("eager", "compiled"))
    parser.add_argument("--checkpoint", type=level_of, default="block", help="a value of grad_checkpoint")
    parser.add_argument("--text-len", type=int, default=120)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default=defaults["dtype"], choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--warmup", type=int, default=defaults["warmup"])
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--peak-tflops", type=float, help="of one device, for MFU; default: by its name")
    return parser.parse_args()


def work_of(args: argparse.Namespace, case: str, sp_size: int, method: Method) -> Work:
    """One line's work."""
    settings: dict[str, Any] = {"cuda_graphs": True} if args.cuda_graphs else {}
    if args.engine == "fsdp2":
        settings |= {"fsdp_reshard": args.fsdp_reshard, "shard_size": args.shard_size}
    return Work(
        case, sp_size, method, args.engine, settings, args.blocks, args.checkpoint, args.batch, args.text_len,
        args.dtype, args.warmup, args.steps,
    )  # fmt: skip


def write_header(args: argparse.Namespace, world: World) -> None:
    """What was measured on."""
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    engine = f"{args.engine} ({args.fsdp_reshard})" if args.engine == "fsdp2" else args.engine
    engine += " with cuda_graphs" * args.cuda_graphs
    peak = device_peak(world.device, to_torch_dtype(args.dtype), args.peak_tflops)
    told = "no MFU: the peak is not known" if peak is None else f"MFU of {peak.tflops:g} TFLOP/s"
    sys.stdout.write(
        f"{world.size} x {name}, torch {torch.__version__}, {args.dtype}, engine {engine}, {args.blocks} blocks, "
        f"grad_checkpoint={args.checkpoint}, batch {args.batch}, {args.text_len} text tokens; {told}\n\n"
        f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    )


def cells(args: argparse.Namespace, work: Work, world: World) -> str:
    """The figures of one line, or why there are none."""
    result = measured(work, args.device)
    if result is None:
        return "out of memory" + " | -" * (len(COLUMNS) - 4)
    peak = device_peak(world.device, to_torch_dtype(work.dtype), args.peak_tflops)
    return " | ".join(figures(result, world.size, None if peak is None else peak.tflops))


def figures(result: Result, processes: int, peak_tflops: float | None) -> list[str]:
    """The cells of a line, from ms/step on."""
    return [
        f"{result.seconds * 1e3:.1f}",
        f"{result.samples / result.seconds:.3g}",
        f"{result.tokens / result.seconds:.4g}",
        f"{result.flops / result.seconds / (peak_tflops * 1e12 * processes):.1%}" if peak_tflops else "-",
        *("-" if value is None else f"{value * 1e3:.1f}" for value in (result.exposed_s, result.idle_s)),
        f"{result.sent_bytes / 2**20:.4g}",
        f"{result.peak_bytes / 2**30:.1f}" if result.peak_bytes else "-",
    ]


def measured(work: Work, device: str) -> Result | None:
    """`measure`, with nothing left of it; None = out of memory. All processes call it together."""
    world = init_world(device, work.sp_size)
    try:
        result = measure(work, world)
    except torch.OutOfMemoryError:
        # the sizes are the same in all processes, and so is what does not fit; after any other error no process waits
        result = None
    gc.collect()
    torch._dynamo.reset()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    barrier()
    return result


def measure(work: Work, world: World) -> Result:
    """Build the model, time `work.steps` steps after `work.warmup`, and profile one more.

    Raises:
        UserError: the engine cannot run here.
    """
    began = time.perf_counter()
    if work.engine != "zero2-seq" or work.sp_size > 1:
        check_engine(work.engine, work.sp_size, device=world.device, dtype=work.dtype)
    torch.manual_seed(0)
    with world.device:
        model = MODELS.build({"type": work.case.partition(":")[0]}, model_max_length=work.text_len).train()
    flops = FORWARDS_IN_A_STEP * model.flops(work.latent, work.text_len)
    samples, tokens = work.batch * world.dp_size, prod(model.grid(work.latent))
    sent = sent_bytes(work, model, world)
    z, cond = batch_of(work, world, model)
    engine = start(work, model, world)
    if world.device.type == "cuda":  # now: recorded passes allocate while they are recorded, and never again
        torch.cuda.reset_peak_memory_stats()
    train(engine, z, cond, range(work.warmup))
    setup_s = time.perf_counter() - began
    seconds = train(engine, z, cond, range(work.warmup, work.warmup + work.steps)) / work.steps
    memory = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    exposed, busy = exposed_and_busy_s(engine, z, cond, work.warmup + work.steps)
    idle = None if busy is None else max(0.0, seconds - busy)
    return Result(seconds, samples, samples * tokens, samples * flops, exposed, sent, memory, setup_s, idle)


def sent_bytes(work: Work, model: Any, world: World) -> int:
    """What a process sends in the all-to-alls of a forward pass."""
    if world.sp_size == 1:
        return 0
    itemsize = to_torch_dtype(work.dtype).itemsize
    traffic = volume(model, world.sp_size, work.latent, batch=work.batch, itemsize=itemsize, method=work.method)
    return traffic.all_to_all_bytes


def start(work: Work, model: Any, world: World) -> Engine:
    """The engine, ready to train."""
    if world.sp_size > 1:
        parallelise(model, world.sp_group, method=work.method)
    if work.blocks == "compiled":
        compile_blocks(model.transformer_blocks())
    checkpoint_activations(model.transformer_blocks(), work.checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=world.device.type == "cuda")
    return build_engine(work.engine, model, optimizer, world, dtype=work.dtype, grad_clip=1.0, **work.settings)


def exposed_and_busy_s(
    engine: Engine, z: Tensor, cond: dict[str, Tensor], number: int
) -> tuple[float | None, float | None]:
    """Of a step, the time in which NCCL's kernels run and no others do, and in which any runs: medians over the processes.

    None on a CPU; the first one also in a process without others.
    """
    if z.device.type != "cuda":
        return None, None
    barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        train(engine, z, cond, range(number, number + 1))
    kernels = gpu_kernels(profiled)
    busy = busy_ms(kernels) / 1e3 if kernels else nan  # nan: the profiler saw nothing
    own = busy_ms(kernel for kernel in kernels if not kernel.name.startswith("nccl")) / 1e3
    if not dist.is_initialized():
        return None, None if isnan(busy) else busy
    of_all = [(nan, nan)] * dist.get_world_size()
    dist.all_gather_object(of_all, (busy - own, busy))
    exposed, busy = (statistics.median(values) for values in zip(*of_all, strict=True))
    return (None, None) if isnan(exposed) else (exposed, busy)


def batch_of(work: Work, world: World, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Latents and conditions; processes that share a sample have the same."""
    rng = torch.Generator().manual_seed(world.dp_rank)
    z = torch.randn(work.batch, model.in_channels, *work.latent, generator=rng)
    y = torch.randn(model.null_condition(work.batch).shape, generator=rng)
    cond = {"y": y, "mask": torch.ones(work.batch, y.shape[2], dtype=torch.bool)}
    for condition, value in (("fps", 8), ("height", 512), ("width", 512), ("num_frames", work.latent[0])):
        cond[condition] = torch.full((work.batch,), float(value))
    return z.to(world.device), {name: value.to(world.device) for name, value in cond.items()}


if __name__ == "__main__":
    main()
