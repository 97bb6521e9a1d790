"""Benchmarks: `python -m tools.benchmark` lists them, `python -m tools.benchmark NAME [OPTION ...]` runs one.

Each prints a heading and a markdown table; `NAME --help` explains the columns. Measured tables: docs/explanation/benchmarks.
"""

import sys
from importlib import import_module

from opensora.utils.errors import UserError, exit_on_user_error

BENCHMARKS = {  # name -> module of this package with a function of that name, and what it measures
    "train_step": (
        "training",
        "training steps: time, MFU, memory, errors against fp32, and by --profile kinds of kernels",
    ),
    "sequence_parallel": ("training", "the same over the processes of torchrun: engines, sequence parallelism"),
    "goals": ("goals", "our training steps against the reference's settings and diffusers' models"),
    "wan": ("wan", "training steps and forward passes of Wan, ours and diffusers' own"),
    "attention": ("attention", "attention kernels at the shapes of our denoisers"),
    "nova": ("nova", "training steps and sampling of NOVA"),
    "sample": ("sampling", "seconds per video of real size: compiled, cached, offloaded, over several GPUs"),
    "step_cache": ("sampling", "what step caches change in a shipped model's videos, and what they save"),
    "compile_modes": ("compiling", "the modes of opensora.acceleration.compiler: time and error of a forward pass"),
    "compile_cache": ("compiling", "how long a process waits for its first compiled step, with and without caches"),
    "text_to_image": (
        "compiling",
        "pipelines of diffusers at many sizes, compiled as OneDiff's benchmark of this name does",
    ),
    "vae": ("encoders", "encoding and decoding of VAEs: speed and memory"),
    "text_encoder": ("encoders", "captions a second of T5"),
    "dataloader": ("loading", "samples a second of the loader of cached features"),
    "decode": ("loading", "decoding of videos, ours and other packages'"),
    "checkpoint": ("loading", "how long the train loop waits for a checkpoint"),
    "table": ("data", "what a long table costs before the first step, and in the tools for tables"),
    "footage": ("data", "probing, scene detection and cutting of videos"),
    "scoring": ("data", "the scorers that need no weights, on one core"),
}


@exit_on_user_error
def main() -> None:
    """List the benchmarks, or run the one that is named."""
    run(sys.argv[1:])


def run(argv: list[str]) -> None:
    """`argv`: the name of a benchmark and its options; nothing lists the names."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        for name, (_, about) in BENCHMARKS.items():
            print(f"  {name:<18} {about}")
        return
    name, *options = argv
    if name not in BENCHMARKS:
        raise UserError(f"{name!r} is no benchmark. Choices: {', '.join(BENCHMARKS)}.")
    module = import_module(f"tools.benchmark.{BENCHMARKS[name][0]}")
    getattr(module, name)(options)


if __name__ == "__main__":
    main()
