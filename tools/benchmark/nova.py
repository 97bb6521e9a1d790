"""Training steps and sampling of NOVA on random latents. No data, no VAE, no text encoder."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.distributed import World, prefer_expandable_segments
from opensora.config.schema import level_of
from opensora.registry import MODELS, SCHEDULERS
from opensora.training.flops import FORWARDS_IN_A_STEP
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.seed import generators
from tools.benchmark import denoisers
from tools.benchmark.measure import OUT_OF_MEMORY, Options, Table, attempt, matmul_tflops, peak_gib, reset_peak, seconds
from tools.benchmark.profiling import Kernel, kernels_of, print_profile

COLUMNS = {
    "case": "", "what": "", "batch": "d", "ms": ".1f", "patches/s": ".0f", "MFU": ".1%", "frames/s": ".3g", "peak GiB": ".1f",
}  # fmt: skip
TEXT_LEN = 256
PROFILED_SETS = 4
MAX_WARMUP = 40


class Case(NamedTuple):
    """A published setting."""

    model: dict[str, Any]
    latent: tuple[int, int, int]


CASES = {
    "t2i": Case({"type": "NOVA-d48w1024", "motion": False, "trained": "image"}, (1, 128, 128)),  # 1024x1024
    "t2v": Case({"type": "NOVA-d48w1024-T2V"}, (9, 60, 96)),  # 33 frames of 480x768
}
_SMALL = {"type": "NOVA", "width": 64, "num_heads": 2, "video_depth": 2, "image_depth": 4, "head_depth": 2}
TOY = {"t2i": Case({**_SMALL, "motion": False}, (1, 16, 16)), "t2v": Case(_SMALL, (3, 8, 12))}


class Result(NamedTuple):
    """One line of the table."""

    seconds: float
    flops: int  # of a forward pass of one sample
    peak_gib: float | None
    profile: tuple[list[Kernel], float] | None  # kernels of a run, and its seconds without the profiler


def nova(argv: Sequence[str]) -> None:
    """Time training steps and sampling of NOVA on random latents. No data, no VAE, no text encoder.

    FLOPs are the model's own `flops()`, which counts one noised copy of each patch, times three (backward = 2 x forward); what
    `loss_repeat` adds in the head is work but is not counted. MFU is their rate over that of a large matrix product, measured first
    or given by --peak-tflops. A batch that does not fit is halved. `--profile` adds, for each line, the kinds of kernels in one
    training step, or in sampling with 4 sets of tokens a frame, with the time in which the GPU had nothing to do.
    """
    options = Options("nova", nova.__doc__, argv)
    options.add_argument("--cases", nargs="+", default=list(CASES), choices=tuple(CASES))
    options.add_argument("--parts", nargs="+", default=["train", "sample"], choices=("train", "sample"))
    options.add("--blocks", ["eager", "compiled"], ["eager"], choices=("eager", "compiled"))
    options.add("--batch", 4, 1)
    options.add("--dtype", "bf16", "fp32", choices=("fp32", "bf16", "fp16"))
    options.add("--checkpoint", "none", "none", type=level_of, help="a value of grad_checkpoint")
    options.add("--steps", 10, 2)
    options.add("--sampling-steps", [64, 25], [4, 2], nargs=2, metavar=("SETS", "DIFFUSION"))
    options.add_argument("--peak-tflops", type=float)
    options.add_argument("--profile", action="store_true", help="where the time goes")
    args, device = options.parse(), options.device
    prefer_expandable_segments()
    peak = args.peak_tflops or matmul_tflops(device, to_torch_dtype(args.dtype))
    options.heading(f"{args.dtype}, {TEXT_LEN} text tokens", f"MFU of {peak:.4g} TFLOP/s")
    table = None

    def measured(case: Case, part: str, blocks: str, batch: int) -> Result:
        torch.manual_seed(0)
        reset_peak(device)
        with device:
            model: Any = MODELS.build(case.model)
            x = torch.randn(batch, model.in_channels, *case.latent)
            cond = {"y": torch.randn(batch, 1, TEXT_LEN, model.text_embed.proj.in_features)}
            if "flow" in model.micro_conditions:
                cond |= {"fps": torch.full((batch,), 12.0), "flow": torch.full((batch,), 5.0)}
        if part == "train":
            how = {"dtype": args.dtype, "compiled": blocks == "compiled", "checkpoint": args.checkpoint}
            engine = denoisers.start(model, World(0, 1, device), **how)
            run = profiled = denoisers.training_step(engine, x, cond, "nova")
        else:
            if blocks == "compiled":
                compile_blocks(model.transformer_blocks())
            model.requires_grad_(False).eval()
            sets, steps = args.sampling_steps
            run, profiled = (sampling(model, x, cond, (n, steps), args.dtype) for n in (sets, PROFILED_SETS))
        warm_up(run, at_least=6 if part == "train" else 1)
        taken = seconds(run, device, args.steps if part == "train" else 1)
        memory = peak_gib(device)
        profile = None
        if args.profile:
            profiled()
            alone = seconds(profiled, device)
            profile = kernels_of(lambda: seconds(profiled, device), device), alone
        return Result(taken, model.flops(case.latent, TEXT_LEN), memory, profile)

    for name in args.cases:
        case = (TOY if args.toy else CASES)[name]
        T, H, W = case.latent
        for blocks in args.blocks:
            for part in args.parts:
                table = table if table and not args.profile else Table(COLUMNS)
                batch = args.batch
                while (found := attempt(partial(measured, case, part, blocks, batch))) == OUT_OF_MEMORY and batch > 1:
                    batch //= 2
                what = f"{part}, {blocks}"
                if isinstance(found, str):
                    table.row(name, what, batch, found)
                    continue
                rate = batch / found.seconds
                mfu = FORWARDS_IN_A_STEP * rate * found.flops / peak / 1e12 if part == "train" else None
                table.row(name, what, batch, found.seconds * 1e3, rate * T * H * W / 4, mfu, rate * T, found.peak_gib)
                if found.profile:
                    print_profile(found.profile[0], 1, found.profile[1] * 1e3)


def sampling(
    model: Any, z: torch.Tensor, cond: dict[str, torch.Tensor], steps: tuple[int, int], dtype: str
) -> Callable[[], None]:
    """A function that samples a batch of whole videos with guidance; `steps`: sets of tokens a frame, diffusion steps of each."""
    sets, diffusion = steps
    scheduler = SCHEDULERS.build({"type": "nova", "num_sampling_steps": sets, "num_diffusion_steps": diffusion})
    null = {"y": model.null_condition(len(z))[:, :, :TEXT_LEN]}
    short = to_torch_dtype(dtype)

    def run() -> None:
        rngs = generators(0, "benchmark", ids=range(len(z)), device=z.device)
        with torch.autocast(z.device.type, short, enabled=short != torch.float32):
            scheduler.sample(model, z, cond, null=null, generators=rngs)

    return run


def warm_up(run: Callable[[], None], at_least: int) -> None:
    """Run until there was no new program for some runs: in training another number of patches is visible each time."""
    quiet = 0
    for number in range(MAX_WARMUP):
        programs = counters["stats"]["unique_graphs"]
        run()
        quiet = quiet + 1 if counters["stats"]["unique_graphs"] == programs else 0
        if number + 1 >= at_least and quiet >= at_least:
            return
