"""Training steps of denoisers on random latents: forward, backward, clipping, AdamW. No data, no VAE, no text encoder."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from math import isnan, nan, prod
from typing import Any

import torch
import torch.distributed as dist

from opensora.acceleration.distributed import World, barrier, init_world, shutdown
from opensora.acceleration.engine import check_engine
from opensora.acceleration.sequence_parallel import Method
from opensora.config.schema import level_of
from opensora.training.flops import FORWARDS_IN_A_STEP, device_peak
from opensora.utils.dtype import to_torch_dtype
from tools.benchmark import denoisers
from tools.benchmark.denoisers import Errors, Steps, Timed
from tools.benchmark.measure import Options, Table, attempt, matmul_tflops, quiet, seconds
from tools.benchmark.profiling import Kernel, busy_ms, kernels_of, print_profile
from tools.benchmark.volume import volume

DTYPES = ("fp32", "bf16", "fp16")
COLUMNS = {
    "model": "", "blocks": "", "checkpointed": "", "ms/step": ".1f", "samples/s": ".2f", "TFLOP/s": ".3g", "MFU": ".1%", "peak GiB": "",
    "error": ".2g", "gradient error": ".2g",
}  # fmt: skip
SHARED_COLUMNS = {
    "ms/step": ".1f", "samples/s": ".3g", "tokens/s": ".4g", "MFU": ".1%", "exposed ms/step": ".1f", "idle ms/step": ".1f",
    "sent MiB/forward": ".4g", "peak GiB": ".1f",
}  # fmt: skip


def train_step(argv: Sequence[str]) -> None:
    """Time training steps of denoisers, one line for each model, way to run the blocks and level of activation checkpointing.

    FLOPs are the model's own `flops()` times three (backward = 2 x forward); recomputation by activation checkpointing is not
    counted as useful work. MFU is their rate over that of a large matrix product, which is measured first on the same device, or
    given by --peak-tflops. The clock runs over all steps without waiting for the device in between, as in training. "retries"
    next to the memory: how often it ran out until PyTorch had freed what it keeps for later (`alloc_retries` of
    docs/reference/log.md); such times are those of a GPU that is too full. The errors are |found - eager fp32| / |eager fp32| of
    the prediction for the first sample and of the gradients of all weights.

    --profile adds, for each line, where the time of a step goes by kinds of kernels, the largest kernels, and the time in which
    the GPU has nothing to do: what is left of the step without the profiler when its busy time in the profile is taken away.
    """
    options = Options("train_step", train_step.__doc__, argv)
    options.add("--models", ["STDiT-XL/2", "DiT-XL/2"], ["STDiT-XXS/2"])
    options.add("--blocks", ["eager", "compiled"], ["eager"], choices=("eager", "compiled"))
    options.add("--checkpoint", ["none"], ["none"], type=level_of, help="values of grad_checkpoint")
    options.add("--latent", [16, 32, 32], [2, 8, 8], nargs=3, metavar=("T", "H", "W"))
    options.add("--text-len", 120, 8)
    options.add("--batch", 8, 1)
    options.add("--dtype", "bf16", "fp32", choices=DTYPES)
    options.add("--warmup", 5, 1)
    options.add("--steps", 20, 2)
    options.add_argument("--peak-tflops", type=float, help="of the device, in --dtype; measured when left out")
    options.add_argument("--profile", action="store_true", help="where the time goes, over two steps more")
    denoisers.add_switches(options)
    args = options.parse()
    denoisers.switch_on(args.inductor)
    device = options.device
    peak = args.peak_tflops or matmul_tflops(device, to_torch_dtype(args.dtype))
    options.heading(
        f"{args.dtype}, batch {args.batch}, latent {'x'.join(map(str, args.latent))}, {args.text_len} text tokens",
        f"MFU of {peak:.4g} TFLOP/s",
    )
    table = None

    def measured() -> tuple[Timed, float, Errors, list[Kernel]]:
        model = denoisers.build(name, device, args.text_len)
        batch = denoisers.inputs(model, args.batch, args.latent, device)
        right = denoisers.exact(denoisers.build(name, device, args.text_len), batch)
        how = {
            "dtype": args.dtype,
            "compiled": blocks == "compiled",
            "checkpoint": level,
            "cuda_graphs": args.cuda_graphs,
        }
        engine = denoisers.start(model, World(0, 1, device), **how)
        errors = denoisers.errors_of(engine, batch, right)
        step = denoisers.training_step(engine, batch.z, batch.cond)
        timed = denoisers.timed(step, device, args.warmup, args.steps)
        kernels = kernels_of(lambda: seconds(step, device, 2), device) if args.profile else []
        flops = FORWARDS_IN_A_STEP * args.batch * model.flops(tuple(args.latent), batch.cond["y"].shape[2])
        return timed, float(flops), errors, kernels

    with quiet():
        for name in args.models:
            for blocks in args.blocks:
                for level in args.checkpoint:
                    table = table if table and not args.profile else Table(COLUMNS)
                    found = attempt(measured)
                    if isinstance(found, str):
                        table.row(name, blocks, level, found)
                        continue
                    timed, flops, errors, kernels = found
                    rate = flops / timed.seconds / 1e12
                    speed = (timed.seconds * 1e3, args.batch / timed.seconds, rate, rate / peak)
                    table.row(name, blocks, level, *speed, timed.memory, *errors)
                    if args.profile:
                        print_profile(kernels, 2, timed.seconds * 1e3)


def sequence_parallel(argv: Sequence[str]) -> None:
    """Time training steps over the processes of torchrun: samples that several share, against one sample for each.

        torchrun --standalone --nproc_per_node 2 -m tools.benchmark sequence_parallel [--cases STDiT-XL/2:64x64x64 ...] ...

    One line of a table for each combination of a case (MODEL:TxHxW, the size of the latent: 64x64x64 is 64x512x512 pixels under
    a VAE that shrinks by 8), a number of processes that share a sample, and a way to exchange. With 1 they share none: that is data
    parallelism, `batch` samples for each process. "sent" is what a process sends in the all-to-alls of a forward pass, counted
    from shapes; the backward pass sends as much, and so does each recomputation. MFU is the model's own FLOPs, three times those of a
    forward pass, over the peak of all GPUs. "exposed" is communication that nothing hides: the time of one more step, under the
    profiler, in which a kernel of NCCL runs and no other kernel does; the median over the processes. It contains waiting for slower
    processes. "idle" is what the step takes less the time in which any kernel runs: the GPU waits for the host to launch the next one.
    Started without torchrun, it times one process.
    """
    options = Options("sequence_parallel", sequence_parallel.__doc__, argv)
    options.add(
        "--cases", ["STDiT-XL/2:64x64x64", "STDiT3-XL/2:15x60x106"], ["STDiT-XXS/2:4x8x8"], metavar="MODEL:TxHxW"
    )
    options.add_argument("--sp-sizes", type=int, nargs="+", help="processes that share a sample; default 1 and all")
    options.add("--methods", ["dsp", "ulysses"], ["dsp", "ulysses"], choices=("auto", "dsp", "ulysses"))
    options.add_argument("--engine", default="ddp")
    options.add_argument("--fsdp-reshard", default="zero2", choices=("zero2", "zero3"), help="of engine fsdp2")
    options.add_argument("--cuda-graphs", action="store_true", help="of engine ddp: record the passes")
    options.add_argument("--shard-size", type=int, help="of engine fsdp2: processes that share the state; default all")
    options.add("--blocks", "compiled", "eager", choices=("eager", "compiled"))
    options.add("--checkpoint", "block", "block", type=level_of, help="a value of grad_checkpoint")
    options.add("--text-len", 120, 8)
    options.add("--batch", 1, 1)
    options.add("--dtype", "bf16", "fp32", choices=DTYPES)
    options.add("--warmup", 4, 1)
    options.add("--steps", 10, 2)
    options.add_argument("--peak-tflops", type=float, help="of one device, for MFU; default: by its name")
    args = options.parse()
    world = init_world(options.device.type)
    peak = device_peak(world.device, to_torch_dtype(args.dtype), args.peak_tflops)
    settings: dict[str, Any] = {"cuda_graphs": True} if args.cuda_graphs else {}
    if args.engine == "fsdp2":
        settings |= {"fsdp_reshard": args.fsdp_reshard, "shard_size": args.shard_size}
    table = None
    try:
        if world.is_main:
            of = "no MFU: the peak is not known" if peak is None else f"MFU of {peak.tflops:g} TFLOP/s"
            options.heading(
                f"processes: {world.size}, {args.dtype}, engine {args.engine}, {args.blocks} blocks",
                f"grad_checkpoint={args.checkpoint}, batch {args.batch}, {args.text_len} text tokens; {of}",
            )
            table = Table({"case": "", "sp_size": "d", "exchange": "", **SHARED_COLUMNS})
        for case in args.cases:
            for sp_size in args.sp_sizes or sorted({1, world.size}):
                methods: list[Method] = args.methods if sp_size > 1 else ["auto"]
                for method in methods:
                    found = measure(args, settings, peak and peak.tflops, case, sp_size, method)
                    cells = [found] if isinstance(found, str) else found
                    if table:
                        table.row(case, sp_size, method if sp_size > 1 else "none", *cells)
    finally:
        shutdown()


def measure(
    args: argparse.Namespace,
    settings: dict[str, Any],
    peak_tflops: float | None,
    case: str,
    sp_size: int,
    method: Method,
) -> list[float | None] | str:
    """The cells of `SHARED_COLUMNS`, or "out of memory". All processes call it together.

    Args:
        settings: more of `build_engine`.
        case: MODEL:TxHxW, the size of the latent.

    Raises:
        UserError: the engine cannot run here.
    """
    world = init_world(args.device, sp_size)

    def run() -> list[float | None]:
        if args.engine != "zero2-seq" or sp_size > 1:
            check_engine(args.engine, sp_size, device=world.device, dtype=args.dtype)
        name, _, size = case.partition(":")
        T, H, W = (int(n) for n in size.split("x"))
        latent = (T, H, W)
        model = denoisers.build(name, world.device, args.text_len)
        samples = args.batch * world.dp_size
        tokens, flops = prod(model.grid(latent)), FORWARDS_IN_A_STEP * model.flops(latent, args.text_len)
        sent = 0
        if sp_size > 1:
            itemsize = to_torch_dtype(args.dtype).itemsize
            sent = volume(model, sp_size, latent, batch=args.batch, itemsize=itemsize, method=method).all_to_all_bytes
        batch = denoisers.inputs(model, args.batch, latent, world.device, seed=world.dp_rank)
        how: dict[str, Any] = {"engine": args.engine, "method": method, **settings}
        engine: Steps = denoisers.start(
            model, world, dtype=args.dtype, compiled=args.blocks == "compiled", checkpoint=args.checkpoint, **how
        )
        step = denoisers.training_step(engine, batch.z, batch.cond)
        timed = denoisers.timed(step, world.device, args.warmup, args.steps)
        exposed, busy = _exposed_and_busy_s(lambda: seconds(step, world.device), world.device)
        mfu = None
        if peak_tflops is not None:
            mfu = samples * flops / timed.seconds / (peak_tflops * 1e12 * world.size)
        waits = (exposed, None if busy is None else max(0.0, timed.seconds - busy))
        return [
            timed.seconds * 1e3,
            samples / timed.seconds,
            samples * tokens / timed.seconds,
            mfu,
            *(None if value is None else value * 1e3 for value in waits),
            sent / 2**20,
            timed.peak_gib,
        ]

    # the sizes are the same in all processes, and so is what does not fit; after any other error no process waits
    found = attempt(run)
    barrier()
    return found


def _exposed_and_busy_s(step: Callable[[], object], device: torch.device) -> tuple[float | None, float | None]:
    """Of a step, the time in which NCCL's kernels run and no others do, and in which any runs: medians over the processes.

    None on a CPU; the first one also in a process without others.
    """
    if device.type != "cuda":
        return None, None
    barrier()
    kernels = kernels_of(step, device)
    busy = busy_ms(kernels) / 1e3 if kernels else nan  # nan: the profiler saw nothing
    own = busy_ms(kernel for kernel in kernels if not kernel.name.startswith("nccl")) / 1e3
    if not dist.is_initialized():
        return None, None if isnan(busy) else busy
    of_all = [(nan, nan)] * dist.get_world_size()
    dist.all_gather_object(of_all, (busy - own, busy))
    exposed, busy = (statistics.median(values) for values in zip(*of_all, strict=True))
    return (None, None) if isnan(exposed) else (exposed, busy)
