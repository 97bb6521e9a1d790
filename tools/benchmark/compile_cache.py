"""How long a process waits for its first compiled step: with empty caches, with the caches of an earlier one, with saved programs.

    python -m tools.benchmark.compile_cache [--model STDiT-XL/2] [--latent 16 32 32] [--mode O3] [--toy]

Each row is a process of its own. `loaded` has an empty cache and what `save_compiled` wrote; the goal is under 35 % of `first`.
The first step is timed from a built model to its end, loading of saved programs included; importing PyTorch and building the
model are not, for no cache can help there. `processor s` counts the same stretch with the compilers that it started, and does not
depend on what else the machine does; `before that` counts the processor seconds of importing PyTorch and building the model. The last column is |found - wanted| / |wanted| of the
prediction, of the first process: 0, or the rounding of other kernels where a mode chooses them by time.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opensora.acceleration.compiler import cache_counters, compile, load_compiled, save_compiled
from opensora.registry import MODELS
from opensora.utils.errors import UserError, exit_on_user_error
from tools.benchmark.compile_modes import TOY, awake, inputs, synchronize
from tools.benchmark.heading import heading

ROUNDING = 0.01
"""Relative, in bf16: a GPU's compilers choose kernels by time, and another kernel may round otherwise."""


@exit_on_user_error
def main() -> None:
    """The command line: the parent, or one of its processes."""
    args = parse_args()
    if args.process is not None:
        print(json.dumps(first_call(args)))
        return
    print(heading(device_here(), "tools.benchmark.compile_cache") + "\n")
    print(
        "| process | first step s | of the first | compiler's imports s | loading s | processor s | of the first "
        "| before that: processor s | programs found | compiled | against the first |"
    )
    print("|---" * 11 + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        first = in_process("save", folder, "a")
        print(row("first", first, first), flush=True)
        print(row("loaded", in_process("load", folder, "b"), first), flush=True)
        print(row("same cache", in_process("plain", folder, "a"), first), flush=True)


def row(name: str, run: dict[str, Any], first: dict[str, Any]) -> str:
    """A line of the table."""
    error = relative_error(torch.load(run["prediction"]), torch.load(first["prediction"]))
    if not error <= ROUNDING:
        raise UserError(f"{name}: the prediction is {error:.2g} away from that of the first process.")
    shares = [run[key] / first[key] for key in ("seconds", "processor")]
    return (
        f"| {name} | {run['seconds']:.1f} | {shares[0]:.0%} | {run['imports']:.1f} | {run['loading']:.1f} | {run['processor']:.1f} | {shares[1]:.0%} | {run['before']:.1f} "
        f"| {run['hits']} | {run['misses']} | {error:.2g} |"
    )


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|."""
    return float((found - wanted).norm() / wanted.norm())


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="STDiT-XL/2", help="a registered denoiser")
    parser.add_argument("--latent", nargs=3, type=int, default=[16, 32, 32], metavar=("T", "H", "W"))
    parser.add_argument("--mode", default="O3")
    parser.add_argument("--whole", action="store_true", help="compile the whole model, not block by block")
    parser.add_argument("--toy", action="store_true", help="a tiny model and tiny latents, for a CPU")
    parser.add_argument("--process", choices=("save", "plain", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.toy:
        args.latent = [4, 8, 8]
    return args


def in_process(what: str, folder: str, cache: str) -> dict[str, Any]:
    """A process with a cache of that name -> what it measured."""
    argv = [sys.executable, "-m", "tools.benchmark.compile_cache", *sys.argv[1:], "--process", what, "--folder", folder]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / cache),
        "TRITON_CACHE_DIR": str(Path(folder) / cache / "triton"),
    }
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@torch.no_grad()
def first_call(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from a built model to the end of its first step, loading of saved programs included."""
    device = device_here()
    torch.manual_seed(0)
    model: Any = MODELS.build({"type": args.model, **(TOY if args.toy else {})})
    model = awake(model).to(device).eval()
    cond = inputs(model, 2, tuple(args.latent), device)
    before, start = processor_s(), time.perf_counter()
    importlib.import_module("torch._inductor.compile_fx")  # `compile` would, and what it imports
    imports = time.perf_counter() - start
    compile(model, options={"mode": args.mode, "regional": not args.whole})
    saved, loading = Path(args.folder) / "saved", -time.perf_counter()
    if args.process == "load":
        load_compiled(saved, model)
    loading += time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16):
        prediction = model(**cond)
    synchronize(device)
    seconds, processor = time.perf_counter() - start, processor_s() - before
    if args.process == "save":
        save_compiled(saved, model)
    file = Path(args.folder) / f"{args.process}.pt"
    torch.save(prediction.float().cpu(), file)
    times = {"seconds": seconds, "imports": imports, "loading": loading, "processor": processor, "before": before}
    return {**times, "prediction": str(file), **cache_counters()._asdict()}


def processor_s() -> float:
    """Of this process so far, and of the compilers that it started and that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def device_here() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
