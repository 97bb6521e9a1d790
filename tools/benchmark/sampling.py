"""Sampling: seconds per video at real sizes, what step caches change, what samplers add to the model."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from opensora.acceleration.cfg_parallel import make_parallel_plan
from opensora.acceleration.compile import compile_blocks
from opensora.acceleration.compiler import compile
from opensora.acceleration.distributed import World, init_world, shutdown
from opensora.acceleration.sequence_parallel import parallelise
from opensora.acceleration.step_cache.build import build_step_cache
from opensora.acceleration.step_cache.steps import StepCache
from opensora.inference.memory import estimate
from opensora.inference.pipeline import Request, VideoPipeline
from opensora.inference.prompts import as_items, load_prompts
from opensora.models.text_encoder.condition import TextCondition
from opensora.models.vae.metrics import LPIPS, mean_quality, quality
from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.dtype import to_torch_dtype
from opensora.utils.errors import UserError
from opensora.utils.seed import generators
from tools.benchmark import denoisers
from tools.benchmark.measure import (
    OUT_OF_MEMORY,
    Options,
    Table,
    attempt,
    peak_gib,
    psnr,
    reset_peak,
    seconds,
    synchronize,
)

SAMPLE_COLUMNS = {
    "case": "", "way": "", "s per video": ".2f", "steps s": ".2f", "speed-up": ".2f", "decode s": ".2f", "peak GiB": ".1f",
    "estimate GiB": ".1f", "PSNR dB": ".1f",
}  # fmt: skip
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
    {"type": "rflow", "shift": "resolution", "num_sampling_steps": 30, "cfg_scale": 7.0},
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


@dataclass(frozen=True)
class Run:
    """What came of a way; seconds are of the run, in which `videos` were made."""

    steps_s: float
    decode_s: float | None  # None: not decoded
    videos: int
    peak_gib: float | None  # None on a CPU
    estimate_gib: float | None  # None: not made, where nothing is decoded
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


def sample(argv: Sequence[str]) -> None:
    """Time seconds per video at real sizes, with random weights: how the denoiser samples and the VAE decodes.

        torchrun --standalone --nproc_per_node 2 -m tools.benchmark sample --ways dp sp cfg
        torchrun --standalone --nproc_per_node 4 -m tools.benchmark sample --cases stdit3-720p --ways compiled sp2 sp4 cfg cfg-sp2

    `stdit` is STDiT-XL/2 at 16x256x256 with 100 steps, `stdit3` STDiT3-XL/2 at 51x480x848 with 30, `stdit3-720p` the same at
    51x720x1280, and `stdit3-16s` at 408x360x640 at once; all with guidance and with text features of the real size; text is encoded
    once and is not timed. `dp` gives each process its own video: seconds per video are those of the whole run over the videos that
    came of it. `sp` lets all processes share the tokens of one video, `sp2` and `sp4` so many, `cfg` lets two share the halves of
    guidance, `cfg-sp2` two times two. Where that is fewer than there are, all teams make the same video at the same time, and so
    does each process of `compiled`: so one command compares them. The speed-up is that of the steps, against the case's first way.
    Videos are decoded by one process, whatever the way; --decode first does it, and the estimate, for the first way only. `graphs`
    compiles the whole denoiser, which takes minutes, and replays it as one CUDA graph, as `--compiler inductor --compiler-config
    '{"mode": "cudagraphs"}'` of scripts/inference.py does: the host launches one thing a forward instead of a thousand. The first run
    of each way, in which kernels are compiled, is not timed; --warmup-steps makes it shorter. The estimate is what
    `opensora.inference.memory` says before the run. PSNR compares the latents with those of the case's first way, from the same noise,
    with their largest value as peak.
    """
    options = Options("sample", sample.__doc__, argv)
    options.add("--cases", ["stdit", "stdit3"], ["toy"], choices=tuple(CASES))
    options.add("--ways", ["eager", "compiled", "pab", "offload-model"], ["eager", "offload-model"], choices=WAYS)
    options.add("--dtype", "bf16", "fp32", choices=("fp32", "bf16", "fp16"))
    options.add_argument("--steps", type=int, help="sampling steps instead of the case's")
    options.add_argument("--warmup-steps", type=int, help="of the run that is not timed; default as the timed one")
    options.add_argument("--decode", default="all", choices=("all", "first"), help="for which ways the VAE is timed")
    args = options.parse()
    world = init_world(args.device)
    if world.size == 1 and (alone := [way for way in args.ways if way in SHARED]):
        raise UserError(
            f"{alone[0]} needs several processes: torchrun --nproc_per_node 2 -m tools.benchmark sample ..."
        )

    def measured(case: Case, way: str, *, decoded: bool) -> Run:
        steps = {} if args.steps is None else {"num_sampling_steps": args.steps}
        timed = SCHEDULERS.build({**case.scheduler, **steps})
        pipeline = build_pipeline(case, way, world, timed, args.dtype)
        request = Request(
            items=as_items(["a lake"], [world.rank if way == "dp" else 0]),
            num_frames=case.num_frames,
            image_size=case.image_size,
            fps=24,
            seed=0,
        )
        needed = None
        if decoded:
            needed = estimate(pipeline, len(request.items), request.num_frames, request.image_size) / 2**30
        if args.warmup_steps is not None:
            pipeline.scheduler = SCHEDULERS.build({**case.scheduler, "num_sampling_steps": args.warmup_steps})
        pipeline.sample(request, decode=decoded)  # compiles, and picks kernels
        pipeline.scheduler = timed
        reset_peak(world.device)
        now = clock(world.device)
        latents = pipeline.sample(request, decode=False).latents[0]
        steps_s, decode_s = clock(world.device) - now, None
        if decoded:
            now = clock(world.device)
            if pipeline.plan.is_leader:
                with torch.no_grad(), pipeline.place.using("vae"):
                    pipeline.vae.decode(latents.to(pipeline.device), request.num_frames).cpu()
            decode_s = clock(world.device) - now
        videos = world.size if way == "dp" else 1
        return Run(steps_s, decode_s, videos, peak_gib(world.device), needed, latents.float().cpu())

    table = None
    try:
        if world.is_main:
            options.heading(f"processes: {world.size}, {args.dtype}")
            table = Table(SAMPLE_COLUMNS)
        for case in args.cases:
            first: Run | None = None
            for way in args.ways:
                decoded = first is None or args.decode == "all"
                # PyTorch's error, or the pipeline's report of it
                found = attempt(partial(measured, CASES[case], way, decoded=decoded), UserError)
                if isinstance(found, str) and OUT_OF_MEMORY not in found:
                    raise UserError(found)
                if table:
                    table.row(case, way, *([OUT_OF_MEMORY] if isinstance(found, str) else sample_cells(found, first)))
                first = first if first or isinstance(found, str) else found
    finally:
        shutdown()


def sample_cells(run: Run, first: Run | None) -> list[Any]:
    """The figures of a line; `first` is the case's first way, to compare with."""
    whole = None if run.decode_s is None else (run.steps_s + run.decode_s) / run.videos
    speed_up = same = None
    if first is not None:
        speed_up = first.steps_s / first.videos / (run.steps_s / run.videos)
        same = "equal" if torch.equal(run.latents, first.latents) else psnr(run.latents, first.latents)
    return [whole, run.steps_s, speed_up, run.decode_s, run.peak_gib, run.estimate_gib, same]


def build_pipeline(case: Case, way: str, world: World, scheduler: Any, number_format: str) -> VideoPipeline:
    """A pipeline with random weights."""
    torch.manual_seed(0)
    dtype = to_torch_dtype(number_format)
    vae = MODELS.build({**case.vae, "dtype": number_format})
    text = {"caption_channels": case.text[1], "in_channels": vae.out_channels}
    model: Any = denoisers.build(case.model["type"], world.device, case.text[0], **{**case.model, **text}).to(dtype)
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
            block.compile()  # around the cache, which breaks the graph
    elif way == "graphs":
        compile(model, options={"mode": "cudagraphs"})
    elif way == "compiled" or way in SHARED:
        compile_blocks(model.transformer_blocks())
    return VideoPipeline(
        model,
        vae,
        Features(*case.text),
        scheduler,
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


def clock(device: torch.device) -> float:
    """The time when all processes have done their work."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------------------- step caches

CACHES: dict[str, dict[str, Any]] = {
    "pab": {"type": "pab"},
    "pab 2/4/6, 100-850, no MLP": {"type": "pab", "ranges": (2, 4, 6), "thresholds": (100, 850), "mlp": {}},
    "pab 5/7/9, 100-850, no MLP": {"type": "pab", "ranges": (5, 7, 9), "thresholds": (100, 850), "mlp": {}},
    "teacache 0.05": {"type": "teacache", "threshold": 0.05},
    "teacache 0.1": {"type": "teacache", "threshold": 0.1},
    "teacache 0.2": {"type": "teacache", "threshold": 0.2},
}
CACHE_COLUMNS = {
    "cache": "", "reused": ".0%", "s per video": ".2f", "speed-up": ".2f", "PSNR dB": ".1f", "SSIM": ".3f", "LPIPS": ".3f",
}  # fmt: skip


def step_cache(argv: Sequence[str]) -> None:
    """Compare samples with a step cache with the same samples without: what caches cost in quality and gain in time.

    Prompts, seeds and noise are the same, so that all of the difference is the cache's. PSNR, SSIM and LPIPS compare each video with
    the one without a cache; they say how much changes, not whether it is worse. Times are of the sampling steps alone, the first of
    each video left out, the median of --repeats runs. The defaults take the shipped model of the quickstart.
    """
    options = Options("step_cache", step_cache.__doc__, argv, device="any")
    options.add_argument("--config", default="configs/quickstart/inference.py")
    options.add_argument("--ckpt-path", help="other weights than the config's")
    options.add_argument("--prompt-path", default="assets/texts/quickstart.txt")
    options.add("--num-prompts", 6, 1)
    options.add("--caches", list(CACHES), ["teacache 0.2"], choices=tuple(CACHES))
    options.add("--repeats", 3, 1, help="runs, of whose times the median is taken")
    args = options.parse()
    changes = {} if args.ckpt_path is None else {"ckpt_path": args.ckpt_path}
    pipeline = VideoPipeline.from_pretrained(args.config, device=args.device, **changes)
    prompts = load_prompts(None, args.prompt_path)[: args.num_prompts]
    try:
        metric: nn.Module | None = LPIPS("alex")
    except UserError:  # its package is not installed
        metric = None
    steps, scale = pipeline.scheduler.num_sampling_steps, pipeline.scheduler.cfg_scale
    options.heading(f"{args.config}, {len(prompts)} prompts one by one, {steps} steps, guidance {scale}")
    table = Table(CACHE_COLUMNS)
    exact, exact_s, _ = sampled(pipeline, prompts, None, args.repeats)
    table.row("none", None, exact_s / len(prompts), 1.0)
    for name in args.caches:
        cache = build_step_cache(CACHES[name], pipeline.model)
        videos, taken, reused = sampled(pipeline, prompts, cache, args.repeats)
        same = mean_quality([quality(a[None], b[None], metric) for a, b in zip(videos, exact, strict=True)])
        table.row(name, reused, taken / len(prompts), exact_s / taken, same.psnr, same.ssim, same.lpips)


def sampled(
    pipeline: VideoPipeline, prompts: list[str], cache: StepCache | None, repeats: int
) -> tuple[Tensor, float, float | None]:
    """Videos [B, 3, T, H, W] of all prompts, one by one; the seconds of their steps; the share that a cache used again."""
    if cache is not None:
        cache.install(pipeline.model.transformer_blocks())
    pipeline.step_cache = cache
    videos, totals = [], []
    for _ in range(repeats):
        times: list[float] = []

        def on_step(step: Any) -> None:
            synchronize(pipeline.device)
            now = time.perf_counter()
            if step.index > 0:
                times.append(now - on_step.last)  # type: ignore[attr-defined]  # noqa: B023
            on_step.last = now  # type: ignore[attr-defined]

        videos = [pipeline([text], prompt_indices=[i], on_step=on_step) for i, text in enumerate(prompts)]
        totals.append(sum(times))
    reused = None
    if cache is not None:
        reused = cache.reused.total() / max(cache.reused.total() + cache.computed.total(), 1)
        cache.remove()
    pipeline.step_cache = None
    return torch.cat(videos), statistics.median(totals), reused


# ------------------------------------------------------------------------------------- what a sampler adds to the model

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH", "aten::item")
DPM = {"type": "dpm-solver"}
SAMPLERS: dict[str, dict[str, Any]] = {
    "IDDPM, ancestral": {"type": "iddpm"},
    "IDDPM, DDIM": {"type": "iddpm", "sampler": "ddim"},
    "DPM-Solver++ 2, multistep": DPM,
    "DPM-Solver++ 3, multistep": {**DPM, "order": 3},
    "DPM-Solver++ 2, SDE": {**DPM, "algorithm_type": "sde-dpmsolver++"},
    "DPM-Solver 3, singlestep": {**DPM, "algorithm_type": "dpmsolver", "method": "singlestep", "order": 3},
    "Rectified flow, Euler": {"type": "rflow"},
    "Rectified flow, Heun": {"type": "rflow", "sampler": "heun"},
}
WITH_MASKS = ("IDDPM, ancestral", "DPM-Solver++ 2, multistep", "Rectified flow, Euler")
OVERHEAD_COLUMNS = {
    "sampler": "", "frame mask": "", "noise drawn on": "", "µs/step without the model": ".0f", "of a forward": ".2%", "waits/step": "g",
}  # fmt: skip


def sampler_overhead(argv: Sequence[str]) -> None:
    """Time what a sampler adds to the model: a step apart from the model, and how often the host waits for the device.

    A step of Heun's method calls the model twice. The time of a step is that of sampling with a model that costs nothing (its output
    is there already), guidance included: the doubled batch, the combination, the update, the noise. It is set against one forward
    pass of a real model on the doubled batch, eager, bf16 under autocast on a GPU. In real sampling the host prepares the next
    kernels while the device is at work on the model, so this is an upper bound.

    Waits are counted by torch.profiler: cudaStreamSynchronize, cudaDeviceSynchronize, cudaEventSynchronize, copies from device to
    host, and aten::item. Both numbers are differences between runs of 2N and of N steps, so what is done once a sample cancels.
    Without a GPU only aten::item can be counted.
    """
    options = Options("sampler_overhead", sampler_overhead.__doc__, argv)
    options.add("--model", "DiT-XL/2", "DiT-S/2")
    options.add("--latent", [1, 32, 32], [1, 8, 8], nargs=3, metavar=("T", "H", "W"))
    options.add("--batch", 2, 1, help="before guidance doubles it")
    options.add("--steps", 50, 4)
    args, device = options.parse(), options.device
    model = denoisers.build(args.model, device, input_size=tuple(args.latent)).eval()
    batch = denoisers.inputs(model, 2 * args.batch, args.latent, device)

    def forward() -> None:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            model(batch.z, batch.t, batch.cond["y"])

    seconds(forward, device, 3)
    forward_s = seconds(forward, device, 50 if device.type == "cuda" else 3)
    options.heading(f"one forward of {args.model}, batch 2 x {args.batch}: {1e3 * forward_s:.2f} ms")
    table = Table(OVERHEAD_COLUMNS)
    masks = {
        "none": None,
        "boolean": torch.ones(args.batch, args.latent[0], device=device, dtype=torch.bool),
        "fractional": torch.full((args.batch, args.latent[0]), 0.9, device=device),
    }
    for name, config in SAMPLERS.items():
        for mask in masks if name in WITH_MASKS else ["none"]:
            for drawn in dict.fromkeys(("cpu", device.type)):
                run = free_sampling(config, args.batch, args.latent, device, masks[mask], drawn)
                run(args.steps)
                # the least of five, as other work on the machine can only add
                short, long = (
                    min(seconds(partial(run, n), device) for _ in range(5)) for n in (args.steps, 2 * args.steps)
                )
                taken = max(long - short, 0.0) / args.steps
                table.row(name, mask, drawn, 1e6 * taken, taken / forward_s, waits_per_step(run, args.steps))


def free_sampling(
    config: dict[str, Any], batch: int, latent: Sequence[int], device: torch.device, mask: Tensor | None, drawn: str
) -> Callable[[int], Tensor]:
    """`run(num_steps)` samples with a model that costs nothing; `drawn`: the device on which noise is drawn."""
    z = torch.randn(batch, 4, *latent, device=device)
    output = torch.randn(2 * batch, 8, *latent, device=device)
    cond, null = ({"y": torch.zeros(batch, 1, 1, 1, device=device)} for _ in range(2))

    def run(num_steps: int) -> Tensor:
        scheduler = SCHEDULERS.build({**config, "num_sampling_steps": num_steps})
        rngs = generators(0, "overhead", ids=range(batch), device=drawn)
        options: dict[str, Any] = {"null": null, "guidance_scale": 4.0, "mask": mask, "generators": rngs}
        return scheduler.sample(lambda x, timestep, y, **_: output[: len(x)], z, cond, **options)

    return run


def waits_per_step(run: Callable[[int], Tensor], num_steps: int) -> float:
    """How often a step waits for the device."""

    def waits(steps: int) -> int:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as profiler:
            run(steps)
        return sum(event.count for event in profiler.key_averages() if event.key.startswith(WAITS))

    return (waits(2 * num_steps) - waits(num_steps)) / num_steps
