"""How long a process waits for its first compiled step: with empty caches, with the caches of an earlier one, with saved programs.

    python -m tools.benchmark.compile_cache [--model STDiT-XL/2] [--latent 16 32 32] [--mode O3] [--toy]

Each row is a process of its own. `loaded` has an empty cache and what `save_compiled` wrote; the goal is under 35 % of `first`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from opensora.acceleration.compiler import cache_counters, compile, load_compiled, save_compiled
from opensora.registry import MODELS
from opensora.utils.errors import exit_on_user_error
from tools.benchmark.compile_modes import TOY, inputs, synchronize


@exit_on_user_error
def main() -> None:
    """The command line: the parent, or one of its processes."""
    args = parse_args()
    if args.process is not None:
        print(json.dumps(first_call(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "first": in_process("save", folder, "a"),
            "same cache": in_process("plain", folder, "a"),
            "loaded": in_process("load", folder, "b"),
        }
    print("| process | first step s | of the first | programs found | compiled |\n|---|---|---|---|---|")
    for name, run in runs.items():
        share = run["seconds"] / runs["first"]["seconds"]
        print(f"| {name} | {run['seconds']:.1f} | {share:.0%} | {run['hits']} | {run['misses']} |")


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = MODELS.build({"type": args.model, **(TOY if args.toy else {})})
    model = model.to(device).eval()
    cond = inputs(model, 2, tuple(args.latent), device)
    start = time.perf_counter()
    compile(model, options={"mode": args.mode, "regional": not args.whole})
    saved = Path(args.folder) / "saved"
    if args.process == "load":
        load_compiled(saved, model)
    with torch.autocast(device.type, torch.bfloat16):
        model(**cond)
    synchronize(device)
    seconds = time.perf_counter() - start
    if args.process == "save":
        save_compiled(saved, model)
    return {"seconds": seconds, **cache_counters()._asdict()}


if __name__ == "__main__":
    main()
