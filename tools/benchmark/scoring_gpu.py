"""Clips a second of the scorers that want a GPU, and of a captioner, with networks of real size and random weights.

    python -m tools.benchmark.scoring_gpu
    python -m tools.benchmark.scoring_gpu --size tiny --clips 2 --frame 90 160 --new-tokens 8      on a CPU

Timed are the scorers' own classes and functions: `aesthetic` (three frames of a clip) and `matching` (one, and its caption) with
CLIP ViT-L/14, `flow` with RAFT large (four pairs of 324 x 576), captions with LLaVA 1.5 7B (four frames, a fixed number of
tokens). The clips are moving WebP pictures, so it needs no PyAV; decoding of videos: docs/benchmarks/scoring.md. What runs on
the processor has one core. "Difference": of scores from those with float32, the largest.
"""

import argparse
import copy
import csv
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers.utils import logging as transformers_logging

from opensora.utils.errors import UserError
from tools.benchmark import random_networks
from tools.benchmark.heading import heading, quiet
from tools.caption.captioner import Captioner, Frames
from tools.caption.prompts import prompt_of
from tools.caption.vision_language import VisionLanguageModel
from tools.scoring.aesthetic import Aesthetic, apply_head, head_layers
from tools.scoring.clip import DTYPES, Clip, clip_model, prepared
from tools.scoring.fields import flow_method
from tools.scoring.frames import key_frames, pairs, shrunk
from tools.scoring.registry import scorer

CAPTIONS = Path(__file__).resolve().parents[2] / "assets" / "clips" / "clips.csv"
FRAMES, FRAME_MS = 5, 400  # of a clip: four pairs a third of a second apart
FILES = 4  # different clips
WHAT = ("aesthetic", "matching", "flow", "caption")
Seconds = tuple[float, float | None, float | None, float, float]  # reading, preparing on a core, here, network, all
HEAD = (
    "| scorer | dtype | clips at a time | reading WebP, one core, ms/clip | preparing, one core | preparing, here | network "
    "| clips/s of preparing here and network | clips/s of all | difference |"
)
CAPTION_HEAD = (
    "| captions | clips at a time | tokens before and of an answer | preparing, one core, ms/clip | network, ms/clip "
    "| clips/s of both | peak GiB |"
)


class Work(NamedTuple):
    """What all rows share."""

    folder: Path
    size: str
    device: str
    paths: list[Path]
    captions: list[str]  # one of each path
    seconds: float
    new_tokens: int


def main() -> None:
    """Measure and print."""
    args = read_arguments()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    print(heading(torch.device(args.device), "tools.benchmark.scoring_gpu"))
    print(f"clips of {args.frame[1]} x {args.frame[0]} pixels\n", flush=True)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        texts = captions()
        files = write_clips(Path(folder), args.frame)
        paths = list(itertools.islice(itertools.cycle(files), args.clips))
        of_paths = list(itertools.islice(itertools.cycle(texts), args.clips))
        work = Work(Path(folder), args.size, args.device, paths, of_paths, args.seconds, args.new_tokens)
        if {"aesthetic", "matching", "flow"} & set(args.only):
            print(f"{HEAD}\n{'|---' * HEAD.count(' |')}|", flush=True)
        if {"aesthetic", "matching"} & set(args.only):
            with told("CLIP"):
                random_networks.write_clip(work.folder / "clip", work.size, texts, work.device)
        for name in ("aesthetic", "matching"):
            if name in args.only:
                with told(name):
                    clip_rows(name, work)
        if "flow" in args.only:
            with told("flow"):
                flow_row(work)
        if "caption" in args.only:
            clip_model.cache_clear()
            flow_method.cache_clear()
            print(f"\n{CAPTION_HEAD}\n{'|---' * CAPTION_HEAD.count(' |')}|", flush=True)
            with told("caption"):
                caption_rows(work, texts, args.caption_clips)


def clip_rows(name: str, work: Work) -> None:
    """A scorer with CLIP, in the dtypes that it may have."""
    settings = {"model": str(work.folder / "clip"), "device": work.device}
    if name == "aesthetic":
        settings["head"] = str(work.folder / "head.safetensors")
        random_networks.write_head(Path(settings["head"]), work.size)
    variants: list[Any] = [scorer(name, **settings, dtype=dtype) for dtype in ("float32", "float16")]
    reading, frames = once(lambda: [key_frames(path, variants[0].points) for path in work.paths])
    on_core = copy.copy(clip_model(settings["model"], work.device, "float32"))
    on_core.device = "cpu"  # frames are prepared there; its network stays where it is
    core, _ = once(lambda: [prepared(on_core, of_clip) for of_clip in frames])
    exact: list[float] = []
    for chosen in variants:
        exact = clip_row(chosen, work, frames, (reading, core), exact)


def clip_row(
    chosen: Any, work: Work, frames: Sequence[Frames], before: tuple[float, float], exact: list[float]
) -> list[float]:
    """Measure and print; `before`: the seconds of reading and of preparing on a core.

    Returns the scores that the next are compared with: `exact`, or its own where there are none.
    """
    clip = clip_model(chosen.model, work.device, chosen.dtype)
    here, pixels = repeated(lambda: torch.cat([prepared(clip, of_clip) for of_clip in frames]), work)
    network, _ = repeated(network_of(chosen, clip, pixels, work), work)
    whole, rows = once(lambda: chosen.score(work.paths, text=work.captions))
    scores = [float(row[chosen.columns[0]]) for row in rows]
    exact = exact or scores
    difference = max(abs(a - b) for a, b in zip(scores, exact, strict=True))
    name = "aesthetic" if isinstance(chosen, Aesthetic) else "matching"
    print_row(name, chosen.dtype, len(work.paths), (*before, here, network, whole), f"{difference:.2g}")
    return exact


def network_of(chosen: Any, clip: Clip, pixels: torch.Tensor, work: Work) -> Callable[[], Any]:
    """What a scorer does with prepared frames; tokenizing is part of it."""
    if isinstance(chosen, Aesthetic):
        layers = head_layers(chosen.head, clip.model.config.projection_dim, work.device)
        return lambda: apply_head(layers, clip.embed_images(pixels))
    return lambda: F.cosine_similarity(clip.embed_images(pixels), clip.embed_texts(work.captions))


def flow_row(work: Work) -> None:
    """The pairs of one clip at a time, as the scorer does."""
    chosen: Any = scorer("flow", method=random_networks.write_flow(work.folder, work.size), device=work.device)
    paths = work.paths[:FILES]
    reading, found = once(lambda: [pairs(path, chosen.fps, chosen.pairs) for path in paths])
    method = flow_method(chosen.method, chosen.device)
    network, _ = repeated(lambda: [method(of_clip) for of_clip in found], work)
    whole, rows = once(lambda: chosen.score(paths))
    if bad := [row["error"] for row in rows if "error" in row]:
        raise UserError(bad[0])
    name = f"flow, {chosen.method.partition(':')[0]}"
    print_row(name, "float32", 1, (reading, None, None, network, whole), "-", len(paths))


def caption_rows(work: Work, texts: Sequence[str], batches: Sequence[int]) -> None:
    """A captioner's own function on decoded frames."""
    dtype = "bfloat16" if work.device == "cuda" else "float32"
    captioner = Captioner(model="llava", max_tokens=work.new_tokens, device=work.device, dtype=dtype)
    processor, model = random_networks.llava(work.size, texts, work.device, DTYPES[dtype], work.new_tokens)
    describe = VisionLanguageModel(captioner, processor, model)
    points = np.linspace(0, 1, captioner.frames).tolist()
    frames = [[shrunk(frame, captioner.long_side) for frame in key_frames(path, points)] for path in work.paths[:FILES]]
    prompt = prompt_of(captioner.prompt)
    describe(list(itertools.islice(itertools.cycle(frames), batches[0])), [prompt] * batches[0], 0)  # the first is slow
    for clips in batches:
        caption_row(describe, list(itertools.islice(itertools.cycle(frames), clips)), [prompt] * clips, work)


def caption_row(describe: VisionLanguageModel, pictures: Sequence[Frames], prompts: Sequence[str], work: Work) -> None:
    """One call, measured and printed."""
    if work.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    core, inputs = once(lambda: describe.inputs(pictures, prompts))
    whole, _ = once(lambda: describe(pictures, prompts, 0))
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if work.device == "cuda" else "-"
    clips = len(pictures)
    tokens = f"{inputs['input_ids'].shape[1]} + {work.new_tokens}"
    times = f"{1000 * core / clips:.1f} | {1000 * (whole - core) / clips:.1f} | {clips / whole:.2f}"
    name = "LLaVA 1.5 7B" if work.size == "real" else "tiny LLaVA"
    print(f"| {name}, {describe.settings.dtype} | {clips} | {tokens} | {times} | {peak} |", flush=True)


def print_row(name: str, dtype: str, batch: int, seconds: Seconds, last: str, clips: int = 0) -> None:
    """Args: `seconds` for all `clips`, which are `batch` where they are not given; see HEAD."""
    clips = clips or batch
    cells = ["-" if one is None else f"{1000 * one / clips:.3g}" for one in seconds[:-1]]
    here, network, whole = seconds[2] or 0.0, seconds[3], seconds[4]
    print(
        f"| {name} | {dtype} | {batch} | {' | '.join(cells)} | {clips / (here + network):.3g} | {clips / whole:.3g} | {last} |",
        flush=True,
    )


def once(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, with what the GPU has left to do, and what it returns."""
    finish()
    start = time.perf_counter()
    result = function()
    finish()
    return time.perf_counter() - start, result


def repeated(function: Callable[[], Any], work: Work) -> tuple[float, Any]:
    """Seconds of a call when it has been called twice, the mean of as many as fit into `work.seconds`."""
    for _ in range(2):
        result = function()
    spent, calls = 0.0, 0
    while not calls or spent < work.seconds:
        took, _ = once(function)
        spent, calls = spent + took, calls + 1
    return spent / calls, result


def finish() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def told(name: str) -> Iterator[None]:
    """A row that fails does not end the others."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (whatever it is, the table says so)
        first = (str(error).splitlines() or [""])[0]
        print(f"| {name} | not measured: {type(error).__name__}: {first[:200]} |", flush=True)


def write_clips(folder: Path, size: Sequence[int]) -> list[Path]:
    """Moving pictures of smooth noise, as compressible as a blurred film."""
    rng = np.random.default_rng(0)
    paths = []
    for number in range(FILES):
        coarse = [Image.fromarray(rng.integers(0, 256, (18, 32, 3), dtype=np.uint8)) for _ in range(FRAMES)]
        frames = [frame.resize((size[1], size[0]), Image.Resampling.BICUBIC) for frame in coarse]
        paths.append(folder / f"{number}.webp")
        frames[0].save(paths[-1], save_all=True, append_images=frames[1:], duration=FRAME_MS, quality=80, method=0)
    return paths


def captions() -> list[str]:
    """Those of the repository's clips."""
    with CAPTIONS.open(newline="", encoding="utf-8") as file:
        return [row["text"] for row in csv.DictReader(file)]


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("real", "tiny"), default="real" if on_gpu else "tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--clips", type=int, default=16, help="at a time; 16 is what the command does")
    parser.add_argument("--caption-clips", type=int, nargs="+", default=[16, 4], metavar="N", help="at a time")
    parser.add_argument("--frame", type=int, nargs=2, default=[720, 1280], metavar=("H", "W"), help="of a clip")
    parser.add_argument("--new-tokens", type=int, default=100, help="of a caption")
    parser.add_argument("--seconds", type=float, default=0.5, help="of repeating, for a network and for preparing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
