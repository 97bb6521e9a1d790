"""What the compiler gives: its modes, how long a process waits for its first step, and pipelines of diffusers at many sizes."""

import argparse
import copy
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from opensora.acceleration.compiler import compile, compile_pipe, load_compiled, quantize_pipe, save_compiled
from opensora.checkpoint.pretrained import hub_error
from opensora.config.command_line import parse_bool
from opensora.utils.errors import UserError
from tools.benchmark import denoisers
from tools.benchmark.denoisers import Inputs
from tools.benchmark.measure import (
    Options,
    Table,
    attempt,
    peak_gib,
    processor_s,
    psnr,
    relative_error,
    reset_peak,
    seconds,
    synchronize,
)

MODES = (
    "jit", "max-autotune", "max-optimize", "O2", "O3", "O3:freezing", "cudagraphs", "O3:cudagraphs", "O3:cudagraphs:freezing", "O3:quant",
)  # fmt: skip
MODE_COLUMNS = {"mode": "", "first call s": ".1f", "ms per step": ".2f", "speed-up": ".2f", "PSNR dB": ".1f"}
CACHE_COLUMNS = {
    "process": "", "first step s": ".1f", "of the first": ".0%", "compiler's imports s": ".1f", "loading s": ".1f",
    "processor s": ".1f", "of the first ": ".0%", "before that: processor s": ".1f", "programs found": "d", "compiled": "d",
    "against the first": ".2g",
}  # fmt: skip
SIZE_COLUMNS = {"size": "", "first call s": ".1f", "s": ".3f", "steps/s": ".2f", "programs": "d", "peak GiB": ".1f"}
STEP = 16  # pixels: of sizes that the pipelines take


def compile_modes(argv: Sequence[str]) -> None:
    """Time one forward pass of a denoiser, eager and compiled with each mode of `opensora.acceleration.compiler`.

    All modes run on the same weights and inputs in one process, under bf16 autocast. A row gives the first call (which compiles),
    the median of later ones, and the PSNR of the prediction against eager's, with eager's largest value as peak; `eager fp32`
    against eager says how far bf16 itself is. A mode that cannot run on this machine gives its reason in place of numbers.
    """
    options = Options("compile_modes", compile_modes.__doc__, argv)
    add_model(options)
    options.add("--batch", 2, 2, help="2 is one video with guidance")
    options.add("--modes", list(MODES), ["jit"])
    options.add("--repeats", 20, 3, help="calls, of whose times the median is taken")
    args = options.parse()
    model, batch = build(args, args.batch, options.device)
    options.heading(f"{args.model}, latents {args.latent}, batch {args.batch}, bf16")
    table = Table(MODE_COLUMNS)
    eager, first_s, eager_s = timed(model, batch, args.repeats)
    table.row("eager", first_s, eager_s * 1e3, 1.0, float("inf"))
    exact, first_s, fp32_s = timed(model, batch, args.repeats, short=False)
    table.row("eager fp32", first_s, fp32_s * 1e3, eager_s / fp32_s, psnr(exact, eager))
    for mode in args.modes:
        # block by block, but for a CUDA graph, which holds the whole model, and frozen blocks, which share no program
        how = {"mode": mode, "regional": None if {"cudagraphs", "freezing"} & set(mode.split(":")) else True}
        found = attempt(lambda: timed(compile(copy.deepcopy(model), options=how), batch, args.repeats), UserError)  # noqa: B023
        if isinstance(found, str):
            table.row(mode, found)
            continue
        prediction, first_s, step_s = found
        table.row(mode, first_s, step_s * 1e3, eager_s / step_s, psnr(prediction, eager))


def add_model(options: Options) -> None:
    """Which model, at which size."""
    options.add_argument("--model", default="STDiT-XL/2", help="a registered denoiser; --toy makes it small")
    options.add("--latent", [16, 32, 32], [4, 8, 8], nargs=3, metavar=("T", "H", "W"))


def build(args: argparse.Namespace, batch: int, device: torch.device) -> tuple[Any, Inputs]:
    """The model without gradients, and what it is called with."""
    size = {"text_len": 16, **denoisers.TOY} if args.toy else {}
    model = denoisers.build(args.model, device, **size).eval().requires_grad_(requires_grad=False)
    return model, denoisers.inputs(model, batch, args.latent, device)


@torch.no_grad()
def timed(model: Any, batch: Inputs, repeats: int, *, short: bool = True) -> tuple[Tensor, float, float]:
    """The prediction, seconds of the first call, and the median of `repeats` others, in bf16 unless not `short`."""
    device = batch.z.device
    found: list[Tensor] = []

    def call() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=short):
            found[:] = [model(batch.z, batch.t, **batch.cond)]

    # two more to warm up: CUDA graphs are recorded in the second
    times = [seconds(call, device) for _ in range(1 + 2 + repeats)]
    return found[0].float(), times[0], statistics.median(times[3:])


def compile_cache(argv: Sequence[str]) -> None:
    """Time how long a process waits for its first compiled step: with empty caches, an earlier one's caches, saved programs.

    Each row is a process of its own. `loaded` has an empty cache and what `save_compiled` wrote; the goal is under 35 % of `first`.
    The first step is timed from a built model to its end, loading of saved programs included; importing PyTorch and building the
    model are not, for no cache can help there. `processor s` counts the same stretch with the compilers that it started, and does
    not depend on what else the machine does; `before that` counts the processor seconds of importing PyTorch and building the model.
    The last column is |found - first| / |first| of the predictions: 0, or the rounding of other kernels where a mode chooses them by
    time.
    """
    options = Options("compile_cache", compile_cache.__doc__, argv, device="any")
    add_model(options)
    options.add_argument("--mode", default="O3")
    options.add_argument("--whole", action="store_true", help="compile the whole model, not block by block")
    options.add_argument("--process", choices=("save", "plain", "load"), help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = options.parse()
    if args.process is not None:
        print(json.dumps(first_call(args, options.device)))
        return
    options.heading()
    table = Table(CACHE_COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        first: dict[str, Any] = {}
        for name, process, cache in (("first", "save", "a"), ("loaded", "load", "b"), ("same cache", "plain", "a")):
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{cache}", "TRITON_CACHE_DIR": f"{folder}/{cache}/triton"}
            command = [sys.executable, *["-m", "tools.benchmark", "compile_cache"], *argv]
            command += ["--process", process, "--folder", folder]
            done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
            run = json.loads(done.stdout.splitlines()[-1])
            first = first or run
            error = relative_error(*(torch.load(one["prediction"], weights_only=True) for one in (run, first)))
            if not error <= 0.01:  # in bf16, compilers choose kernels by time, and another kernel may round otherwise
                raise UserError(f"{name}: the prediction is {error:.2g} away from that of the first process.")
            shares = [run[key] / first[key] for key in ("seconds", "processor")]
            table.row(
                name, run["seconds"], shares[0], run["imports"], run["loading"], run["processor"], shares[1], run["before"],
                run["hits"], run["misses"], error,
            )  # fmt: skip


@torch.no_grad()
def first_call(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds from a built model to the end of its first step, loading of saved programs included."""
    model, batch = build(args, 2, device)
    before, start = processor_s(), time.perf_counter()
    importlib.import_module("torch._inductor.compile_fx")  # `compile` would, and what it imports
    imports = time.perf_counter() - start
    compile(model, options={"mode": args.mode, "regional": not args.whole})
    loading = 0.0
    if args.process == "load":
        loading = seconds(lambda: load_compiled(args.folder / "saved", model), device)
    with torch.autocast(device.type, torch.bfloat16):
        prediction = model(batch.z, batch.t, **batch.cond)
    synchronize(device)
    taken, processor = time.perf_counter() - start, processor_s() - before
    if args.process == "save":
        save_compiled(args.folder / "saved", model)
    file = args.folder / f"{args.process}.pt"
    torch.save(prediction.float().cpu(), file)
    times = {"seconds": taken, "imports": imports, "loading": loading, "processor": processor, "before": before}
    counters = torch._dynamo.utils.counters
    # a program found in the outer of the two caches is usually looked up in the inner one too
    hits = max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
    return {**times, "prediction": str(file), "hits": hits, "misses": counters["inductor"]["fxgraph_cache_miss"]}


def text_to_image(argv: Sequence[str]) -> None:
    """Time any text-to-image pipeline of diffusers, compiled or not: OneDiff's benchmark of this name, with its options.

    A row is a size, in height x width: the first call, the median of later ones, the steps a second of the denoising loop in these,
    the programs that the first call compiled, and peak memory. The first row is --height x --width. With "dynamic": true, a model
    that needs no program of its own for another size has 0 in the others. On a GPU weights are in fp16, as there.
    """
    options = Options("text_to_image", text_to_image.__doc__, argv, device="any")
    options.add_argument("--model", required=True, help="folder or hub id of a pipeline of diffusers")
    for flag, default, about in (
        ("--scheduler", "none", "a class of diffusers; none: the pipeline's own"),
        ("--prompt", "a white dog runs over a meadow", "what to draw"),
        ("--steps", 30, "of the scheduler"),
        ("--height", 1024, "pixels"),
        ("--width", 1024, "pixels"),
        ("--seed", 1, "of the noise"),
        ("--repeats", 3, "calls after the first of a size"),
        ("--compiler", "nexfort", "none, nexfort, compile, compile-max-autotune, or another backend"),
        ("--compiler-config", {}, "JSON, see docs/how-to/compiler.md"),
        ("--run_multiple_resolutions", False, "1: also 3/4 and 1/2 of the sides"),
        ("--run_rare_resolutions", False, "1: also sizes that few models are trained at"),
        ("--output-image", "", "file for the first image"),
    ):
        kind: Any = {bool: parse_bool, dict: json.loads}.get(type(default), type(default))
        options.add_argument(flag, default=default, type=kind, help=about)
    about = "JSON of what quantize_pipe takes, or nothing"
    options.add_argument("--quantize", "--quantize-config", nargs="?", type=json.loads, const={}, help=about)
    args, device = options.parse(), options.device
    import diffusers  # the other benchmarks need no pipelines

    try:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        pipe: Any = diffusers.DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
    except (OSError, ValueError) as error:
        raise hub_error(args.model, "pipeline", error) from error
    if args.scheduler != "none":
        if not hasattr(diffusers, args.scheduler):
            raise UserError(
                f"--scheduler {args.scheduler}: diffusers has no such class; none keeps the pipeline's own."
            )
        pipe.scheduler = getattr(diffusers, args.scheduler).from_config(pipe.scheduler.config)
    if args.quantize is not None:
        quantize_pipe(pipe, **args.quantize)
    backend, config = args.compiler, args.compiler_config
    if backend in ("compile", "compile-max-autotune"):  # OneDiff's names for torch.compile
        backend, config = "inductor", {"mode": backend.partition("-")[2], **config}
    compile_pipe(pipe, backend=backend, options=config)
    loops: list[float] = []
    images: list[Any] = []

    @contextmanager
    def progress_bar(iterable: Any = None, total: int | None = None) -> Iterator[tqdm]:
        synchronize(device)
        start = time.perf_counter()
        yield tqdm(iterable, total=total, disable=True)
        synchronize(device)
        loops.append(time.perf_counter() - start)

    pipe.progress_bar = progress_bar  # around the loop over steps, in every pipeline
    binning = "use_resolution_binning" in inspect.signature(pipe.__call__).parameters
    fixed = {"use_resolution_binning": False} if binning else {}
    sides = args.height, args.width
    shares = product((1, 0.75, 0.5), repeat=2) if args.run_multiple_resolutions else [(1, 1)]
    sizes = [[max(STEP, round(s * n / STEP) * STEP) for s, n in zip(sides, of, strict=True)] for of in shares]
    if args.run_rare_resolutions:
        sizes += [[sides[0] + a * STEP, sides[1] + b * STEP] for a, b in ((1, 3), (3, 1), (5, 2))]
    options.heading(f"{args.steps} steps")
    table = Table(SIZE_COLUMNS)
    programs = torch._dynamo.utils.counters["stats"]
    for height, width in dict.fromkeys(map(tuple, sizes)):

        def call(size: dict[str, int] = {"height": height, "width": width}) -> None:  # noqa: B006
            rng = torch.Generator(device).manual_seed(args.seed)
            images.extend(pipe(args.prompt, num_inference_steps=args.steps, generator=rng, **size, **fixed).images)

        before = programs["unique_graphs"]
        reset_peak(device)
        first, compiled = seconds(call, device), programs["unique_graphs"] - before
        loops.clear()
        later = statistics.median(seconds(call, device) for _ in range(args.repeats))
        rate = args.steps / statistics.median(loops)
        table.row(f"{height}x{width}", first, later, rate, compiled, peak_gib(device))
    if args.output_image:
        images[0].save(args.output_image)
