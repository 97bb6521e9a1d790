"""Time training steps and sampling of NOVA on random latents. No data, no VAE, no text encoder.

    python -m tools.benchmark.nova [--cases t2i t2v] [--parts train sample] [--batch 4] [--peak-tflops 790]

One line of a table for each combination. FLOPs are the model's own `flops()`, which counts one noised copy of each patch, times
three (backward = 2 x forward); what `loss_repeat` adds in the head is work but is not counted. MFU is their rate over that of a
large matrix product, measured first or given by --peak-tflops. A batch that does not fit is halved. Without a GPU the defaults are
toy sizes. `--profile` adds, for each line, the kinds of kernels in one training step, or in sampling with `PROFILED_SETS` sets of
tokens a frame, with the time in which the GPU had nothing to do.
"""

import argparse
import gc
import time
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from opensora.acceleration.checkpointing import checkpoint_activations
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, prefer_expandable_segments
from opensora.acceleration.engine import build_engine
from opensora.config.activation_checkpointing import level_of
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.seed import generators
from tools.benchmark.step_profile import Kernel, kernels_of, write_kinds
from tools.benchmark.train_step import matmul_tflops, synchronize

TEXT = 256
PROFILED_SETS = 4
MOST_WARM_UP = 40


class Profiled(NamedTuple):
    """Kernels of a run, and the seconds that it takes without the profiler."""

    seconds: float
    kernels: list[Kernel]


class Case(NamedTuple):
    """A published setting."""

    model: dict[str, Any]
    latent: tuple[int, int, int]


GPU = {
    "t2i": Case({"type": "NOVA-d48w1024", "motion": False, "trained": "image"}, (1, 128, 128)),  # 1024x1024
    "t2v": Case({"type": "NOVA-d48w1024-T2V"}, (9, 60, 96)),  # 33 frames of 480x768
}
_TOY = {"type": "NOVA", "width": 64, "num_heads": 2, "video_depth": 2, "image_depth": 4, "head_depth": 2}
CPU = {"t2i": Case({**_TOY, "motion": False}, (1, 16, 16)), "t2v": Case(_TOY, (3, 8, 12))}


def main() -> None:
    """The command line."""
    args = parse_args()
    prefer_expandable_segments()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    peak = args.peak_tflops or matmul_tflops(device, to_torch_dtype(args.dtype))
    print(f"{name}, torch {torch.__version__}, {args.dtype}, {TEXT} text tokens; MFU of {peak:.4g} TFLOP/s\n")
    print("| case | what | batch | ms | patches/s | MFU | frames/s | peak GiB |\n|---|---|---|---|---|---|---|---|")
    cases = GPU if device.type == "cuda" else CPU
    for case in args.cases:
        for blocks in args.blocks:
            for part in args.parts:
                figures, profiled = row(cases[case], part, blocks, args, device, peak)
                print(f"| {case} | {part}, {blocks} | {figures} |", flush=True)
                if profiled:
                    print()
                    write_kinds(profiled.kernels, 1, profiled.seconds * 1e3)
                gc.collect()
                torch._dynamo.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def parse_args() -> argparse.Namespace:
    """Options, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=["t2i", "t2v"], choices=tuple(GPU))
    parser.add_argument("--parts", nargs="+", default=["train", "sample"], choices=("train", "sample"))
    parser.add_argument("--blocks", nargs="+", default=["eager", "compiled"], choices=("eager", "compiled"))
    parser.add_argument("--batch", type=int, default=4 if on_gpu else 1)
    parser.add_argument("--dtype", default="bf16" if on_gpu else "fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--checkpoint", type=level_of, default="none", help="a value of grad_checkpoint")
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 2)
    parser.add_argument("--sampling-steps", type=int, nargs=2, default=(64, 25) if on_gpu else (4, 2))
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    return parser.parse_args()


def row(
    case: Case, part: str, blocks: str, args: argparse.Namespace, device: torch.device, peak: float
) -> tuple[str, Profiled | None]:
    """The figures of one line for the largest batch that fits, or why there are none."""
    batch = args.batch
    while batch:
        try:
            return cells(case, part, blocks, batch, args, device, peak)
        except torch.OutOfMemoryError:
            batch //= 2
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    return "1 | out of memory | - | - | - | -", None


def cells(
    case: Case, part: str, blocks: str, batch: int, args: argparse.Namespace, device: torch.device, peak: float
) -> tuple[str, Profiled | None]:
    """The figures of one line, and its profile if one is asked for."""
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with device:
        model: Any = MODELS.build(case.model)
    if blocks == "compiled":
        compile_blocks(model.transformer_blocks())
    run = (training_step if part == "train" else sampling)(model, case, batch, args, device)
    warm_up(run, at_least=6 if part == "train" else 1)
    seconds = timed(run, device, repeats=args.steps if part == "train" else 1)
    T, H, W = case.latent
    patches, frames = batch * T * H * W / 4 / seconds, batch * T / seconds
    mfu = f"{3 * batch * model.flops(case.latent, TEXT) / seconds / peak / 1e12:.1%}" if part == "train" else "-"
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device.type == "cuda" else "-"
    figures = f"{batch} | {seconds * 1e3:.1f} | {patches:.0f} | {mfu} | {frames:.3g} | {memory}"
    if not args.profile:
        return figures, None
    if part == "sample":
        run = sampling(model, case, batch, args, device, sets=PROFILED_SETS)
        run()
        seconds = timed(run, device, repeats=1)
    return figures, Profiled(seconds, kernels_of(lambda: timed(run, device, repeats=1), device.type))


def warm_up(run: Callable[[], object], at_least: int) -> None:
    """Run until there was no new program for some runs: in training another number of patches is visible each time."""
    quiet = 0
    for number in range(MOST_WARM_UP):
        programs = counters["stats"]["unique_graphs"]
        run()
        quiet = quiet + 1 if counters["stats"]["unique_graphs"] == programs else 0
        if number + 1 >= at_least and quiet >= at_least:
            return


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a run: the mean of `repeats`, without waiting for the device in between."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def inputs(model: Any, case: Case, batch: int, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Random latents and conditions."""
    x = torch.randn(batch, model.in_channels, *case.latent, device=device)
    cond = {"y": torch.randn(batch, 1, TEXT, model.text_embed.proj.in_features, device=device)}
    if "flow" in model.numbers:
        cond |= {"fps": torch.full((batch,), 12.0, device=device), "flow": torch.full((batch,), 5.0, device=device)}
    return x, cond


def training_step(
    model: Any, case: Case, batch: int, args: argparse.Namespace, device: torch.device
) -> Callable[[], object]:
    """What takes a step: forward, backward, clipping, AdamW."""
    checkpoint_activations(model.transformer_blocks(), args.checkpoint, model.stack_depths)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    engine = build_engine("ddp", model.train(), optimizer, World(0, 1, device), dtype=args.dtype, grad_clip=1.0)
    scheduler = SCHEDULERS.build({"type": "nova"})
    x, cond = inputs(model, case, batch, device)
    numbers = count()

    def step() -> None:
        rngs = generators(0, "benchmark", next(numbers), ids=range(batch), device=device)
        with engine.micro_step(last=True):
            loss = scheduler.training_losses(engine.model, x, cond, generators=rngs).mean()
        engine.backward(loss)
        engine.step()

    return step


def sampling(
    model: Any, case: Case, batch: int, args: argparse.Namespace, device: torch.device, sets: int | None = None
) -> Callable[[], object]:
    """What samples a batch of whole videos, with guidance; `sets` replaces the sets of tokens of --sampling-steps."""
    steps, diffusion = args.sampling_steps
    scheduler = SCHEDULERS.build(
        {"type": "nova", "num_sampling_steps": sets or steps, "num_diffusion_steps": diffusion}
    )
    z, cond = inputs(model.requires_grad_(False).eval(), case, batch, device)  # as in a pipeline
    null = {"y": model.null_condition(batch)[:, :, :TEXT]}
    dtype = to_torch_dtype(args.dtype)

    def run() -> None:
        rngs = generators(0, "benchmark", ids=range(batch), device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            scheduler.sample(model, z, cond, null=null, generators=rngs)

    return run


if __name__ == "__main__":
    main()
