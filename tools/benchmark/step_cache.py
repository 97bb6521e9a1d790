"""What step caches cost in quality and gain in time: samples with a cache against the same samples without.

    python -m tools.benchmark.step_cache [--config CONFIG] [--ckpt-path W] [--num-prompts 6] [--caches NAME ...]

Prompts, seeds and noise are the same, so that all of the difference is the cache's. PSNR, SSIM and LPIPS compare each video with
the one without a cache; they say how much changes, not whether it is worse. Times are of the sampling steps alone, the
median of --repeats runs. The defaults take the shipped model of the quickstart.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opensora.acceleration.step_cache.build import build_step_cache
from opensora.acceleration.step_cache.steps import StepCache
from opensora.inference.pipeline import VideoPipeline
from opensora.inference.prompts import load_prompts
from opensora.models.vae.metrics import LPIPS, Quality, mean_quality, quality
from opensora.utils.errors import UserError, exit_on_user_error

CACHES: dict[str, dict[str, Any]] = {
    "pab": {"type": "pab"},
    "pab 2/4/6, 100-850, no MLP": {"type": "pab", "ranges": (2, 4, 6), "thresholds": (100, 850), "mlp": {}},
    "pab 5/7/9, 100-850, no MLP": {"type": "pab", "ranges": (5, 7, 9), "thresholds": (100, 850), "mlp": {}},
    "teacache 0.05": {"type": "teacache", "threshold": 0.05},
    "teacache 0.1": {"type": "teacache", "threshold": 0.1},
    "teacache 0.2": {"type": "teacache", "threshold": 0.2},
}


class Run(NamedTuple):
    """Videos of all prompts, and how long their steps took."""

    videos: Tensor  # [B, 3, T, H, W] in [-1, 1]
    seconds: float
    reused: float  # share of what the cache looked at


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    changes = {} if args.ckpt_path is None else {"ckpt_path": args.ckpt_path}
    pipeline = VideoPipeline.from_pretrained(args.config, **changes)
    prompts = load_prompts(None, args.prompt_path)[: args.num_prompts]
    metric = lpips_or_none()
    device = (
        torch.cuda.get_device_name() if pipeline.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{args.config}, {len(prompts)} prompts one by one, {pipeline.scheduler.num_sampling_steps} steps, guidance "
        f"{pipeline.scheduler.cfg_scale}; {device}, torch {torch.__version__}\n"
    )
    print("| cache | reused | s per video | speed-up | PSNR dB | SSIM | LPIPS |\n|---|---|---|---|---|---|---|")
    exact = sampled(pipeline, prompts, None, args.repeats)
    print(f"| none | - | {exact.seconds / len(prompts):.2f} | 1 | - | - | - |", flush=True)
    for name in args.caches:
        run = sampled(pipeline, prompts, build_step_cache(CACHES[name], pipeline.model), args.repeats)
        same = mean_quality(compared(run.videos, exact.videos, metric))
        print(
            f"| {name} | {run.reused:.0%} | {run.seconds / len(prompts):.2f} | {exact.seconds / run.seconds:.2f} | "
            f"{same.psnr:.1f} | {same.ssim:.3f} | {same.lpips:.3f} |",
            flush=True,
        )


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart/inference.py")
    parser.add_argument("--ckpt-path", help="other weights than the config's")
    parser.add_argument("--prompt-path", default="assets/texts/quickstart.txt")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=tuple(CACHES))
    parser.add_argument("--repeats", type=int, default=3, help="runs, of whose times the median is taken")
    return parser.parse_args()


def sampled(pipeline: VideoPipeline, prompts: list[str], cache: StepCache | None, repeats: int) -> Run:
    """Every prompt's video, by itself, with a cache or without."""
    if cache is not None:
        cache.install(pipeline.model.transformer_blocks())
    pipeline.step_cache = cache
    videos, times = [], []
    for _ in range(repeats):
        clock = Clock(pipeline.device)
        videos = [pipeline([text], prompt_indices=[i], on_step=clock) for i, text in enumerate(prompts)]
        times.append(clock.seconds)
    reused = 0.0
    if cache is not None:
        reused = cache.reused.total() / max(cache.reused.total() + cache.computed.total(), 1)
        cache.remove()
    pipeline.step_cache = None
    return Run(torch.cat(videos), statistics.median(times), reused)


class Clock:
    """Adds up the seconds between the sampling steps; called after each of them. The first step of a video is left out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self._last = device, 0.0, 0.0

    def __call__(self, step: Any) -> None:
        """After a step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if step.index > 0:
            self.seconds += now - self._last
        self._last = now


def compared(videos: Tensor, exact: Tensor, metric: nn.Module | None) -> list[Quality]:
    """Each video against its exact one."""
    return [quality(a[None], b[None], metric) for a, b in zip(videos, exact, strict=True)]


def lpips_or_none() -> nn.Module | None:
    """The metric, if its package is installed; without it the column says nan."""
    try:
        return LPIPS("alex")
    except UserError:
        return None


if __name__ == "__main__":
    main()
