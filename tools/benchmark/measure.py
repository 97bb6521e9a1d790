"""What all benchmarks share: options, the heading and the table they print, clocks, memory, and what happens when it runs out."""

import argparse
import gc
import logging
import platform
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from opensora.utils.errors import UserError
from tools.command import Parser

T = TypeVar("T")
OUT_OF_MEMORY = "out of memory"


class Options(Parser):
    """The options of one benchmark: --toy, --device where there is a choice, and what `add` adds.

    Args:
        name: of the benchmark.
        description: of it, for --help.
        argv: what follows its name on the command line.
        device: "gpu" = a GPU if there is one, toy sizes if there is none; "any" = a GPU if there is one, toy sizes only by --toy;
            "cpu" = always a CPU, toy sizes only by --toy.
    """

    def __init__(self, name: str, description: str | None, argv: Sequence[str], device: str = "gpu") -> None:
        super().__init__(description, prog=f"python -m tools.benchmark {name}")
        here = "cuda" if torch.cuda.is_available() else "cpu"
        first = Parser(add_help=False)
        for parser in (self, first):
            parser.add_argument("--toy", action="store_true", help="small sizes, to see that it runs")
            if device != "cpu":
                parser.add_argument("--device", default=here, choices=("cuda", "cpu"))
        known = first.parse_known_args(argv)[0]
        self.argv = list(argv)
        self.device = torch.device("cpu" if device == "cpu" else known.device)
        self.toy = known.toy or (device == "gpu" and self.device.type == "cpu")

    def add(self, flag: str, full: Any, toy: Any, **settings: Any) -> None:
        """An option with a default for each size, whose type is that of the default; a list takes any number of values."""
        settings.setdefault("type", type(full[0] if isinstance(full, list) else full))
        if isinstance(full, list):
            settings.setdefault("nargs", "+")
        self.add_argument(flag, default=toy if self.toy else full, **settings)

    def parse(self) -> argparse.Namespace:
        """The values, in which `toy` says which sizes are measured."""
        args = self.parse_args(self.argv)
        args.toy = self.toy
        return args

    def heading(self, *more: str) -> None:
        """Print the line above the table: command, device, versions, date, and `more`."""
        command = " ".join([self.prog, *self.argv])
        today = date.today().isoformat()
        print(", ".join([f"`{command}`", device_name(self.device), versions(self.device), today, *more]) + "\n")


class Table:
    """A markdown table, printed row by row.

    Args:
        columns: title -> format of its numbers, such as ".1f".
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, *values: Any) -> None:
        """Texts as they are, numbers as their column has them; - for None and for what is missing at the end."""
        filled = [*values, *[None] * (len(self.columns) - len(values))]
        cells = zip(filled, self.columns.values(), strict=True)
        texts = (
            value if isinstance(value, str) else "-" if value is None else format(value, spec) for value, spec in cells
        )
        print(f"| {' | '.join(texts)} |", flush=True)


def attempt(call: Callable[[], T], *caught: type[Exception]) -> T | str:
    """What `call` returns; or "out of memory", or the message of an error that is one of `caught`.

    In the end memory and compiled programs are given back.
    """
    try:
        return call()
    except torch.OutOfMemoryError:
        return OUT_OF_MEMORY
    except caught as error:
        first = str(error).strip().partition("\n")[0]
        if "ALLOC_FAILED" in str(error):  # cuBLAS' word for it
            return OUT_OF_MEMORY
        if isinstance(error, UserError):
            return first
        traceback.print_exc()
        return f"{type(error).__name__}: {first[:100]}"
    finally:
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextmanager
def quiet() -> Iterator[None]:
    """Between the lines of a table nothing is logged but warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def device_name(device: torch.device) -> str:
    """Of the GPU; or of the processor, with the number of threads that PyTorch computes with."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo, threads = Path("/proc/cpuinfo"), torch.get_num_threads()
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else f'CPU {platform.machine()}'}, {threads} thread{'s' * (threads != 1)}"


def versions(device: torch.device) -> str:
    """Of PyTorch, and on a GPU of Triton."""
    found = f"torch {torch.__version__}"
    if device.type == "cuda" and find_spec("triton") is not None:
        import triton

        found += f", triton {triton.__version__}"
    return found


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Of a call: the mean of `repeats`, without waiting for the device in between."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak of a GPU's memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most that tensors took since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def resident_gib() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def processor_s() -> float:
    """Processor seconds so far of this process, and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| in 2-norms."""
    exact = exact.to(found.device).float()
    return float((found.detach().float() - exact).norm() / exact.norm())


def psnr(found: Tensor, exact: Tensor) -> float:
    """In dB, with the largest value of `exact` as peak; infinite where they are equal."""
    error = (found - exact).float().square().mean()
    return float(10 * torch.log10(exact.float().abs().max() ** 2 / error)) if error > 0 else float("inf")


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """What a large matrix product reaches."""
    n, repeats = (8192, 50) if device.type == "cuda" else (1024, 5)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    seconds(lambda: a @ b, device, 5)
    return 2 * n**3 / seconds(lambda: a @ b, device, repeats) / 1e12
