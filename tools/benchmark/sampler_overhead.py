"""What a sampler adds to the model: the time of a step apart from the model, and how often the host waits for the device.

    python -m tools.benchmark.sampler_overhead [--model DiT-XL/2] [--batch 2] [--steps 50] [--device cuda]

A step of Heun's method calls the model twice. The time of a step is that of sampling with a model that costs nothing (its output is there already), guidance included: the
doubled batch, the combination, the update, the noise. It is set against one forward pass of a real model on the doubled
batch, eager, bf16 under autocast on a GPU. In real sampling the host prepares the next kernels while the device is at work on
the model, so this is an upper bound.

Waits are counted by torch.profiler: cudaStreamSynchronize, cudaDeviceSynchronize, cudaEventSynchronize, copies from device to
host, and aten::item. Both numbers are differences between runs of 2N and of N steps, so what is done once a sample cancels.
Without a GPU the defaults are small, and only aten::item can be counted.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from opensora.registry import MODELS, SCHEDULERS
from opensora.utils.seed import generators

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH", "aten::item")
DPM = {"type": "dpm-solver"}
SAMPLERS: dict[str, dict[str, Any]] = {
    "IDDPM, ancestral": {"type": "iddpm"},
    "IDDPM, DDIM": {"type": "iddpm", "sampler": "ddim"},
    "DPM-Solver++ 2, multistep": DPM,
    "DPM-Solver++ 3, multistep": {**DPM, "order": 3},
    "DPM-Solver++ 2, SDE": {**DPM, "algorithm_type": "sde-dpmsolver++"},
    "DPM-Solver 3, singlestep": {**DPM, "algorithm_type": "dpmsolver", "method": "singlestep", "order": 3},
    "DPM-Solver++ 2, dynamic thresholding": {**DPM, "thresholding": "dynamic"},
    "Rectified flow, Euler": {"type": "rflow"},
    "Rectified flow, Heun": {"type": "rflow", "sampler": "heun"},
}
MASKS = ("none", "boolean", "fractional")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="DiT-XL/2" if on_gpu else "DiT-S/2")
    parser.add_argument("--latent", type=int, nargs=3, default=(1, 32, 32), metavar=("T", "H", "W"))
    parser.add_argument("--batch", type=int, default=2, help="before guidance doubles it")
    parser.add_argument("--steps", type=int, default=50 if on_gpu else 10)
    args = parser.parse_args()
    device, latent = torch.device(args.device), tuple(args.latent)
    forward = forward_seconds(args.model, args.batch, latent, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{where}, torch {torch.__version__}; one forward of {args.model}, latent {'x'.join(map(str, latent))}, batch "
        f"2 x {args.batch}: {1e3 * forward:.2f} ms\n"
    )
    print("| sampler | frame mask | noise drawn on | µs/step beside the model | of a forward | waits/step |")
    print("|---|---|---|---|---|---|")
    for name, config in SAMPLERS.items():
        for mask in (
            MASKS if name in ("DPM-Solver++ 2, multistep", "IDDPM, ancestral", "Rectified flow, Euler") else MASKS[:1]
        ):
            for drawn in dict.fromkeys(("cpu", device.type)):
                run = sampling(config, args.batch, latent, device, mask, drawn)
                seconds, waits = step_seconds(run, args.steps, device), waits_per_step(run, args.steps)
                cells = [name, mask, drawn, f"{1e6 * seconds:.0f}", f"{seconds / forward:.2%}", f"{waits:g}"]
                print(f"| {' | '.join(cells)} |", flush=True)


def sampling(
    config: dict[str, Any], batch: int, latent: tuple[int, ...], device: torch.device, mask: str, drawn: str
) -> Callable[[int], Tensor]:
    """`run(num_steps)` samples with a model that costs nothing."""
    z = torch.randn(batch, 4, *latent, device=device)
    output = torch.randn(2 * batch, 8, *latent, device=device)
    cond, null = ({"y": torch.zeros(batch, 1, 1, 1, device=device)} for _ in range(2))
    frames = {
        "none": None,
        "boolean": torch.ones(batch, latent[0], device=device, dtype=torch.bool),
        "fractional": torch.full((batch, latent[0]), 0.9, device=device),
    }[mask]

    def free(x: Tensor, timestep: Tensor, y: Tensor, **cond: Tensor) -> Tensor:
        return output[: len(x)]

    def run(num_steps: int) -> Tensor:
        scheduler = SCHEDULERS.build({**config, "num_sampling_steps": num_steps})
        rngs = generators(0, "overhead", ids=range(batch), device=drawn)
        return scheduler.sample(free, z, cond, null=null, guidance_scale=4.0, mask=frames, generators=rngs)

    return run


def step_seconds(run: Callable[[int], Tensor], num_steps: int, device: torch.device) -> float:
    """Of one step; the least of five differences, as other work on the machine can only add."""

    def seconds(steps: int) -> float:
        wait_for(device)
        start = time.perf_counter()
        run(steps)
        wait_for(device)
        return time.perf_counter() - start

    run(num_steps)
    short, long = (min(seconds(steps) for _ in range(5)) for steps in (num_steps, 2 * num_steps))
    return max(long - short, 0.0) / num_steps


def waits_per_step(run: Callable[[int], Tensor], num_steps: int) -> float:
    """How often a step waits for the device."""

    def waits(steps: int) -> int:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as profiler:
            run(steps)
        return sum(event.count for event in profiler.key_averages() if event.key.startswith(WAITS))

    return (waits(2 * num_steps) - waits(num_steps)) / num_steps


def forward_seconds(name: str, batch: int, latent: tuple[int, ...], device: torch.device) -> float:
    """One forward pass without gradients, the mean of several."""
    torch.manual_seed(0)
    with device:
        model = MODELS.build({"type": name, "input_size": latent}).eval()
        x, y = torch.randn(2 * batch, model.in_channels, *latent), model.null_condition(2 * batch)
        timestep = torch.full((2 * batch,), 500.0)

    def forward() -> None:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            model(x, timestep, y)

    repeats = 50 if device.type == "cuda" else 3
    for _ in range(3):
        forward()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        forward()
    wait_for(device)
    return (time.perf_counter() - start) / repeats


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
