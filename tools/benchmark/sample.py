"""Seconds per video at real sizes, with random weights: how the denoiser samples and the VAE decodes.

    python -m tools.benchmark.sample [--cases stdit stdit3] [--ways eager compiled graphs pab offload-model offload-block]
    torchrun --standalone --nproc_per_node 2 -m tools.benchmark.sample --ways dp sp cfg

`stdit` is STDiT-XL/2 at 16x256x256 with 100 steps, `stdit3` STDiT3-XL/2 at 51x480x848 with 30, both with guidance and with
text features of the real size; text is encoded once and is not timed. `dp` gives each process its own video, `sp` and
`cfg` share one: seconds per video are those of the whole run over the videos that came of it. `graphs` compiles the whole denoiser,
which takes minutes, and replays it as one CUDA graph, as `--compiler inductor --compiler-config '{"mode": "cudagraphs"}'` of
scripts/inference.py does: the host launches one thing a forward instead of a thousand. The first run of each way, in which kernels
are compiled, is not timed. The estimate is what `opensora.inference.memory` says before the run. PSNR compares the latents with
those of the case's first way, from the same noise, with their largest value as peak. `--cases toy` tries it all on a CPU.
"""

import argparse
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora.acceleration.cfg_parallel import share_videos
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.compiler import compile
from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.acceleration.sequence_parallel import parallelise
from opensora.acceleration.step_cache.build import build_step_cache
from opensora.inference.memory import estimate
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


CASES = {
    "stdit": Case(
        {"type": "STDiT-XL/2", "space_scale": 0.5},
        {"type": "VideoAutoencoderKL", "architecture": SD_VAE, "micro_batch_size": 4},
        {"type": "iddpm", "num_sampling_steps": 100, "cfg_scale": 7.0, "cfg_channel": 3},
        16,
        (256, 256),
        (120, 4096),
    ),
    "stdit3": Case(
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
    ),
    "toy": Case(
        {"type": "STDiT3-XS/2"},
        {"type": "VideoAutoencoderKL", "architecture": {**SD_VAE, "block_out_channels": (32, 32)}},
        {"type": "rflow", "num_sampling_steps": 8, "cfg_scale": 7.0},
        4,
        (32, 48),
        (20, 64),
    ),
}
WAYS = ("eager", "compiled", "graphs", "pab", "pab-compiled", "offload-model", "offload-block", "dp", "sp", "cfg")
SHARED = ("dp", "sp", "cfg")


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
            print("| case | way | s per video | steps s | decode s | peak GiB | estimate GiB | PSNR dB |")
            print("|---|---|---|---|---|---|---|---|")
        for case in args.cases:
            first: Tensor | None = None
            for way in args.ways:
                row, latents = measured(args, case, way, world)
                if world.is_main:
                    print(f"| {case} | {way} | {row} | {psnr(latents, first)} |", flush=True)
                first = latents if first is None else first
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
    return parser.parse_args()


def measured(args: argparse.Namespace, case: str, way: str, world: World) -> tuple[str, Tensor | None]:
    """The cells of one line, or why there are none; and the latents, on the CPU."""
    try:
        pipeline = build(args, CASES[case], way, world)
        request = Request(
            items=as_items(["a lake"], [world.rank if way == "dp" else 0]),
            num_frames=CASES[case].num_frames,
            image_size=CASES[case].image_size,
            fps=24,
            seed=0,
        )
        needed = estimate(pipeline, request, pipeline.vae.latent_size((request.num_frames, *request.image_size)))
        pipeline.sample(request)  # compiles, picks kernels
        cells, latents = timed(pipeline, request, world, way)
        return f"{cells} | {needed.peak(pipeline.place.policy) / 2**30:.1f}", latents
    except UserError as error:
        if "out of memory" not in str(error):
            raise
        return "out of memory | - | - | - | -", None
    finally:
        gc.collect()
        torch._dynamo.reset()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def psnr(latents: Tensor | None, first: Tensor | None) -> str:
    """Of the latents of a way, against those of the first."""
    if latents is None or first is None:
        return "-"
    error = (latents - first).square().mean()
    return f"{float(10 * torch.log10(first.abs().max() ** 2 / error)):.1f}" if error > 0 else "equal"


def timed(pipeline: VideoPipeline, request: Request, world: World, way: str) -> tuple[str, Tensor]:
    """Seconds per video, of the steps, of decoding; peak of memory; and the latents."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    now = clock(world)
    latents = pipeline.sample(request, decode=False).latents[0]
    steps = clock(world) - now
    decoded = pipeline.sharing.leads
    now = clock(world)
    if decoded:
        decode(pipeline, latents, request.num_frames)
    decoding = clock(world) - now
    videos = world.size if way == "dp" else 1
    peak = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else 0.0
    return f"{(steps + decoding) / videos:.2f} | {steps:.2f} | {decoding:.2f} | {peak:.1f}", latents.float().cpu()


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
    model: Any = awake(MODELS.build({**case.model, **text})).to(dtype)
    for part in (model, vae):
        part.requires_grad_(False).eval()
    sharing = share_videos(world, world.size if way == "sp" else 1, cfg_parallel=way == "cfg")
    if sharing.sp_group is not None:
        parallelise(model, sharing.sp_group)
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
        sharing=sharing,
        step_cache=cache,
    )


def clock(world: World) -> float:
    """The time when all processes have done their work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()


if __name__ == "__main__":
    main()
