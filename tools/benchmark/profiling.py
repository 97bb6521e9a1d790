"""Where a GPU's time goes: the kernels of a run by kind, the largest of them, and the time in which none runs.

Inductor names its kernels after the operations in them: those that only copy, cast or transpose count as copies. On a CPU the
same tables are of PyTorch's operations, each without those that it calls.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tools.benchmark.measure import Table

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
"""What is in the names of a kind's kernels or operations; the first that fits. Case does not count."""
OTHER = "other"
COPYING = {
    "to", "copy", "clone", "transpose", "permute", "view", "unsafe", "cat", "slice", "expand", "split", "unbind", "select", "squeeze",
    "unsqueeze", "t",
}  # fmt: skip
"""Words of operations that compute nothing, in the names of Inductor's pointwise kernels."""
LARGEST, NAME_LENGTH = 15, 70


class Kernel(NamedTuple):
    """One that ran."""

    name: str
    start_us: float
    busy_us: float


def kernels_of(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """What `run` runs: kernels, copies and fills on a GPU, PyTorch's operations on a CPU. It must wait for the device at its end."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        run()
    if not on_gpu:
        events = (event for event in profiled.events() or () if event.name)
        return [Kernel(event.name, event.time_range.start, event.self_cpu_time_total) for event in events]
    with tempfile.TemporaryDirectory() as folder:  # the trace has categories, which the profiler's own lists have not
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


def kind_of(name: str) -> str:
    """Which of `KINDS` a kernel is, or `OTHER`."""
    fused = re.fullmatch(r"triton_poi_fused_(\w+?)_\d+", name)
    if fused and COPYING.issuperset(word for word in fused[1].split("_") if word):
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


def print_profile(kernels: list[Kernel], steps: int, step_ms: float) -> None:
    """The tables of kinds and of the largest kernels, and how long a GPU had nothing to do in a step.

    Args:
        kernels: of `steps` steps.
        step_ms: of a step without the profiler.
    """
    kinds: dict[str, list[float]] = defaultdict(list)
    names: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        kinds[kind_of(kernel.name)].append(kernel.busy_us)
        names[f"`{' '.join(kernel.name.split()).replace('|', '/')[:NAME_LENGTH]}`"].append(kernel.busy_us)
    whole = sum(kernel.busy_us for kernel in kernels) or 1.0
    largest = sorted(names, key=lambda name: -sum(names[name]))[:LARGEST]
    for title, groups, order in (("kind", kinds, [*KINDS, OTHER]), ("kernel", names, largest)):
        print()
        table = Table({title: "", "ms/step": ".3f", "share": ".1%", "launches/step": ".0f"})
        for name in order:
            total = sum(groups[name])
            table.row(name, total / steps / 1e3, total / whole, len(groups[name]) / steps)
        if title == "kind":
            table.row("all", whole / steps / 1e3, 1.0, len(kernels) / steps)
    busy = busy_ms(kernels) / steps
    idle = max(0.0, step_ms - busy)
    print(
        f"\nstep {step_ms:.2f} ms without the profiler, busy {busy:.2f} ms, idle {idle:.2f} ms ({idle / step_ms:.1%})\n"
    )
