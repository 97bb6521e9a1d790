"""Time one forward pass of a denoiser, eager and compiled with each mode of `opensora.acceleration.compiler`.

    python -m tools.benchmark.compile_modes [--model STDiT-XL/2] [--latent 16 32 32] [--batch 2] [--modes MODE ...] [--toy]

All modes run on the same weights and inputs in one process, under bf16 autocast. A row gives the first call (which compiles),
the median of later ones, and the PSNR of the prediction against eager's, with eager's largest value as peak; `eager fp32`
against eager says how far bf16 itself is. A mode that cannot run on this machine gives its reason in place of numbers.
"""

import argparse
import copy
import statistics
import time
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from opensora.acceleration.compiler import compile
from opensora.models.denoiser import Denoiser
from opensora.registry import MODELS
from opensora.utils.errors import UserError, exit_on_user_error
from tools.benchmark.heading import heading

MODES = (
    "jit",
    "max-autotune",
    "max-optimize",
    "O2",
    "O3",
    "O3:freezing",
    "cudagraphs",
    "O3:cudagraphs",
    "O3:cudagraphs:freezing",
    "O3:quant",
)
TOY = {"hidden_size": 64, "depth": 2, "num_heads": 2, "caption_channels": 64, "model_max_length": 16}

Model = TypeVar("Model", bound=nn.Module)


class Timed(NamedTuple):
    """A prediction and how long it took."""

    prediction: Tensor
    first_s: float
    step_ms: float


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model: Any = MODELS.build({"type": args.model, **(TOY if args.toy else {})})
    model = awake(model).to(device).eval().requires_grad_(requires_grad=False)
    cond = inputs(model, args.batch, tuple(args.latent), device)
    print(heading(device, "tools.benchmark.compile_modes"))
    print(f"{args.model}, latents {args.latent}, batch {args.batch}, bf16\n")
    print("| mode | first call s | ms per step | speed-up | PSNR dB |\n|---|---|---|---|---|")
    eager = timed(model, cond, args.repeats)
    print(row("eager", eager, eager), flush=True)
    print(row("eager fp32", timed(model, cond, args.repeats, enabled=False), eager), flush=True)
    for mode in args.modes:
        torch._dynamo.reset()
        try:
            compiled = compile(copy.deepcopy(model), options={"mode": mode, "regional": regional(mode)})
            print(row(mode, timed(compiled, cond, args.repeats), eager), flush=True)
        except UserError as error:
            print(f"| {mode} | {error} | | | |", flush=True)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="STDiT-XL/2", help="a registered denoiser")
    parser.add_argument("--latent", nargs=3, type=int, default=[16, 32, 32], metavar=("T", "H", "W"))
    parser.add_argument("--batch", type=int, default=2, help="2 is one video with guidance")
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--repeats", type=int, default=20, help="calls, of whose times the median is taken")
    parser.add_argument("--toy", action="store_true", help="a tiny model and tiny latents, for a CPU")
    args = parser.parse_args()
    if args.toy:
        args.latent, args.repeats = [4, 8, 8], 3
    return args


def regional(mode: str) -> bool | None:
    """Block by block, where the mode allows it: a CUDA graph holds the whole model, and frozen blocks share no program."""
    return None if {"cudagraphs", "freezing"} & set(mode.split(":")) else True


def awake(model: Model) -> Model:
    """Weights in place of zero initialisations, which would hide every difference."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


def inputs(model: Denoiser, batch: int, size: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Keyword arguments of the model; x [B, 4, T, H, W]."""
    null = model.null_condition(batch)
    y = torch.randn(null.shape) if null.is_floating_point() else null
    cond = {
        "x": torch.randn(batch, 4, *size),
        "timestep": torch.linspace(100, 900, batch),
        "y": y,
        "fps": torch.full((batch,), 24.0),
        "height": torch.full((batch,), 8.0 * size[1]),
        "width": torch.full((batch,), 8.0 * size[2]),
        "num_frames": torch.full((batch,), float(size[0])),
    }
    if y.shape[2] > 1:
        cond["mask"] = torch.arange(y.shape[2]).expand(batch, -1) < y.shape[2] // 2
    return {name: value.to(device) for name, value in cond.items()}


@torch.no_grad()
def timed(model: Any, cond: dict[str, Tensor], repeats: int, *, enabled: bool = True) -> Timed:
    """The first call by itself, then the median of `repeats` others."""
    device = cond["x"].device
    times = []
    for _ in range(1 + 2 + repeats):  # two more to warm up: CUDA graphs are recorded in the second
        synchronize(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            prediction = model(**cond)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return Timed(prediction.float(), times[0], 1e3 * statistics.median(times[3:]))


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(name: str, run: Timed, eager: Timed) -> str:
    """Of the table."""
    error = (run.prediction - eager.prediction).square().mean()
    psnr = 10 * torch.log10(eager.prediction.abs().max() ** 2 / error) if error > 0 else float("inf")
    return f"| {name} | {run.first_s:.1f} | {run.step_ms:.2f} | {eager.step_ms / run.step_ms:.2f} | {float(psnr):.1f} |"


if __name__ == "__main__":
    main()
