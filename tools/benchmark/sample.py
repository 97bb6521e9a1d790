"""Seconds per video at real sizes, with random weights: how the denoiser samples and the VAE decodes.

    python -m tools.benchmark.sample [--cases stdit stdit3] [--ways eager compiled graphs pab offload-model offload-block]
    torchrun --standalone --nproc_per_node 2 -m tools.benchmark.sample --ways dp sp cfg
    torchrun --standalone --nproc_per_node 4 -m tools.benchmark.sample --cases stdit3-720p --ways compiled sp2 sp4 cfg cfg-sp2

`stdit` is STDiT-XL/2 at 16x256x256 with 100 steps, `stdit3` STDiT3-XL/2 at 51x480x848 with 30, `stdit3-720p` the same at 51x720x1280, and
`stdit3-16s` at 408x360x640 in one piece; all with guidance and with text features of the real size; text is encoded once and is not
timed. `dp` gives each process its own video: seconds per video are those of the whole run over the videos that came of it. `sp` lets all
processes share the tokens of one video, `sp2` and `sp4` so many, `cfg` lets two share the halves of guidance, `cfg-sp2` two times two.
Where that is fewer than there are, all teams make the same video at the same time, and so does each process of `compiled`: so one command
compares them. The speed-up is that of the steps, against the case's first way. Videos are decoded by one process, whatever the way;
--decode first does it, and the estimate, for the first way only. `graphs` compiles the whole denoiser,
which takes minutes, and replays it as one CUDA graph, as `--compiler inductor --compiler-config '{"mode": "cudagraphs"}'` of
scripts/inference.py does: the host launches one thing a forward instead of a thousand. The first run of each way, in which kernels
are compiled, is not timed; --warmup-steps makes it shorter. The estimate is what `opensora.inference.memory` says before the run. PSNR compares the latents with
those of the case's first way, from the same noise, with their largest value as peak. `--cases toy` tries it all on a CPU.
"""

import argparse
import gc
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.cfg_parallel import make_parallel_plan
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.compiler import compile
from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.acceleration.sequence_parallel import parallelise
from opensora.acceleration.step_cache.build import build_step_cache
from opensora.inference.memory import estimate_once
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.request import Request, as_items
from opensora.models.text_encoder.condition import TextCondition
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError, exit_on_user_error
from tools.benchmark.compile_modes import awake
from tools.benchmark.heading import heading

SD_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
}


@dataclass(frozen=True)
class Case:
    """A model at a size."""

    model: dict[str, Any]
    vae: dict[str, Any]
    scheduler: dict[str, Any]
    num_frames: int
    image_size: tuple[int, int]
    text: tuple[int, int]  # tokens and channels


STDIT3 = Case(
    {"type": "STDiT3-XL/2", "qk_norm": True},
    {
        "type": "OpenSoraVAE_V1_2",
        "vae_2d": {"type": "VideoAutoencoderKL", "architecture": SD_VAE, "micro_batch_size": 4},
        "micro_frame_size": 17,
    },
    {"type": "rflow", "use_timestep_transform": True, "num_sampling_steps": 30, "cfg_scale": 7.0},
    51,
    (480, 848),
    (300, 4096),
)
CASES = {
    "stdit": Case(
        {"type": "STDiT-XL/2", "space_scale": 0.5},
        {"type": "VideoAutoencoderKL", "architecture": SD_VAE, "micro_batch_size": 4},
        {"type": "iddpm", "num_sampling_steps": 100, "cfg_scale": 7.0, "cfg_channel": 3},
        16,
        (256, 256),
        (120, 4096),
    ),
    "stdit3": STDIT3,
    "stdit3-720p": replace(STDIT3, image_size=(720, 1280)),
    "stdit3-16s": replace(STDIT3, num_frames=408, image_size=(360, 640)),
    "toy": Case(
        {"type": "STDiT3-XS/2"},
        {"type": "VideoAutoencoderKL", "architecture": {**SD_VAE, "block_out_channels": (32, 32)}},
        {"type": "rflow", "num_sampling_steps": 8, "cfg_scale": 7.0},
        4,
        (32, 48),
        (20, 64),
    ),
}
SHARED = ("dp", "sp", "sp2", "sp4", "sp8", "cfg", "cfg-sp2", "cfg-sp4")
WAYS = ("eager", "compiled", "graphs", "pab", "pab-compiled", "offload-model", "offload-block", *SHARED)


COLUMNS = ("case", "way", "s per video", "steps s", "speed-up", "decode s", "peak GiB", "estimate GiB", "PSNR dB")


@dataclass(frozen=True)
class Run:
    """What came of a way; seconds are of the run, in which `videos` were made."""

    steps_s: float
    decode_s: float | None  # None: not decoded
    videos: int
    peak_bytes: int  # 0 on a CPU
    estimate_bytes: int | None  # None: not made, where nothing is decoded
    latents: Tensor  # of one video, on the CPU


class Features(nn.Module):
    """Stands for a text encoder: features of its size for any text, without its weights."""

    def __init__(self, length: int, channels: int) -> None:
        super().__init__()
        self.model_max_length, self.output_dim = length, channels

    def encode(self, texts: list[str]) -> TextCondition:
        """y [B, 1, L, C], mask [B, L]; half of the tokens are there."""
        generator = torch.Generator().manual_seed(len(texts))
        y = torch.randn(len(texts), 1, self.model_max_length, self.output_dim, generator=generator)
        return TextCondition(y, torch.arange(self.model_max_length).expand(len(texts), -1) < self.model_max_length // 2)


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    world = init_world(args.device)
    if world.size == 1 and (alone := [way for way in args.ways if way in SHARED]):
        raise UserError(
            f"{alone[0]} needs several processes: torchrun --nproc_per_node 2 -m tools.benchmark.sample ..."
        )
    try:
        if world.is_main:
            print(f"{heading(world.device, 'tools.benchmark.sample')}, processes: {world.size}, {args.dtype}\n")
            print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for case in args.cases:
            first: Run | None = None
            for way in args.ways:
                run = measured(args, case, way, world, decoded=first is None or args.decode == "all")
                if world.is_main:
                    print(f"| {case} | {way} | {' | '.join(cells(run, first))} |", flush=True)
                first = run if first is None else first
    finally:
        shutdown()


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=["stdit", "stdit3"], choices=tuple(CASES))
    parser.add_argument("--ways", nargs="+", default=["eager", "compiled", "pab", "offload-model"], choices=WAYS)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--steps", type=int, help="sampling steps instead of the case's")
    parser.add_argument("--warmup-steps", type=int, help="of the run that is not timed; default as the timed one")
    parser.add_argument("--decode", default="all", choices=("all", "first"), help="for which ways the VAE is timed")
    return parser.parse_args()


def measured(args: argparse.Namespace, case: str, way: str, world: World, *, decoded: bool) -> Run | None:
    """Sample once to compile and once to time it; None: out of memory."""
    try:
        pipeline = build(args, CASES[case], way, world)
        request = Request(
            items=as_items(["a lake"], [world.rank if way == "dp" else 0]),
            num_frames=CASES[case].num_frames,
            image_size=CASES[case].image_size,
            fps=24,
            seed=0,
        )
        estimated = None
        if decoded:  # takes seconds for a large video
            latent_size = pipeline.vae.latent_size((request.num_frames, *request.image_size))
            estimated = estimate_once(pipeline, request, latent_size).peak(pipeline.place.policy)
        warm_up(args, pipeline, request, CASES[case], decoded=decoded)
        return replace(timed(pipeline, request, world, way, decoded=decoded), estimate_bytes=estimated)
    except UserError as error:
        if "out of memory" not in str(error):
            raise
        return None
    finally:
        gc.collect()
        torch._dynamo.reset()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def warm_up(args: argparse.Namespace, pipeline: VideoPipeline, request: Request, case: Case, *, decoded: bool) -> None:
    """Compile, and pick kernels."""
    scheduler = pipeline.scheduler
    if args.warmup_steps is not None:
        pipeline.scheduler = SCHEDULERS.build({**case.scheduler, "num_sampling_steps": args.warmup_steps})
    pipeline.sample(request, decode=decoded)
    pipeline.scheduler = scheduler


def cells(run: Run | None, first: Run | None) -> list[str]:
    """The figures of a line, or why there are none; `first` is the case's first, to compare with."""
    if run is None:
        return ["out of memory", *["-"] * (len(COLUMNS) - 3)]
    return [
        "-" if run.decode_s is None else f"{(run.steps_s + run.decode_s) / run.videos:.2f}",
        f"{run.steps_s:.2f}",
        "-" if first is None else f"{first.steps_s / first.videos / (run.steps_s / run.videos):.2f}",
        "-" if run.decode_s is None else f"{run.decode_s:.2f}",
        f"{run.peak_bytes / 2**30:.1f}",
        "-" if run.estimate_bytes is None else f"{run.estimate_bytes / 2**30:.1f}",
        "-" if first is None else psnr(run.latents, first.latents),
    ]


def psnr(latents: Tensor, first: Tensor) -> str:
    """Of the latents of a way, against those of the first."""
    error = (latents - first).square().mean()
    return f"{float(10 * torch.log10(first.abs().max() ** 2 / error)):.1f}" if error > 0 else "equal"


def timed(pipeline: VideoPipeline, request: Request, world: World, way: str, *, decoded: bool) -> Run:
    """Seconds of the steps and of decoding, peak of memory, and the latents."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    now = clock(world)
    latents = pipeline.sample(request, decode=False).latents[0]
    steps_s = clock(world) - now
    decode_s = None
    if decoded:
        now = clock(world)
        if pipeline.plan.is_leader:
            decode(pipeline, latents, request.num_frames)
        decode_s = clock(world) - now
    peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    return Run(steps_s, decode_s, world.size if way == "dp" else 1, peak, None, latents.float().cpu())


@torch.no_grad()
def decode(pipeline: VideoPipeline, latents: Tensor, num_frames: int) -> Tensor:
    """The pictures of one video, on the CPU."""
    with pipeline.place.using("vae"):
        return pipeline.vae.decode(latents.to(pipeline.device), num_frames).cpu()


def build(args: argparse.Namespace, case: Case, way: str, world: World) -> VideoPipeline:
    """A pipeline with random weights."""
    torch.manual_seed(0)
    dtype = to_torch_dtype(args.dtype)
    vae = MODELS.build({**case.vae, "dtype": args.dtype})
    text = {"caption_channels": case.text[1], "model_max_length": case.text[0], "in_channels": vae.out_channels}
    with world.device:
        model: Any = awake(MODELS.build({**case.model, **text})).to(dtype)
    for part in (model, vae):
        part.requires_grad_(False).eval()
    plan = make_parallel_plan(world, sp_size(way, world), cfg_parallel=way.startswith("cfg"))
    if plan.sp_group is not None:
        parallelise(model, plan.sp_group)
    cache = build_step_cache({"type": "pab"} if way.startswith("pab") else None, model)
    if cache is not None:
        cache.install(model.transformer_blocks(), compiled=way == "pab-compiled")
    if way == "pab-compiled":
        for block in model.transformer_blocks():
            block.compile()  # around the cache, in pieces
    elif way == "graphs":
        compile(model, options={"mode": "cudagraphs"})
    elif way == "compiled" or way in SHARED:
        compile_blocks(model.transformer_blocks())
    steps = {} if args.steps is None else {"num_sampling_steps": args.steps}
    return VideoPipeline(
        model,
        vae,
        Features(*case.text),
        SCHEDULERS.build({**case.scheduler, **steps}),
        device=world.device,
        dtype=dtype,
        offload={"offload-model": "model", "offload-block": "block"}.get(way, "none"),  # type: ignore[arg-type]
        plan=plan,
        step_cache=cache,
    )


def sp_size(way: str, world: World) -> int:
    """Processes that share the tokens of a video."""
    count = way.rpartition("sp")[2] if "sp" in way else "1"
    return int(count) if count else world.size


def clock(world: World) -> float:
    """The time when all processes have done their work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()


if __name__ == "__main__":
    main()
