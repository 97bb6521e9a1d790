"""Where the time of a training step goes, by kinds of kernels: matrix products, attention, fused pointwise kernels, copies, optimizer.

    python -m tools.benchmark.step_profile [--model STDiT-XL/2] [--latent 16 32 32] [--batch 8] [--blocks compiled]

The step is that of tools/benchmark/train_step.py: forward, backward, clipping, fused AdamW; no data, VAE or text encoder. Some steps
are timed, then some are profiled. The GPU is idle for what is left of the step without the profiler when its busy time in the
profile is taken away. Inductor names its kernels after the operations in them: those that only copy, cast or
transpose count as copies. On a CPU the same tables are of PyTorch's operations, each without those that it calls.
"""

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from opensora.config.activation_checkpointing import level_of
from opensora.utils.errors import exit_on_user_error
from tools.benchmark.heading import heading, quiet
from tools.benchmark.train_step import add_experiments, build, inputs, start, switched_on, switches, timed, told, train

KINDS = {
    "attention (cuDNN, flash, efficient)": r"sdpa|scaled_dot_product|flash|fmha|cudnn::fusion",
    "our short_attention": r"_short_attention_",
    "our head_norm": r"_norm_heads_",
    "norm clipping": r"lpnorm|_foreach_norm|linalg_vector_norm",
    "optimizer": r"FusedAdam|fused_adam|multi_tensor_apply|aten::_foreach|Optimizer\.",
    "matrix products": r"nvjet|cutlass|gemm|gemv|xmma|splitK|cublas|convolution|triton_tem_|^aten::(add|b|badd)?mm$|linear",
    "copies, casts, transposes": r"memcpy|memset|copy|CatArray|transpose|^aten::(clone|cat|contiguous|fill_|zero_)$",
    "fused by Inductor, reductions": r"^triton_(red|per)_",
    "fused by Inductor, pointwise": r"^triton_|Torch-Compiled|CompiledFunction|^graph_|cpp_fused",
    "eager pointwise and reductions": r"elementwise|reduce_kernel|layer_norm|RandomEventInfo|distribution|^aten::",
}
"""What the name of a kernel or operation says of it; the first that fits. Case does not count."""
OTHER = "other"
COPYING = {
    "to", "copy", "clone", "transpose", "permute", "view", "unsafe", "cat", "slice", "expand", "split", "unbind", "select", "squeeze",
    "unsqueeze", "t",
}  # fmt: skip
"""Words of operations that compute nothing, in the names of Inductor's pointwise kernels."""
ON_GPU = {
    "model": "STDiT-XL/2",
    "latent": [16, 32, 32],
    "batch": 8,
    "text_len": 120,
    "blocks": "compiled",
    "dtype": "bf16",
}
ON_CPU = {"model": "STDiT-XXS/2", "latent": [2, 8, 8], "batch": 1, "text_len": 8, "blocks": "eager", "dtype": "fp32"}
LARGEST, NAME = 15, 70


class Kernel(NamedTuple):
    """One that ran."""

    name: str
    start_us: float
    busy_us: float


@exit_on_user_error
def main() -> None:
    """The command line."""
    args = parse_args()
    device = torch.device(args.device)
    print(
        f"{heading(device, 'tools.benchmark.step_profile')}\n{args.model}, latent {'x'.join(map(str, args.latent))}, batch {args.batch}, "
        f"{''.join(f'{name}, ' for name in told(args))}"
        f"{args.text_len} text tokens, {args.dtype}, {args.blocks} blocks, "
        f"grad_checkpoint={args.checkpoint}\n",
        flush=True,
    )
    with quiet():
        seconds, kernels = measure(args)
    write_kinds(kernels, args.profiled, seconds * 1e3)
    write_largest(kernels, args.profiled)


def parse_args() -> argparse.Namespace:
    """Options, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    defaults: dict[str, Any] = ON_GPU if parser.parse_known_args()[0].device == "cuda" else ON_CPU
    parser.add_argument("--model", default=defaults["model"])
    parser.add_argument("--latent", type=int, nargs=3, default=defaults["latent"], metavar=("T", "H", "W"))
    parser.add_argument("--batch", type=int, default=defaults["batch"])
    parser.add_argument("--text-len", type=int, default=defaults["text_len"])
    parser.add_argument("--dtype", default=defaults["dtype"], choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--blocks", default=defaults["blocks"], choices=("eager", "compiled"))
    parser.add_argument(
        "--checkpoint", type=level_of, default="none", metavar="LEVEL", help="a value of the config's grad_checkpoint"
    )
    add_experiments(parser)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="that are timed")
    parser.add_argument("--profiled", type=int, default=2, help="steps that are profiled")
    return switched_on(parser)


def measure(args: argparse.Namespace) -> tuple[float, list[Kernel]]:
    """Seconds of a step without the profiler, and the kernels of the profiled steps."""
    device = torch.device(args.device)
    model = build(args.model, device, args.text_len)
    z, _, cond = inputs(model, args.batch, args.latent, device)
    engine = start(model, device, args.dtype, args.blocks, args.checkpoint, **switches(args))
    seconds = timed(engine, z, cond, args.warmup, args.steps).seconds
    return seconds, kernels_of(
        lambda: train(engine, z, cond, range(args.warmup, args.warmup + args.profiled)), device.type
    )


def kernels_of(run: Callable[[], object], device_type: str) -> list[Kernel]:
    """What `run` runs: kernels on a GPU, PyTorch's operations on a CPU. It must end by waiting for the device."""
    on_gpu = device_type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        run()
    return gpu_kernels(profiled) if on_gpu else cpu_operations(profiled)


def gpu_kernels(profiled: profile) -> list[Kernel]:
    """Kernels, copies and fills on the GPU. The trace names their categories, which the profiler's own lists do not."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return in_trace(json.loads(trace.read_text()))


def in_trace(trace: Mapping[str, Any]) -> list[Kernel]:
    """What ran on the GPU by a trace in Chrome's format."""
    return [
        Kernel(event["name"], float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def cpu_operations(profiled: profile) -> list[Kernel]:
    """PyTorch's operations, each with the time that it took by itself."""
    return [
        Kernel(event.name, event.time_range.start, event.self_cpu_time_total)
        for event in profiled.events() or ()
        if event.name
    ]


def kind_of(name: str) -> str:
    """Which of `KINDS` a kernel is, or `OTHER`."""
    if (fused := re.fullmatch(r"triton_poi_fused_(\w+?)_\d+", name)) and COPYING.issuperset(
        word for word in fused[1].split("_") if word
    ):
        return "copies, casts, transposes"
    if name.startswith("triton_") and not name.startswith("triton_tem_"):  # whatever operations its name lists
        return next(kind for kind in KINDS if kind.startswith("fused") and re.match(KINDS[kind], name))
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def busy_ms(kernels: Iterable[Kernel]) -> float:
    """How long at least one of them ran."""
    total, end = 0.0, float("-inf")
    for _, start_us, busy_us in sorted(kernels, key=lambda kernel: kernel.start_us):
        total += max(0.0, start_us + busy_us - max(start_us, end))
        end = max(end, start_us + busy_us)
    return total / 1e3


def write_kinds(kernels: list[Kernel], steps: int, step_ms: float) -> None:
    """The table of kinds, and the idle time."""
    sums: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        sums[kind_of(kernel.name)].append(kernel.busy_us)
    whole = sum(kernel.busy_us for kernel in kernels) or 1.0
    print("| kind | ms/step | share | launches/step |\n|---|---|---|---|")
    for kind in (*KINDS, OTHER):
        print(row(kind, sums[kind], steps, whole))
    busy = busy_ms(kernels) / steps
    print(f"| all | {whole / steps / 1e3:.3f} | 100.0% | {len(kernels) / steps:.0f} |")
    idle = max(0.0, step_ms - busy)
    print(
        f"\nstep {step_ms:.2f} ms without the profiler, busy {busy:.2f} ms, idle {idle:.2f} ms ({idle / step_ms:.1%})\n"
    )


def write_largest(kernels: list[Kernel], steps: int) -> None:
    """The table of single kernels."""
    sums: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        sums[kernel.name].append(kernel.busy_us)
    whole = sum(kernel.busy_us for kernel in kernels) or 1.0
    print("| kernel | ms/step | share | launches/step |\n|---|---|---|---|")
    for name in sorted(sums, key=lambda name: -sum(sums[name]))[:LARGEST]:
        print(row(f"`{' '.join(name.split()).replace('|', '/')[:NAME]}`", sums[name], steps, whole))


def row(name: str, times_us: list[float], steps: int, whole_us: float) -> str:
    """A line of a table."""
    total = sum(times_us)
    return f"| {name} | {total / steps / 1e3:.3f} | {total / whole_us:.1%} | {len(times_us) / steps:.0f} |"


if __name__ == "__main__":
    main()
